"""Buffers that the other ranks of a node read.

[Note: When a buffer is written again]
A rank sends a sum by telling the others where it lies in its part (SENT), and they add it from there (ADDED). Sums are
sent and added in one order on all ranks, so both are counted: sum n of one rank is sum n of all. A buffer that was
last sent as sum n is handed out again once ADDED of all ranks is at least n: nobody can still read it, and nobody
will, as what comes later is read from where it is told to lie then. Places are told in a ring of 64: the place of sum
n is overwritten by that of sum n + 64, before which ADDED of all has reached n.

A sum that waits between micro-batches ("full") lies in a buffer of its own for good (:class:`NodePlace`). It is written
again on the same terms: whoever opens it waits until all have added the last sum that was sent from it.

Nobody waits in a circle. Whoever waits for a buffer of sum n has added all of its own up to n, as buffers come back,
and gradients are taken, only then; and what it waits for, that the others add sum n, asks of them only what comes
before sum n + 2 in the order that all follow, for which they need buffers of earlier sums. So the rank that is least
far can always go on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from layerzero.comm.transport.shm_counters import LINE
from layerzero.comm.transport.shm_segment import SharedSegment
from layerzero.device.buffer_pools import BufferPool, Size
from layerzero.device.gradient_storage import GradientStorage, SendLease

__all__ = ["RING_BYTES", "NodePlace", "PeersReady", "SharedBufferPool", "aligned_bytes", "aligned_bytes_of_all"]

SENT, ADDED = 1, 2  # words of the node's memory; the next one is free
FIRST_FREE_WORD = 3
_RING = 64
_USUAL = 4  # buffers of a size that nothing was foreseen of, before one is taken that others may still read
RING_BYTES = _RING * 2 * 8


def aligned_bytes(nbytes: int) -> int:
    """Bytes of a part that a buffer takes."""
    return -(-nbytes // LINE) * LINE


def aligned_bytes_of_all(buffers: Mapping[Size, int]) -> int:
    """The same of several."""
    return sum(count * aligned_bytes(numel * dtype.itemsize) for (numel, dtype), count in buffers.items())


class SharedBufferPool(BufferPool):
    """Buffers in this rank's part of the node's memory; see [Note: When a buffer is written again].

    Args:
        explain: what to raise where waiting for another rank has failed.
        foreseen: how many of a size are made before one is used again.
    """

    def __init__(
        self,
        memory: SharedSegment,
        explain: Callable[[Exception], Exception],
        foreseen: Mapping[Size, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(torch.device("cpu"), foreseen)
        self._memory = memory
        self._signals = memory.signals
        self._explain = explain
        self._used = RING_BYTES  # bytes of the part
        self._offsets: dict[int, int] = {}  # by address of a buffer: its place in the part
        self._sent_as: dict[int, int] = {}  # by address: the last sum that it was sent as
        self.kept_bytes = 0  # of buffers that do not come back
        self._sent = 0
        self._added = 0
        self._rings: list[ctypes.Array[ctypes.c_uint64]] = [
            memory.numbers_of(rank, 2 * _RING) for rank in range(memory.size)
        ]
        self.allocated_bytes = memory.committed
        self._foreseen_bytes = memory.committed

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def predicted_bytes(self) -> int:
        return self._foreseen_bytes - self.kept_bytes

    # Buffers

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D buffer ``[numel]`` with unspecified contents, which nobody reads."""
        size = numel, dtype
        with self._lock:
            idle = self._idle[size]
            buffer = None
            if idle and self._made[size] >= self.expected.get(size, _USUAL):
                buffer = idle.popleft()[0]  # the one that the others have most likely read
            else:
                self._made[size] += 1
        if buffer is None:
            return self._grow(numel, dtype)
        self.wait_consumed(buffer)
        return buffer

    def keep(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D buffer ``[numel]`` of zeros that does not come back."""
        buffer = self._grow(numel, dtype)
        self.kept_bytes += aligned_bytes(buffer.nbytes)
        self.allocated_bytes = self._memory.committed - self.kept_bytes
        return buffer

    def wait_consumed(self, buffer: Tensor) -> None:
        """Return when a buffer may be written: all have added what was sent from it."""
        self._wait(ADDED, self._sent_as.get(buffer.data_ptr(), 0))

    def holds(self, tensor: Tensor) -> bool:
        """It is one of these buffers."""
        return tensor.data_ptr() in self._offsets

    def _grow(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        try:
            self._memory.mark_committed(self._used + nbytes)
        except OSError as error:
            raise RuntimeError(
                f"no room for {nbytes} more bytes of gradients in the memory that the ranks of a node share ({error}): "
                'give the node more, or pass shared_memory="off"'
            ) from error
        buffer = self._memory.part_of(self._memory.rank, numel, dtype, self._used)
        self._offsets[buffer.data_ptr()] = self._used
        self._used += aligned_bytes(nbytes)
        self.allocated_bytes = self._memory.committed - self.kept_bytes
        return buffer

    # Sums

    def publish(self, buffer: Tensor) -> int:
        """Tell the others where this rank's next sum lies; its number. It must not be written before :meth:`add`."""
        number = self._sent + 1
        self._wait(ADDED, max(0, number - _RING))
        place = 2 * (number % _RING)
        mine = self._rings[self._memory.rank]
        mine[place], mine[place + 1] = self._offsets[buffer.data_ptr()], buffer.nbytes
        self._sent_as[buffer.data_ptr()] = self._sent = number
        self._signals.increment(SENT)
        return number

    def parts(self, number: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """This rank's piece of sum `number` of each rank, 1-D [numel]; once it has arrived."""
        place, nbytes = 2 * (number % _RING), numel * self.size * dtype.itemsize
        parts = []
        for rank, ring in enumerate(self._rings):
            if ring[place + 1] != nbytes:
                raise RuntimeError(f"a rank of the node reduces something else: {ring[place + 1]} bytes, not {nbytes}")
            offset = ring[place] + self._memory.rank * numel * dtype.itemsize
            parts.append(self._memory.part_of(rank, numel, dtype, offset))
        return tuple(parts)

    def mark_consumed(self, number: int) -> None:
        """This rank has added up what it needs of a sum."""
        assert number == self._added + 1, "sums are added in the order in which they are sent"
        self._added = number
        self._signals.increment(ADDED)

    def peers_ready(self, number: int) -> PeersReady:
        return PeersReady(self, number)

    def is_published(self, number: int) -> bool:
        """By all ranks."""
        return not self._signals.ranks_below(SENT, number)

    def wait_published(self, number: int) -> None:
        self._signals.wait(SENT, number)

    def _wait(self, word: int, target: int) -> None:
        if not self._signals.ranks_below(word, target):
            return
        try:
            self._signals.wait(word, target)
        except RuntimeError as error:
            raise self._explain(error) from error


class NodePlace(GradientStorage):
    """Memory of one sum that the other ranks of the node read where it is; from its first use on."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: SharedBufferPool) -> None:
        super().__init__(numel, dtype)
        self._pool = pool
        self._tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def open(self, *, keep: bool) -> Tensor:
        if self._tensor is None:
            self._tensor = self._pool.keep(self.numel, self.dtype)
        self._pool.wait_consumed(self._tensor)
        return self._tensor

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> SendLease:
        """As it is: whoever reads it rounds it to `wire`."""
        self._leases += 1
        return SendLease(self._end_loan, self.open(keep=True))


class PeersReady:
    """That all ranks have sent a sum, as a transfer that may be waited for."""

    def __init__(self, pool: SharedBufferPool, number: int) -> None:
        self._pool = pool
        self._number = number

    def is_completed(self) -> bool:
        return self._pool.is_published(self._number)

    def wait(self) -> Any:
        self._pool.wait_published(self._number)

    def get_future(self) -> NoReturn:
        raise RuntimeError("nobody is told of the end of it")
