"""Keep gradient accumulators in pinned host memory between the backward passes of a step.

[Note: Two slabs]
If `Offload.grads` is True, accumulators are in pinned host memory. While gradients are added to the accumulator of a
handle, or while it is reduced, the accumulator is in a slab. A slab is device memory that is large enough for any
accumulator. One of the two slabs serves the handle whose gradients are added or reduced. The other slab serves its
neighbors in the order of reductions: the accumulator of the previous handle is copied to the host, and then that of the
next handle to the device. An accumulator leaves its slab when the handle's last collective has been enqueued or, on the
CPU, has ended. A copy runs after all work enqueued so far on the current stream, after uses of the slab on other
streams, and after earlier copies to and from the slab. Streams wait for copies, but the host does not wait.

The memory to which kernels add gradients themselves (``main_grad``) belongs to a handle whose reduction may be launched
much later. Such an accumulator leaves its slab at the next point at which reductions may be launched. If a unit has
several such handles, both slabs may be in use when another one is needed. A third slab is then allocated, which the
estimates of memory do not include.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.comm.transport.base import SendBuffer
from layerzero.device.accelerator import HostDeviceCopies, StreamEvent
from layerzero.engine.gradient_storage import GradientStorage, PersistentStorage, StagedStorage

_SLABS = 2


class AccumulatorAllocator:
    """Allocator of memory for the gradient accumulators of a model.

    Args:
        device: device on which accumulators are used.
        transfers: object that copies accumulators to and from the host. If it is None, they stay on the device.
    """

    def __init__(self, device: torch.device, transfers: HostDeviceCopies | None = None) -> None:
        self._device = device
        self._slabs = None if transfers is None else _Slabs(transfers)
        self._made: list[GradientStorage] = []

    @property
    def device_bytes(self) -> int:
        """Number of bytes currently allocated on the device for accumulators, including slabs."""
        slabs = 0 if self._slabs is None else self._slabs.nbytes
        return slabs + sum(each.nbytes for each in self._made)

    @property
    def host_bytes(self) -> int:
        """Number of bytes currently allocated in host memory for accumulators."""
        return sum(each.host_bytes for each in self._made)

    def make(
        self, numel: int, dtype: torch.dtype, send_buffer: Callable[[int, torch.dtype], SendBuffer] | None = None
    ) -> GradientStorage:
        """Return a new storage of `numel` elements.

        Args:
            send_buffer: function that creates the memory of an accumulator that the transport sends. It is None if the
                transport does not use the memory.
        """
        storage: GradientStorage
        if self._slabs is not None:
            storage = OffloadedStorage(numel, dtype, self._slabs)
        elif send_buffer is not None:
            storage = PersistentStorage(send_buffer(numel, dtype))
        else:
            storage = PersistentStorage(SendBuffer(numel, dtype, self._device))
        self._made.append(storage)
        return storage


def accumulator_bytes(sizes: Sequence[int], *, offloaded: bool) -> tuple[int, int]:
    """Return the number of bytes that accumulators use on the device, and the number that they use on the host.

    Args:
        sizes: size of each accumulator in bytes.
        offloaded: True if accumulators are kept in host memory, and slabs on the device.
    """
    if not offloaded:
        return sum(sizes), 0
    return min(_SLABS, len(sizes)) * max(sizes, default=0), sum(sizes)


class OffloadedStorage(StagedStorage):
    """Storage of an accumulator that is kept in host memory and copied to a slab for use; see [Note: Two slabs]."""

    def __init__(self, numel: int, dtype: torch.dtype, slabs: _Slabs) -> None:
        super().__init__(numel, dtype, slabs.transfers)
        self._slabs = slabs
        self._slab: _Slab | None = None  # while the storage is open
        slabs.make_room(numel * dtype.itemsize)

    def prefetch(self, *, keep: bool) -> None:
        self._fetch(keep=keep)

    def _acquire(self) -> tuple[Tensor, Sequence[StreamEvent]]:
        self._slab = self._slabs.acquire()
        return self._slab.memory[: self.numel * self.dtype.itemsize].view(self.dtype), self._slab.uses

    def _release(self, device: Tensor, after: Sequence[StreamEvent]) -> None:
        slab, self._slab = self._slab, None
        assert slab is not None
        self._slabs.release(slab, after)


@dataclass(eq=False)
class _Slab:
    memory: Tensor  # uint8
    uses: Sequence[StreamEvent] = ()  # events of its last uses


class _Slabs:
    """Slabs of a model. Threads that finish collectives also use this object."""

    def __init__(self, transfers: HostDeviceCopies) -> None:
        self.transfers = transfers
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._idle: deque[_Slab] = deque()  # least recently used first
        self._largest = 0  # size of the largest accumulator in bytes

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.untyped_storage().nbytes() for slab in self._slabs)

    def make_room(self, nbytes: int) -> None:
        """Make room for another accumulator of `nbytes`. The memory of slabs is allocated on first use."""
        self._largest = max(self._largest, nbytes)
        if len(self._slabs) < _SLABS:
            self._idle.append(self._new_slab())

    def _new_slab(self) -> _Slab:
        self._slabs.append(_Slab(torch.empty(0, dtype=torch.uint8)))
        return self._slabs[-1]

    def acquire(self) -> _Slab:
        """Return the slab that was released first. Its `uses` may not be over."""
        with self._lock:
            slab = self._idle.popleft() if self._idle else self._new_slab()
        if slab.memory.numel() < self._largest:
            for mark in slab.uses:
                self.transfers.wait(mark)
            slab.memory = self.transfers.device_buffer(self._largest)
        return slab

    def release(self, slab: _Slab, uses: Sequence[StreamEvent]) -> None:
        """Return a slab, which may be reused after the events in `uses`."""
        slab.uses = uses
        with self._lock:
            self._idle.append(slab)
