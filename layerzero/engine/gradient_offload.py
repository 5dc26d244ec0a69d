"""Keep gradient accumulators in pinned host memory between the backward passes of a step.

[Note: Two slabs]
If `Offload.grads` is True, accumulators are in pinned host memory. During the backward pass of a unit, its accumulators
are in a slab. A slab is device memory that is large enough for the accumulators of any unit. One of the two slabs
serves the unit whose backward pass is running. The other slab serves a neighboring unit, whose accumulators are copied
to or from the host meanwhile. A unit that needs a slab and has none is assigned the least recently used slab. Before
that, the previous unit's contents are copied to the host, unless the host already has them. A copy runs after all work
enqueued so far on the current stream, after uses of the slab on other streams, and after earlier copies to and from the
slab. Streams wait for copies, but the host does not wait.

On the CPU, threads finish collectives that read slabs, while the main thread assigns slabs to other units. A thread
acquires a lock for each operation, so a slab remains assigned until the unit's next collective has been launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from layerzero.comm.transport.base import SendBuffer
from layerzero.device.accelerator import HostDeviceCopies, StreamEvent, StreamUses
from layerzero.engine.gradient_storage import GradientStorage, PersistentStorage

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
        self,
        unit: Hashable,
        numel: int,
        dtype: torch.dtype,
        send_buffer: Callable[[int, torch.dtype], SendBuffer] | None = None,
    ) -> GradientStorage:
        """Return a new storage of `numel` elements for a handle of `unit`.

        Args:
            send_buffer: function that creates the memory of an accumulator that the transport sends. It is None if the
                transport does not use the memory.
        """
        storage: GradientStorage
        if self._slabs is not None:
            storage = OffloadedStorage(self._slabs, unit, numel, dtype)
        elif send_buffer is not None:
            storage = PersistentStorage(send_buffer(numel, dtype))
        else:
            storage = PersistentStorage(SendBuffer(numel, dtype, self._device))
        self._made.append(storage)
        return storage


def accumulator_bytes(sizes: Sequence[Sequence[int]], *, offloaded: bool) -> tuple[int, int]:
    """Return the number of bytes that accumulators use on the device, and the number that they use on the host.

    Args:
        sizes: size of each accumulator in bytes, in one sequence per unit.
        offloaded: True if accumulators are kept in host memory, and slabs on the device.
    """
    total = sum(map(sum, sizes))
    if not offloaded:
        return total, 0
    units = sorted(sum(map(_align_nbytes, unit)) for unit in sizes if any(unit))
    return (min(_SLABS, len(units)) * units[-1] if units else 0), total


def _align_nbytes(nbytes: int) -> int:
    """Return `nbytes` rounded up to 16, the alignment of accumulators of any dtype in a slab."""
    return -(-nbytes // 16) * 16


class OffloadedStorage(GradientStorage):
    """Storage of an accumulator that is kept in host memory and copied to a slab for use; see [Note: Two slabs]."""

    lasting = False

    def __init__(self, slabs: _Slabs, unit: Hashable, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel, dtype)
        self._slabs = slabs
        self.guard = slabs.lock
        self._unit_accumulators = slabs.accumulators_of(unit)
        self._byte_range = self._unit_accumulators.reserve(self, numel * dtype.itemsize)  # byte range in a slab
        self._host: Tensor | None = None  # [numel], allocated on the first copy to the host
        self._device: Tensor | None = None  # [numel], view of a slab while the unit has a slab
        self._newer = False  # True if the slab has contents that the host does not have
        self._stored: StreamEvent = None  # event of the last copy to the host
        self._leases = 0

    @property
    def leased(self) -> bool:
        """True while the memory must not move."""
        return self._leases > 0

    def lease(self, leases: ExitStack) -> None:
        self._leases += 1
        leases.callback(self._end_lease)

    def _end_lease(self) -> None:
        self._leases -= 1

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def open(self, *, keep: bool) -> Tensor:
        with self.guard:
            device = self._enter_slab(keep=keep)
            assert self._unit_accumulators.slab is not None
            self._slabs.wait(self._unit_accumulators.slab)
            self._unit_accumulators.slab.stream_uses.record_use()
            self._newer = True
            return device

    def prefetch(self, *, keep: bool) -> None:
        with self.guard:
            self._enter_slab(keep=keep)

    def close(self, *, keep: bool) -> None:
        with self.guard:
            slab = self._unit_accumulators.slab
            if keep and self._newer:
                assert self._device is not None and slab is not None
                if self._host is None:
                    self._host = self._slabs.transfers.host_buffer(self.numel, self.dtype)
                self._stored = self._slabs.copy(slab, self._host, self._device, to_host=True)
            elif slab is not None:
                slab.end_uses()
            self._newer = False

    def leave_slab(self) -> None:
        """Copy the contents to the host before the slab is assigned to another unit."""
        self.close(keep=True)
        self._device = None

    def _enter_slab(self, *, keep: bool) -> Tensor:
        slab = self._slabs.assign_slab(self._unit_accumulators)
        if self._device is None:
            self._device = slab.memory[self._byte_range].view(self.dtype)
            if keep:
                assert self._host is not None, "contents must be kept, but were never stored"
                self._slabs.copy(slab, self._device, self._host, to_host=False, after=self._stored)
        return self._device


class _UnitAccumulators:
    """Accumulators of one unit, which share a slab."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.slab: _Slab | None = None
        self._places: list[OffloadedStorage] = []

    @property
    def leased(self) -> bool:
        return any(storage.leased for storage in self._places)

    def reserve(self, storage: OffloadedStorage, nbytes: int) -> slice:
        """Reserve `nbytes` for an accumulator, and return the accumulator's byte range in a slab."""
        assert self.slab is None, "an accumulator is added to a unit that has a slab"
        self._places.append(storage)
        byte_range = slice(self.nbytes, self.nbytes + nbytes)
        self.nbytes += _align_nbytes(nbytes)
        return byte_range

    def leave_slab(self) -> None:
        for storage in self._places:
            storage.leave_slab()
        self.slab = None


