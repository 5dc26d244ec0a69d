"""Sums that wait in pinned host memory between the backwards of a step.

[Note: Two slabs]
With `offload_grads` the sums that wait lie in pinned host memory. A unit's sums are used in a slab: device memory for
the largest unit. There are two of them, for the unit whose backward runs and for a neighbour of it, whose sums are on
their way out or in meanwhile. A unit that needs a slab takes the one that was not used for longer; what is in there and
not yet in the host is carried there first. A copy comes after all that the current stream was given before, after the
uses of the slab on other streams, and after the copies from and to it. Only streams wait.

On the CPU threads end exchanges that read slabs, while the program takes slabs for other units: each holds a lock for
what it does, so that a slab stays with a unit until its next exchange has been launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.device.accelerator import HostDeviceCopies, StreamEvent, TouchedBy
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.device.gradient_storage import GradientStorage, PersistentStorage

__all__ = ["AccumulatorAllocator", "ModelPools", "accumulator_bytes"]

_SLABS = 2


class AccumulatorAllocator:
    """Makes the places in which the sums of a model wait.

    Args:
        device: where they are used.
        transfers: what carries them to the host and back; None keeps them on the device.
        in_node: where hop 1 reads them in the node's memory: makes their places in there.
    """

    def __init__(
        self,
        device: torch.device,
        transfers: HostDeviceCopies | None = None,
        in_node: Callable[[int, torch.dtype], GradientStorage] | None = None,
    ) -> None:
        self._device = device
        self._in_node = in_node
        self._slabs = None if transfers is None else _Slabs(transfers)
        self._made: list[GradientStorage] = []

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now."""
        slabs = 0 if self._slabs is None else self._slabs.nbytes
        return slabs + sum(each.nbytes for each in self._made)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory now."""
        return sum(each.host_bytes for each in self._made if isinstance(each, OffloadedStorage))

    def make(self, unit: Hashable, numel: int, dtype: torch.dtype, *, sent_in_node: bool = False) -> GradientStorage:
        """A place of `numel` elements for a handle of `unit`; `sent_in_node`: hop 1 sends it, if there is one."""
        made: GradientStorage
        if self._slabs is not None:
            made = OffloadedStorage(self._slabs, unit, numel, dtype)
        elif sent_in_node and self._in_node is not None:
            made = self._in_node(numel, dtype)
        else:
            made = PersistentStorage(numel, dtype, self._device)
        self._made.append(made)
        return made


def accumulator_bytes(sizes: Sequence[Sequence[int]], *, offloaded: bool) -> tuple[int, int]:
    """Bytes on the device and in the host, where the sums of each unit take `sizes` bytes each."""
    total = sum(map(sum, sizes))
    if not offloaded:
        return total, 0
    units = sorted(sum(map(_aligned, unit)) for unit in sizes if any(unit))
    return (min(_SLABS, len(units)) * units[-1] if units else 0), total


@dataclass(frozen=True)
class ModelPools:
    """What the handles of a model share."""

    scratch: BufferPool  # of exchanges
    outgoing: BufferPool  # of what hop 1 sends: the same, or memory that the other ranks of the node read
    full: FullBufferPool
    accumulators: AccumulatorAllocator
    to_host: HostDeviceCopies | None = None  # what carries masters and final gradients, where the host updates
    weights_to_host: HostDeviceCopies | None = None  # copies of compute weights, if these are in host memory


def _aligned(nbytes: int) -> int:
    """Rounded up to where the next sum of a slab may begin, whatever its dtype."""
    return -(-nbytes // 16) * 16


class OffloadedStorage(GradientStorage):
    """See [Note: Two slabs]."""

    lasting = False

    def __init__(self, slabs: _Slabs, unit: Hashable, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel, dtype)
        self._slabs = slabs
        self.guard = slabs.lock
        self._tenant = slabs.tenant_of(unit)
        self._place = self._tenant.add(self, numel * dtype.itemsize)  # bytes of a slab
        self._host: Tensor | None = None  # [numel], from the first store on
        self._device: Tensor | None = None  # [numel], inside a slab, while the unit has one
        self._newer = False  # the slab holds contents that the host does not
        self._stored: StreamEvent = None  # of the last copy to the host

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    @property
    def blocked(self) -> bool:
        with self.guard:
            return self._tenant.slab is None and self._slabs.free_slab() is None

    def open(self, *, keep: bool) -> Tensor:
        with self.guard:
            device = self._enter(keep=keep)
            assert self._tenant.slab is not None
            self._slabs.wait(self._tenant.slab)
            self._tenant.slab.touched.note()
            self._newer = True
            return device

    def prefetch(self, *, keep: bool) -> None:
        with self.guard:
            if not self.blocked:
                self._enter(keep=keep)

    def close(self, *, keep: bool) -> None:
        with self.guard:
            self._close(keep=keep)

    def _close(self, *, keep: bool) -> None:
        if keep and self._newer:
            assert self._device is not None and self._tenant.slab is not None
            if self._host is None:
                self._host = self._slabs.transfers.host_buffer(self.numel, self.dtype)
            self._stored = self._slabs.copy(self._tenant.slab, self._host, self._device, to_host=True)
        elif self._tenant.slab is not None:
            self._tenant.slab.end_uses()
        self._newer = False

    def leave(self) -> None:
        """Another unit takes the slab."""
        self._close(keep=True)
        self._device = None

    def _enter(self, *, keep: bool) -> Tensor:
        slab = self._slabs.admit(self._tenant)
        if self._device is None:
            self._device = slab.memory[self._place].view(self.dtype)
            if keep:
                assert self._host is not None, "contents to keep that were never stored"
                self._slabs.copy(slab, self._device, self._host, to_host=False, after=self._stored)
        return self._device


class _Tenant:
    """The sums of one unit, which share a slab."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.slab: _Slab | None = None
        self._places: list[OffloadedStorage] = []

    @property
    def leased(self) -> bool:
        return any(place.leased for place in self._places)

    def add(self, place: OffloadedStorage, nbytes: int) -> slice:
        """The bytes of a slab that are to be its own."""
        assert self.slab is None, "a unit grows while it has a slab"
        self._places.append(place)
        own = slice(self.nbytes, self.nbytes + nbytes)
        self.nbytes += _aligned(nbytes)
        return own

    def leave(self) -> None:
        for place in self._places:
            place.leave()
        self.slab = None


