"""Create and map a memory segment that the ranks on one machine share.

[Note: Anonymous shared memory]
The memory is a file without a name (``memfd_create``), which the other ranks open through ``/proc``. The file exists as
long as a process has it open or mapped, so it does not outlive the ranks. The file is not in /dev/shm, which is limited
to 64 MB in many containers. Only the same user can open the file. Its pages are allocated before any rank accesses
them. If there is not enough memory, the allocation raises an error. Without this allocation, the first access to a page
would raise a signal instead.

[Note: Layout of a segment]
The segment begins with the counters, followed by the common part, which all ranks share (weights), and one part per
rank. The parts of all ranks have the same length, which is the maximum that a rank may need. Only committed bytes use
memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.extend import available_memory
from layerzero.shared_memory.counters import SharedCounters

_PROOF = 0  # index of each rank's first counter, which is incremented when the rank has reserved its memory


@dataclass(frozen=True)
class SegmentSizes:
    """Sizes of a segment; the same on all ranks."""

    num_counters: int  # number of counters per rank
    common: int  # size of the common part in bytes
    part: int  # maximum size of each rank's part in bytes
    predicted: int  # number of bytes in each rank's part that are committed initially

    def starts(self, ranks: int) -> tuple[int, int, int]:
        """Return the byte offsets of the common part, of the first rank's part, and of the end of a segment."""
        common = round_up_to_pages(SharedCounters.nbytes(ranks, self.num_counters))
        parts = common + round_up_to_pages(self.common)
        return common, parts, parts + ranks * round_up_to_pages(self.part)


@dataclass(frozen=True)
class SegmentDescriptor:
    """Location of a segment. The first rank broadcasts the location, so that the other ranks can open the segment."""

    process: int  # id of the first rank's process
    file: int  # file descriptor in that process
    token: int  # random number in the label of the file


def _label(token: int) -> str:
    return f"layerzero-{token:x}"


class SharedSegment:
    """Memory mapping that the ranks on one machine share.

    Created by :func:`layerzero.shared_memory.rendezvous.map_shared_segment`.

    Attributes:
        size: number of ranks.
        rank: index of this rank, from 0 to `size` - 1.
        counters: counters of all ranks. Counter 0 is reserved for :meth:`visibility_error`.
        committed: number of allocated bytes in this rank's part.
    """

    def __init__(self, file: int, region: SegmentSizes, *, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.size = len(ranks)
        self.rank = rank
        self.region = region
        self._file = file
        self._close = weakref.finalize(self, os.close, file)
        self._common_start, self._parts_start, total = region.starts(self.size)
        self.committed = 0
        if os.fstat(file).st_size != total:
            raise OSError(f"the shared memory has {os.fstat(file).st_size} bytes, not {total}")
        self._mapping = mmap.mmap(file, total)
        self.counters = SharedCounters(
            self._mapping, file=file, ranks=ranks, rank=rank, num_counters=region.num_counters, timeout=timeout
        )

    @staticmethod
    def create(region: SegmentSizes, size: int) -> tuple[int, SegmentDescriptor]:
        """Create a segment for `size` ranks. Return its file descriptor, and its location for the other ranks."""
        token = secrets.randbits(62)
        file = os.memfd_create(_label(token), os.MFD_CLOEXEC)
        common_start, _, total = region.starts(size)
        try:
            os.fchmod(file, 0o600)  # by default, other users could open it through /proc
            _require_memory(region.common + size * region.predicted)
            os.ftruncate(file, total)
            os.posix_fallocate(file, 0, common_start)
        except OSError:
            os.close(file)
            raise
        return file, SegmentDescriptor(os.getpid(), file, token)

    @staticmethod
    def open(call: SegmentDescriptor) -> int:
        """Open a segment that another rank has created, and return its file descriptor.

        Raises:
            OSError: the file cannot be opened, or is not the segment.
        """
        path = f"/proc/{call.process}/fd/{call.file}"
        target = os.readlink(path)
        if _label(call.token) not in target:
            raise OSError(f"{path} is a different file, {target}: the ranks cannot see each other's processes")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def reserve(self) -> None:
        """Mark this rank as alive, and allocate its share of the common part and the start of its own part.

        In its own part, the rank allocates the first `SegmentSizes.predicted` bytes.
        """
        self.counters.mark_alive()
        page = mmap.PAGESIZE
        share = -(-round_up_to_pages(self.region.common) // page // self.size) * page
        start, stop = share * self.rank, min(share * (self.rank + 1), round_up_to_pages(self.region.common))
        if start < stop:
            os.posix_fallocate(self._file, self._common_start + start, stop - start)
        self.commit(self.region.predicted)
        self.counters.increment(_PROOF)

    def close(self) -> None:
        """Close the file. The other ranks of the ZeRO-3 group then consider the process of this rank to have exited."""
        self._close()

    def visibility_error(self) -> str | None:
        """Return an error message if this rank does not see the writes of other ranks, or None if it sees them.

        All ranks must have called :meth:`reserve` before this call.
        """
        behind = self.counters.ranks_below(_PROOF, 1)
        return f"writes of other ranks are not visible here (indices {behind} in the ZeRO-3 group)" if behind else None

    def commit(self, nbytes: int) -> None:
        """Allocate the first `nbytes` of this rank's part.

        Raises:
            OSError: there is not enough memory.
        """
        nbytes = round_up_to_pages(nbytes)
        assert nbytes <= round_up_to_pages(self.region.part), "a part exceeds its maximum length"
        if nbytes > self.committed:
            _require_memory(nbytes - self.committed)
            os.posix_fallocate(self._file, self._part_start(self.rank) + self.committed, nbytes - self.committed)
            self.committed = nbytes

    @property
    def allocated_bytes(self) -> int:
        """Total number of bytes that all ranks have allocated for the segment."""
        return os.fstat(self._file).st_blocks * 512

    def common(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        """Return a 1-D tensor [numel] that begins at byte `offset` of the common part."""
        assert offset + numel * dtype.itemsize <= self.region.common
        return self._tensor(numel, dtype, self._common_start + offset)

    def part_of(self, rank: int, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        """Return a 1-D tensor [numel] that begins at byte `offset` of the part of `rank`."""
        assert offset + numel * dtype.itemsize <= self.region.part
        return self._tensor(numel, dtype, self._part_start(rank) + offset)

    def numbers_of(self, rank: int, count: int) -> ctypes.Array[ctypes.c_uint64]:
        """Return a view of the first `count` 8-byte integers in the part of `rank`."""
        return (ctypes.c_uint64 * count).from_buffer(self._mapping, self._part_start(rank))

    def _part_start(self, rank: int) -> int:
        return self._parts_start + rank * round_up_to_pages(self.region.part)

    def _tensor(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)  # keeps the mapping alive


def _require_memory(nbytes: int) -> None:
    """Raise OSError if fewer than `nbytes` bytes of memory are available.

    Without this check, Linux would kill a process when memory runs out.
    """
    available = available_memory()
    if available < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are needed, {available:.0f} are available")


def round_up_to_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
