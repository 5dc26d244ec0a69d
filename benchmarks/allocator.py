"""Model of torch's caching allocator, and the memory that it would reserve for steps that run on a CPU.

    python -m benchmarks.allocator                     # layerzero and FSDP2, as one of 64 ranks

The model has four layers of the width and vocabulary of Llama-3 8B, divided by eight, with an eighth of the tokens.
Each allocation is counted with 64 times its size. torch's profiler records the allocations; layerzero uses its pools
for devices, and all memory belongs to one stream. What only kernels of CUDA allocate is missing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.loopback import Loopback
from benchmarks.gpu.models import NODE, WORLD, batches, contestant, one_of_64
from layerzero.device.buffer_pools import FullBufferPool

_SCHEMES = ["layerzero", "layerzero-full", "layerzero-local", "layerzero-apart", "fsdp2-full", "fsdp2-hsdp"]
_MIB = 2**20
_SCALE = 64
_MARK = "mark of the allocator's model"  # name of a range of the profiler
_MODULES = (
    "comm.collectives",
    "comm.watchdog",
    "device.accelerator",
    "device.buffer_pools",
    "device.streams",
    "engine.rank_traits",
    "engine.scheduler",
    "sharding.make_root",
)


class CachingAllocator:
    """Sizes and places of blocks, as torch's CUDACachingAllocator chooses them on one stream.

    Args:
        expandable: as with ``PYTORCH_ALLOC_CONF=expandable_segments:True``, of which each pool has one segment.

    Attributes:
        allocated, reserved: current bytes of blocks in use, and of segments.
        peak_allocated, peak_reserved: their maxima so far.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by pool: (size, address), ascending
        self._blocks: dict[int, tuple[int, bool]] = {}  # by address: size and pool of blocks in use
        self._ends: dict[int, int] = {}  # by end of a free block: its size
        self._starts: dict[int, int] = {}  # by address of a free block: its size
        self._segments: dict[int, tuple[int, bool]] = {}  # by address: size and pool
        self._tops = {True: 2**50, False: 0}  # by pool: end of the last segment

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new block."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= _MIB
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at < len(free):
            found, address = free[at]
        else:
            found, address = self._grow(size, small)
        self._take(found, address, small)
        rest = found - size
        if rest >= 512 if small or self._expandable else rest > _MIB:
            self._give(rest, address + size, small)
        else:
            size = found
        self._blocks[address] = size, small
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return address

    def _grow(self, size: int, small: bool) -> tuple[int, int]:
        """Take memory from the device. Return the size and the address of a free block of at least `size` bytes."""
        top = self._tops[small]
        before = self._ends.get(top, 0) if self._expandable else 0
        page = 20 * _MIB if self._expandable and not small else 2 * _MIB
        least = 20 * _MIB if not small and size < 10 * _MIB else size - before
        found = -(-least // page) * page
        self.reserved += found
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self._expandable:
            if before:
                self._take(before, top - before, small)
            self._tops[small] = top + found
        else:
            self._segments[top] = found, small
            self._tops[small] = top + found + 512  # segments are never neighbors
        self._give(before + found, top - before, small)
        return before + found, top - before

    def free(self, address: int) -> None:
        size, small = self._blocks.pop(address)
        self.allocated -= size
        if address in self._ends:
            before = self._ends[address]
            self._take(before, address - before, small)
            address, size = address - before, size + before
        if address + size in self._starts:
            after = self._starts[address + size]
            self._take(after, address + size, small)
            size += after
        self._give(size, address, small)

    def empty_cache(self) -> None:
        """Return segments without blocks in use to the device. Expandable segments are kept here."""
        for address, (size, small) in list(self._segments.items()):
            if self._starts.get(address) == size:
                self._take(size, address, small)
                del self._segments[address]
                self.reserved -= size

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _take(self, size: int, address: int, small: bool) -> None:
        free = self._free[small]
        del free[bisect_left(free, (size, address))]
        del self._ends[address + size], self._starts[address]

    def _give(self, size: int, address: int, small: bool) -> None:
        insort(self._free[small], (size, address))
        self._ends[address + size] = size
        self._starts[address] = size


Event = tuple[int, int]  # address, and bytes that are allocated (positive) or freed (negative); 0, 0 marks a range


@contextmanager
def as_device() -> Iterator[None]:
    """Make layerzero treat the CPU as a device with streams that run everything at once."""

    class Stream:
        def __init__(self, device: object = None, priority: int = 0) -> None:
            pass

        def record_event(self) -> Any:
            return SimpleNamespace(query=lambda: True, synchronize=lambda: None, wait=lambda stream=None: None)

        def wait_event(self, event: object) -> None:
            pass

        def wait_stream(self, stream: object) -> None:
            pass

    current = Stream()

    @contextmanager
    def stream(each: object) -> Iterator[None]:
        yield

    module = SimpleNamespace(Stream=Stream, current_stream=lambda: current, stream=stream)
    with ExitStack() as stack:
        for name in _MODULES:
            stack.enter_context(mock.patch(f"layerzero.{name}.device_module", lambda device: module))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        yield


def recorded(run: Callable[[], object]) -> list[Event]:
    """Return the allocations of a run in order, of memory that it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        run()
    found: list[tuple[int, Event]] = []

    def visit(events: Sequence[Any]) -> None:
        for event in events:
            if event.tag == _EventType.Allocation:
                found.append((event.start_time_ns, (event.extra_fields.ptr, event.extra_fields.alloc_size)))
            elif event.name == _MARK:
                found.append((event.start_time_ns, (0, 0)))
            visit(event.children)

    visit(observed.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    found.sort(key=lambda each: each[0])
    return [event for _, event in found]


def replay(events: Sequence[Event], *, empties: bool = False, expandable: bool = False) -> CachingAllocator:
    """Return an allocator after a run. Its peaks are those since the last mark.

    Args:
        empties: empty the cache at the first mark.
    """
    allocator = CachingAllocator(expandable=expandable)
    blocks: dict[int, int] = {}
    for address, nbytes in events:
        if nbytes > 0:
            blocks[address] = allocator.allocate(nbytes * _SCALE)
        elif nbytes < 0:
            if address in blocks:
                allocator.free(blocks.pop(address))
        else:
            if empties:
                allocator.empty_cache()
                empties = False
            allocator.reset_peaks()
    return allocator


def steps(scheme: str, micro_batches: int) -> list[Event]:
    """Return the allocations of sharding a model and of three steps. Marks precede the first and the last step."""
    args = argparse.Namespace(device="cpu", tiny=False, model="llama/64", side_stream=False)

    def run() -> None:
        _, step = contestant(args, scheme, WORLD, NODE)
        for index in range(3):
            gc.collect()
            if index != 1:
                with record_function(_MARK):
                    pass
            step(batches(args, micro_batches))

    with one_of_64(Loopback), as_device():
        return recorded(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemes", nargs="+", default=_SCHEMES)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--swap", action="store_true", help="as torch 2.12 or newer, which can move memory of storages")
    args = parser.parse_args()
    FullBufferPool.can_cache &= args.swap
    for scheme in args.schemes:
        events = steps(scheme, args.micro_batches)
        for name, how in {
            "": {},
            ", empty_cache after sharding": {"empties": True},
            ", expandable segments": {"expandable": True},
        }.items():
            found = replay(events, **how)
            peak, reserved = found.peak_allocated / 1e9, found.peak_reserved / 1e9
            sys.stdout.write(f"{scheme}{name}: peak {peak:.2f} GB, reserved {reserved:.2f} GB, {reserved / peak:.2f}\n")


if __name__ == "__main__":
    main()
