"""Post-forward shards: parts of a full buffer that a few neighboring ranks keep from a forward to its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.comm.collectives import Communicator, PendingCollective, all_gather
from layerzero.comm.traffic_counters import Collective
from layerzero.device.buffer_pools import FullBufferPool

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """N/k elements of a full buffer on each of k neighboring ranks: ``reshard_after_forward=k``.

    The shard is allocated at the end of a forward that may have a backward. The shard is freed at the end of the
    backward of the last forward that has kept it, or when the weights change. The shard is kept even for a forward
    whose output is discarded, because the lifetime of the graph depends on each rank's garbage collection, and all
    ranks must launch the same gathers. While the shard is allocated, gathers run among the k ranks only.

    Args:
        full: 1-D [G], the full buffer.
        comm: communicator of the k ranks. If it is None, no shard is kept.
        storages: pool that provides the memory.
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
        """Copy this rank's part from the gathered full buffer, unless the part is already kept."""
        if self._comm is not None and self.size > self.nbytes:
            self._storages.allocate(self._storage, self.size)
            self._shard.copy_(self._full.chunk(self._comm.size)[self._comm.rank])

    def gather(self, *, name: str) -> PendingCollective | None:
        """Start the regather of the full buffer; return None if no shard is kept."""
        if self._comm is None or not self.nbytes:
            return None
        return all_gather(self._comm, Collective.REGATHER, self._full, self._shard, name=name)

    def drop(self) -> None:
        if self.nbytes:
            self._storages.free(self._storage)
