"""Divide a model into fragments, and schedule the exchange of each fragment between training sites.

See [Note: Outer steps] in outer_steps.py. This module does not import torch and needs no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide_into_fragments", "start_positions"]


def divide_into_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide a sequence of items into contiguous groups of about equal total size.

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


def start_positions(every: int, fragments: int) -> list[int]:
    """Return the position, in a period of `every` steps, of the step after which each fragment is sent.

    Position 1 is the first step of a period, and position 0 the last. The last fragment is sent at the end of a period.
    """
    return [every * (index + 1) // fragments % every for index in range(fragments)]
