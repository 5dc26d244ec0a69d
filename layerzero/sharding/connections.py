"""Connect the ranks of a model with the largest messages of a step, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from layerzero.comm.collectives import Collective, Communicator, Message, connect
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.model_ranks import ModelRanks
from layerzero.device.accelerator import ConnectionCost
from layerzero.engine.handle import Handle
from layerzero.engine.reduction_spec import ReductionStage
from layerzero.engine.unit import Unit
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent

_log = logging.getLogger("layerzero")


def connect_for_steps(units: Iterable[Unit], ranks: ModelRanks, cost: ConnectionCost) -> None:
    """Connect the communicators of a model for the operations of a step; see :func:`connect`. Log the cost.

    The buffers of a step do not exist yet. Therefore each message uses temporary memory. All ranks must call this
    function.
    """
    largest: dict[tuple[Communicator, str], Message] = {}
    for comm, message in _messages(units, ranks):
        key = comm, message.operation
        if comm.connects_on_use and _nbytes(message) > _nbytes(largest.get(key, Message("", 0))):
            largest[key] = message
    if not largest:
        return
    with cost.measured():
        for (comm, _), message in largest.items():
            connect(comm, ranks.mesh_info.device, [message])
    if ranks.mesh_info.device.type != "cpu":
        torch.accelerator.empty_cache()  # otherwise lasting tensors may split the memory of the messages
    if ranks.is_first:
        numbers = len({comm for comm, _ in largest}), cost.seconds, cost.nbytes / 2**20
        _log.info("connected %d communicators in %.1f s; they use %.0f MiB outside of torch's allocator", *numbers)


def _nbytes(message: Message) -> int:
    return message.numel * message.dtype.itemsize


def _messages(units: Iterable[Unit], ranks: ModelRanks) -> Iterator[tuple[Communicator, Message]]:
    """Yield the messages of a step, in the same order on all ranks."""
    for comm in ranks.mesh_info.over_model:
        yield comm, Message("all_reduce", 1, torch.float64)  # norms, and flags of fewer bytes
    for unit in units:
        for handle in unit.handles:
            yield from _gathers(handle, unit.mesh_info)
            if handle.gradients is not None:
                for stage in handle.reduction_spec.stages:
                    yield _reduction(stage, handle.layout, unit.mesh_info)


def _gathers(handle: Handle, mesh_info: MeshInfo) -> Iterator[tuple[Communicator, Message]]:
    layout, dtype, encoded = handle.layout, handle.precision.compute, handle.weights.buffer.encoded_bytes
    full = Message("all_gather", layout.numel, dtype)
    yield mesh_info.zero3_gather_comm, Message("all_gather", encoded, torch.uint8) if encoded else full
    for comm in mesh_info.subgroup_comms.values():
        yield comm, full
    yield mesh_info.replica_comm, Message("all_gather", mesh_info.grid.numel(layout, Extent.ZERO3), dtype)


def _reduction(stage: ReductionStage, layout: FlatLayout, mesh_info: MeshInfo) -> tuple[Communicator, Message]:
    comm = mesh_info.zero3_reduce_comm if stage.collective is Collective.HOP1 else mesh_info.replica_comm
    if comm.sums_locally or stage.codec is not None:
        return comm, Message("all_to_all")  # sends between pairs, whose connections do not depend on the size
    return comm, Message("reduce_scatter", mesh_info.grid.numel(layout, stage.source), stage.wire_dtype)