class _Slab:
    def __init__(self, stream_uses: StreamUses) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.accumulators: _UnitAccumulators | None = None
        self.copied: StreamEvent = None  # event of the last copy to or from the slab
        self.stream_uses = stream_uses  # streams that have used the slab since that copy
        self.used: list[StreamEvent] = []  # events after the uses of the slab since that copy

    def end_uses(self) -> None:
        """Make the next copy wait for work that is already on the current stream and on streams that use the slab."""
        self.stream_uses.record_use()  # a collective that reads the slab may end on another stream than its launch
        self.used += self.stream_uses.record_events()


class _Slabs:
    """Two slabs, and the units that use them."""

    def __init__(self, transfers: HostDeviceCopies) -> None:
        self.transfers = transfers
        self.lock = threading.RLock()
        self._slabs = [_Slab(StreamUses(transfers.module)) for _ in range(_SLABS)]  # least recently used first
        self._accumulators_by_unit: dict[Hashable, _UnitAccumulators] = {}

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.untyped_storage().nbytes() for slab in self._slabs)

    def accumulators_of(self, unit: Hashable) -> _UnitAccumulators:
        accumulators = self._accumulators_by_unit.setdefault(unit, _UnitAccumulators())
        if accumulators.slab is not None:  # another accumulator will be added to the unit
            accumulators.slab.accumulators = None
            accumulators.leave_slab()
        return accumulators

    def assign_slab(self, accumulators: _UnitAccumulators) -> _Slab:
        """Return the slab of a unit. If the unit has no slab, first assign the least recently used one to it."""
        unleased = (each for each in self._slabs if each.accumulators is None or not each.accumulators.leased)
        slab = accumulators.slab or next(unleased, None)
        assert slab is not None, "collectives read both slabs"
        if slab.accumulators is not accumulators:
            if slab.accumulators is not None:
                slab.accumulators.leave_slab()
            slab.accumulators, accumulators.slab = accumulators, slab
            largest = max(each.nbytes for each in self._accumulators_by_unit.values())
            if slab.memory.numel() < largest:
                self.wait(slab)
                slab.memory = self.transfers.device_buffer(largest)
        self._slabs.remove(slab)
        self._slabs.append(slab)
        return slab

    def copy(
        self, slab: _Slab, target: Tensor, source: Tensor, *, to_host: bool, after: StreamEvent = None
    ) -> StreamEvent:
        slab.end_uses()
        marks = (slab.copied, after, *slab.used)
        slab.used.clear()
        slab.copied = self.transfers.copy(target, source, to_host=to_host, after=marks)
        return slab.copied

    def wait(self, slab: _Slab) -> None:
        """Make the current stream wait for the copies to and from a slab, and for other uses of the slab."""
        if slab.copied is not None:
            self.transfers.wait(slab.copied)
        for mark in slab.used:
            self.transfers.wait(mark)
