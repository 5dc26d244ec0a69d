"""Details of the engine that larger tests do not cover: each was broken once without a failing test."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero.comm.collectives import Communicator
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.engine.gather_order import GatherOrderCheck
from layerzero.engine.hooks import get_state
from tests.support.graphs import (
    MODES,
    SIZE,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    batch,
    blocks,
    compare,
    freeze,
    join,
    loss_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import full_gradients, integer_net
from tests.support.ranks import on_ranks, run_ranks

FP64 = torch.float64


# --- gather order ---


class Pair(nn.Module):
    """Returns the output of an inner unit and its own output."""

    UNIT = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=FP64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return join(self, self.inner(x)), x * self.scale

    def unwrap(self, output: tuple[Tensor, Tensor]) -> list[Tensor]:
        return list(output)


def _use_outputs_by_rank(model: nn.Module, rank: int, step: int) -> None:
    """Use outputs so that the backward reaches the inner unit first on odd ranks, the outer one on even ranks."""
    outputs = model(batch(rank, step).requires_grad_())
    loss_of(outputs[0] if rank % 2 else sum(outputs)).backward()


@on_ranks(world_size=WORLD, pg_timeout=5)
def test_ranks_may_use_different_outputs_of_a_unit_with_units_inside(rank: int) -> None:
    for settings in (*MODES, {"size": 4}):
        compare(rank, "outputs by rank", Case(lambda: Pair(Block()), _use_outputs_by_rank), **settings)


def _message(call: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a second error of a module that has already failed
            call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def _swap_on_rank_1(rank: int) -> str:
    model = shard(blocks(3))
    for step in range(2):
        one_pass(model, rank, step)
    if rank == 1:
        model.order = (1, 0, 2)
    return _message(lambda: one_pass(model, rank, 2))


def test_a_rank_that_did_as_always_is_told_that_another_did_not() -> None:
    for message in run_ranks(_swap_on_rank_1, world_size=2, pg_timeout=2, shared_memory="off"):
        assert "different orders" in message and "'units.1'" in message, message


def _leave_after_a_new_order(rank: int) -> str:
    model = shard(blocks(3))
    for step in range(4):
        model.order = (0, 1, 2) if step < 2 else (1, 0, 2)  # on all ranks: unexpected, but no difference
        one_pass(model, rank, step)
    return "left" if rank == 1 else _message(lambda: one_pass(model, rank, 4))


def test_a_change_of_order_that_all_ranks_shared_is_not_blamed_for_a_later_failure() -> None:
    message, left = run_ranks(_leave_after_a_new_order, world_size=2, pg_timeout=2, shared_memory="off")
    assert left == "left" and message != "nothing was raised" and "different orders" not in message, message


def _repeat_for_long(rank: int) -> int:
    comm = Communicator.over("control", "control", dist.group.WORLD, TrafficCounters(), "cpu")
    order = GatherOrderCheck(["a", "b", "c"], [comm], range(comm.size))
    for place in range(30_000):
        order.check((0, 1, 2, 1, 0)[place % 5])
    return comm.counters.calls["gather_order"]


def test_a_loop_stays_predicted_however_long_it_runs() -> None:
    assert all(compared <= 15 for compared in run_ranks(_repeat_for_long, world_size=2))


def _whole_bytes(model: nn.Module) -> int:
    return layerzero.memory(model).measured["full_buffer"]


def _leave_out_a_unit(rank: int) -> int:
    model = shard(blocks(3), prefetch=1)
    one_pass(model, rank, 0)
    model.order = (0, 2)
    model(batch(rank, 1).requires_grad_())
    return _whole_bytes(model)


def test_a_unit_gathered_ahead_and_not_called_is_freed_by_the_end_of_the_forward() -> None:
    assert run_ranks(_leave_out_a_unit, world_size=WORLD) == [0] * WORLD


class Ending(nn.Module):
    """Calls its units with gradient, but ends without one."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.inner = blocks(2)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.end == "raises":
            raise LookupError("raised")
        return out.detach()


def _end_without_gradient(rank: int, end: str) -> int:
    model = shard(Ending(end), reshard_after_forward=False)
    with contextlib.suppress(LookupError):
        model(batch(rank, 0))
    return _whole_bytes(model)


