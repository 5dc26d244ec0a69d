"""Memory that is taken, given back and taken again."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from layerzero.device.accelerator import CurrentStream, StreamEvent

__all__ = ["BufferPool", "FullBufferPool", "Size", "UnitFootprint", "bytes_of_buffers", "max_gathered_bytes"]

Size = tuple[int, torch.dtype]  # of a flat buffer: elements of a dtype

_SLOTS = 3  # buffers of a size that units on a device take in turns: one is filled, one is sent, one is added up


def bytes_of_buffers(foreseen: Mapping[Size, int], *, on_device: bool) -> int:
    """What a pool comes to have allocated, if no more of a size are in use at once."""
    return sum(
        (_slots(count) if on_device else count) * numel * dtype.itemsize for (numel, dtype), count in foreseen.items()
    )


def _slots(foreseen: int) -> int:
    """How many of a size a device's pool makes: one for a unit whose size no other has, such as embeddings."""
    return 1 if foreseen == 1 else _SLOTS


class UnitFootprint(NamedTuple):
    """What is there while a unit computes."""

    nbytes: int
    reshards: bool | int  # it is freed after a forward
    post_forward_ranks: Hashable  # what it is gathered from
    kept: int = 0  # bytes that stay of it from a forward to its backward


def max_gathered_bytes(units: Sequence[UnitFootprint], prefetch: int) -> int:
    """Bytes of the full buffers that are filled at once: the root's, those that stay, of each mesh a unit's and those
    ahead of it; and of what is kept of them.
    """
    root, *others = units
    total = sum(unit.kept for unit in units) + root.nbytes + sum(unit.nbytes for unit in others if not unit.reshards)
    for over in {unit.post_forward_ranks for unit in others}:
        sizes = sorted(unit.nbytes for unit in others if unit.reshards and unit.post_forward_ranks == over)
        total += sum(sizes[-1 - prefetch :])
    return total


