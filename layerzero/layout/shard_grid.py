"""Compute the coordinates of a data-parallel rank, and the parts of a layout that it stores, from integers only.

[Note: Three extents]
A tensor of a handle has one of three extents on a rank. Weights are copied from smaller to larger extents. Gradients
are reduced from larger to smaller extents:

    FULL  [G]    full buffer             full gradient
                 ^ gather   (zero3)      v hop 1   (zero3)
    ZERO3 [G/S]  ZeRO-3 shard            ZeRO-3 gradient shard
                 ^ refresh  (replica)    v hop 2   (replica)
    ZERO1 [L]    master                  final gradient

A smaller extent is a part of each larger one. If S = 1, ZERO3 equals FULL. If R = 1, ZERO1 equals ZERO3.
The full buffer consists of D equal shards in order. The rank (r, s) has the ZeRO-1 shard k = s * R + r, and the ZeRO-3
shard s, which consists of the ZeRO-1 shards of all replicas. flat_layout.py defines which dim-0 rows of the parameters
each shard contains. Shards always contain complete rows. Owners of full parameters may change the boundaries
(owner_layout.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.layout.flat_layout import FlatLayout, Slot


class Extent(enum.IntEnum):
    """Part of a handle's flat order that a tensor covers; see [Note: Three extents]."""

    ZERO1 = 0
    ZERO3 = 1
    FULL = 2


class Overlap(NamedTuple):
    """Elements that a slot and a range of the flat order have in common. If there are none, both slices are empty."""

    of_slot: slice  # the common elements within the slot
    of_range: slice  # the common elements within the range


def overlap(slot: Slot, flat: range) -> Overlap:
    """Return the elements that `slot` and `flat`, a range of the flat order, have in common."""
    start = min(max(slot.offset, flat.start), flat.stop)
    stop = max(start, min(slot.end, flat.stop))
    if start == stop:
        return Overlap(slice(0, 0), slice(start - flat.start, start - flat.start))
    return Overlap(slice(start - slot.offset, stop - slot.offset), slice(start - flat.start, stop - flat.start))


@dataclass(frozen=True)
class ShardGrid:
    """Grid of D data-parallel ranks, arranged as R replicas of S ranks, and the coordinates of one rank.

    The rank with the coordinates (r, s) has the index r * S + s.

    >>> grid = ShardGrid.of_rank(2, data_parallel=4, zero3_size=2)  # (r, s) = (1, 0)
    >>> grid.shard_index, grid.same_elements(Extent.ZERO1, Extent.ZERO3)
    (1, False)
    """

    data_parallel: int  # D
    zero3_size: int  # S
    zero3_rank: int  # coordinate on the zero3 axis
    replica_rank: int  # coordinate on the replica axis

    def __post_init__(self) -> None:
        if self.zero3_size < 1 or self.data_parallel % self.zero3_size:
            raise ValueError(f"zero3_size={self.zero3_size} does not divide the {self.data_parallel} ranks")
        if not (0 <= self.zero3_rank < self.zero3_size and 0 <= self.replica_rank < self.replicas):
            raise ValueError(
                f"the coordinates ({self.replica_rank}, {self.zero3_rank}) are outside of the mesh of "
                f"{self.replicas} x {self.zero3_size} ranks"
            )

    @classmethod
    def of_rank(cls, rank: int, *, data_parallel: int, zero3_size: int) -> ShardGrid:
        r, s = divmod(rank, zero3_size)
        return cls(data_parallel, zero3_size, s, r)

    @property
    def replicas(self) -> int:
        return self.data_parallel // self.zero3_size

    @property
    def shard_index(self) -> int:
        """Index k of this rank's ZeRO-1 shard in the flat order. This shard is a part of ZeRO-3 shard s."""
        return self.zero3_rank * self.replicas + self.replica_rank

    def same_elements(self, small: Extent, big: Extent) -> bool:
        """Return whether the extents `small` and `big` cover the same elements in every layout."""
        low, high = sorted((small, big))
        one_replica, one_shard = self.replicas == 1, self.zero3_size == 1
        return all(
            equal for step, equal in ((Extent.ZERO1, one_replica), (Extent.ZERO3, one_shard)) if low <= step < high
        )

    def range_of(self, layout: FlatLayout, extent: Extent) -> range:
        """Return the range of flat positions that this rank's tensors with the extent `extent` cover."""
        if extent is Extent.ZERO1:
            return layout.shard_range(self.shard_index)
        if extent is Extent.ZERO3:
            return layout.zero3_range(self.zero3_rank, self.zero3_size)
        return range(layout.numel)

    def numel(self, layout: FlatLayout, extent: Extent) -> int:
        return len(self.range_of(layout, extent))

    def slice_within(self, layout: FlatLayout, small: Extent, big: Extent) -> slice:
        """Return the slice of this rank's `small` extent within its `big` extent."""
        inner, outer = self.range_of(layout, small), self.range_of(layout, big)
        return slice(inner.start - outer.start, inner.stop - outer.start)

    def replica_part_sizes(self, layout: FlatLayout) -> tuple[int, ...] | None:
        """Return the number of elements in each replica's part of this rank's ZeRO-3 shard.

        Return None if all parts have the same number of elements.
        """
        if not layout.bounds:
            return None
        first = self.zero3_rank * self.replicas
        return tuple(len(layout.shard_range(k)) for k in range(first, first + self.replicas))

    def slot_slice(self, layout: FlatLayout, slot: Slot, extent: Extent) -> slice:
        """Return the slice of this rank's tensor with the extent `extent` that contains elements of `slot`."""
        return overlap(slot, self.range_of(layout, extent)).of_range