class _Slab:
    def __init__(self, touched: TouchedBy) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.tenant: _Tenant | None = None
        self.copied: StreamEvent = None  # the last copy from or to it
        self.touched = touched  # streams that have opened it since, and not closed it yet
        self.used: list[StreamEvent] = []  # ends of uses since

    def end_uses(self) -> None:
        """Order the next copy after the work so far of the current stream and of streams that have opened the slab."""
        self.touched.note()  # a collective that reads it ends on another stream than the one that launched it
        self.used += self.touched.marks()


class _Slabs:
    """Two slabs, and who has them."""

    def __init__(self, transfers: HostDeviceCopies) -> None:
        self.transfers = transfers
        self.lock = threading.RLock()
        self._slabs = [_Slab(TouchedBy(transfers.order)) for _ in range(_SLABS)]  # the one used last comes last
        self._tenants: dict[Hashable, _Tenant] = {}

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.untyped_storage().nbytes() for slab in self._slabs)

    def tenant_of(self, unit: Hashable) -> _Tenant:
        tenant = self._tenants.setdefault(unit, _Tenant())
        if tenant.slab is not None:  # it is about to grow
            tenant.slab.tenant = None
            tenant.leave()
        return tenant

    def free_slab(self) -> _Slab | None:
        """The slab that a unit without one would take."""
        for slab in self._slabs:
            if slab.tenant is None or not slab.tenant.leased:
                return slab
        return None

    def admit(self, tenant: _Tenant) -> _Slab:
        """The slab of a unit, which gets one if it has none."""
        slab = tenant.slab or self.free_slab()
        assert slab is not None, "exchanges read both slabs"
        if slab.tenant is not tenant:
            if slab.tenant is not None:
                slab.tenant.leave()
            slab.tenant, tenant.slab = tenant, slab
            largest = max(each.nbytes for each in self._tenants.values())
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
        """Let what the current stream computes from here on come after the copies from and to a slab."""
        if slab.copied is not None:
            self.transfers.wait(slab.copied)
        for mark in slab.used:
            self.transfers.wait(mark)
