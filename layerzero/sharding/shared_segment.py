"""Shared memory of a model: the ranks of a ZeRO-3 group on one machine map one segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerzero.comm.collectives import Collective, collective_error
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.shared_memory import WriteBarrier, num_counters, shared_weight_bytes
from layerzero.comm.transport.shm_buffers import (
    RING_BYTES,
    NodePlace,
    SharedBufferPool,
    aligned_bytes,
    aligned_bytes_of_all,
)
from layerzero.comm.transport.shm_rendezvous import map_shared_segment
from layerzero.comm.transport.shm_segment import SegmentSizes, SharedSegment
from layerzero.config import LayerZeroConfig
from layerzero.estimates.scratch_buffers import plan_scratch
from layerzero.estimates.specs import HandleSpec, RankTraits

__all__ = ["Node", "share_node"]

_MORE = 5  # address space reserved for each handle beyond the predicted buffers, in full gradients


@dataclass(frozen=True)
class Node:
    """Shared segment of a ZeRO-3 group, and the parts of it that a model uses for weights and gradients."""

    memory: SharedSegment
    weights: WriteBarrier
    outgoing: SharedBufferPool

    def keep(self, numel: int, dtype: torch.dtype) -> NodePlace:
        """Return gradient storage [numel] in shared memory, from which hop 1 sends."""
        return NodePlace(numel, dtype, self.outgoing)


def share_node(handles: Sequence[HandleSpec], config: LayerZeroConfig, mesh_info: MeshInfo) -> Node | None:
    """Map shared memory for these handles, or return None on all ranks of the ZeRO-3 group if they do not share memory.

    All ranks of the group must call this.
    """
    comm = mesh_info.zero3_reduce_comm
    if config.shared_memory == "off" or mesh_info.zero3_size == 1 or mesh_info.device.type != "cpu" or not comm.is_gloo:
        return None
    sums = [aligned_bytes(each.layout.numel * each.precision.master.itemsize) for each in handles]
    kept = sum(
        size
        for size, each in zip(sums, handles, strict=True)
        if each.has_persistent_send_buffer(config) and each.trainable
    )
    rotating = plan_scratch(handles, config, RankTraits.of(mesh_info, in_node=True, offload_params=False)).outgoing
    predicted = RING_BYTES + aligned_bytes_of_all(rotating) + kept
    region = SegmentSizes(
        words=num_counters(len(handles)),
        common=sum(
            shared_weight_bytes(each.layout.numel, each.precision.compute) for each in handles if each.extension is None
        ),
        part=predicted + sum(sums) * _MORE,
        predicted=predicted,
    )
    memory = map_shared_segment(mesh_info.zero3_control_comm, region)
    if memory is None:
        return None
    explain = partial(collective_error, comm, Collective.NODE_SUM, "")
    return Node(memory, WriteBarrier(memory, mesh_info.zero3_gather_comm), SharedBufferPool(memory, explain, rotating))
