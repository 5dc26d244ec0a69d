"""Provide gradient buffers in shared memory, which the other ranks of a ZeRO-3 group read in place.

[Note: Reuse of send buffers]
A rank sends a full gradient by publishing the gradient's offset in the rank's part, and increments its counter
PUBLISHED. The other ranks read and add the gradient in place, and increment their counters CONSUMED. All ranks send and
add gradients in the same order, so gradient n of one rank corresponds to gradient n of every other rank. A buffer that
was last sent as gradient n is reused once CONSUMED is at least n on all ranks. From then on, no rank reads the buffer,
because later gradients have different offsets. Offsets are published in a ring of 64 entries. Gradient n + 64
overwrites the entry of gradient n once CONSUMED has reached n on all ranks.

With "full" accumulation, an accumulator has a permanent buffer (:class:`SharedSendBuffer`), to which the same condition
applies. A rank that opens the buffer waits until all ranks have added the gradient that was last sent from it.

Ranks cannot deadlock. A rank that waits for the buffer of gradient n has itself added all gradients up to n, because it
releases buffers and accepts further gradients only after that. The rank waits until the other ranks have added gradient
n. To do so, the other ranks need only operations that precede gradient n + 2 in the common order. These operations use
buffers of earlier gradients. Therefore the rank with the least progress can always proceed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.extend import BufferPool, LaunchedCollective, SendBuffer, Size
from layerzero.shared_memory.counters import LINE, SharedCounters, wait_for_peers
from layerzero.shared_memory.segment import SharedSegment

PUBLISHED, CONSUMED = 1, 2  # indices of counters in the shared memory
FIRST_FREE_COUNTER = 3
_RING = 64
_USUAL = 4  # for sizes that were not predicted: number of buffers to create before buffers are reused
RING_BYTES = _RING * 2 * 8


def aligned_bytes(nbytes: int) -> int:
    """Return the number of bytes that a buffer occupies in a rank's part: `nbytes`, rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


