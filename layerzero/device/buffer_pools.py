"""Provide pools that reuse the memory of flat buffers and full buffers."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from layerzero.device.accelerator import StreamEvent, device_module, keep_until_done
from layerzero.utils.torch_compat import CAN_SWAP_STORAGES

Size = tuple[int, torch.dtype]  # number of elements and dtype of a flat buffer

_USUAL = 2  # number of buffers of a size that was not predicted: one is filled while the other is reduced


def bytes_of_buffers(buffers: Mapping[Size, int]) -> int:
    """Return the total number of bytes in `buffers`, which contains the number of buffers of each size."""
    return sum(count * numel * dtype.itemsize for (numel, dtype), count in buffers.items())


class UnitFootprint(NamedTuple):
    """Memory that one unit uses while it is gathered."""

    nbytes: int  # bytes of the unit's full buffers
    reshards: bool | int  # nonzero if full buffers are freed after the forward pass and after the backward pass
    mesh: Hashable  # key of the mesh on which the unit is gathered
    kept: int = 0  # bytes of the unit's post-forward shards


def max_gathered_bytes(units: Sequence[UnitFootprint], prefetch: int) -> int:
    """Return the maximum number of bytes that gathered full buffers and post-forward shards use at the same time.

    The sum includes the root (the first of `units`), units that stay gathered, the post-forward shards of all units,
    and for each mesh the `prefetch` + 1 largest of the other units.
    """
    root, *others = units
    total = sum(unit.kept for unit in units) + root.nbytes + sum(unit.nbytes for unit in others if not unit.reshards)
    for mesh in {unit.mesh for unit in others}:
        sizes = sorted(unit.nbytes for unit in others if unit.reshards and unit.mesh == mesh)
        total += sum(sizes[-1 - prefetch :])
    return total


class BufferPool:
    """Pool of flat buffers in host memory that are reused by size and dtype.

    In the steady state, the pool allocates no memory. All predicted buffers of a size are allocated together, and the
    buffer that was released last is reused first. Buffers that were never used then occupy address space but no memory.
    The pool allocates more buffers if needed. :meth:`of` returns a pool for any device.

    Args:
        device: device of the buffers.
        predicted: number of buffers that may be in use at the same time, by size.

    Attributes:
        predicted_bytes: number of bytes that the pool allocates if no more than the predicted buffers are needed.
        most_bytes: maximum number of bytes that were allocated at the same time so far.
    """

    def __init__(self, device: torch.device, predicted: Mapping[Size, int] = MappingProxyType({})) -> None:
        self.device = device
        self.predicted: Mapping[Size, int] = dict(predicted)
        self.predicted_bytes = bytes_of_buffers(predicted)
        self.most_bytes = 0
        self._idle: dict[Size, deque[Tensor]] = defaultdict(deque)
        self._made: Counter[Size] = Counter()  # number of existing buffers, by size
        self._lock = threading.Lock()  # background threads of reductions also use the pool

    @staticmethod
    def of(device: torch.device) -> BufferPool:
        """Return a new pool for a device."""
        return BufferPool(device) if device_module(device) is None else DeviceBufferPool(device)

    def set_predicted(self, buffers: Mapping[Size, int], nbytes: int) -> None:
        """Set the predicted number of buffers by size, and their total number of bytes, `nbytes`.

        Call this method before the first buffer is used.
        """
        self.predicted = dict(buffers)
        self.predicted_bytes = nbytes

    def add_predicted(self, buffers: Mapping[Size, int]) -> None:
        """Predict more buffers, which are never in use at the same time as those predicted so far."""
        self.predicted = Counter(self.predicted) | Counter(buffers)
        self.predicted_bytes = bytes_of_buffers(self.predicted)

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D buffer ``[numel]`` with unspecified contents."""
        key = numel, dtype
        with self._lock:
            idle = self._idle[key]
            if not idle:
                count = max(1, self.predicted.get(key, 0) - self._made[key])
                idle.extend(self._allocate(numel, dtype) for _ in range(count))
            return idle.pop()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self._made[numel, dtype] += 1
        self.most_bytes += buffer.untyped_storage().nbytes()
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. Work that uses the buffer must have been launched on the current stream."""
        with self._lock:
            self._idle[buffer.numel(), buffer.dtype].append(buffer)

    def trim(self) -> None:
        """Return the memory of released buffers to the device's allocator. A pool in host memory keeps its buffers.

        The stream that owns the memory waits for the last use of each buffer.
        """


class _Released(NamedTuple):
    """Buffer that was released, and whose last use on the device may not have run yet."""

    buffer: Tensor
    mark: StreamEvent  # recorded after the last use
    stream: Any  # stream of the last use


class DeviceBufferPool(BufferPool):
    """Pool of flat buffers on a device, which exist only while they are used.

    [Note: Scratch memory on a device]
    Buffers come from torch's caching allocator and belong to the stream that was current when the pool was created,
    which is the stream of the computation. At the end of a backward pass, :meth:`trim` returns them to the allocator.
    The memory can then hold activations. After a backward pass inside no_sync, whose reductions are still in flight,
    and after a refresh with `Offload.params`, :meth:`trim` is called in the middle of the next forward pass.

    The host releases a buffer long before the buffer's last use on the device. Therefore released buffers are kept with
    an event. While all buffers together are smaller than `predicted_bytes`, :meth:`acquire` allocates new memory and
    does not wait. After that, the buffer that was released first is reused, or its memory is returned to the allocator,
    and the stream waits for the event. The prediction has room for two units: one unit is reduced while the reduction
    of the next unit is launched.

    The allocator reuses memory on the stream to which the memory belongs. Therefore this stream first waits for the
    last use. ``record_stream`` would defer the reuse instead. In a loop of micro-batches, the memory would then grow
    with the number of micro-batches by which the host is ahead of the device. ``record_stream`` is used only if the
    pool is deleted while buffers are in use, because a model may be deleted after a backward pass inside no_sync.

    If more bytes are in use at the same time than predicted, for example after parameters were unfrozen, the pool may
    grow to twice the maximum number of bytes in use.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = device_module(device)
        self._main_stream = self._module.current_stream()
        self._released: deque[_Released] = deque()  # oldest first
        self.held_bytes = 0  # bytes of all existing buffers
        self._in_use = 0  # bytes of buffers that were acquired and not released
        self._peak_in_use = 0  # maximum of `_in_use` so far

    def add_predicted(self, buffers: Mapping[Size, int]) -> None:
        self.predicted = Counter(self.predicted) | Counter(buffers)
        self.predicted_bytes = max(self.predicted_bytes, bytes_of_buffers(buffers))

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._peak_in_use = max(self._peak_in_use, self._in_use + numel * dtype.itemsize)
        buffer = self._reuse_or_allocate(numel, dtype)
        self._in_use += buffer.nbytes
        return buffer

    def _reuse_or_allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        key = numel, dtype
        if self._made[key] >= self.predicted.get(key, _USUAL):
            for index, released in enumerate(self._released):
                if (released.buffer.numel(), released.buffer.dtype) == key:
                    del self._released[index]
                    self._module.current_stream().wait_event(released.mark)
                    return released.buffer
        exceeded = self._peak_in_use > self.predicted_bytes
        limit = 2 * self._peak_in_use if exceeded else self.predicted_bytes
        while self._released and self.held_bytes + numel * dtype.itemsize > limit:
            oldest = self._released.popleft()
            if (oldest.buffer.numel(), oldest.buffer.dtype) == key:
                self._module.current_stream().wait_event(oldest.mark)
                return oldest.buffer
            self._main_stream.wait_event(oldest.mark)
            self._subtract(oldest.buffer)
        return self._allocate(numel, dtype)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._module.stream(self._main_stream):
            buffer = torch.empty(numel, dtype=dtype, device=self.device)
        current = self._module.current_stream()
        if current != self._main_stream:  # earlier work of that stream may still use the memory
            current.wait_event(self._main_stream.record_event())
        self._made[numel, dtype] += 1
        self.held_bytes += buffer.untyped_storage().nbytes()
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return buffer

    def release(self, buffer: Tensor) -> None:
        self._in_use -= buffer.nbytes
        current = self._module.current_stream()
        self._released.append(_Released(buffer, current.record_event(), current))

    def trim(self) -> None:
        while self._released:
            released = self._released.popleft()
            self._main_stream.wait_event(released.mark)
            self._subtract(released.buffer)

    def __del__(self) -> None:
        with suppress(Exception):  # at the exit of the interpreter
            for released in self._released:
                if released.stream != self._main_stream:
                    keep_until_done(released.buffer, released.stream)

    def _subtract(self, buffer: Tensor) -> None:
        self._made[buffer.numel(), buffer.dtype] -= 1
        self.held_bytes -= buffer.untyped_storage().nbytes()


