"""Grids, reduction specs and gradient buffers of all ranks in one process, without communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, Communicator, LaunchedCollective, PendingCollective, PendingReduction
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.comm.transport.base import SendBuffer
from layerzero.config import Precision
from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.gradient_buffer import GradientBuffer, SlotState
from layerzero.engine.gradient_storage import (
    AliasedStorage,
    AliasState,
    GradientStorage,
    PersistentStorage,
    PooledStorage,
)
from layerzero.engine.handle_gradients import PendingSlots
from layerzero.engine.reduction_spec import ReductionSpec, ReductionStage
from layerzero.layout.flat_layout import FlatLayout, plan_layouts
from layerzero.layout.shard_grid import Extent, ShardGrid, overlap

RANK, NODE, WHOLE = Extent.ZERO1, Extent.ZERO3, Extent.FULL
CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32, torch.float32, torch.float32)
HALF = Precision(torch.float32, torch.float16, torch.float16, torch.float32)
MIXED = Precision(torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
SIZES = [(d, s) for d in (1, 2, 3, 4, 6, 8, 12, 16) for s in range(1, d + 1) if d % s == 0]
SHAPES = [("matrix", (7, 3)), ("empty", (0, 3)), ("bias", (5,)), ("one", (1,)), ("long", (2, 2, 3))]


def grids(data_parallel: int, zero3_size: int) -> list[ShardGrid]:
    return [
        ShardGrid.of_rank(rank, data_parallel=data_parallel, zero3_size=zero3_size) for rank in range(data_parallel)
    ]


def layouts(data_parallel: int) -> tuple[FlatLayout, ...]:
    return plan_layouts(SHAPES, num_shards=data_parallel, align=4)


# Grids


@pytest.mark.parametrize(("data_parallel", "zero3_size"), SIZES)
def test_extents_are_nested_and_cut_the_flat_order(data_parallel: int, zero3_size: int) -> None:
    for layout in layouts(data_parallel):
        ranks = grids(data_parallel, zero3_size)
        shards = [grid.range_of(layout, RANK) for grid in ranks]
        assert sorted(element for shard in shards for element in shard) == list(range(layout.numel)), "each once"
        for grid in ranks:
            nodes = [other.range_of(layout, NODE) for other in ranks if other.replica_rank == grid.replica_rank]
            assert sorted(element for node in nodes for element in node) == list(range(layout.numel))
            for small in Extent:
                for big in Extent:
                    inner, outer = grid.range_of(layout, small), grid.range_of(layout, big)
                    if small <= big:
                        assert outer[grid.slice_within(layout, small, big)] == inner
                    assert grid.same_elements(small, big) == (len(inner) == len(outer)) == (inner == outer)


@pytest.mark.parametrize(("data_parallel", "zero3_size"), SIZES)
def test_the_part_of_a_slot_is_what_it_shares_with_an_extent(data_parallel: int, zero3_size: int) -> None:
    for layout in layouts(data_parallel):
        for grid in grids(data_parallel, zero3_size):
            for extent in Extent:
                flat = grid.range_of(layout, extent)
                for slot in layout.slots:
                    common = [element for element in range(slot.offset, slot.end) if element in flat]
                    of_slot, of_range = overlap(slot, flat)
                    assert [slot.offset + i for i in range(slot.numel)[of_slot]] == common
                    assert list(flat[of_range]) == common
                    assert grid.slot_slice(layout, slot, extent) == of_range
                    assert len(common) == len(layout.rows_in(slot, flat)) * slot.row_numel


def test_a_grid_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="zero3_size=3 does not divide the 4"):
        ShardGrid(4, 3, 0, 0)
    with pytest.raises(ValueError, match=r"coordinates \(2, 0\) are outside of the mesh of 2 x 2 ranks"):
        ShardGrid.of_rank(4, data_parallel=4, zero3_size=2)


# Reduction specs

ROWS = {  # (S > 1, R > 1, mode): incoming extent, accumulator extent, collectives with source and target
    (False, False, "sharded"): (RANK, RANK, []),
    (False, False, "full"): (RANK, RANK, []),
    (False, True, "sharded"): (WHOLE, WHOLE, [(WHOLE, RANK, Collective.HOP2)]),
    (False, True, "full"): (WHOLE, WHOLE, [(WHOLE, RANK, Collective.HOP2)]),
    (True, False, "full"): (WHOLE, WHOLE, [(WHOLE, RANK, Collective.HOP1)]),
    (True, True, "full"): (WHOLE, WHOLE, [(WHOLE, NODE, Collective.HOP1), (NODE, RANK, Collective.HOP2)]),
    (True, False, "sharded"): (WHOLE, RANK, [(WHOLE, RANK, Collective.HOP1)]),
    (True, True, "sharded"): (WHOLE, NODE, [(WHOLE, NODE, Collective.HOP1), (NODE, RANK, Collective.HOP2)]),
    (False, False, "local"): (RANK, RANK, []),
    (False, True, "local"): (WHOLE, RANK, [(WHOLE, RANK, Collective.HOP2)]),
    (True, False, "local"): (WHOLE, RANK, [(WHOLE, RANK, Collective.HOP1)]),
    (True, True, "local"): (WHOLE, RANK, [(WHOLE, NODE, Collective.HOP1), (NODE, RANK, Collective.HOP2)]),
}


@pytest.mark.parametrize(("data_parallel", "zero3_size"), SIZES)
@pytest.mark.parametrize("mode", ["sharded", "full", "local"])
@pytest.mark.parametrize("adds_hop1", [False, True])
def test_reduction_specs_are_those_of_the_table(
    data_parallel: int, zero3_size: int, mode: str, adds_hop1: bool
) -> None:
    lands, waits, stages = ROWS[zero3_size > 1, data_parallel // zero3_size > 1, mode]
    for grid in grids(data_parallel, zero3_size):
        for precision, half in ((FP32, False), (MIXED, False), (HALF, True)):
            spec = ReductionSpec.plan(
                grid,
                precision,
                accumulation=mode,
                divide_factor=data_parallel,
                adds_hop1=adds_hop1,
                adds_hop2=adds_hop1,
            )
            assert (spec.incoming_extent, spec.accumulator_extent) == (lands, waits)
            assert [(stage.source, stage.target, stage.collective) for stage in spec.stages] == stages
            early = lands is not waits
            first = precision.replica_reduce if zero3_size == 1 else precision.reduce
            as_computed = early and adds_hop1 and first is torch.float32
            landing = precision.compute if as_computed else first
            wires = [landing if stage.source is WHOLE else precision.replica_reduce for stage in spec.stages]
            assert [stage.wire_dtype for stage in spec.stages] == wires
            scales = [spec.incoming_scale, *(stage.scale for stage in spec.stages)]
            if half and not adds_hop1:
                assert math.prod(scales) == pytest.approx(1 / data_parallel, rel=1e-15)
                assert all(math.frexp(scale)[0] == 0.5 for scale in scales[:-1]), "powers of two"
            else:
                expected = [1.0] * len(stages) + [1 / data_parallel]
                assert scales == expected, "the mean is taken once"
            assert spec.incoming_dtype == (landing if early else precision.master)
            assert spec.accumulator_is_reduced == early
            accumulating, reducing = spec.stages_between(lands, waits), spec.stages_between(lands, RANK)
            assert reducing == spec.stages == accumulating + spec.stages_between(waits, RANK)


# fp16 collectives by arithmetic: the sum of equal gradients, added as backends do

F16, F32 = torch.float16, torch.float32
WIRES = {"both": (F16, F16), "hop 1": (F16, F32), "hop 2": (F32, F16), "hop 2, bf16 inside": (torch.bfloat16, F16)}


def _sum_of_equal(value: Tensor, ranks: int, *, adds: bool) -> Tensor:
    """Return the sum over ranks, a power of two, in fp32 or in the dtype of the collective."""
    value = value.float() if adds else value
    while ranks > 1:
        value, ranks = value + value, ranks // 2
    return value


def _reduced(gradient: float, spec: ReductionSpec, grid: ShardGrid, *, adds: bool) -> float:
    """Return the final gradient if every rank has the same one, in fp16."""
    value = (torch.tensor(gradient, dtype=F16).float() * spec.incoming_scale).to(spec.incoming_dtype)
    for stage in spec.stages:
        ranks = grid.zero3_size if stage.collective is Collective.HOP1 else grid.replicas
        value = _sum_of_equal(value.to(stage.wire_dtype), ranks, adds=adds).float() * stage.scale
    return value.item()


def _root_of_ranks(data_parallel: int, zero3_size: int) -> float:
    """Return the largest divisor of gradients before the backend adds them."""
    return max(2.0 ** math.ceil(math.log2(n) / 2) for n in (zero3_size, data_parallel // zero3_size))


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize("mode", ["sharded", "full", "local"])
@pytest.mark.parametrize("adds", [True, False], ids=["added here", "added by the backend"])
@pytest.mark.parametrize(("data_parallel", "zero3_size"), [(1024, 2**power) for power in range(11)] + [(2, 2), (4, 2)])
def test_fp16_gradients_keep_their_size_on_the_way(
    data_parallel: int, zero3_size: int, adds: bool, mode: str, wires: str
) -> None:
    grid = ShardGrid.of_rank(0, data_parallel=data_parallel, zero3_size=zero3_size)
    precision = Precision(F32, F16, *WIRES[wires])
    how: Any = {"accumulation": mode, "adds_hop1": adds, "adds_hop2": adds}
    spec = ReductionSpec.plan(grid, precision, divide_factor=data_parallel, **how)
    assert _reduced(3e-5, spec, grid, adds=adds) == pytest.approx(3e-5, rel=0.05), "1e-3 of it, divided by all of D"
    lost = 1 if adds else _root_of_ranks(data_parallel, zero3_size)
    for gradient in (2.0**-24 * lost, 2.0**15 / lost, 1.0):
        assert _reduced(gradient, spec, grid, adds=adds) == gradient
    # A loss divided by all tokens needs a sum: then each rank's gradient is already small.
    summed = ReductionSpec.plan(grid, precision, divide_factor=1.0, **how)
    assert summed.incoming_scale == 1.0
    assert _reduced(2.0**-24, summed, grid, adds=adds) == 2.0**-24 * data_parallel
    assert _reduced(2.0**15 / data_parallel, summed, grid, adds=adds) == 2.0**15


@pytest.mark.parametrize("factor", [0.5, 3.0, 24.0, 1e6])
@pytest.mark.parametrize("zero3_size", [1, 2, 3, 6, 12])
def test_a_factor_of_any_size_is_divided_out(zero3_size: int, factor: float) -> None:
    grid = ShardGrid.of_rank(0, data_parallel=12, zero3_size=zero3_size)
    for wires, mode, adds in itertools.product(WIRES.values(), ("sharded", "full", "local"), (True, False)):
        precision = Precision(F32, F16, *wires)
        spec = ReductionSpec.plan(
            grid, precision, accumulation=mode, divide_factor=factor, adds_hop1=adds, adds_hop2=adds
        )
        scales = [spec.incoming_scale, *(stage.scale for stage in spec.stages)]
        assert math.prod(scales) == pytest.approx(1 / factor, rel=1e-15)
        assert all(math.frexp(scale)[0] == 0.5 and scale <= 1 for scale in scales[:-1]), "powers of two"


@pytest.mark.parametrize("mode", ["sharded", "full", "local"])
@pytest.mark.parametrize("zero3_size", [3, 5, 6, 12])
def test_hop_2_in_fp16_carries_no_more_than_one_rank_has(zero3_size: int, mode: str) -> None:
    grid = ShardGrid.of_rank(0, data_parallel=2 * zero3_size, zero3_size=zero3_size)
    precision = Precision(F32, F16, F16, F16)
    how: Any = {"accumulation": mode, "divide_factor": 2.0 * zero3_size, "adds_hop1": True, "adds_hop2": True}
    spec = ReductionSpec.plan(grid, precision, **how)
    sent = zero3_size * spec.incoming_scale * spec.stages[0].scale
    assert 0.5 < sent <= 1, "65504 times this is a number of fp16"


# Gradient buffers


class Rank(NamedTuple):
    grid: ShardGrid
    sums: dict[Extent, GradientBuffer]


def make_rank(grid: ShardGrid, spec: ReductionSpec, layout: FlatLayout, pool: BufferPool) -> Rank:
    """Build the gradient buffers as the engine does; a waiting ZeRO-3 gradient shard holds the final gradient."""
    sums: dict[Extent, GradientBuffer] = {}
    for extent in (WHOLE, NODE, RANK):
        numel = grid.numel(layout, extent)
        place: GradientStorage = PersistentStorage(SendBuffer(numel, torch.float32, CPU))
        if extent is spec.incoming_extent and spec.accumulator_is_reduced:
            place = PooledStorage(numel, torch.float32, pool)
        if extent is RANK and spec.accumulator_extent is NODE:
            place = AliasedStorage(sums[NODE].storage, grid.slice_within(layout, RANK, NODE))
        place.open(keep=False).fill_(torch.nan)
        sums[extent] = GradientBuffer(layout, grid, extent, place)
    return Rank(grid, sums)


def carry(ranks: list[Rank], layout: FlatLayout, stages: tuple[ReductionStage, ...], pool: BufferPool) -> None:
    """Run the engine's stages on each rank, and the collectives in between."""
    for stage in stages:
        sent = []
        for rank in ranks:
            if NODE in (stage.source, stage.target):
                rank.sums[RANK].set_aside()
            source = rank.sums[stage.source]
            source.seal()
            lease = source.storage.lend_send_buffer(stage.wire_dtype, pool)
            sent.append(lease.tensor.clone())
            lease.end()
        for rank in ranks:
            own = rank.grid.slice_within(layout, stage.target, stage.source)
            same = "replica_rank" if stage.collective is Collective.HOP1 else "zero3_rank"
            peers = [i for i, each in enumerate(ranks) if getattr(each.grid, same) == getattr(rank.grid, same)]
            pending = brought(*(sent[i][own] for i in peers))
            if stage.target is RANK:
                rank.sums[RANK].restore()
            rank.sums[stage.target].add_reduction(pending, scale=stage.scale)


