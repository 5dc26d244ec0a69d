"""What is kept of a gathered handle from a forward to its backward: a part on each of a few neighbouring ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.comm.collectives import Communicator, PendingCollective, all_gather
from layerzero.comm.traffic_counters import Collective
from layerzero.device.buffer_pools import FullBufferPool

__all__ = ["PostForwardShard", "kept_bytes"]


class PostForwardShard:
    """N/k elements of a full buffer on each of k neighbours: ``reshard_after_forward=k``.

    There from the end of a forward whose graph may come back to the end of the backward of the last forward that has
    kept it, or until the weights change. A forward that is thrown away keeps it until then, too: whether its graph is
    still there depends on each rank's garbage collection, and ranks must agree. Gathers take place among the k ranks
    meanwhile.

    Args:
        full: 1-D [G], the full buffer.
        lane: of the k ranks; None: nothing is ever kept.
    """

    def __init__(self, full: Tensor, lane: Communicator | None, storages: FullBufferPool) -> None:
        self._full = full
        self._lane = lane
        self._storages = storages
        numel = 0 if lane is None else kept_bytes(full.numel(), 1, lane.size)
        self._shard = torch.empty(numel, dtype=full.dtype, device=full.device)  # 1-D [G / k]
        self._storage = self._shard.untyped_storage()
        self.size = self._storage.nbytes()  # bytes, when it is there
        storages.free(self._storage)

    @property
    def nbytes(self) -> int:
        """Bytes that are there now."""
        return self._storage.nbytes()

    @torch.no_grad()
    def keep(self) -> None:
        """Take this rank's part of what has been gathered, unless it is there."""
        if self._lane is not None and self.size > self.nbytes:
            self._storages.allocate(self._storage, self.size)
            self._shard.copy_(self._full.chunk(self._lane.size)[self._lane.rank])

    def gather(self, *, name: str) -> PendingCollective | None:
        """Start filling the full buffer again; None: nothing is kept."""
        if self._lane is None or not self.nbytes:
            return None
        return all_gather(self._lane, Collective.REGATHER, self._full, self._shard, name=name)

    def drop(self) -> None:
        if self.nbytes:
            self._storages.free(self._storage)


def kept_bytes(numel: int, element: int, ranks: int) -> int:
    """Of a full buffer of `numel` elements: what each of `ranks` keeps."""
    return numel // ranks * element
