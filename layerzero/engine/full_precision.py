"""Gather parameters in master precision for evaluation; see `layerzero.full_precision`.

[Note: Full-precision gathers]
Compute weights are casts of the masters, so weights in full precision must be gathered from the ZeRO-1 shards. The
first all-gather runs along the replica axis, into this rank's slice of the full buffer. The second all-gather runs
along the zero3 axis. All data-parallel ranks take part, even if they share memory or do not need to gather compute
weights. If the compute dtype of a handle represents the masters exactly, its compute weights are gathered instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from layerzero.comm.collectives import Collective, PendingCollective, all_gather
from layerzero.device.streams import PendingWait, Waitable
from layerzero.dtensor.model_parallel_spec import local_part
from layerzero.engine.gathered_params import GatheredParams
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.weight_storage import WeightStorage
from layerzero.layout.shard_grid import Extent


class FullPrecision:
    """Full buffer of one handle in master dtype, and the parameters that are views of it.

    Attributes:
        needs_gather: True, as in :class:`WeightStorage`.
        parameters: for each managed parameter, the parameter that the module uses. This parameter has the shape and
            strides of `ManagedParam.gathered`.
    """

    needs_gather = True

    def __init__(self, weights: WeightStorage, members: Sequence[ManagedParam]) -> None:
        self._weights = weights
        self._storages = weights.pool
        layout, device = weights.layout, weights.mesh_info.device
        self._full = torch.empty(layout.numel, dtype=weights.precision.master, device=device)
        self._bytes = self._full.untyped_storage().nbytes()
        self._leaves = GatheredParams(self._full.data)  # 1-D [G]; see [Note: Version counters]
        self.parameters: dict[ManagedParam, nn.Parameter] = {}
        for slot, member in zip(layout.slots, members, strict=True):
            flat_range, original = slice(slot.offset, slot.end), local_part(member.gathered)
            parameter = self._leaves.make(flat_range, original, member.spec.model_parallel, offers_main_grad=False)
            parameter.requires_grad_(False)
            self.parameters[member] = parameter
        self._version = self._leaves.version
        self.free()

    @property
    def gathered_bytes(self) -> int:
        """Number of bytes currently allocated."""
        return self._full.untyped_storage().nbytes() + self._leaves.nbytes

    @torch.no_grad()
    def gather(self) -> Waitable | None:
        """Allocate the full buffer and launch the first all-gather, which writes to the full buffer.

        The wait for the result runs the second one.
        """
        mesh_info, layout = self._weights.mesh_info, self._weights.layout
        grid = mesh_info.grid
        self._storages.allocate(self._full.untyped_storage(), self._bytes)
        zero1_shard = self._full[grid.slice_within(layout, Extent.ZERO1, Extent.FULL)]
        zero1_shard.copy_(self._weights.master)
        if mesh_info.replicas == 1:
            return self._gather_zero3()
        zero3, parts = self._full[grid.slice_within(layout, Extent.ZERO3, Extent.FULL)], grid.replica_part_sizes(layout)
        label = self._weights.label
        first = all_gather(mesh_info.replica_comm, Collective.UNSHARD, zero3, zero1_shard, name=label, parts=parts)
        return PendingWait(partial(self._wait, first))

    @torch.no_grad()
    def _wait(self, first: PendingCollective) -> None:
        first.wait()
        if (second := self._gather_zero3()) is not None:
            second.wait()

    def _gather_zero3(self) -> PendingCollective | None:
        mesh_info, layout = self._weights.mesh_info, self._weights.layout
        if mesh_info.zero3_size == 1:
            return None
        zero3 = self._full[mesh_info.grid.slice_within(layout, Extent.ZERO3, Extent.FULL)]
        label = self._weights.label
        return all_gather(mesh_info.zero3_gather_comm, Collective.UNSHARD, self._full, zero3, name=label)

    def fill(self) -> None:
        """Fill the parameters that have separate memory."""
        self._leaves.fill(self._storages)

    def free(self) -> bool:
        """Free the full buffer and the parameters that have separate memory.

        Return True if a forward pass has changed a parameter since the last call.
        """
        previous, self._version = self._version, self._leaves.version
        self._leaves.free(self._storages)
        self._storages.free(self._full.untyped_storage())
        return self._version != previous