@pytest.mark.parametrize("end", ["raises", "detaches"])
def test_full_buffers_for_a_backward_that_cannot_come_are_freed(end: str) -> None:
    assert run_ranks(_end_without_gradient, end, world_size=WORLD) == [0] * WORLD


def _evaluate(rank: int) -> int:
    model = shard(blocks(5, own=False), reshard_after_forward=False, prefetch=0)
    lz_state, whole = get_state(model), []
    for unit in model.units:
        unit.linear.register_forward_hook(lambda *_: whole.append(sum(u.gathered for u in lz_state.units)))
    with torch.no_grad():
        model(batch(rank, 0))
    return max(whole)


def test_evaluation_frees_each_unit_even_where_training_keeps_them() -> None:
    """Count the root as gathered while it runs; it has no parameters here."""
    assert max(run_ranks(_evaluate, world_size=WORLD)) <= 2


def _look_at_hop1(rank: int) -> dict[str, int]:
    calls = {}
    for frozen in ((), ("units.2.linear.bias",)):
        model = freeze(shard(blocks(), prefetch=0), *frozen)
        for step in range(2):
            layerzero.traffic(model, reset=True)
            output = model.units[0](batch(rank, step).requires_grad_())
            output.register_hook(
                lambda gradient, model=model, frozen=frozen: calls.update(
                    {str(frozen): layerzero.traffic(model).calls.get("hop1", 0)}
                )
            )
            loss_of(model.units[2](model.units[1](output))).backward()
    return calls


def test_a_partly_frozen_unit_is_reduced_as_early_as_any_other() -> None:
    for calls in run_ranks(_look_at_hop1, world_size=WORLD, shared_memory="off"):
        first, second = calls.values()
        assert first == second > 0, calls


@on_ranks(world_size=WORLD)
def test_gradients_whose_sum_over_ranks_is_too_large_for_fp16_have_their_mean(rank: int) -> None:
    """Use gradients that fit in fp16, as does their mean; their sum over ranks does not."""
    fp16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for accumulation in ("sharded", "full", "local"):
        for size in (1, SIZE, WORLD):
            model = layerzero.shard_model(nn.Linear(4, 4), zero3_size=size, accumulation=accumulation, mp_policy=fp16)
            model(torch.full((1, 4), 2.0**15 + rank * 2.0**10)).sum().backward()
            expected = torch.full((4, 4), 2.0**15 + 1.5 * 2.0**10)
            assert torch.equal(full_gradients(model)["weight"], expected), (accumulation, size)


@on_ranks(world_size=WORLD)
def test_clipping_and_stepping_call_no_hook_for_gradients_that_were_final_before(rank: int) -> None:
    for settings in MODES:
        model, seen = shard(blocks(), **settings), []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        one_pass(model, rank, 0)
        layerzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        assert len(seen) == len(list(model.parameters())), settings


