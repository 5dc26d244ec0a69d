"""Grids, reduction specs, and what reductions lend and wait for, in one process, without communication."""

from __future__ import annotations

import itertools
import math
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import layerzero
from layerzero.comm.collectives import Collective
from layerzero.comm.transport.base import SendBuffer
from layerzero.config import Precision
from layerzero.device.buffer_pools import BufferPool
from layerzero.engine import handle_gradients
from layerzero.engine.gradient_offload import AccumulatorAllocator
from layerzero.engine.gradient_storage import PersistentStorage, PooledStorage
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.layout.flat_layout import FlatLayout, plan_layouts
from layerzero.layout.grad_usage import GradUsage
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
            assert spec.accumulating_stages + spec.remaining_stages == spec.stages
            assert all(stage.target >= waits for stage in spec.accumulating_stages)
            assert all(stage.source <= waits for stage in spec.remaining_stages)


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


def test_an_encoded_hop_2_is_added_by_the_rank_on_every_backend() -> None:
    codec = layerzero.Int4Blocks()
    for zero3_size, adds in itertools.product((1, 2), (False, True)):
        spec = ReductionSpec.plan(
            grids(4, zero3_size)[0],
            MIXED,
            accumulation="local",
            divide_factor=4,
            adds_hop1=True,
            adds_hop2=adds,
            hop2_codec=codec,
        )
        assert spec.stages[-1].codec is codec
        assert spec.incoming_dtype is MIXED.compute, "gradients wait for their message as they were computed"


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


def test_a_send_buffer_is_lent_until_the_collective_ends() -> None:
    pool = BufferPool(CPU)
    kept, scratch = PersistentStorage(SendBuffer(4, F32, CPU)), PooledStorage(4, F32, pool)
    assert kept.lend_send_buffer(F32, pool).tensor.data_ptr() == kept.open(keep=True).data_ptr()
    copied, give_copy_back = kept.lend_send_buffer(torch.bfloat16, pool)
    assert copied.dtype == torch.bfloat16 and pool.acquire(4, torch.bfloat16) is not copied
    first = scratch.open(keep=False)
    lent, give_first_back = scratch.lend_send_buffer(F32, pool)
    assert lent is first
    assert scratch.open(keep=False) is not first, "what comes meanwhile lies elsewhere"
    give_copy_back()
    give_first_back()
    assert pool.acquire(4, torch.bfloat16) is copied and pool.acquire(4, F32) is first
    second = scratch.open(keep=False)
    scratch.lend_send_buffer(torch.bfloat16, pool)
    assert pool.acquire(4, F32) is second, "a copy in another dtype is sent, so the memory is free at once"


def _alone() -> HandleGradients:
    """Return the gradients of a handle with three parameters on the only rank."""
    (layout,) = plan_layouts([("a", (2,)), ("b", (2,)), ("c", (2,))], num_shards=1, align=2)
    (grid,) = grids(1, 1)
    how: Any = {"accumulation": "sharded", "divide_factor": 1.0, "adds_hop1": True, "adds_hop2": True}
    pools = SimpleNamespace(scratch=BufferPool(CPU), accumulators=AccumulatorAllocator(CPU))
    mesh: Any = SimpleNamespace(mesh_info=SimpleNamespace(grid=grid), transport=None, pools=pools)
    return HandleGradients(layout, ReductionSpec.plan(grid, FP32, **how), label="unit", master=F32, mesh=mesh)


def _receive(gradients: HandleGradients, *slots: int) -> None:
    for slot in slots:
        gradients.receive(slot, torch.ones(2))


def test_a_reduction_is_ready_when_the_unit_has_ended_and_what_is_expected_has_arrived() -> None:
    each = _alone()
    _receive(each, 1)
    assert each.arrived and not each.all_arrived
    each.await_only([0, 1])
    assert not each.all_arrived, "slot 0 is still coming"
    each.await_only([0, 2])
    _receive(each, 0)
    assert each.all_arrived, "a gradient that no call expected is not waited for later"
    assert each.create_reduction(()) is None
    assert not each.arrived and not each.all_arrived
    _receive(each, 0, 1, 2)
    assert not each.all_arrived, "no rank launches before the backward has passed the unit"
    each.await_only([0, 1, 2])
    assert each.all_arrived


def test_gradients_are_added_at_the_launch_and_a_failed_backward_adds_none() -> None:
    each = _alone()
    _receive(each, 0)
    assert each.final.empty
    _receive(each, 0)
    assert each.final.filled_parts()[0][1].tolist() == [1, 1], "the first of two parts"
    assert each.create_reduction(()) is None
    assert [(slot, part.tolist()) for slot, part in each.final.filled_parts()] == [(0, [2, 2])]
    _receive(each, 0, 1)
    each.abort()
    assert each.create_reduction(()) is None
    assert [(slot, part.tolist()) for slot, part in each.final.filled_parts()] == [(0, [2, 2])]


def test_gradients_with_memory_of_their_own_are_added_before_they_need_much_more() -> None:
    each, first = _alone(), torch.ones(2)
    arrived = weakref.ref(first)
    with mock.patch.object(handle_gradients, "_MOST_WAITING", first.nbytes):
        each.receive(0, first)
        del first
        assert each.final.empty and arrived() is not None
        _receive(each, 1)
        assert arrived() is None, "autograd can reuse its memory"
        assert [(slot, part.tolist()) for slot, part in each.final.filled_parts()] == [(0, [1, 1]), (1, [1, 1])]
        each.await_only([0, 1])
        assert each.all_arrived
        _receive(each, 2)
        assert each.arrived[2] is not None, "the limit applies to what waits"
        assert each.create_reduction(()) is None
    assert [(slot, part.tolist()) for slot, part in each.final.filled_parts()] == [(n, [1, 1]) for n in range(3)]


def test_the_usage_of_a_parameter_follows_contributions_publications_and_drops() -> None:
    each = _alone()
    unused, unknown, published, contributed = GradUsage

    def assert_usage(*expected: GradUsage) -> None:
        assert list(each.usage) == list(expected)

    _receive(each, 0)
    assert_usage(contributed, unused, unused)
    each.incoming.expose(1)
    each.record_main_grad(1)
    assert_usage(contributed, contributed, unused)
    each.await_only([1])
    assert each.all_arrived, "a kernel has added the gradient"
    assert each.create_reduction(()) is None
    each.record_usage(bytes([contributed, unused, published]))
    assert_usage(published, contributed, published)
    each.drop([0, 1])
    assert_usage(unused, unused, published)
    each.record_unused([0])
    assert_usage(unknown, unused, published)
    _receive(each, 1)
    each.record_unused(())
    assert_usage(unused, contributed, published)
    each.add_rows(0, torch.ones(2))
    assert_usage(contributed, contributed, published)
    each.zero(0)
    assert_usage(published, contributed, published)
    each.drop([0, 1, 2])
    assert_usage(unused, unused, unused)
    assert each.final.empty and not each.used