class BufferPool:
    """Reuses flat buffers of equal size and dtype, so that a steady state allocates nothing.

    A buffer handed to an exchange is given back only after the exchange was waited for. On a device that is a stream's
    waiting, not the host's: the host has given a buffer back long before it is free, and so takes the one that was
    given back first, once there are as many as are used at a time; whoever takes it waits for whoever gave it.

    Args:
        expected: how many of a size may be in use at once. In the host's memory these are made together, and those that
            were given back last are taken first: what is never needed is an address, and no memory. More are made where
            they are needed.

    Attributes:
        expected: the same; it may be changed before there are any.
    """

    def __init__(self, device: torch.device, foreseen: Mapping[Size, int] = MappingProxyType({})) -> None:
        self.device = device
        self.expected: Mapping[Size, int] = dict(foreseen)
        self._order = CurrentStream.of(device)
        self._idle: dict[tuple[int, torch.dtype], deque[tuple[Tensor, StreamEvent]]] = defaultdict(deque)
        self._made: Counter[tuple[int, torch.dtype]] = Counter()
        self._lock = threading.Lock()  # reductions take and give in threads of theirs
        self.allocated_bytes = 0

    @property
    def predicted_bytes(self) -> int:
        """What it comes to have allocated, if no more are needed than was foreseen."""
        return bytes_of_buffers(self.expected, on_device=self._order is not None)

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D buffer ``[numel]`` with unspecified contents."""
        key = numel, dtype
        if self._order is None:
            with self._lock:
                idle = self._idle[key]
                if not idle:
                    more = max(1, self.expected.get(key, 0) - self._made[key])
                    idle.extend((self._make(numel, dtype), None) for _ in range(more))
                return idle.pop()[0]
        idle = self._idle[key]
        if idle and self._made[key] >= _slots(self.expected.get(key, _SLOTS)):
            buffer, given = idle.popleft()
            self._order.wait_event(given)
            return buffer
        return self._make(numel, dtype)

    def _make(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self._made[numel, dtype] += 1
        self.allocated_bytes += buffer.untyped_storage().nbytes()
        return buffer

    def release(self, buffer: Tensor) -> None:
        mark = None if self._order is None else self._order.record_event()
        with self._lock:
            self._idle[buffer.numel(), buffer.dtype].append((buffer, mark))


class FullBufferPool:
    """Lends memory to the storages of full buffers, of which few are filled at once.

    Autograd saves views of a full buffer, so its storage must stay the same object while its memory comes and goes.
    Memory given back is parked and lent again to a storage of the same size: no allocation, and none of the page faults
    that memory fresh from the system costs. A storage gets the memory that it had before, where that is free. No more
    is parked than what is lent leaves of the limit. torch 2.11 cannot move memory between storages; there, every loan
    is an allocation.

    Memory is freed on the stream that allocated it, after its last use on the current stream, because torch's caching
    allocator reuses it on that stream without further synchronization.
    """

    can_cache = hasattr(UntypedStorage, "_swap_data_ptr_")

    def __init__(self, device: torch.device) -> None:
        self.limit = 0  # bytes that may be lent and parked; to be set
        self.cached_bytes = 0
        self.allocations = 0  # so far
        self.most_bytes = 0  # lent and parked at once, so far
        self._lent_bytes = 0
        self._device = device
        self._order = CurrentStream.of(device)
        self._parked: dict[int, list[tuple[UntypedStorage, StreamEvent]]] = defaultdict(list)  # by bytes
        self._empty: list[UntypedStorage] = []
        self._homes: dict[int, int] = {}  # by storage: the address that it had last
        self._streams: dict[int, Any] = {}  # streams that allocated the memory, by address

    def allocate(self, storage: UntypedStorage, nbytes: int) -> None:
        """Give a storage `nbytes` of memory with unspecified contents; what it may have is taken first."""
        if storage.nbytes():
            self.free(storage)
        parked = self._parked[nbytes]
        if parked:
            source, given = parked.pop(self._choose(storage, parked))
            if self._order is not None:
                self._order.wait_event(given)
            storage._swap_data_ptr_(source)  # type: ignore[attr-defined]
            self._empty.append(source)
            self.cached_bytes -= nbytes
        else:
            self._keep_parked(self.limit - self._lent_bytes - nbytes)
            storage.resize_(nbytes)
            self.allocations += 1
            if self._order is not None:
                self._streams[storage.data_ptr()] = self._order.current()
        self._lent_bytes += nbytes
        self._homes[storage._cdata] = storage.data_ptr()
        self.most_bytes = max(self.most_bytes, self._lent_bytes + self.cached_bytes)

    def free(self, storage: UntypedStorage) -> None:
        """Take a storage's memory; it has 0 bytes then."""
        nbytes = storage.nbytes()
        self._lent_bytes = max(0, self._lent_bytes - nbytes)  # what a storage was born with was not lent
        if self.can_cache and 0 < nbytes <= self.limit - self.cached_bytes - self._lent_bytes:
            target = self._empty.pop() if self._empty else UntypedStorage(0, device=self._device)  # type: ignore[no-untyped-call]
            target._swap_data_ptr_(storage)  # type: ignore[attr-defined]
            self._parked[nbytes].append((target, None if self._order is None else self._order.record_event()))
            self.cached_bytes += nbytes
        else:
            self._free(storage, None if self._order is None else self._order.record_event())

    def _free(self, storage: UntypedStorage, used: StreamEvent) -> None:
        """Return the memory of a storage to the allocator, to be reused after `used`."""
        stream = self._streams.pop(storage.data_ptr(), None)
        if stream is not None and used is not None:
            stream.wait_event(used)
        storage.resize_(0)

    def _choose(self, storage: UntypedStorage, parked: Sequence[tuple[UntypedStorage, StreamEvent]]) -> int:
        """The memory that it had last, if it is there: a program that repeats itself finds units where they were."""
        home = self._homes.get(storage._cdata)
        return next((index for index, (source, _) in enumerate(parked) if source.data_ptr() == home), -1)

    def _keep_parked(self, most: int) -> None:
        """Free parked memory, of whatever size, until no more than `most` bytes are parked."""
        for nbytes, parked in self._parked.items():
            while parked and self.cached_bytes > max(most, 0):
                storage, given = parked.pop()
                self._free(storage, given)
                self._empty.append(storage)
                self.cached_bytes -= nbytes
