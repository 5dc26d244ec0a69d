"""Masters, final gradients and compute weights in host memory; the optimizer runs there.

[Note: The host updates]
With `offload_optimizer` masters and the final gradients that ``.grad`` shows are in pinned host memory. The optimizer
runs on the CPU and keeps its state there. A final gradient is accumulated in scratch on the device, and copied to the
host when it is complete. A refresh copies updated rows to the ZeRO-3 shard on the device and casts them. Both copies
overlap with other work, and streams wait for them. The host waits before it reads a gradient that has just been copied.
It may write a master that is still being copied to the device: another refresh follows each write.

[Note: Weights in the host]
With `offload_params` ZeRO-3 shards are in host memory. A gather first copies the shard into this rank's slice of the
full buffer, on the stream for such copies, and is launched from that stream. So the computation waits for neither the
copy nor the gather until it needs the weights. A refresh writes to scratch on the device, which is then copied to the
host. The stream that launches the refresh waits for that copy, so that the next handle can use the same scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.device.accelerator import HostDeviceCopies, StreamEvent, TouchedBy
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.gradient_storage import GradientStorage

__all__ = ["Fetch", "HostShard", "HostStorage"]


class HostStorage(GradientStorage):
    """Storage of a gradient that is kept in host memory and computed on the device; see [Note: The host updates]."""

    lasting = False

    def __init__(self, numel: int, dtype: torch.dtype, transfers: HostDeviceCopies, pool: BufferPool) -> None:
        super().__init__(numel, dtype)
        self._transfers = transfers
        self._pool = pool  # provides scratch on the device
        self._host: Tensor | None = None
        self._stored: StreamEvent = None  # event of the last copy to the host
        self._device: Tensor | None = None  # scratch while it is open
        self._touched = TouchedBy(transfers.order)

    @property
    def own_numel(self) -> int:
        return 0  # memory on the device belongs to the pool

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def home(self) -> Tensor:
        if self._host is None:
            self._host = self._transfers.host_buffer(self.numel, self.dtype)
        return self._host

    def open(self, *, keep: bool) -> Tensor:
        if self._device is None:
            self._device = self._pool.acquire(self.numel, self.dtype)
            if keep:
                fetched = self._transfers.copy(self._device, self.home(), to_host=False, after=(self._stored,))
                self._transfers.wait(fetched)
        self._touched.note()
        return self._device

    def close(self, *, keep: bool) -> None:
        if self._device is None:
            return
        device, self._device = self._device, None
        uses = self._touched.marks()
        if keep:
            self._stored = self._transfers.copy(self.home(), device, to_host=True, after=uses)
            self._transfers.wait(self._stored)  # the next user of the scratch comes after the copy
        else:
            for mark in uses:
                self._transfers.wait(mark)
        self._pool.release(device)

    def wait_for_host(self) -> None:
        stored, self._stored = self._stored, None
        self._transfers.finish(stored)


@dataclass(frozen=True)
class Fetch:
    """Copy to the device that no collective follows."""

    transfers: HostDeviceCopies
    mark: StreamEvent

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        self.transfers.wait(self.mark)


class HostShard:
    """ZeRO-3 shard in host memory; see [Note: Weights in the host].

    Attributes:
        tensor: 1-D [numel], initially zeros.
    """

    def __init__(self, numel: int, dtype: torch.dtype, transfers: HostDeviceCopies, pool: BufferPool) -> None:
        self.tensor = transfers.host_buffer(numel, dtype).zero_()
        self._transfers = transfers
        self._pool = pool  # provides scratch on the device
        self._stored: StreamEvent = None  # event of the last copy to the host
        self._fetched: StreamEvent = None  # event of the last copy to the device

    @contextmanager
    def fetched(self, target: Tensor, *, beside: bool) -> Iterator[None]:
        """Context manager that copies the shard to `target` [numel] on the device before work launched inside.

        Args:
            beside: make the stream of the copy current inside, so that the computation does not wait for the copy.
        """
        fetch = self.start_fetch(target)
        with self._transfers.beside(to_host=False) if beside else nullcontext():
            fetch.wait()
            yield

    def start_fetch(self, target: Tensor) -> Fetch:
        """Start copying the shard to `target` [numel] on the device."""
        self._fetched = self._transfers.copy(target, self.tensor, to_host=False, after=(self._stored,))
        return Fetch(self._transfers, self._fetched)

    def borrow(self) -> Tensor:
        """Return scratch on the device, 1-D [numel], for :meth:`store`."""
        return self._pool.acquire(self.tensor.numel(), self.tensor.dtype)

    def store(self, fresh: Tensor) -> None:
        """Copy borrowed scratch to the host, and release it to the pool."""
        self._stored = self._transfers.copy(self.tensor, fresh, to_host=True, after=(self._fetched,))
        self._transfers.wait(self._stored)
        self._pool.release(fresh)

    def arrive(self) -> Tensor:
        """Wait until the host may read the shard, and return it."""
        self._transfers.finish(self._stored)
        return self.tensor