class FullBufferPool:
    """Pool of memory for the storages of full buffers. Only a few full buffers are gathered at a time.

    Autograd saves views of a full buffer. Therefore the storage must stay the same object while its memory is freed and
    allocated again. Freed memory is cached and reused for storages of the same size. This avoids allocations and page
    faults in new memory. A storage reuses its own previous memory if that memory is cached. Memory is cached only while
    the sum of used and cached bytes stays within the limit. torch 2.11 cannot move memory between storages, so with
    that version every gather allocates memory.

    torch's caching allocator reuses memory on the stream that allocated it, without further synchronization. Therefore
    the stream that allocated the memory waits for its last use on the current stream before the memory is freed.
    """

    can_cache = CAN_SWAP_STORAGES

    def __init__(self, device: torch.device) -> None:
        self.limit = 0  # limit on the sum of used and cached bytes; set by the owner
        self.cached_bytes = 0
        self.allocations = 0  # number of allocations so far
        self.most_bytes = 0  # maximum of the sum of used and cached bytes so far
        self._lent_bytes = 0
        self._device = device
        self._module = device_module(device)
        self._cached: dict[int, list[tuple[UntypedStorage, StreamEvent]]] = defaultdict(list)  # cached memory, by size
        self._empty: list[UntypedStorage] = []
        self._last_addresses: dict[int, int] = {}  # last address of each storage
        self._streams: dict[int, Any] = {}  # streams that allocated the memory, by address

    def allocate(self, storage: UntypedStorage, nbytes: int) -> None:
        """Allocate `nbytes` of memory with unspecified contents for a storage.

        If the storage already has memory, that memory is freed first.
        """
        if storage.nbytes():
            self.free(storage)
        cached = self._cached[nbytes]
        if cached:
            source, event = cached.pop(self._previous_index(storage, cached))
            if event is not None:
                self._module.current_stream().wait_event(event)
            storage._swap_data_ptr_(source)  # type: ignore[attr-defined]
            self._empty.append(source)
            self.cached_bytes -= nbytes
        else:
            self._shrink_cache_to(self.limit - self._lent_bytes - nbytes)
            storage.resize_(nbytes)
            self.allocations += 1
            if self._module is not None:
                self._streams[storage.data_ptr()] = self._module.current_stream()
        self._lent_bytes += nbytes
        self._last_addresses[storage._cdata] = storage.data_ptr()
        self.most_bytes = max(self.most_bytes, self._lent_bytes + self.cached_bytes)

    def free(self, storage: UntypedStorage) -> None:
        """Free the memory of a storage. The size of the storage becomes 0 bytes."""
        nbytes = storage.nbytes()
        self._lent_bytes = max(0, self._lent_bytes - nbytes)  # the initial memory of a storage is not from the pool
        event = None if self._module is None else self._module.current_stream().record_event()
        if self.can_cache and 0 < nbytes <= self.limit - self.cached_bytes - self._lent_bytes:
            target = self._empty.pop() if self._empty else UntypedStorage(0, device=self._device)
            target._swap_data_ptr_(storage)  # type: ignore[attr-defined]
            self._cached[nbytes].append((target, event))
            self.cached_bytes += nbytes
        else:
            self._free(storage, event)

    def _free(self, storage: UntypedStorage, used: StreamEvent) -> None:
        """Return the memory of a storage to the allocator, which reuses it only after the event `used`."""
        stream = self._streams.pop(storage.data_ptr(), None)
        if stream is not None and used is not None:
            stream.wait_event(used)
        storage.resize_(0)

    def _previous_index(self, storage: UntypedStorage, cached: Sequence[tuple[UntypedStorage, StreamEvent]]) -> int:
        """Return the index of the storage's previous memory if that memory is cached, otherwise -1.

        As a result, the full buffers of units keep their addresses from step to step.
        """
        address = self._last_addresses.get(storage._cdata)
        return next((index for index, (source, _) in enumerate(cached) if source.data_ptr() == address), -1)

    def _shrink_cache_to(self, most: int) -> None:
        """Free cached memory of any size until no more than `most` bytes are cached."""
        for nbytes, cached in self._cached.items():
            while cached and self.cached_bytes > max(most, 0):
                storage, event = cached.pop()
                self._free(storage, event)
                self._empty.append(storage)
                self.cached_bytes -= nbytes