class Turned(nn.Module):
    """Linear layer whose weight has other strides; the backward needs the weight."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=FP64).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.turned)


def _outlive_a_step(rank: int, unit: type[nn.Module], size: int) -> str:
    model = shard(Chain(unit(), own=False), size)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    loss = loss_of(model(batch(rank, 0).requires_grad_()))
    one_pass(model, rank, 1)
    optimizer.step()
    return _message(loss.backward)


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("unit", [Block, Turned])
def test_a_graph_that_outlived_a_step_is_refused(unit: type[nn.Module], size: int) -> None:
    for message in run_ranks(_outlive_a_step, unit, size, world_size=WORLD, pg_timeout=5):
        assert "modified by an inplace operation" in message, message


@on_ranks(world_size=WORLD)
def test_gradients_that_come_in_portions_after_their_unit_was_reduced_are_all_reduced(rank: int) -> None:
    """Compare training with reentrant activation checkpointing, whose nested backward yields separate gradients."""
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        compare(rank, "portions", Case(lambda: blocks(order=(0, 1, 0, 2, 0), reentrant=True)), **settings)


@on_ranks(world_size=WORLD)
def test_clipping_takes_in_the_norms_of_further_groups(rank: int) -> None:
    """Clip with an extra group of W ranks with equal norms: the total p-norm is W ** (1 / p) times that of one."""
    model = shard(blocks())
    one_pass(model, rank, 0)
    for norm_type, factor in ((2.0, WORLD**0.5), (1.0, float(WORLD)), (float("inf"), 1.0)):
        norm = layerzero.clip_grad_norm_(model, float("inf"), norm_type)
        ours = layerzero.clip_grad_norm_(model, float("inf"), norm_type, extra_groups=(dist.group.WORLD,))
        torch.testing.assert_close(ours, norm * factor)


@on_ranks(world_size=WORLD)
def test_gradients_in_fp64_are_clipped_in_fp64(rank: int) -> None:
    """Clip integer gradients whose squared norm needs more bits than fp32 has."""
    model = layerzero.shard_model(integer_net().double(), zero3_size=2, units=["first"])
    gradients = [float(2**13 + index) for index, _ in enumerate(model.parameters())]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = torch.full_like(parameter.detach(), gradient)
    each = torch.cat([torch.full((p.numel(),), g).double() for p, g in zip(model.parameters(), gradients, strict=True)])
    for norm_type in (2.0, 1.0, float("inf")):
        norm = layerzero.clip_grad_norm_(model, float("inf"), norm_type)
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, torch.linalg.vector_norm(each, norm_type), rtol=1e-14, atol=0)
    layerzero.clip_grad_norm_(model, 0.5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        expected = torch.tensor(gradient).double() * (0.5 / (torch.linalg.vector_norm(each) + 1e-6))
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.expand(parameter.shape), rtol=1e-14, atol=0)


def _blow(gradient: Tensor) -> None:
    raise LookupError("blown")


def _count_after_a_failure(rank: int) -> list[tuple[int, int]]:
    calls = []
    for accumulation in ("sharded", "full", "local"):
        model = shard(blocks(2), units=None, accumulation=accumulation)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        for fails in (False, True):
            if fails:  # when the gradients of the second block have arrived
                model.order = (0, 1)
                handle = model.units[0].linear.weight.register_hook(_blow)
                with pytest.raises(LookupError):
                    one_pass(model, rank, 0)
                handle.remove()
                optimizer.zero_grad()
            model.order = (1, 0)  # those of the second block arrive last
            layerzero.traffic(model, reset=True)
            one_pass(model, rank, 1)
            sent = layerzero.traffic(model).calls
            calls.append((sent["hop1"], sent["hop2"]))
            optimizer.zero_grad()
    return calls


def test_what_arrived_in_a_backward_that_failed_starts_no_reduction_of_the_next() -> None:
    for calls in run_ranks(_count_after_a_failure, world_size=WORLD, shared_memory="off"):
        assert calls == [(1, 1)] * 6, calls


def _look_after_a_failure(rank: int) -> list[int]:
    model = shard(blocks(3))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    handle = model.units[1].linear.weight.register_hook(_blow)
    with pytest.raises(LookupError):
        one_pass(model, rank, 0)
    handle.remove()
    optimizer.zero_grad()
    whole = [_whole_bytes(model)]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        model(batch(rank, 0))
    return [*whole, _whole_bytes(model)]


def test_after_a_backward_that_failed_nothing_stays_whole() -> None:
    assert run_ranks(_look_after_a_failure, world_size=WORLD) == [[0, 0]] * WORLD


def _look_into_units(rank: int) -> list[str]:
    """Return why torch.compile did not compile a unit's full call as one graph."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it imports
        model = shard(blocks(2))
        for unit in model.units:
            unit.compile(backend="eager")
        for step in range(3):
            one_pass(model, rank, step)
        torch._dynamo.reset()
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    return list(counters["graph_break"])


def test_torch_compile_does_not_look_into_the_schedule() -> None:
    for reasons in run_ranks(_look_into_units, world_size=2):
        assert reasons and all("torch.compiler.disable" in reason for reason in reasons), reasons


def _add_after_sharding(rank: int) -> str:
    model = shard(blocks(1))
    model.late = nn.Linear(2, 2)
    with pytest.raises(ValueError) as caught:
        layerzero.shard_optimizer(sgd(model), model)
    return str(caught.value)


def test_a_module_added_after_sharding_is_no_part_of_the_model() -> None:
    for message in run_ranks(_add_after_sharding, world_size=2):
        assert "[2, 2]" in message and "before shard_model" in message
