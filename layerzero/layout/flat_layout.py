"""Where every parameter of a handle lies in flat storage: integers only, no torch, no processes.

The flat order of a handle is cut into `num_shards` equal ZeRO-1 shards. Parameters are ordered and spaced
so that no cut falls inside a dim-0 row: a rank's piece of a parameter is always a `[rows, *rest]` view. For
other cuts of the same order see owner_layout.py.

    >>> (layout,) = plan_layouts([("weight", (6, 4)), ("bias", (6,))], num_shards=4, align=2)
    >>> layout.shard_numel, [(slot.name, slot.offset) for slot in layout.slots]
    (8, [('weight', 0), ('bias', 24)])
    >>> [layout.rows_in(layout.slots[0], layout.shard_range(k)) for k in range(4)]
    [range(0, 2), range(2, 4), range(4, 6), range(6, 6)]

[Note: How long a shard may be]
With D shards, W the longest row of a layout in elements, and

    n = sum over the slots of numel rounded up to a whole multiple of lcm(row, align),

every planned layout has  shard_numel <= floor(n / D) + W  (and at least 1, where all slots are empty). A row
that is a multiple of `align`, the usual case, loses nothing in n. Two things follow.

- Padding beyond n is at most W a shard, hence at most 1 % wherever a shard holds 100 of its longest rows.
- It can always be met. Take one row length r and  L = r * ceil(n / (r * D)),  the first multiple of r that
  holds n in D shards: L - r < n / D, so L <= floor(n / D) + r. Every cut is then a multiple of r, so a slot
  may start at any multiple of lcm(r, align), and slots laid end to end, each rounded up, take n <= D * L.
  `_pack` puts each slot at the earliest legal place, which is never later than that. So a layout of a single
  row length always exists, and `plan_layouts` splits parameters by row length when it must.

[Note: Which parameters constrain the shard length]
A slot that crosses two cuts or more forces L to be a multiple of its row; a slot longer than 2L always does.
A slot that crosses one cut only needs the right start: (cut - offset) % row == 0, at the price of a gap
shorter than lcm(row, align). A slot between two cuts needs nothing. So only the longest parameters of a
unit decide which L are possible at all, and the shorter ones decide how much of a shard is left empty.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import NamedTuple

_WIDTH = 8  # orders of slots followed at a time, where one alone does not fit: 4 to 64 pad models the same
_MANY = 16  # row lengths: beyond what any known model has, so only there is the search cut short
_EFFORT = 2_500  # places looked at for one shard length, at most: dozens of odd parameters stay quick


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat order; `Slot("w", (6, 4), 8)` is flat elements 8 to 31."""

    name: str
    shape: tuple[int, ...]  # at least one dim
    offset: int  # elements from the start of the flat order

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_numel(self) -> int:
        """Elements of one dim-0 row; 1 for a 1-dim parameter."""
        return prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The flat order of one handle and its cuts; the constructor refuses one that cuts a row.

    Element counts, not bytes. ZeRO-1 shard k is elements [k * shard_numel, (k + 1) * shard_numel), or as `bounds` say.
    """

    slots: tuple[Slot, ...]  # by offset; empty slots come first, at offset 0
    shard_numel: int  # L, elements of one ZeRO-1 shard; where they differ, their mean
    num_shards: int  # D
    align: int  # elements; every slot starts at a multiple of it
    bounds: tuple[int, ...] = ()  # shard k is [bounds[k], bounds[k + 1]); none: all are of one length

    def __post_init__(self) -> None:
        # Layouts also come back from checkpoints, so this is checked here and not only by the planner.
        if min(self.shard_numel, self.num_shards, self.align) < 1:
            raise ValueError(
                f"shard_numel={self.shard_numel}, num_shards={self.num_shards} and align={self.align} "
                "must all be at least 1"
            )
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.end > self.numel:
                raise ValueError(f"{slot} is not between the slot before it (end {end}) and {self.numel}")
            if slot.offset % self.align:
                raise ValueError(f"{slot} does not start at a multiple of align={self.align}")
            if self._cuts_a_row(slot):
                raise ValueError(f"{slot} has a row that is cut at a multiple of {self.shard_numel}")
            end = slot.end
        if self.bounds:
            self._check_bounds()

    def _check_bounds(self) -> None:
        ends = self.bounds[0], self.bounds[-1], len(self.bounds) - 1
        if ends != (0, self.numel, self.num_shards) or list(self.bounds) != sorted(self.bounds):
            raise ValueError(f"bounds {self.bounds} do not cut {self.numel} elements into {self.num_shards} shards")
        for slot in self.slots:
            if any((b - slot.offset) % slot.row_numel for b in self.bounds if slot.offset < b < slot.end):
                raise ValueError(f"{slot} has a row that is cut by {self.bounds}")

    def _cuts_a_row(self, slot: Slot) -> bool:
        first_cut = _round_up(slot.offset + 1, self.shard_numel)
        if first_cut >= slot.end:
            return False
        crosses_another = first_cut + self.shard_numel < slot.end
        return (first_cut - slot.offset) % slot.row_numel != 0 or (
            crosses_another and self.shard_numel % slot.row_numel != 0
        )

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def used(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        return self.numel - self.used

    def shard_range(self, k: int) -> range:
        """Flat elements of ZeRO-1 shard k."""
        assert 0 <= k < self.num_shards, (k, self.num_shards)
        return range(*(self.bounds[k : k + 2] or (k * self.shard_numel, (k + 1) * self.shard_numel)))

    def zero3_range(self, s: int, zero3_size: int) -> range:
        """Flat elements of ZeRO-3 shard s: the R = D / zero3_size ZeRO-1 shards of its replicas, in order."""
        if zero3_size < 1 or self.num_shards % zero3_size:
            raise ValueError(f"zero3_size={zero3_size} does not divide the {self.num_shards} ZeRO-1 shards")
        assert 0 <= s < zero3_size, (s, zero3_size)
        numel = self.num_shards // zero3_size * self.shard_numel
        return range(s * numel, (s + 1) * numel)

    def rows_in(self, slot: Slot, flat: range) -> range:
        """The rows of `slot` that lie in `flat`, a range of flat elements.

        Where there are none, the empty range stands at the number of rows that start before `flat`. So the
        ranges of consecutive shards, put end to end, count from 0 to `slot.rows`. Rows of zero elements are
        all in the range that holds the slot's offset.
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