def brought(*parts: Tensor) -> PendingReduction:
    """A completed collective."""
    group: Any = None
    comm = Communicator("alone", "zero3", group, TrafficCounters(), 1, 0, is_gloo=True, sums_locally=True)
    works = PendingCollective((), LaunchedCollective(comm, Collective.HOP1, "", 0))
    return PendingReduction(works, torch.empty(0), lambda: parts, parts[0].dtype, lambda: None)


def contribution(rank: int, index: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


def programs() -> Iterator[str]:
    """Yield programs: backwards inside (u) and outside (r) no_sync, step (s), drop all (z), drop one (d)."""
    yield from ("r", "ur", "uus", "rr", "rur", "ruurs", "rzr", "urzus", "rdr", "urdur", "udus", "rdus", "uzur")


@pytest.mark.parametrize(("data_parallel", "zero3_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (6, 3)])
@pytest.mark.parametrize("mode", ["sharded", "full", "local"])
def test_every_program_ends_with_the_mean_of_what_was_contributed(
    data_parallel: int, zero3_size: int, mode: str
) -> None:
    for program in programs():
        for layout in layouts(data_parallel):
            follow(program, layout, grids(data_parallel, zero3_size), mode)


def follow(program: str, layout: FlatLayout, all_grids: list[ShardGrid], mode: str) -> None:
    pool = BufferPool(CPU)
    factor = 4.0
    how: Any = {"accumulation": mode, "divide_factor": factor, "adds_hop1": True, "adds_hop2": True}
    specs = [ReductionSpec.plan(grid, FP32, **how) for grid in all_grids]
    ranks = [make_rank(grid, spec, layout, pool) for grid, spec in zip(all_grids, specs, strict=True)]
    spec, dropped = specs[0], len(layout.slots) - 1
    expected = {slot: torch.zeros(each.shape) for slot, each in enumerate(layout.slots)}
    for index, action in enumerate(program):
        if action in "ur":
            for number, rank in enumerate(ranks):
                for slot, each in enumerate(layout.slots):
                    if (slot + number + index) % 3:  # ranks use different parameters
                        values = contribution(number, index, each.shape)
                        rank.sums[spec.incoming_extent].add(slot, values, spec.incoming_scale)
                        expected[slot] += values / factor
            carry(
                ranks,
                layout,
                spec.stages_between(spec.incoming_extent, RANK if action == "r" else spec.accumulator_extent),
                pool,
            )
        elif action == "s":
            carry(ranks, layout, spec.stages_between(spec.accumulator_extent, RANK), pool)
        else:
            forgotten = list(expected) if action == "z" else [dropped]
            for slot in forgotten:
                expected[slot].zero_()
            for rank in ranks:
                for each in set(rank.sums.values()):
                    each.clear(forgotten)
                if action == "z":
                    rank.sums[RANK].restore()
    if program[-1] in "rs":
        for rank in ranks:
            final = rank.sums[RANK]
            flat = rank.grid.range_of(layout, RANK)
            for slot, each in enumerate(layout.slots):
                rows = layout.rows_in(each, flat)
                if final[slot] is SlotState.WRITTEN or len(ranks) > 1:  # a collective fills all
                    ours, theirs = final.part(slot), expected[slot][rows.start : rows.stop]
                    assert torch.equal(ours, theirs), (program, mode, rank.grid, each.name)


def one_sum() -> tuple[GradientBuffer, FlatLayout]:
    (layout,) = plan_layouts([("a", (2, 2)), ("b", (3,))], num_shards=1, align=1)
    place = PersistentStorage(SendBuffer(layout.numel, torch.float32, CPU))
    place.open(keep=False).fill_(torch.nan)
    return GradientBuffer(layout, ShardGrid(1, 1, 0, 0), WHOLE, place), layout


def test_the_first_write_overwrites_later_ones_add_and_holes_become_zero() -> None:
    ours, layout = one_sum()
    names = {slot.name: index for index, slot in enumerate(layout.slots)}
    a, b = names["a"], names["b"]
    assert ours.empty and ours.untouched and ours[a] is SlotState.EMPTY
    ours.add(a, torch.ones(2, 2), 0.5)
    ours.add(a, torch.ones(2, 2).bfloat16(), 2.0)
    assert ours[a] is SlotState.WRITTEN and ours[b] is SlotState.EMPTY and not ours.empty
    ours.seal()
    whole = ours.storage.open(keep=True)
    assert whole[layout.slots[a].offset] == 2.5 and not whole[layout.slots[b].offset : layout.slots[b].end].any()
    assert ours.empty
    ours.add(b, torch.ones(3))
    ours.add_reduction(brought(torch.ones(7), torch.ones(7)), scale=2.0)
    assert ours.part(a).eq(4).all() and ours.part(b).eq(5).all(), "holes are zero before a reduction is added"
    ours.clear([b])
    ours.add_reduction(brought(torch.ones(7)), scale=1.0)
    assert ours.part(a).eq(5).all() and ours.part(b).eq(1).all()
    ours.clear()
    ours.add_reduction(brought(torch.ones(7)), scale=3.0)
    assert ours.part(a).eq(3).all() and ours.part(b).eq(3).all()
    ours.overwrite(a, torch.full((2, 2), 5.0))
    assert ours.part(a).eq(5).all() and ours.part(b).eq(3).all(), "a replaced gradient is not added to"


def test_what_is_offered_counts_when_it_is_taken_and_is_refused_otherwise() -> None:
    ours, _ = one_sum()
    ours.expose(0).add_(1)
    assert ours[0] is SlotState.EXPOSED and ours.empty and not ours.untouched
    ours.mark_written(0)
    ours.expose(0).add_(1)
    assert ours[0] is SlotState.WRITTEN and ours.part(0).eq(2).all(), "what is there is kept"
    ours.expose(1).add_(1)
    with pytest.raises(RuntimeError, match="but autograd received no gradient"):
        ours.seal()
    ours.withdraw([0, 1])
    assert ours[0] is SlotState.WRITTEN and ours[1] is SlotState.EMPTY
    with pytest.raises(RuntimeError, match="was read in a forward"):
        ours.mark_written(1)
    ours.zero(1)
    assert ours[1] is SlotState.WRITTEN and not ours.part(1).any()


def test_a_send_buffer_is_leased_until_the_collective_ends() -> None:
    pool = BufferPool(CPU)
    kept = PersistentStorage(SendBuffer(4, torch.float32, CPU))
    in_place, copied = kept.lend_send_buffer(torch.float32, pool), kept.lend_send_buffer(torch.bfloat16, pool)
    assert kept.leased and in_place.tensor.data_ptr() == kept.open(keep=True).data_ptr()
    assert copied.tensor.dtype == torch.bfloat16
    in_place.end()
    in_place.end()  # once
    assert not kept.leased
    allocated = pool.most_bytes
    copied.end()
    assert pool.acquire(4, torch.bfloat16).data_ptr() == copied.tensor.data_ptr() and pool.most_bytes == allocated
    scratch = PooledStorage(4, torch.float32, pool)
    first = scratch.open(keep=False)
    lease = scratch.lend_send_buffer(torch.float32, pool)
    assert lease.tensor is first and scratch.open(keep=False) is not first, "what comes meanwhile lies elsewhere"


def test_a_final_gradient_leaves_its_home_only_where_it_is_wanted() -> None:
    around = PersistentStorage(SendBuffer(4, torch.float32, CPU))
    inside = AliasedStorage(around, slice(1, 3))
    inside.set_aside(keep=False)
    assert inside.state is AliasState.VACATED and not inside.nbytes, "nothing is moved"
    inside.restore(keep=False)
    inside.open(keep=True).fill_(3)
    inside.set_aside(keep=True)
    inside.set_aside(keep=True)  # it was released
    around.open(keep=True).fill_(7)
    assert inside.state is AliasState.SET_ASIDE and inside.open(keep=True).eq(3).all()
    inside.restore(keep=True)
    assert inside.state is AliasState.IN_PLACE and around.open(keep=True).tolist() == [7, 3, 3, 7]
    assert inside.nbytes == 8, "it stays, to be used again"
    inside.set_aside(keep=True)
    inside.restore(keep=False)
    around.open(keep=True).fill_(5)
    assert inside.open(keep=True).tolist() == [5, 5]


def test_a_round_is_ready_when_the_unit_has_ended_and_what_is_expected_has_come() -> None:
    each = PendingSlots(3)
    each.mark_ready(1)
    assert each.has_begun and not each.all_ready
    each.close(lambda slot: slot != 2)
    assert not each.all_ready, "slot 0 is still coming"
    each.mark_ready(0)
    assert each.all_ready
    each.end()
    assert not each.has_begun and not each.all_ready
    for slot in range(3):
        each.mark_ready(slot)
    assert not each.all_ready, "no rank launches before the backward has passed the unit"
    each.close(lambda slot: True)
    assert each.all_ready
    each.end()
    each.set_trainable([False, True, False])
    each.mark_ready(1)
    each.close(lambda slot: False)
    assert each.all_ready
