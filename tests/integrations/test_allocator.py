"""The model of torch's caching allocator chooses the sizes and places that CUDACachingAllocator.cpp chooses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.allocator import CachingAllocator, replay

MIB = 2**20


def test_sizes_are_rounded_and_segments_have_the_sizes_of_their_pool() -> None:
    for nbytes, allocated, reserved in (
        (1, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (10 * MIB + 1, 10 * MIB + 512, 12),
        (11 * MIB + 1, 12 * MIB, 12),  # a rest of at most 1 MiB stays with the block
    ):
        allocator = CachingAllocator()
        allocator.allocate(nbytes)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved * MIB), nbytes


def test_freed_neighbors_are_joined_and_the_smallest_block_that_fits_is_used() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    assert (first, second, third) == (0, 6 * MIB, 12 * MIB) and allocator.reserved == 20 * MIB
    allocator.free(first)
    allocator.free(third)
    assert allocator.allocate(8 * MIB) == 12 * MIB, "joined with the rest of the segment"
    allocator.free(second)
    assert allocator.allocate(12 * MIB) == 0 and allocator.reserved == 20 * MIB
    assert allocator.allocate(2 * MIB) > 20 * MIB and allocator.reserved == 40 * MIB, "no block crosses segments"
    assert allocator.peak_allocated == 22 * MIB


def test_empty_cache_returns_free_segments_and_expandable_segments_grow() -> None:
    events = [(1, MIB // 2), (2, MIB), (2, -MIB), (0, 0), (3, 2 * MIB)]  # each size counts 64 times
    assert replay(events).peak_reserved == (32 + 64 + 128) * MIB
    assert replay(events, empties=True).peak_reserved == (32 + 128) * MIB
    assert replay(events, expandable=True).peak_reserved == 160 * MIB, "pages of 20 MiB"


@pytest.mark.slow
def test_little_more_than_the_peak_is_reserved_if_embedding_and_head_are_units() -> None:
    command = [sys.executable, "-m", "benchmarks.allocator", "--schemes", "layerzero-apart"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ratios = [float(each) for each in re.findall(r"^layerzero-apart: peak .* ([\d.]+)$", done.stdout, re.M)]
    assert len(ratios) == 1 and ratios[0] <= 1.25, done.stdout
