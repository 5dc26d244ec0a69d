"""Numbers in memory that ranks share: one rank raises them, the others wait.

[Note: Signals]
Each number has one owner, which alone raises it, by one, and lies on a cache line of its own. It is raised by the
kernel (``FUTEX_WAKE_OP``), which adds with release semantics and wakes who waits: whoever sees the new number sees all
that its owner had written before. On x86-64 that is enough, as loads are not reordered there. Elsewhere who has seen
it makes another such call (of 0, on a number of its own), which is a full barrier, before it reads what the number
stands for.

A number has 32 bits and may wrap; two are compared by their difference. Who waits sleeps in the kernel, for a slice
of time after which it looks whether the owner still lives and whether the time is up.

[Note: Life and death]
Each rank holds a lock of the shared file, on a byte of its own, from the rendezvous on. The kernel drops it when the
process ends, however it ends, or when the memory is given up. It is a record lock, which a forked child (a worker of a
data loader) does not inherit, as it would a lock of an open file: a worker that outlives its rank does not make it
look alive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Sequence

__all__ = ["LINE", "SharedCounters", "refuse_platform"]

LINE = 64  # bytes: a cache line
_SLICE = 0.05  # seconds
_WAIT, _WAKE_OP = 0, 5
_ADD = 1 << 28
_EVERYBODY = 2**31 - 1
_HALF = 1 << 31
_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # futex
_ORDERS_LOADS = platform.machine() == "x86_64"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def refuse_platform() -> str | None:
    """Why this machine has no signals; None if it has."""
    if sys.platform != "linux" or _SYSCALL is None:
        return f"{sys.platform} on {platform.machine()} is not supported, Linux on x86-64 or aarch64 is"
    return None


class SharedCounters:
    """The numbers of all ranks of a node.

    Args:
        mapping: shared memory.
        start: where the numbers lie in it, ``nbytes(len(ranks), words)`` bytes of zeros.
        file: descriptor of the shared memory, whose first bytes ranks lock.
        ranks: global ranks, for messages.
        rank: the place of this one in `ranks`.
        words: numbers of each rank.
        timeout: seconds.
    """

    def __init__(
        self, mapping: mmap.mmap, start: int, *, file: int, ranks: Sequence[int], rank: int, words: int, timeout: float
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._ranks = tuple(ranks)
        self._others = tuple(other for other in range(self.size) if other != rank)
        self._file = file
        self._words = words + 1  # the last one of each rank stays 0
        self._timeout = timeout
        self._per_line = LINE // 4
        self._numbers = (ctypes.c_uint32 * (self.size * self._words * self._per_line)).from_buffer(mapping, start)
        self._address = ctypes.addressof(self._numbers)

    @staticmethod
    def nbytes(ranks: int, words: int) -> int:
        return ranks * (words + 1) * LINE

    def live(self) -> None:
        """From here on this rank counts as alive. See [Note: Life and death]."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)

    def increment(self, word: int) -> None:
        """Raise a number of this rank by one. See [Note: Signals]."""
        self._add(word, 1)

    def ranks_below(self, word: int, target: int) -> list[int]:
        """The other ranks whose number has not reached `target`."""
        return [rank for rank in self._others if self._is_behind(rank, word, target)]

    def wait(self, word: int, target: int) -> None:
        """Return when the numbers of all other ranks have reached `target`.

        Raises:
            RuntimeError: a rank has died, or the time is up.
        """
        deadline = time.monotonic() + self._timeout
        for rank in self._others:
            place = (rank * self._words + word) * self._per_line
            while self._is_behind(rank, word, target):
                seen = self._numbers[place]
                if not self._is_behind(rank, word, target):
                    break
                if self._sleep(place, seen):
                    continue
                if not self._lives(rank) and self._is_behind(rank, word, target):
                    raise RuntimeError(f"connection closed: rank {self._ranks[rank]} has died or has ended")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {self._timeout:g} s for rank {self._ranks[rank]}")
        if not _ORDERS_LOADS:
            self._add(self._words - 1, 0)

    def _is_behind(self, rank: int, word: int, target: int) -> bool:
        number: int = self._numbers[(rank * self._words + word) * self._per_line]
        return (number - target) & (2 * _HALF - 1) >= _HALF

    def _add(self, word: int, count: int) -> None:
        assert _libc is not None
        address = ctypes.c_void_p(self._address + (self.rank * self._words + word) * LINE)
        operation = _ADD | count << 12
        if _libc.syscall(_SYSCALL, address, _WAKE_OP, _EVERYBODY, None, address, operation) < 0:
            raise _failure("FUTEX_WAKE_OP")

    def _sleep(self, place: int, seen: int) -> bool:
        """Sleep while a number is `seen`; False if that took a whole slice."""
        assert _libc is not None
        slice_ = _Timespec(0, int(_SLICE * 1e9))
        address = ctypes.c_void_p(self._address + 4 * place)
        if _libc.syscall(_SYSCALL, address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(slice_), None, 0) == 0:
            return True
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise _failure("FUTEX_WAIT")
        return ctypes.get_errno() != errno.ETIMEDOUT

    def _lives(self, rank: int) -> bool:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


def _failure(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
