"""Owners of parameters and the resulting cuts: integers only, for all ranks in one process."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.layout.flat_layout import FlatLayout, Slot, plan_layouts
from layerzero.layout.shard_grid import Extent, ShardGrid
from layerzero.muon.owner_layout import JoinAxis, OwnerLayouts, ParamOwner, plan_owners, update_cost

GRIDS = [(replicas, size) for replicas in (1, 2, 3, 4, 8) for size in (1, 2, 4, 8)]
Params = list[tuple[str, tuple[int, ...]]]


def block(name: str, width: int) -> Params:
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    biases = {f"{key}.bias": shape[:1] for key, shape in shapes.items()}
    return [(f"{name}.{key}", shape) for key, shape in (shapes | biases | {"norm": (width,)}).items()]


def planned(
    handles: list[Params], replicas: int, zero3_size: int
) -> tuple[list[FlatLayout], list[set[str]], OwnerLayouts]:
    """Return the plan in which matrices are owned."""
    layouts = [
        layout for params in handles for layout in plan_layouts(params, num_shards=replicas * zero3_size, align=4)
    ]
    owned = [{slot.name for slot in layout.slots if len(slot.shape) > 1} for layout in layouts]
    return layouts, owned, plan_owners(layouts, owned, replicas=replicas, zero3_size=zero3_size)


def check(layouts: list[FlatLayout], owned: list[set[str]], plan: OwnerLayouts, replicas: int, zero3_size: int) -> None:
    """Check the rules that every plan obeys."""
    assert plan.owners.keys() == set().union(*owned)
    for before, layout, names in zip(layouts, plan.layouts, owned, strict=True):
        assert (layout.slots, layout.shard_numel) == (before.slots, before.shard_numel), "the flat order stays"
        assert bool(layout.bounds) == (bool(names) and replicas > 1)
        shards = [layout.shard_range(k) for k in range(layout.num_shards)]
        assert shards[0].start == 0 and shards[-1].stop == layout.numel
        assert all(one.stop == other.start for one, other in pairwise(shards))
        for k, shard in enumerate(shards):
            around = layout.zero3_range(k // replicas, zero3_size)
            assert around.start <= shard.start <= shard.stop <= around.stop, "inside the ZeRO-3 shard of its node"
        for slot in layout.slots:
            held = [layout.rows_in(slot, shard) for shard in shards]
            assert [row for rows in held for row in rows] == list(range(slot.rows))
            if slot.name in names and slot.numel:
                assert {k % replicas for k, rows in enumerate(held) if rows} == {plan.owners[slot.name].r}
        for rank in range(layout.num_shards):
            grid = ShardGrid.of_rank(rank, data_parallel=layout.num_shards, zero3_size=zero3_size)
            parts = grid.replica_part_sizes(layout)
            assert (parts is None) == (not layout.bounds)
            if parts is not None:
                assert sum(parts) == grid.numel(layout, Extent.ZERO3)
                assert parts[grid.replica_rank] == grid.numel(layout, Extent.ZERO1)


@pytest.mark.parametrize(("replicas", "zero3_size"), GRIDS)
def test_a_whole_parameter_lies_on_one_replica(replicas: int, zero3_size: int) -> None:
    handles = [block(f"{i}", 48) for i in range(5)] + [[("embedding", (300, 48)), ("head.bias", (300,))]]
    layouts, owned, plan = planned(handles, replicas, zero3_size)
    check(layouts, owned, plan, replicas, zero3_size)
    assert planned(handles, replicas, zero3_size)[2] == plan, "every rank plans the same"


SHAPE = st.one_of(
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 40), st.integers(0, 12)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
)


@given(
    st.lists(st.lists(SHAPE, min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 2**24 - 1),
)
@settings(deadline=None, derandomize=True, database=None, max_examples=400)
def test_every_plan_keeps_every_rule(
    shapes: list[list[tuple[int, ...]]], replicas: int, zero3_size: int, chosen: int
) -> None:
    handles = [[(f"{i}.{j}", shape) for j, shape in enumerate(unit)] for i, unit in enumerate(shapes)]
    layouts = [
        layout for params in handles for layout in plan_layouts(params, num_shards=replicas * zero3_size, align=4)
    ]
    names = iter(range(24))
    owned = [{slot.name for slot in layout.slots if chosen >> next(names) & 1} for layout in layouts]
    plan = plan_owners(layouts, owned, replicas=replicas, zero3_size=zero3_size)
    check(layouts, owned, plan, replicas, zero3_size)


@pytest.mark.parametrize("layers", [12, 24, 48])
@pytest.mark.parametrize(("replicas", "zero3_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4), (2, 8), (4, 8), (8, 2)])
def test_owners_have_equal_shares_where_there_are_enough_parameters(
    layers: int, replicas: int, zero3_size: int
) -> None:
    layouts, owned, plan = planned([block(f"{i}", 768) for i in range(layers)], replicas, zero3_size)
    if 4 * layers <= 4 * replicas * zero3_size:
        return  # an owner has at most four matrices, of different sizes
    held: Counter[int] = Counter()
    for layout in plan.layouts:
        for k in range(layout.num_shards):
            held[k % replicas] += len(layout.shard_range(k))
    assert max(held.values()) <= 1.05 * sum(held.values()) / replicas, "the slow link carries as much as before"
    for measure in (update_cost, prod):
        has: Counter[ParamOwner] = Counter()
        for layout, names in zip(layouts, owned, strict=True):
            for slot in layout.slots:
                if slot.name in names:
                    has[plan.owners[slot.name]] += measure(slot.shape)
        assert max(has.values()) <= 1.1 * sum(has.values()) / (replicas * zero3_size), (measure, has)


def test_a_stack_of_matrices_counts_as_its_matrices() -> None:
    assert update_cost((8, 16, 32)) == 8 * update_cost((16, 32))
    assert update_cost((32, 16)) == update_cost((16, 32)) == 16 * 512
    assert update_cost((7,)) == 7


def test_layouts_of_which_nothing_is_owned_stay_as_they_are() -> None:
    layouts, _, _ = planned([block("a", 16), block("b", 16)], 2, 2)
    plan = plan_owners(layouts, [set(), set()], replicas=2, zero3_size=2)
    assert list(plan.layouts) == layouts and not plan.owners


def test_bounds_that_cannot_be_are_refused() -> None:
    slots = (Slot("w", (4, 3), 0),)
    FlatLayout(slots, 6, 2, 4, bounds=(0, 3, 12))
    for bounds, said in (((0, 4, 12), "row that is cut"), ((0, 12), "do not cut"), ((0, 9, 11), "do not cut")):
        with pytest.raises(ValueError, match=said):
            FlatLayout(slots, 6, 2, 4, bounds=bounds)
    with pytest.raises(ValueError, match="do not cut"):
        FlatLayout((), 6, 3, 4, bounds=(0, 12, 6, 18))


@pytest.mark.parametrize(("replicas", "zero3_size", "places"), [(1, 1, 2), (2, 2, 2), (1, 2, 4), (2, 1, 8)])
def test_owners_are_balanced_over_the_places_of_a_further_axis(replicas: int, zero3_size: int, places: int) -> None:
    """Cut each block's matrices along dim 0 over `places`; the plan is for the parts at one coordinate."""
    width = 64
    handles = [block(f"b{i}", width) for i in range(4 * places)]
    parts = [[(name, (shape[0] // places, *shape[1:])) for name, shape in params] for params in handles]
    whole = dict(each for params in handles for each in params)
    layouts = [layout for each in parts for layout in plan_layouts(each, num_shards=replicas * zero3_size, align=4)]
    owned = [{slot.name for slot in layout.slots if len(slot.shape) > 1} for layout in layouts]
    across = {name: JoinAxis(0, places, shape) for name, shape in whole.items() if len(shape) > 1}
    plan = plan_owners(layouts, owned, replicas=replicas, zero3_size=zero3_size, join_axes_of=across)
    check(layouts, owned, plan, replicas, zero3_size)
    work: Counter[ParamOwner] = Counter()
    for name, owner in plan.owners.items():
        assert owner.axis == 0 and owner.t in range(places)
        work[owner] += update_cost(whole[name])
    assert len(work) == replicas * zero3_size * places
    mean = sum(work.values()) / len(work)
    assert max(work.values()) <= 1.25 * mean