def plan_layouts(
    params: Sequence[tuple[str, tuple[int, ...]]], *, num_shards: int, align: int
) -> tuple[FlatLayout, ...]:
    """Order `params`, (name, shape) pairs, into as few layouts as meet [Note: How long a shard may be].

    `align` is in elements: 16 bytes over the smallest itemsize stored, 8 where bf16 is. `shard_numel` is a
    multiple of it wherever the note allows. The result depends on the arguments alone, so that every rank
    plans the same.
    """
    _refuse_nonsense(params, num_shards, align)
    slots = [Slot(name, tuple(shape), 0) for name, shape in params]
    empty = tuple(slot for slot in slots if slot.numel == 0)
    filled = [slot for slot in slots if slot.numel > 0]
    if not filled:  # one element a shard, so that shards still have distinct ranges
        return (FlatLayout(empty, shard_numel=1, num_shards=num_shards, align=align),)
    whole = _plan_one(filled, num_shards, align, _EFFORT)
    first, *others = [whole] if whole is not None else _plan_split(filled, num_shards, align)
    return (FlatLayout(empty + first.slots, first.shard_numel, num_shards, align), *others)


def _refuse_nonsense(params: Sequence[tuple[str, tuple[int, ...]]], num_shards: int, align: int) -> None:
    if num_shards < 1 or align < 1:
        raise ValueError(f"num_shards={num_shards} and align={align} must be at least 1")
    if not params:
        raise ValueError("there are no parameters to lay out; leave a unit without parameters unsharded")
    seen = set()
    for name, shape in params:
        if len(shape) == 0:
            raise ValueError(f"parameter {name!r} has no dims and so no rows; give it the shape (1,)")
        if min(shape) < 0:
            raise ValueError(f"parameter {name!r} has a negative size in its shape {tuple(shape)}")
        if name in seen:
            raise ValueError(f"parameter {name!r} is given twice; a shared parameter has one slot")
        seen.add(name)


