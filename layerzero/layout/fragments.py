"""Divide the handles of a model into the fragments that sites exchange. The code needs neither torch nor processes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide_into_fragments"]


def divide_into_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide items of these sizes, in their order, into contiguous groups of about equal size.

    Args:
        sizes: size of each item. There are at least `fragments` items.
        fragments: number of groups.

    Returns:
        The indices of the items of each group. No group is empty.
    """
    starts = [0]
    done, total = 0, sum(sizes)
    for index, size in enumerate(sizes):
        remaining = len(sizes) - index
        has_reached_share = len(starts) * total <= done * fragments
        must_start = remaining <= fragments - len(starts)
        if index > starts[-1] and len(starts) < fragments and (has_reached_share or must_start):
            starts.append(index)
        done += size
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]