class SharedBufferPool(BufferPool):
    """Pool of buffers in this rank's part of the shared memory; see [Note: Reuse of send buffers].

    Args:
        memory: segment that the ranks of the ZeRO-3 group have mapped.
        hop1: collective that failed waits for another rank report.
        predicted: number of buffers to create before buffers are reused, by size.
    """

    def __init__(
        self,
        memory: SharedSegment,
        hop1: LaunchedCollective,
        predicted: Mapping[Size, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(torch.device("cpu"), predicted)
        self._memory = memory
        self._counters = memory.counters
        self._hop1 = hop1
        self._used = RING_BYTES  # bytes of the part that are in use
        self._offsets: dict[int, int] = {}  # offset of each buffer in the part, by address of the buffer
        self._sent_as: dict[int, int] = {}  # number of the gradient last sent from each buffer, by address
        self.kept_bytes = 0  # bytes of the buffers that `allocate_permanent` has returned
        self._sent = 0
        self._added = 0
        self._rings: list[ctypes.Array[ctypes.c_uint64]] = [
            memory.numbers_of(rank, 2 * _RING) for rank in range(memory.size)
        ]
        self.most_bytes = self.predicted_bytes = memory.committed

    # Buffers

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D buffer ``[numel]`` with unspecified contents.

        If the buffer is reused, wait until no other rank reads it.
        """
        size = numel, dtype
        with self._lock:
            idle = self._idle[size]
            buffer = None
            if idle and self._made[size] >= self.predicted.get(size, _USUAL):
                buffer = idle.popleft()  # the oldest buffer, which all ranks have most likely read
            else:
                self._made[size] += 1
        if buffer is None:
            return self._grow(numel, dtype)
        self.wait_consumed(buffer)
        return buffer

    def allocate_permanent(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a permanent, zero-filled 1-D buffer ``[numel]``, which is never released."""
        buffer = self._grow(numel, dtype)
        self.kept_bytes += aligned_bytes(buffer.nbytes)
        self.predicted_bytes -= aligned_bytes(buffer.nbytes)
        self.most_bytes = self._memory.committed - self.kept_bytes
        return buffer

    def wait_consumed(self, buffer: Tensor) -> None:
        """Wait until all ranks have added the gradient last sent from `buffer`. The buffer may then be overwritten."""
        self._wait_consumed(self._sent_as.get(buffer.data_ptr(), 0))

    def contains(self, tensor: Tensor) -> bool:
        """Return whether `tensor` starts at the address of a buffer in this pool."""
        return tensor.data_ptr() in self._offsets

    def _grow(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        try:
            self._memory.commit(self._used + nbytes)
        except OSError as error:
            raise RuntimeError(
                f"the shared memory of the ranks of a ZeRO-3 group cannot grow by {nbytes} bytes for gradients: "
                f'{error}. Give the machine or its container more memory, or pass shared_memory="off" to shard_model'
            ) from error
        buffer = self._memory.part_of(self._memory.rank, numel, dtype, self._used)
        self._offsets[buffer.data_ptr()] = self._used
        self._used += aligned_bytes(nbytes)
        self.most_bytes = self._memory.committed - self.kept_bytes
        return buffer

    # Gradients

    def publish(self, buffer: Tensor) -> int:
        """Send the gradient in `buffer` by publishing the buffer's offset. Return the number of the gradient.

        The buffer must not be written before :meth:`wait_consumed` returns.
        """
        number = self._sent + 1
        self._wait_consumed(max(0, number - _RING))
        index = 2 * (number % _RING)
        ring = self._rings[self._memory.rank]
        ring[index], ring[index + 1] = self._offsets[buffer.data_ptr()], buffer.nbytes
        self._sent_as[buffer.data_ptr()] = self._sent = number
        self._counters.increment(PUBLISHED)
        return number

    def parts(self, number: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return this rank's piece of every rank's gradient `number`, as one 1-D view [numel] per rank.

        All ranks must have sent gradient `number`.
        """
        index, nbytes = 2 * (number % _RING), numel * self._memory.size * dtype.itemsize
        parts = []
        for rank, ring in enumerate(self._rings):
            if ring[index + 1] != nbytes:
                raise RuntimeError(
                    f"rank {rank} of the ZeRO-3 group reduces different gradients: hop 1 number {number} has "
                    f"{ring[index + 1]} bytes there and {nbytes} here. Run the same backwards on all ranks of the group"
                )
            offset = ring[index] + self._memory.rank * numel * dtype.itemsize
            parts.append(self._memory.part_of(rank, numel, dtype, offset))
        return tuple(parts)

    def mark_consumed(self, number: int) -> None:
        """Tell the other ranks that this rank has read gradient `number`, so that its buffer can be reused."""
        assert number == self._added + 1, "gradients are added in the order in which they are sent"
        self._added = number
        self._counters.increment(CONSUMED)

    def _wait_consumed(self, number: int) -> None:
        wait_for_peers(self._counters, CONSUMED, number, self._hop1)


class SharedSendBuffer(SendBuffer):
    """Accumulator memory in a shared segment, which the peers read in place."""

    read_in_place = True

    def __init__(self, numel: int, dtype: torch.dtype, pool: SharedBufferPool) -> None:
        super().__init__(numel, dtype, pool.device)
        self._pool = pool

    def wait_until_writable(self) -> None:
        if self._tensor is not None:
            self._pool.wait_consumed(self._tensor)

    def _allocate(self) -> Tensor:
        return self._pool.allocate_permanent(self.numel, self.dtype)


class PendingPeers:
    """Transfer that completes when all ranks have sent gradient `number`."""

    def __init__(self, counters: SharedCounters, number: int) -> None:
        self._counters = counters
        self._number = number

    def is_completed(self) -> bool:
        return not self._counters.ranks_below(PUBLISHED, self._number)

    def wait(self) -> Any:
        self._counters.wait(PUBLISHED, self._number)
