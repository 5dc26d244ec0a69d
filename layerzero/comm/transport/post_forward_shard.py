"""Keep post-forward shards, the parts of a full buffer that a few consecutive ranks keep until the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.comm.collectives import Communicator, PendingCollective, all_gather
from layerzero.comm.traffic_counters import Collective
from layerzero.device.buffer_pools import FullBufferPool

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """Part of a full buffer that each of k consecutive ranks keeps after a forward pass (``reshard_after_forward=k``).

    The part has 1/k of the buffer's elements. The shard is allocated at the end of a forward pass that may have a
    backward pass. The shard is freed at the end of the backward pass of the last forward pass that has kept it, or when
    the weights change. The shard is kept even for a forward pass whose output is discarded. Otherwise the launched
    gathers could differ between ranks, because the lifetime of the graph depends on each rank's garbage collection.
    While the shard is allocated, gathers run only among the k ranks.

    Args:
        full: full buffer, 1-D [G].
        comm: communicator of the k ranks. If it is None, no shard is kept.
        storages: pool that provides the memory of the shard.
    """

    def __init__(self, full: Tensor, comm: Communicator | None, storages: FullBufferPool) -> None:
        self._full = full
        self._comm = comm
        self._storages = storages
        numel = 0 if comm is None else full.numel() // comm.size
        self._shard = torch.empty(numel, dtype=full.dtype, device=full.device)  # 1-D [G / k]
        self._storage = self._shard.untyped_storage()
        self.size = self._storage.nbytes()  # number of bytes while the shard is allocated
        storages.free(self._storage)

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated."""
        return self._storage.nbytes()

    @torch.no_grad()
    def keep(self) -> None:
        """Copy this rank's part of the gathered full buffer into the shard, unless the shard is already allocated."""
        if self._comm is not None and self.size > self.nbytes:
            self._storages.allocate(self._storage, self.size)
            self._shard.copy_(self._full.chunk(self._comm.size)[self._comm.rank])

    def gather(self, *, name: str) -> PendingCollective | None:
        """Start the regather of the full buffer. Return None if no shard is kept."""
        if self._comm is None or not self.nbytes:
            return None
        return all_gather(self._comm, Collective.REGATHER, self._full, self._shard, name=name)

    def drop(self) -> None:
        if self.nbytes:
            self._storages.free(self._storage)