def _plan_split(slots: Sequence[Slot], num_shards: int, align: int) -> list[FlatLayout]:
    """Several layouts, each of some of the row lengths: the fewest found, of the least padding."""
    by_row: dict[int, list[Slot]] = {}
    for slot in slots:
        by_row.setdefault(slot.row_numel, []).append(slot)
    # Neither order is the better one for all models, and both together cost about a millisecond.
    by_length = [by_row[row] for row in sorted(by_row, reverse=True)]
    by_elements = sorted(by_length, key=lambda same_row: -sum(slot.numel for slot in same_row))
    plans = [_join(order, num_shards, align) for order in (by_length, by_elements)]
    return min(plans, key=lambda plan: (len(plan), sum(layout.numel for layout in plan)))


def _join(groups: Sequence[Sequence[Slot]], num_shards: int, align: int) -> list[FlatLayout]:
    """Each group, of one row length, joins the layout that grows least by it, or begins another."""
    # Models have few row lengths. For hundreds of unrelated ones, to be quick matters more than to be tight.
    effort = _EFFORT if len(groups) <= _MANY else 0
    layouts: list[FlatLayout] = []
    for group in groups:
        grown: list[tuple[int, int, FlatLayout]] = []
        for i in range(max(0, len(layouts) - _MANY), len(layouts)):
            joint = _plan_one([*layouts[i].slots, *group], num_shards, align, effort)
            if joint is not None:
                grown.append((joint.numel - layouts[i].numel, i, joint))
        if grown:
            _, i, joint = min(grown, key=lambda choice: choice[:2])
            layouts[i] = joint
        else:
            alone = _plan_one(group, num_shards, align, effort)
            assert alone is not None  # see [Note: How long a shard may be]
            layouts.append(alone)
    return layouts


def _plan_one(slots: Sequence[Slot], num_shards: int, align: int, effort: int) -> FlatLayout | None:
    """One layout of all `slots`, none empty, with the shortest shard found; None if none is short enough."""
    kinds = _kinds(slots)
    # Aligned lengths get the thorough search; other lengths are for what is too small or too odd for them.
    for unit in dict.fromkeys((align, 1)):
        for shard in _candidates(kinds, num_shards, unit, align):
            placed = _pack(kinds, shard, num_shards, align, effort if unit == align else 0)
            if placed is not None:
                return FlatLayout(placed, shard, num_shards, align)
    return None


@dataclass(frozen=True)
class _Kind:
    """Slots that the planner cannot tell apart: the same row length and size, in the caller's order."""

    row: int
    numel: int
    slots: tuple[Slot, ...]


def _kinds(slots: Iterable[Slot]) -> list[_Kind]:
    """Kinds by longest row, then most elements: slots whose rows divide each other then leave no gaps."""
    groups: dict[tuple[int, int], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.row_numel, slot.numel), []).append(slot)
    return [_Kind(*key, tuple(groups[key])) for key in sorted(groups, reverse=True)]


def _candidates(kinds: Sequence[_Kind], num_shards: int, unit: int, align: int) -> Iterator[int]:
    """Shard lengths worth trying, ascending multiples of `unit`: ever further apart, up to the limit."""
    longest_row = kinds[0].row
    # Slots at aligned offsets end here at the earliest: whichever is the last is not rounded up.
    least = sum(_round_up(kind.numel, align) * len(kind.slots) for kind in kinds)
    least -= max(_round_up(kind.numel, align) - kind.numel for kind in kinds)
    shard = max(_ceil_div(least, num_shards), longest_row)
    # See [Note: How long a shard may be]: the length proved to work for one row length is not stepped over.
    n = sum(_round_up(kind.numel, lcm(kind.row, align)) * len(kind.slots) for kind in kinds)
    limit = n // num_shards + longest_row
    sure = _round_up(max(shard, _ceil_div(n, num_shards)), lcm(unit, *(kind.row for kind in kinds)))
    stride = unit
    while (possible := _next_possible(kinds, shard, unit, limit)) is not None:
        yield possible
        shard = sure if possible < sure < possible + stride else possible + stride
        stride *= 2


