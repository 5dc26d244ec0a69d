"""Fragments are contiguous, not empty, and about equally large."""

from __future__ import annotations

import random

import pytest

from layerzero.outer_fragments import divide_into_fragments, start_positions


@pytest.mark.parametrize(
    ("sizes", "fragments", "stops"),
    [
        ([1, 1, 1, 1], 2, [2, 4]),
        ([1, 1, 1, 1], 4, [1, 2, 3, 4]),
        ([10, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1, 10], 2, [3, 4]),
        ([0, 0, 0], 3, [1, 2, 3]),
        ([5], 1, [1]),
    ],
)
def test_small_divisions(sizes: list[int], fragments: int, stops: list[int]) -> None:
    assert [group.stop for group in divide_into_fragments(sizes, fragments)] == stops


def test_every_item_is_in_one_fragment() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        sizes = [numbers.randint(0, 9) for _ in range(numbers.randint(1, 12))]
        fragments = numbers.randint(1, len(sizes))
        groups = divide_into_fragments(sizes, fragments)
        assert [index for group in groups for index in group] == list(range(len(sizes)))
        assert len(groups) == fragments and all(groups)


@pytest.mark.parametrize(
    ("every", "fragments", "positions"),
    [(16, 4, [4, 8, 12, 0]), (16, 1, [0]), (7, 4, [1, 3, 5, 0]), (1, 1, [0]), (3, 3, [1, 2, 0])],
)
def test_fragments_are_sent_at_different_steps(every: int, fragments: int, positions: list[int]) -> None:
    assert start_positions(every, fragments) == positions
