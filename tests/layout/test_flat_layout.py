"""The layout planner compared with an oracle that knows only the rules, and with small cases done by hand."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, permutations
from math import lcm, prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.layout import flat_layout
from layerzero.layout.flat_layout import FlatLayout, RowBounds, Slot, plan_layouts

Params = list[tuple[str, tuple[int, ...]]]

COMMON = settings(deadline=None, derandomize=True, database=None)

DIM = st.one_of(st.integers(0, 3), st.integers(1, 40), st.sampled_from([64, 96, 147, 256, 768, 2304, 3072]))
SHAPE = st.one_of(
    st.tuples(DIM),
    st.tuples(DIM, DIM),
    st.tuples(DIM, DIM),
    st.tuples(DIM, DIM, st.sampled_from([1, 3]), st.sampled_from([1, 3])),
    st.tuples(st.integers(1, 5), st.integers(1, 300_000)),  # rows far longer than a shard should be
    st.tuples(st.integers(1, 60_000), st.integers(1, 20)),  # far more rows than shards
)
TINY = st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 4), st.integers(0, 5)))
NUM_SHARDS = st.one_of(
    st.integers(1, 16), st.sampled_from([24, 32, 48, 64, 100, 128, 256, 512, 1024]), st.integers(1, 1024)
)
ALIGN = st.sampled_from([1, 4, 8])


def named(shapes: Sequence[tuple[int, ...]]) -> Params:
    return [(f"p{i}", shape) for i, shape in enumerate(shapes)]


PARAMS = st.one_of(
    st.lists(SHAPE, min_size=1, max_size=12),
    st.lists(TINY, min_size=1, max_size=60),
    # the same few shapes over and over, as in a model
    st.builds(list.__mul__, st.lists(SHAPE, min_size=1, max_size=3), st.integers(1, 6)),
).map(named)


def longest_shard(layout: Any) -> int:
    """Return the limit of [Note: Bound on the shard length] in layerzero/layout/flat_layout.py, from shapes alone."""
    shapes = [slot.shape for slot in layout.slots if prod(slot.shape)]
    n = 0
    num_shards: int = layout.num_shards
    for rows, *rest in shapes:
        whole = lcm(prod(rest), layout.align)
        n += -(-rows * prod(rest) // whole) * whole
    longest_row = max((prod(rest) for _, *rest in shapes), default=0)
    return max(1, n // num_shards + max(longest_row, n // num_shards // 200))


def faults(layouts: Any, params: Params, *, num_shards: int, align: int) -> list[str]:
    """Return every rule that `layouts` violates as a plan for `params`; empty for a correct plan."""
    found = []
    planned = [(slot.name, slot.shape) for layout in layouts for slot in layout.slots]
    if sorted(planned) != sorted(params):
        found.append("slots are not the parameters")
    for layout in layouts:
        if (layout.num_shards, layout.align) != (num_shards, align):
            found.append("not what was asked for")
        if layout.shard_numel > longest_shard(layout):
            found.append("shard too long")
        end = 0
        for slot in layout.slots:
            row, slot_end = prod(slot.shape[1:]), slot.offset + prod(slot.shape)
            if slot.offset < end:
                found.append("overlap or disorder")
            if slot.offset % align:
                found.append("misaligned")
            cuts = range(0, slot_end, layout.shard_numel)
            if any(slot.offset < cut < slot_end and (cut - slot.offset) % row for cut in cuts):
                found.append("row cut")
            end = slot_end
        if end > layout.shard_numel * num_shards:
            found.append("does not fit")
    return found


def rows_by_shard(layout: FlatLayout, slot: Slot) -> list[tuple[int, int]]:
    """Return first row and row past the last of `slot`, for every ZeRO-1 shard; `[(0, 2), (2, 4)]`."""
    pieces = [layout.rows_in(slot, layout.shard_range(k)) for k in range(layout.num_shards)]
    return [(piece.start, piece.stop) for piece in pieces]


@given(PARAMS, NUM_SHARDS, ALIGN)
@settings(COMMON, max_examples=1000)
def test_every_plan_keeps_every_rule(params: Params, num_shards: int, align: int) -> None:
    layouts = plan_layouts(params, num_shards=num_shards, align=align)
    assert faults(layouts, params, num_shards=num_shards, align=align) == []
    assert layouts == plan_layouts(list(params), num_shards=num_shards, align=align)


@given(PARAMS, NUM_SHARDS, ALIGN)
@settings(COMMON, max_examples=100)
def test_shards_hold_every_row_exactly_once_and_in_order(params: Params, num_shards: int, align: int) -> None:
    for layout in plan_layouts(params, num_shards=num_shards, align=align):
        shards = [layout.shard_range(k) for k in range(num_shards)]
        assert shards[0].start == 0 and shards[-1].stop == layout.numel
        assert all(one.stop == next_one.start for one, next_one in pairwise(shards))
        for slot in layout.slots:
            pieces = [layout.rows_in(slot, shard) for shard in shards]
            assert pieces[0].start == 0 and pieces[-1].stop == slot.rows
            assert all(one.stop == next_one.start for one, next_one in pairwise(pieces))
            bounds, expected = RowBounds(layout, slot), (*(piece.start for piece in pieces), slot.rows)
            assert tuple(bounds) == expected and bounds[-1] == slot.rows and bounds[1::2] == expected[1::2]
            assert bounds == RowBounds(layout, slot) == expected and bounds != (*expected[:-1], slot.rows + 1)
            for piece, shard in zip(pieces, shards, strict=True):
                if len(piece) and slot.row_numel:
                    assert shard.start <= slot.offset + piece.start * slot.row_numel
                    assert slot.offset + piece.stop * slot.row_numel <= shard.stop


@given(PARAMS, NUM_SHARDS, ALIGN)
@settings(COMMON, max_examples=100)
def test_a_zero3_shard_is_its_replicas_zero1_shards(params: Params, num_shards: int, align: int) -> None:
    for layout in plan_layouts(params, num_shards=num_shards, align=align):
        for zero3_size in (size for size in range(1, num_shards + 1) if num_shards % size == 0):
            replicas = num_shards // zero3_size
            for s in {0, zero3_size // 2, zero3_size - 1}:
                whole = layout.zero3_range(s, zero3_size)
                assert whole.start == layout.shard_range(s * replicas).start
                assert whole.stop == layout.shard_range((s + 1) * replicas - 1).stop
                assert len(whole) * zero3_size == layout.numel
                for slot in layout.slots:
                    first = layout.rows_in(slot, layout.shard_range(s * replicas))
                    last = layout.rows_in(slot, layout.shard_range((s + 1) * replicas - 1))
                    assert layout.rows_in(slot, whole) == range(first.start, last.stop)


@given(PARAMS, ALIGN)
@settings(COMMON, max_examples=100)
def test_one_shard_pads_for_alignment_only(params: Params, align: int) -> None:
    (layout,) = plan_layouts(params, num_shards=1, align=align)
    assert layout.padding <= max(1, sum(-slot.numel % align for slot in layout.slots))


@given(st.integers(1, 5000), st.integers(1, 500), NUM_SHARDS, ALIGN)
@settings(COMMON, max_examples=200)
def test_a_lone_matrix_has_the_shortest_shard(rows: int, row: int, num_shards: int, align: int) -> None:
    (layout,) = plan_layouts([("weight", (rows, row))], num_shards=num_shards, align=align)
    shortest = -(-rows // num_shards) * row
    if row % align == 0:
        assert layout.shard_numel == shortest
    else:  # an aligned shard is worth at most one row more
        assert shortest <= layout.shard_numel <= longest_shard(layout)
        assert layout.shard_numel % align == 0 or layout.shard_numel % row == 0


def test_a_bias_that_may_be_cut_anywhere_comes_after_the_matrix() -> None:
    (layout,) = plan_layouts([("bias", (8,)), ("weight", (8, 8))], num_shards=4, align=4)
    assert layout.slots == (Slot("weight", (8, 8), 0), Slot("bias", (8,), 64))
    assert (layout.shard_numel, layout.numel, layout.used, layout.padding) == (24, 96, 72, 24)
    assert layout.shard_range(3) == range(72, 96)


def test_only_long_parameters_force_the_shard_length() -> None:
    # 15 rows of 1000 span shards, so a shard is a multiple of 1000; the 3 rows of 300 fit inside the last.
    (layout,) = plan_layouts([("short", (3, 300)), ("long", (15, 1000))], num_shards=8, align=1)
    assert layout.shard_numel == 2000
    assert [slot.name for slot in layout.slots] == ["long", "short"]


def test_a_slot_that_crosses_one_cut_is_moved_until_the_cut_falls_between_rows() -> None:
    # Shards of 8 cut 4 rows of 3 at 8: from offset 2 that is after two of them.
    (layout,) = plan_layouts([("weight", (4, 3)), ("bias", (2,)), ("other", (2,))], num_shards=2, align=1)
    assert layout.shard_numel == 8 and layout.padding == 0
    (weight,) = (slot for slot in layout.slots if slot.name == "weight")
    assert rows_by_shard(layout, weight) == [(0, 2), (2, 4)]


def test_rows_that_no_length_serves_together_are_split_into_two_layouts() -> None:
    params: Params = [("up", (11008, 4096)), ("down", (4096, 11008)), ("norm", (4096,))]
    layouts = plan_layouts(params, num_shards=1024, align=8)
    assert faults(layouts, params, num_shards=1024, align=8) == []
    assert [{slot.name for slot in layout.slots if slot.name != "norm"} for layout in layouts] == [
        {"down"},
        {"up"},
    ]
    # One length serves both where it can be a multiple of 176128, the least common multiple of the rows.
    assert len(plan_layouts(params[:2], num_shards=64, align=8)) == 1


def test_an_aligned_shard_is_preferred_while_it_is_short_enough() -> None:
    assert plan_layouts([("weight", (5, 3))], num_shards=2, align=4)[0].shard_numel == 12  # not 9
    assert plan_layouts([("weight", (5, 3))], num_shards=5, align=4)[0].shard_numel == 3  # 12 is too long
    assert plan_layouts([("bias", (5,))], num_shards=1024, align=8)[0].shard_numel == 1


def test_empty_parameters_take_no_space_and_their_rows_are_on_one_rank() -> None:
    params: Params = [("no_rows", (0, 5)), ("weight", (4, 2)), ("no_columns", (6, 0)), ("nothing", (0,))]
    (layout,) = plan_layouts(params, num_shards=4, align=1)
    assert (layout.shard_numel, layout.padding) == (2, 0)
    by_name = {slot.name: slot for slot in layout.slots}
    assert [len(layout.rows_in(by_name["no_columns"], layout.shard_range(k))) for k in range(4)] == [
        6,
        0,
        0,
        0,
    ]
    assert [len(layout.rows_in(by_name["no_rows"], layout.shard_range(k))) for k in range(4)] == [0, 0, 0, 0]
    (only_empty,) = plan_layouts([("no_columns", (6, 0)), ("nothing", (0,))], num_shards=4, align=8)
    assert rows_by_shard(only_empty, only_empty.slots[0]) == [(0, 6), (6, 6), (6, 6), (6, 6)]


def test_rows_of_nothing_are_where_their_slot_begins() -> None:
    slots = (Slot("weight", (4, 2), 0), Slot("no_columns", (6, 0), 8), Slot("bias", (4,), 8))
    layout = FlatLayout(slots, shard_numel=4, num_shards=4, align=4)
    assert rows_by_shard(layout, slots[1]) == [(0, 0), (0, 0), (0, 6), (6, 6)]


def test_rows_in_counts_whole_rows_of_any_flat_range() -> None:
    layout = FlatLayout((Slot("weight", (4, 10), 8),), shard_numel=48, num_shards=1, align=8)
    (slot,) = layout.slots
    assert (slot.rows, slot.row_numel, slot.numel, slot.end) == (4, 10, 40, 48)
    assert layout.rows_in(slot, range(8)) == range(0)
    assert layout.rows_in(slot, range(8, 28)) == range(2)
    assert layout.rows_in(slot, range(9, 47)) == range(1, 3)  # rows 0 and 3 are only partly in it
    assert layout.rows_in(slot, range(20, 25)) == range(2, 2)
    assert layout.rows_in(slot, range(48, 60)) == range(4, 4)


@pytest.mark.parametrize(
    ("params", "num_shards", "align", "message"),
    [
        ([("scale", ())], 2, 1, "'scale' has no dims"),
        ([("weight", (3, -1))], 2, 1, "negative size"),
        ([("weight", (3,)), ("weight", (4,))], 2, 1, "'weight' is listed twice"),
        ([("weight", (3,))], 0, 1, "num_shards=0"),
        ([("weight", (3,))], 2, 0, "align=0"),
        ([], 2, 1, "at least one parameter"),
    ],
)
def test_nonsense_is_refused_by_name(params: Params, num_shards: int, align: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layouts(params, num_shards=num_shards, align=align)


def test_a_zero3_size_that_does_not_divide_the_ranks_is_refused() -> None:
    (layout,) = plan_layouts([("weight", (6, 2))], num_shards=6, align=1)
    with pytest.raises(ValueError, match="zero3_size=4 does not divide the 6"):
        layout.zero3_range(0, 4)


def test_another_process_with_other_string_hashes_and_no_torch_plans_the_same() -> None:
    params = [(f"p{i}", (i % 7 + 1, 3 ** (i % 5) * 2 ** (i % 3))) for i in range(40)]
    # By its path, not as layerzero.layout.flat_layout: importing the package imports torch.
    program = f"""