def _next_possible(kinds: Sequence[_Kind], shard: int, unit: int, limit: int) -> int | None:
    """The next length, from `shard` on, that [Note: Which parameters constrain the shard length] allows."""
    while shard <= limit:
        multiple = unit
        eased = limit + 1  # the length at which some slot stops forcing its row
        for kind in kinds:
            if kind.numel > 2 * shard:
                eased = min(eased, _ceil_div(kind.numel, 2))
                if multiple <= limit:  # beyond it nothing fits, and unrelated rows make huge numbers
                    multiple = lcm(multiple, kind.row)
        candidate = _round_up(shard, multiple)
        if candidate < eased:
            return candidate
        shard = eased
    return None


class _Way(NamedTuple):
    """A way to begin the flat order: the slot placed last, and the way before it (None: no slot yet)."""

    gaps: int  # elements left empty between slots so far
    end: int  # flat element after the last slot
    kind: int  # of the last slot, an index
    offset: int  # of the last slot
    before: "_Way | None"


def _pack(
    kinds: Sequence[_Kind],
    shard: int,
    num_shards: int,
    align: int,
    effort: int,
) -> tuple[Slot, ...] | None:
    """Lay all slots into the shards, cutting no row; None if no order that was tried fits.

    First one order, the smallest gap next and the longest row among equals; then several at a time, as far
    as `effort` allows, which is counted in places looked at.
    """
    widest = effort // (len(kinds) * sum(len(kind.slots) for kind in kinds))
    way = _best_way(kinds, shard, num_shards, align, width=1)
    if way is None and widest > 1:
        way = _best_way(kinds, shard, num_shards, align, width=min(widest, _WIDTH))
    if way is None:
        return None
    backwards: list[_Way] = []
    while way.before is not None:
        backwards.append(way)
        way = way.before
    waiting = [iter(kind.slots) for kind in kinds]
    return tuple(replace(next(waiting[step.kind]), offset=step.offset) for step in reversed(backwards))


def _best_way(kinds: Sequence[_Kind], shard: int, num_shards: int, align: int, *, width: int) -> _Way | None:
    """Place slots one by one, following up to `width` ways to begin.

    What lies before matters to the slots that follow only by where it ends, and the earlier the better. So of
    the ways that have placed the same slots one is enough, and with no limit on `width` the search is exact.
    """
    counts = tuple(len(kind.slots) for kind in kinds)
    spare = shard * num_shards - sum(kind.numel * len(kind.slots) for kind in kinds)
    ways = {counts: _Way(0, 0, -1, 0, None)}  # by the slots of each kind that are still to place
    for _ in range(sum(counts)):
        longer: dict[tuple[int, ...], _Way] = {}
        for left, way in ways.items():
            start = _round_up(way.end, align)
            for i, kind in enumerate(kinds):
                if not left[i]:
                    continue
                offset = _earliest(kind, start, shard, align)
                if offset is None:
                    return None
                gaps = way.gaps + offset - way.end
                after = (*left[:i], left[i] - 1, *left[i + 1 :])
                rival = longer.get(after)
                if gaps <= spare and (rival is None or gaps < rival.gaps):
                    longer[after] = _Way(gaps, offset + kind.numel, i, offset, way)
                if width == 1 and offset == start:
                    break
        # A single way does best to save gaps. Several may spend what there is to spare, and do best to place
        # the longest rows, which come first in `left`: those are the hard ones, and the short ones fill in.
        ranked = sorted(longer.items(), key=lambda item: (item[1].gaps if width == 1 else 0, item[0]))
        ways = dict(ranked[:width])
    return next(iter(ways.values()), None)


def _earliest(kind: _Kind, start: int, shard: int, align: int) -> int | None:
    """The first legal offset from `start`, a multiple of `align`, on; None if no offset is ever legal.

    For example a slot of 4 rows of 3, shards of 8: from 0 it starts at 2 and has rows at 2, 5 | 8, 11.
    """
    # How cuts lie between aligned offsets repeats after this many, so a place is found by then or never.
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
    """The first multiple of `align` from `start`, itself one, on, that lies whole rows away from `cut`."""
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
