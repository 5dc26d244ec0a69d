"""Synchronize ranks with counters in shared memory. A rank increments its counters, and other ranks wait for a value.

[Note: Futex counters]
Each counter has a separate cache line and one owner, which is the only rank that increments the counter. The futex
operation ``FUTEX_WAKE_OP`` increments the counter with release semantics and wakes the waiting ranks. A rank that reads
the new value sees all earlier writes by the owner. On x86-64, the load of the counter is sufficient, because loads are
not reordered. On other machines, the reader makes another system call before it reads the data. This call adds 0 to one
of the reader's own counters and acts as a full barrier.

A counter has 32 bits and may wrap around. Therefore the sign of the difference modulo 2^32 decides which of two values
is larger. A waiting rank sleeps in the kernel for short intervals. After each interval, the rank checks that the owner
is alive and that the timeout has not expired.

[Note: Detection of exited processes]
From the rendezvous on, each rank holds a lock on one byte of the shared file. The kernel releases the lock when the
process exits for any reason, or when the file is closed. The lock is a process-associated record lock. Unlike an open
file description lock, it is not inherited by a forked child, such as a data loader worker. Therefore a worker that
outlives its rank does not hold the lock.
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

from layerzero.extend import LaunchedCollective, NonCollectiveWait, raise_verdict, waiting

LINE = 64  # bytes in a cache line
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


def unsupported_platform_reason() -> str | None:
    """Return the reason why shared counters do not work on this machine, or None if they work."""
    if sys.platform != "linux" or _SYSCALL is None:
        return f"{sys.platform} on {platform.machine()} is not supported: Linux on x86-64 or aarch64 is required"
    return None


class SharedCounters:
    """Counters of all ranks of a ZeRO-3 group.

    Args:
        mapping: shared memory. The counters occupy its first ``nbytes(len(ranks), num_counters)`` bytes, which are
            initially 0.
        file: file descriptor of the shared memory. Each rank locks one of the first bytes of the file.
        ranks: global ranks, for messages.
        rank: index of this rank in `ranks`.
        num_counters: number of counters per rank.
        timeout: maximum duration of a wait, in seconds.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        *,
        file: int,
        ranks: Sequence[int],
        rank: int,
        num_counters: int,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._ranks = tuple(ranks)
        self._others = tuple(peer for peer in range(self.size) if peer != rank)
        self._file = file
        self._num_counters = num_counters + 1  # the last counter of each rank stays 0; see [Note: Futex counters]
        self._timeout = timeout
        self._per_line = LINE // 4
        self._numbers = (ctypes.c_uint32 * (self.size * self._num_counters * self._per_line)).from_buffer(mapping)
        self._address = ctypes.addressof(self._numbers)

    @staticmethod
    def nbytes(ranks: int, num_counters: int) -> int:
        return ranks * (num_counters + 1) * LINE

    def mark_alive(self) -> None:
        """Mark this rank as alive by locking its byte of the file. See [Note: Detection of exited processes]."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)

    def increment(self, counter: int) -> None:
        """Increment this rank's counter with index `counter`. See [Note: Futex counters]."""
        self._add_and_wake(counter, 1)

    def ranks_below(self, counter: int, target: int) -> list[int]:
        """Return the other ranks whose counter with index `counter` is below `target`, as indices in the group."""
        return [rank for rank in self._others if self._is_behind(rank, counter, target)]

    def absent(self, counter: int, target: int) -> list[int]:
        """Return the global ranks whose counter with index `counter` is below `target`."""
        return [self._ranks[rank] for rank in self.ranks_below(counter, target)]

    def wait(self, counter: int, target: int) -> None:
        """Wait until the counter with index `counter` of every other rank has reached `target`.

        Raises:
            RuntimeError: a rank has exited, or the timeout has expired.
        """
        deadline = time.monotonic() + self._timeout
        for rank in self._others:
            index = (rank * self._num_counters + counter) * self._per_line
            while self._is_behind(rank, counter, target):
                value = self._numbers[index]
                if not self._is_behind(rank, counter, target):
                    break
                if self._sleep(index, value):
                    continue
                raise_verdict()
                if not self._is_alive(rank) and self._is_behind(rank, counter, target):
                    raise RuntimeError(f"connection closed: rank {self._ranks[rank]} has died or has exited")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {self._timeout:g} s for rank {self._ranks[rank]}")
        if not _ORDERS_LOADS:
            self._add_and_wake(self._num_counters - 1, 0)

    def _is_behind(self, rank: int, counter: int, target: int) -> bool:
        number: int = self._numbers[(rank * self._num_counters + counter) * self._per_line]
        return (number - target) & (2 * _HALF - 1) >= _HALF

    def _add_and_wake(self, counter: int, count: int) -> None:
        assert _libc is not None
        address = ctypes.c_void_p(self._address + (self.rank * self._num_counters + counter) * LINE)
        operation = _ADD | count << 12
        if _libc.syscall(_SYSCALL, address, _WAKE_OP, _EVERYBODY, None, address, operation) < 0:
            raise _os_error("FUTEX_WAKE_OP")

    def _sleep(self, index: int, seen: int) -> bool:
        """Sleep while the counter at `index` equals `seen`. Return False if the whole time slice has passed."""
        assert _libc is not None
        slice_ = _Timespec(0, int(_SLICE * 1e9))
        address = ctypes.c_void_p(self._address + 4 * index)
        if _libc.syscall(_SYSCALL, address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(slice_), None, 0) == 0:
            return True
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise _os_error("FUTEX_WAIT")
        return ctypes.get_errno() != errno.ETIMEDOUT

    def _is_alive(self, rank: int) -> bool:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK


def wait_for_peers(counters: SharedCounters, counter: int, target: int, reported: LaunchedCollective) -> None:
    """Wait until the counter with index `counter` of every other rank has reached `target`.

    Args:
        reported: collective that messages name, and that makes the error to raise after a failed wait.
    """
    if not counters.ranks_below(counter, target):
        counters.wait(counter, target)
        return
    try:
        with waiting(NonCollectiveWait(reported.status.doing, lambda store: counters.absent(counter, target))):
            counters.wait(counter, target)
    except RuntimeError as error:
        raise reported.failure_error(error) from error


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
