"""Plan which dim-0 rows of a handle's parameters each rank holds, and their positions in flat storage.

This module does not import torch and needs no process group.

The flat order of a handle is divided into `num_shards` equal ZeRO-1 shards. Parameters are ordered and padded so that
no shard boundary (cut) is inside a dim-0 row. The shard of a parameter on each rank is therefore always a `[rows,
*rest]` view. The rank with the coordinates (r, s) has shard k = s * R + r, where R is the number of replicas; see
`ShardGrid` in shard_grid.py. See owner_layout.py for layouts with other cuts of the same order.

    >>> (layout,) = plan_layouts([("weight", (6, 4)), ("bias", (6,))], num_shards=4, align=2)
    >>> layout.shard_numel, [(slot.name, slot.offset) for slot in layout.slots]
    (8, [('weight', 0), ('bias', 24)])
    >>> [layout.rows_in(layout.slots[0], layout.shard_range(k)) for k in range(4)]
    [range(0, 2), range(2, 4), range(4, 6), range(6, 6)]

[Note: Bound on the shard length]
Let D be the number of shards, W the longest row of a layout in elements, and

    n = sum over the slots of numel rounded up to a multiple of lcm(row, align).

Every planned layout has  shard_numel <= floor(n / D) + max(W, floor(n / D) / 200)  (and at least 1 if all slots are
empty). If each row is a multiple of `align`, as is usual, the rounding in n adds nothing. Properties of the bound:

- Padding beyond n is at most W or 0.5 % per shard, whichever is larger. This is at most 1 % if a shard is at least 100
  times as long as the longest row.
- Without the 0.5 %, the blocks of many models would need two layouts, and twice as many collectives. For example, a
  block of Llama 70B on 64 ranks has one layout with 0.36 % padding.
- The bound can always be met. For one row length r, let  L = r * ceil(n / (r * D)),  the first multiple of r for which
  D shards contain n elements. Then L - r < n / D, so L <= floor(n / D) + r. Every cut is a multiple of r, so a slot may
  start at any multiple of lcm(r, align). Adjacent slots, each rounded up, need n <= D * L elements. `_pack_slots`
  places each slot at the earliest legal offset, which is never later. Therefore a layout of a single row length always
  exists, and `plan_layouts` splits parameters by row length if necessary.

[Note: Constraints on the shard length]
A slot that crosses two or more cuts requires L to be a multiple of its row. A slot longer than 2L always crosses two
cuts. A slot that crosses one cut needs only a suitable start: (cut - offset) % row == 0, which costs a gap shorter than
lcm(row, align). A slot between two cuts has no constraint. Therefore the longest parameters of a unit determine the
possible values of L, and the shorter parameters determine the amount of padding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm, prod
from typing import NamedTuple, overload

_WIDTH = 8  # beam width of the search if the greedy order does not fit; 4 to 64 yield the same padding for known models
_MANY = 16  # number of row lengths above which the search is cut short; no known model has that many
_PADDING = 200  # padding of 1 / 200 of a shard is preferred to a second layout
_EFFORT = 2_500  # maximum number of offsets tried per shard length; keeps planning fast for dozens of odd parameters


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in the flat order. `Slot("w", (6, 4), 8)` covers flat positions 8 to 31."""

    name: str
    shape: tuple[int, ...]  # has at least one dim
    offset: int  # number of elements from the start of the flat order

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_numel(self) -> int:
        """Number of elements in one dim-0 row; 1 for a 1-dim parameter."""
        return prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Flat order of one handle's parameters, and the cuts between its shards. All sizes are in elements.

    ZeRO-1 shard k is elements [k * shard_numel, (k + 1) * shard_numel), or [bounds[k], bounds[k + 1]) if `bounds` are
    given.

    Raises:
        ValueError: slots overlap, are not aligned or exceed the shards, or a cut falls inside a row.
    """

    slots: tuple[Slot, ...]  # sorted by offset; empty slots are first, at offset 0
    shard_numel: int  # L, number of elements in each ZeRO-1 shard, or the mean if the shards differ in length
    num_shards: int  # D
    align: int  # every slot starts at a multiple of this number of elements
    bounds: tuple[int, ...] = ()  # D + 1 cuts; empty if all shards have equal length

    def __post_init__(self) -> None:
        # Layouts are also read from checkpoints. Therefore they are checked here and not only in the planner.
        if min(self.shard_numel, self.num_shards, self.align) < 1:
            raise ValueError(
                f"shard_numel={self.shard_numel}, num_shards={self.num_shards} and align={self.align} "
                "must all be at least 1"
            )
        ends = self.bounds[:1], self.bounds[-1:], len(self.bounds) - 1
        if self.bounds and (ends != ((0,), (self.numel,), self.num_shards) or list(self.bounds) != sorted(self.bounds)):
            raise ValueError(f"bounds {self.bounds} do not cut {self.numel} elements into {self.num_shards} shards")
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.end > self.numel:
                raise ValueError(f"{slot} is not between the end of the previous slot, {end}, and {self.numel}")
            if slot.offset % self.align:
                raise ValueError(f"{slot} does not start at a multiple of align={self.align}")
            if wrong := [cut for cut in self._cuts_inside(slot) if (cut - slot.offset) % slot.row_numel]:
                raise ValueError(f"{slot} has a row that is cut at {wrong[0]}")
            end = slot.end

    def _cuts_inside(self, slot: Slot) -> Iterable[int]:
        """Return the cuts inside a slot. Of equally distant cuts, the first two are sufficient for a check."""
        if self.bounds:
            return [cut for cut in self.bounds if slot.offset < cut < slot.end]
        return range(_round_up(slot.offset + 1, self.shard_numel), slot.end, self.shard_numel)[:2]

    @property
    def numel(self) -> int:
        """Number of elements in the full buffer, including padding."""
        return self.shard_numel * self.num_shards

    @property
    def used(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        return self.numel - self.used

    def shard_range(self, k: int) -> range:
        """Return the range of flat positions in ZeRO-1 shard k."""
        assert 0 <= k < self.num_shards, (k, self.num_shards)
        return range(*(self.bounds[k : k + 2] or (k * self.shard_numel, (k + 1) * self.shard_numel)))

    def zero3_range(self, s: int, zero3_size: int) -> range:
        """Return the range of flat positions in ZeRO-3 shard s.

        The ZeRO-3 shard consists of R = D / zero3_size ZeRO-1 shards, one for each replica, in order.

        Raises:
            ValueError: `zero3_size` does not divide the number of ZeRO-1 shards.
        """
        if zero3_size < 1 or self.num_shards % zero3_size:
            raise ValueError(f"zero3_size={zero3_size} does not divide the {self.num_shards} ZeRO-1 shards")
        assert 0 <= s < zero3_size, (s, zero3_size)
        numel = self.num_shards // zero3_size * self.shard_numel
        return range(s * numel, (s + 1) * numel)

    def rows_in(self, slot: Slot, flat: range) -> range:
        """Return the rows of `slot` inside `flat`, a range of flat positions.

        If `flat` contains no rows of the slot, return an empty range that starts at the number of rows that begin
        before `flat`. Therefore the ranges of consecutive shards are adjacent and form ``range(slot.rows)``. Rows
        without elements are all in the range that contains the offset of the slot.
        """
        assert flat.step == 1, flat
        row = slot.row_numel
        if row == 0:
            start = slot.rows if slot.offset < flat.start else 0
            return range(start, slot.rows if slot.offset < flat.stop else start)
        inside_start = min(max(flat.start - slot.offset, 0), slot.numel)
        inside_stop = min(max(flat.stop - slot.offset, 0), slot.numel)
        start = _ceil_div(inside_start, row)
        return range(start, max(start, inside_stop // row))


class RowBounds(Sequence[int]):
    """Rows of a slot at which the ZeRO-1 shards begin, followed by the number of rows.

    The bounds are computed when they are read. With thousands of ranks, most programs never read most of them.
    """

    def __init__(self, layout: FlatLayout, slot: Slot) -> None:
        self._layout, self._slot = layout, slot

    def __len__(self) -> int:
        return self._layout.num_shards + 1

    @overload
    def __getitem__(self, k: int) -> int: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[int, ...]: ...
    def __getitem__(self, k: int | slice) -> int | tuple[int, ...]:
        if isinstance(k, slice):
            return tuple(map(self._bound, range(len(self))[k]))
        return self._bound(range(len(self))[k])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowBounds) and other._cuts == self._cuts:
            return True
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _cuts(self) -> tuple[object, ...]:
        layout, slot = self._layout, self._slot
        return slot.offset, slot.shape, layout.shard_numel, layout.num_shards, layout.bounds

    def _bound(self, k: int) -> int:
        layout, slot = self._layout, self._slot
        return slot.rows if k == layout.num_shards else layout.rows_in(slot, layout.shard_range(k)).start


def plan_layouts(
    params: Sequence[tuple[str, tuple[int, ...]]], *, num_shards: int, align: int
) -> tuple[FlatLayout, ...]:
    """Plan layouts that meet the bound in [Note: Bound on the shard length].

    The result is a single layout if the search finds one. Otherwise, parameters are split by row length. The result
    depends only on the arguments, so all ranks plan the same layouts.

    Args:
        params: (name, shape) of each parameter.
        num_shards: number of ZeRO-1 shards.
        align: alignment of slots in elements: 16 bytes divided by the smallest itemsize in which the parameters are
            stored, for example 8 with bf16. `shard_numel` is a multiple of `align` if the bound in the note allows
            this.

    Raises:
        ValueError: an argument is not positive, there are no parameters, a name is repeated, or a shape is invalid.
    """
    _check_arguments(params, num_shards, align)
    return _plan_cached(tuple((name, tuple(shape)) for name, shape in params), num_shards, align)


@lru_cache(maxsize=1024)  # plans of many combinations of settings need the same layouts
def _plan_cached(
    params: tuple[tuple[str, tuple[int, ...]], ...], num_shards: int, align: int
) -> tuple[FlatLayout, ...]:
    slots = [Slot(name, shape, 0) for name, shape in params]
    empty = tuple(slot for slot in slots if slot.numel == 0)
    filled = [slot for slot in slots if slot.numel > 0]
    if not filled:  # one element per shard, so that shards have distinct ranges
        return (FlatLayout(empty, shard_numel=1, num_shards=num_shards, align=align),)
    single = _plan_one(filled, num_shards, align, _EFFORT)
    first, *others = [single] if single is not None else _plan_split(filled, num_shards, align)
    return (FlatLayout(empty + first.slots, first.shard_numel, num_shards, align), *others)


def _check_arguments(params: Sequence[tuple[str, tuple[int, ...]]], num_shards: int, align: int) -> None:
    if num_shards < 1 or align < 1:
        raise ValueError(f"num_shards={num_shards} and align={align} must be at least 1")
    if not params:
        raise ValueError("a layout needs at least one parameter. Do not shard a unit without parameters")
    seen = set()
    for name, shape in params:
        if len(shape) == 0:
            raise ValueError(f"parameter {name!r} has no dims and therefore no rows. Use the shape (1,)")
        if min(shape) < 0:
            raise ValueError(f"parameter {name!r} has a negative size in its shape {tuple(shape)}")
        if name in seen:
            raise ValueError(f"parameter {name!r} is listed twice. A shared parameter has only one slot")
        seen.add(name)


def _plan_split(slots: Sequence[Slot], num_shards: int, align: int) -> list[FlatLayout]:
    """Return several layouts, each of which contains the slots of some row lengths.

    The function tries two plans. It returns the one with fewer layouts or, if they are equal, with less padding.
    """
    by_row: dict[int, list[Slot]] = {}
    for slot in slots:
        by_row.setdefault(slot.row_numel, []).append(slot)
    # Neither order is better for all models. Trying both costs about a millisecond.
    by_length = [by_row[row] for row in sorted(by_row, reverse=True)]
    by_elements = sorted(by_length, key=lambda same_row: -sum(slot.numel for slot in same_row))
    plans = [_join_groups(order, num_shards, align) for order in (by_length, by_elements)]
    return min(plans, key=lambda plan: (len(plan), sum(layout.numel for layout in plan)))


def _join_groups(groups: Sequence[Sequence[Slot]], num_shards: int, align: int) -> list[FlatLayout]:
    """Return layouts that together contain all `groups`.

    Each group is added to the layout whose size grows least, or to a new layout if it fits in none.

    Args:
        groups: slots, grouped by row length.
    """
    # Models have few row lengths. With hundreds of unrelated row lengths, speed matters more than padding.
    effort = _EFFORT if len(groups) <= _MANY else 0
    layouts: list[FlatLayout] = []
    for group in groups:
        candidates: list[tuple[int, int, FlatLayout]] = []
        for i in range(max(0, len(layouts) - _MANY), len(layouts)):
            joint = _plan_one([*layouts[i].slots, *group], num_shards, align, effort)
            if joint is not None:
                candidates.append((joint.numel - layouts[i].numel, i, joint))
        if candidates:
            _, i, joint = min(candidates, key=lambda choice: choice[:2])
            layouts[i] = joint
        else:
            separate = _plan_one(group, num_shards, align, effort)
            assert separate is not None  # see [Note: Bound on the shard length]
            layouts.append(separate)
    return layouts


def _plan_one(slots: Sequence[Slot], num_shards: int, align: int, effort: int) -> FlatLayout | None:
    """Return one layout of all `slots` with the shortest shards found, or None if no shard length meets the bound.

    The slots must have elements.
    """
    kinds = _kinds(slots)
    # Search aligned lengths thoroughly. Other lengths are for parameters that are too small or irregular for alignment.
    for unit in dict.fromkeys((align, 1)):
        for shard in _candidate_lengths(kinds, num_shards, unit, align):
            placed = _pack_slots(kinds, shard, num_shards, align, effort if unit == align else 0)
            if placed is not None:
                return FlatLayout(placed, shard, num_shards, align)
    return None


@dataclass(frozen=True)
class _Kind:
    """Slots of equal row length and size, which the planner treats alike, in the order in which they were passed."""

    row: int
    numel: int
    slots: tuple[Slot, ...]


def _kinds(slots: Iterable[Slot]) -> list[_Kind]:
    """Group `slots` into kinds, sorted by row length and then by number of elements, largest first.

    In this order, slots leave no gaps if each row length is a multiple of the next smaller one.
    """
    groups: dict[tuple[int, int], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.row_numel, slot.numel), []).append(slot)
    return [_Kind(*key, tuple(groups[key])) for key in sorted(groups, reverse=True)]


def _candidate_lengths(kinds: Sequence[_Kind], num_shards: int, unit: int, align: int) -> Iterator[int]:
    """Yield the shard lengths to try: multiples of `unit` within the bound, in ascending order with growing steps."""
    longest_row = kinds[0].row
    # Lower bound for the end of the last slot if all offsets are aligned. The last slot itself is not rounded up.
    least = sum(_round_up(kind.numel, align) * len(kind.slots) for kind in kinds)
    least -= max(_round_up(kind.numel, align) - kind.numel for kind in kinds)
    shard = max(_ceil_div(least, num_shards), longest_row)
    # Do not skip the length that provably works for a single row length; see [Note: Bound on the shard length].
    n = sum(_round_up(kind.numel, lcm(kind.row, align)) * len(kind.slots) for kind in kinds)
    limit = n // num_shards + max(longest_row, n // num_shards // _PADDING)
    fallback = _round_up(max(shard, _ceil_div(n, num_shards)), lcm(unit, *(kind.row for kind in kinds)))
    stride = unit
    while (possible := _next_possible(kinds, shard, unit, limit)) is not None:
        yield possible
        shard = fallback if possible < fallback < possible + stride else possible + stride
        stride *= 2


def _next_possible(kinds: Sequence[_Kind], shard: int, unit: int, limit: int) -> int | None:
    """Return the smallest shard length from `shard` to `limit` that may be feasible, or None if there is none.

    See [Note: Constraints on the shard length].
    """
    while shard <= limit:
        multiple = unit
        eased = limit + 1  # length from which some slot no longer requires multiples of its row
        for kind in kinds:
            if kind.numel > 2 * shard:
                eased = min(eased, _ceil_div(kind.numel, 2))
                if multiple <= limit:  # avoid huge multiples of unrelated rows, which cannot fit
                    multiple = lcm(multiple, kind.row)
        candidate = _round_up(shard, multiple)
        if candidate < eased:
            return candidate
        shard = eased
    return None


class _PartialArrangement(NamedTuple):
    """Partial arrangement of slots, as a linked list: the slot placed last, and the arrangement before it."""

    gaps: int  # number of elements left empty between the slots placed so far
    end: int  # flat position after the last slot
    kind: int  # index of the last slot's kind
    offset: int  # offset of the last slot
    before: "_PartialArrangement | None"


def _pack_slots(
    kinds: Sequence[_Kind],
    shard: int,
    num_shards: int,
    align: int,
    effort: int,
) -> tuple[Slot, ...] | None:
    """Place all slots in the shards without cutting a row. Return None if none of the orders that are tried fits.

    First try a greedy order. It always places next the slot that leaves the smallest gap and, among equals, the slot
    with the longest row. Then try a beam search whose width is limited by `effort`, the number of offsets to try.
    """
    widest = effort // (len(kinds) * sum(len(kind.slots) for kind in kinds))
    order = _best_order(kinds, shard, num_shards, align, width=1)
    if order is None and widest > 1:
        order = _best_order(kinds, shard, num_shards, align, width=min(widest, _WIDTH))
    if order is None:
        return None
    backwards: list[_PartialArrangement] = []
    while order.before is not None:
        backwards.append(order)
        order = order.before
    waiting = [iter(kind.slots) for kind in kinds]
    return tuple(replace(next(waiting[step.kind]), offset=step.offset) for step in reversed(backwards))


def _best_order(
    kinds: Sequence[_Kind], shard: int, num_shards: int, align: int, *, width: int
) -> _PartialArrangement | None:
    """Place the slots one by one in a beam search with the given `width`. Return the best order, or None if none fits.

    A partial arrangement affects the positions of later slots only through its end, and an earlier end is better.
    Therefore, of the arrangements that contain the same slots, only the best is kept. Without a limit on `width`, the
    search would be exact.
    """
    counts = tuple(len(kind.slots) for kind in kinds)
    spare = shard * num_shards - sum(kind.numel * len(kind.slots) for kind in kinds)
    orders = {
        counts: _PartialArrangement(0, 0, -1, 0, None)
    }  # by the numbers of slots of each kind that remain to be placed
    for _ in range(sum(counts)):
        extended: dict[tuple[int, ...], _PartialArrangement] = {}
        for left, order in orders.items():
            start = _round_up(order.end, align)
            for i, kind in enumerate(kinds):
                if not left[i]:
                    continue
                offset = _first_legal_offset(kind, start, shard, align)
                if offset is None:
                    return None
                gaps = order.gaps + offset - order.end
                counts_after = (*left[:i], left[i] - 1, *left[i + 1 :])
                current = extended.get(counts_after)
                if gaps <= spare and (current is None or gaps < current.gaps):
                    extended[counts_after] = _PartialArrangement(gaps, offset + kind.numel, i, offset, order)
                if width == 1 and offset == start:
                    break
        # A greedy search works best if it prefers the smallest gaps. A wider search may use all spare elements. It
        # works best if it places the longest rows first (they are first in `left`), because long rows are the hardest
        # to place and short rows can fill gaps.
        ranked = sorted(extended.items(), key=lambda item: (item[1].gaps if width == 1 else 0, item[0]))
        orders = dict(ranked[:width])
    return next(iter(orders.values()), None)


def _first_legal_offset(kind: _Kind, start: int, shard: int, align: int) -> int | None:
    """Return the first legal offset at or after `start`, a multiple of `align`, or None if no offset is legal.

    For example, with 4 rows of 3 elements, shards of 8 and `align` 1, the first legal offset from 0 is 2. The rows then
    start at 2, 5 | 8, 11.
    """
    # The positions of cuts between aligned offsets repeat after this many shards, so more iterations are useless.
    for _ in range(align // gcd(shard, align) + 1):
        cut = (start // shard + 1) * shard
        if start + kind.numel <= cut:
            return start
        offset = _first_aligned(start, cut, kind.row, align)
        crosses_one = offset is not None and offset + kind.numel <= cut + shard
        if offset is not None and offset < cut and (crosses_one or shard % kind.row == 0):
            return offset
        start = _round_up(cut, align)
    return None


def _first_aligned(start: int, cut: int, row: int, align: int) -> int | None:
    """Return the first multiple of `align` at or after `start` whose distance from `cut` is a whole number of rows.

    Return None if there is no such multiple.
    """
    common = gcd(row, align)
    if (cut - start) % common:
        return None
    # start + steps * align = cut (mod row), solved for steps
    inverse = pow(align // common, -1, row // common)
    steps = (cut - start) // common * inverse % (row // common)
    return start + steps * align


def _ceil_div(numel: int, by: int) -> int:
    return -(-numel // by)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
