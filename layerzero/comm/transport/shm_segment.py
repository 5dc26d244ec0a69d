"""Memory that the ranks of a node share.

[Note: No name]
The memory is a file without a name (``memfd_create``), which the others open through ``/proc``: it exists as long as
someone has it open or mapped, so that nothing is left behind by whatever ends a rank, at whatever moment. It does not
lie in /dev/shm, which is 64 MB in many containers, and none but the same user can open it. Its pages are allocated
before anyone touches them: where there is no room, that is an error in one place, and no signal in another.

[Note: Parts]
Behind the signals lies what belongs to all ranks (weights), and then a part of each rank, of equal length. A part is
long enough for whatever a rank may ever need; memory is only what has been committed.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerzero.comm.transport.shm_counters import SharedCounters

__all__ = ["SegmentDescriptor", "SegmentSizes", "SharedSegment", "left_of_container", "pages"]

_OLD_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # of the first version of cgroups
_PROOF = 0  # the first word of each rank


@dataclass(frozen=True)
class SegmentSizes:
    """What is shared, in bytes; the same on all ranks."""

    words: int  # signals of each rank
    common: int  # of all ranks together
    part: int  # of each rank, at most
    foreseen: int  # of each rank, from the beginning


@dataclass(frozen=True)
class SegmentDescriptor:
    """What the first rank of a node tells the others: where they find the memory."""

    process: int
    file: int
    token: int

    @property
    def label(self) -> str:
        return f"layerzero-{self.token:x}"


class SharedSegment:
    """One mapping of all ranks of a node. Made by :func:`layerzero.comm.transport.shm_rendezvous.share_memory`.

    Attributes:
        size: ranks.
        rank: this one's place among them.
        signals: words from 1 on are the user's.
    """

    def __init__(self, file: int, region: SegmentSizes, *, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.size = len(ranks)
        self.rank = rank
        self.region = region
        self._file = file
        self._close = weakref.finalize(self, os.close, file)
        self._common_start = pages(SharedCounters.nbytes(self.size, region.words))
        self._parts_start = self._common_start + pages(region.common)
        self._committed = 0  # bytes of this rank's part
        total = _length(region, self.size)
        if os.fstat(file).st_size != total:
            raise OSError(f"the shared memory has {os.fstat(file).st_size} bytes, not {total}")
        self._mapping = mmap.mmap(file, total)
        self.signals = SharedCounters(
            self._mapping, 0, file=file, ranks=ranks, rank=rank, words=region.words, timeout=timeout
        )

    @staticmethod
    def create(region: SegmentSizes, size: int) -> tuple[int, SegmentDescriptor]:
        """The descriptor of new memory for `size` ranks, and what to tell them."""
        token = secrets.randbits(62)
        call = SegmentDescriptor(os.getpid(), -1, token)
        file = os.memfd_create(call.label, os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)  # it is born open to all who come to the descriptor
            _require(region.common + size * region.foreseen)
            os.ftruncate(file, _length(region, size))
            os.posix_fallocate(file, 0, pages(SharedCounters.nbytes(size, region.words)))
        except OSError:
            os.close(file)
            raise
        return file, SegmentDescriptor(call.process, file, token)

    @staticmethod
    def open(call: SegmentDescriptor) -> int:
        """The descriptor of memory that another rank has made."""
        path = f"/proc/{call.process}/fd/{call.file}"
        found = os.readlink(path)
        if call.label not in found:
            raise OSError(f"{path} is another file, {found}: the ranks do not see each other's processes")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def reserve(self) -> None:
        """Allocate what is foreseen: this rank's part, and its share of what belongs to all; count as alive."""
        self.signals.live()
        page = mmap.PAGESIZE
        share = -(-pages(self.region.common) // page // self.size) * page
        start, stop = share * self.rank, min(share * (self.rank + 1), pages(self.region.common))
        if start < stop:
            os.posix_fallocate(self._file, self._common_start + start, stop - start)
        self.mark_committed(self.region.foreseen)
        self.signals.increment(_PROOF)

    def close(self) -> None:
        """Close the file. The other ranks of the ZeRO-3 group then treat this rank as ended."""
        self._close()

    def check_visible(self) -> str | None:
        """What speaks against the others having this very memory, once they have reserved it; None: nothing."""
        behind = self.signals.ranks_below(_PROOF, 1)
        return f"what others wrote is not here (places {behind} in the node)" if behind else None

    def mark_committed(self, nbytes: int) -> None:
        """Allocate the first `nbytes` of this rank's part.

        Raises:
            OSError: there is no room.
        """
        nbytes = pages(nbytes)
        assert nbytes <= pages(self.region.part), "a part is longer than was thought possible"
        if nbytes > self._committed:
            _require(nbytes - self._committed)
            start = self._parts_start + self.rank * pages(self.region.part)
            os.posix_fallocate(self._file, start + self._committed, nbytes - self._committed)
            self._committed = nbytes

    @property
    def committed(self) -> int:
        """Bytes of this rank's part that are memory."""
        return self._committed

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that all ranks of the node hold together."""
        return os.fstat(self._file).st_blocks * 512

    def common(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        """1-D [numel] of what belongs to all, from byte `offset` on."""
        assert offset + numel * dtype.itemsize <= self.region.common
        return self._tensor(numel, dtype, self._common_start + offset)

    def part_of(self, rank: int, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        """1-D [numel] of a rank's part, from byte `offset` on."""
        assert offset + numel * dtype.itemsize <= self.region.part
        return self._tensor(numel, dtype, self._parts_start + rank * pages(self.region.part) + offset)

    def numbers_of(self, rank: int, count: int) -> ctypes.Array[ctypes.c_uint64]:
        """The first `count` numbers of a rank's part."""
        start = self._parts_start + rank * pages(self.region.part)
        return (ctypes.c_uint64 * count).from_buffer(self._mapping, start)

    def _tensor(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)  # keeps the mapping


def _require(nbytes: int) -> None:
    """Raise OSError where less memory is left: asked for more, Linux would end some process instead."""
    available = min(_left_of_machine(), left_of_container())
    if available < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are needed, {available:.0f} are available")


def _left_of_machine() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return math.inf


def left_of_container(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that a container may take beyond what it has, pages of files apart, which can be dropped."""
    left = math.inf
    for folder, limit, used in ((root, "memory.max", "memory.current"), (root / "memory", *_OLD_NAMES)):
        with suppress(OSError, ValueError):  # another kind of machine, or "max"
            most, taken = (int((folder / name).read_text()) for name in (limit, used))
            left = min(left, most - taken + _of_files(folder / "memory.stat"))
    return left


def _of_files(stat: Path) -> int:
    """Bytes of a container that are pages of files, with those of containers inside it where they count apart."""
    with suppress(OSError, ValueError):
        found = dict(line.split() for line in stat.read_text().splitlines())
        inside = "total_" if "total_active_file" in found else ""
        return sum(int(found.get(f"{inside}{kind}_file", 0)) for kind in ("active", "inactive"))
    return 0


def pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _length(region: SegmentSizes, size: int) -> int:
    return pages(SharedCounters.nbytes(size, region.words)) + pages(region.common) + size * pages(region.part)
