"""What the optimizer works on, in host memory: masters and their final gradients.

[Note: The host updates]
With `offload_optimizer` masters lie in pinned host memory, and so do the final gradients that ``.grad`` shows; the
optimizer runs on the CPU and keeps its state there. A final gradient is summed up in scratch on the device, and stored
when it rests. Fresh rows are carried up to the ZeRO-3 shard when a refresh is launched, and cast on the way. Both are
copies beside other work, which streams wait for. The host waits before it reads a gradient that has just been stored.
It may write a master that is still being carried up: who writes launches another refresh, which comes after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.storage.buffers import BufferPool
from layerzero.storage.device import StreamMark, Transfers
from layerzero.storage.places import Place

__all__ = ["HostPlace"]


class HostPlace(Place):
    """Memory in the host, used on the device; see [Note: The host updates]."""

    lasting = False

    def __init__(self, numel: int, dtype: torch.dtype, transfers: Transfers, pool: BufferPool) -> None:
        super().__init__(numel, dtype)
        self._transfers = transfers
        self._pool = pool  # lends the scratch
        self._host: Tensor | None = None
        self._stored: StreamMark = None  # ends when the host has what was stored last
        self._device: Tensor | None = None  # while it is used

    @property
    def own_numel(self) -> int:
        return 0  # on the device: the pool's

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def home(self) -> Tensor:
        if self._host is None:
            self._host = self._transfers.host_buffer(self.numel, self.dtype)
        return self._host

    def open(self, *, keep: bool) -> Tensor:
        if self._device is None:
            self._device = self._pool.take(self.numel, self.dtype)
            if keep:
                fetched = self._transfers.copy(self._device, self.home(), to_host=False, after=(self._stored,))
                self._transfers.wait(fetched)
        return self._device

    def close(self, *, keep: bool) -> None:
        if self._device is None:
            return
        device, self._device = self._device, None
        if keep:
            self._stored = self._transfers.copy(self.home(), device, to_host=True)
            self._transfers.wait(self._stored)  # whoever takes the scratch next comes after it
        self._pool.give(device)

    def arrive(self) -> None:
        stored, self._stored = self._stored, None
        self._transfers.finish(stored)