import runpy, sys
plan_layouts = runpy.run_path({flat_layout.__file__!r})["plan_layouts"]
print("torch" in sys.modules, plan_layouts({params}, num_shards=24, align=4))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"False {plan_layouts(params, num_shards=24, align=4)}\n"}


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(2, 4),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4]),
)
@settings(COMMON, max_examples=1000)
def test_of_few_slots_the_search_finds_an_order_that_fits_if_there_is_one(
    shapes: list[tuple[int, int]], num_shards: int, extra: int, align: int
) -> None:
    shard_numel = -(-sum(map(prod, shapes)) // num_shards) + extra  # little slack, so that order matters

    def fits(order: tuple[tuple[int, int], ...]) -> bool:
        end = 0
        for rows, row in order:
            for offset in range(end, shard_numel * num_shards - rows * row + 1):
                cuts = [cut - offset for cut in range(0, offset + rows * row, shard_numel) if cut > offset]
                if offset % align == 0 and all(cut % row == 0 for cut in cuts):
                    end = offset + rows * row
                    break
            else:
                return False
        return True

    kinds = flat_layout._kinds([Slot(name, shape, 0) for name, shape in named(shapes)])
    placed = flat_layout._pack_slots(kinds, shard_numel, num_shards, align, effort=1_000_000)
    assert (placed is not None) == any(fits(order) for order in permutations(shapes))
    if placed is not None:
        FlatLayout(placed, shard_numel, num_shards, align)


@pytest.mark.parametrize(
    ("slots", "shard_numel", "message"),
    [
        ((Slot("weight", (6, 5), 0),), 12, "a row that is cut at 12"),
        ((Slot("weight", (5, 4), 2),), 6, "a row that is cut at 12"),  # by its second cut only
        ((Slot("weight", (6, 5), 1),), 40, "multiple of align=2"),
        ((Slot("weight", (6, 5), 0), Slot("bias", (6,), 28)), 40, "not between"),
        ((Slot("weight", (6, 5), 0), Slot("bias", (60,), 30)), 20, "not between"),
        ((Slot("weight", (6, 5), 0),), 0, "shard_numel=0"),
    ],
)
def test_a_broken_layout_cannot_be_made(slots: tuple[Slot, ...], shard_numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout(slots, shard_numel=shard_numel, num_shards=4, align=2)
