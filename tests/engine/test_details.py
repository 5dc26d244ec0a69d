"""Details of the engine that larger tests do not cover: each was broken once without a failing test."""

from __future__ import annotations

import contextlib
import itertools
import warnings

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
    boom,
    compare,
    freeze,
    join,
    loss_of,
    message_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import full_gradients, integer_net
from tests.support.ranks import on_ranks

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


@on_ranks(world_size=2, pg_timeout=2, shared_memory="off")
def test_a_rank_that_did_as_always_is_told_that_another_did_not(rank: int) -> None:
    model = shard(blocks(3))
    for step in range(2):
        one_pass(model, rank, step)
    if rank == 1:
        model.order = (1, 0, 2)
    message = message_of(lambda: one_pass(model, rank, 2))
    assert "different orders" in message and "'units.1'" in message, message


@on_ranks(world_size=2, pg_timeout=2, shared_memory="off")
def test_a_change_of_order_that_all_ranks_shared_is_not_blamed_for_a_later_failure(rank: int) -> None:
    model = shard(blocks(3))
    for step in range(4):
        model.order = (0, 1, 2) if step < 2 else (1, 0, 2)  # on all ranks: unexpected, but no difference
        one_pass(model, rank, step)
    if rank == 0:
        message = message_of(lambda: one_pass(model, rank, 4))
        assert message != "nothing was raised" and "different orders" not in message, message


@on_ranks(world_size=2)
def test_a_loop_stays_predicted_however_long_it_runs(rank: int) -> None:
    comm = Communicator.over("control", "control", dist.group.WORLD, TrafficCounters(), "cpu")
    order = GatherOrderCheck(["a", "b", "c"], [comm], range(comm.size))
    for place in range(30_000):
        order.check((0, 1, 2, 1, 0)[place % 5])
    assert comm.counters.calls["gather_order"] <= 15


# --- gathered memory ---


def _whole_bytes(model: nn.Module) -> int:
    return layerzero.memory(model).measured["full_buffer"]


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


@on_ranks(world_size=WORLD)
def test_full_buffers_that_no_call_and_no_backward_can_need_are_freed(rank: int) -> None:
    model = shard(blocks(3), prefetch=1)
    one_pass(model, rank, 0)
    model.order = (0, 2)
    model(batch(rank, 1).requires_grad_())
    assert _whole_bytes(model) == 0, "a unit gathered ahead and not called"
    for end in ("raises", "detaches"):
        model = shard(Ending(end), reshard_after_forward=False)
        with contextlib.suppress(LookupError):
            model(batch(rank, 0))
        assert _whole_bytes(model) == 0, end
    model = shard(blocks(5, own=False), reshard_after_forward=False, prefetch=0)
    units, gathered = get_state(model).units, []
    for unit in model.units:
        unit.linear.register_forward_hook(lambda *_: gathered.append(sum(each.gathered for each in units)))
    with torch.no_grad():
        model(batch(rank, 0))
    assert max(gathered) <= 2, "in an evaluation, one unit and the root, which has no parameters"


@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_partly_frozen_unit_is_reduced_as_early_as_any_other(rank: int) -> None:
    calls: list[int] = []
    for frozen in ((), ("units.2.linear.bias",)):
        model = freeze(shard(blocks(), prefetch=0), *frozen)
        for step in range(2):
            layerzero.traffic(model, reset=True)
            output = model.units[0](batch(rank, step).requires_grad_())
            output.register_hook(
                lambda gradient, model=model: calls.append(layerzero.traffic(model).calls.get("hop1", 0))
            )
            loss_of(model.units[2](model.units[1](output))).backward()
    assert calls[1] == calls[3] > 0, calls


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


@on_ranks(world_size=WORLD, pg_timeout=5)
def test_a_graph_that_outlived_a_step_is_refused(rank: int) -> None:
    for unit, size in itertools.product((Block, Turned), (1, SIZE)):
        model = shard(Chain(unit(), own=False), size)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        loss = loss_of(model(batch(rank, 0).requires_grad_()))
        one_pass(model, rank, 1)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


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


@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_backward_that_failed_leaves_nothing_whole_and_starts_no_reduction_of_the_next(rank: int) -> None:
    for accumulation in ("sharded", "full", "local"):
        model = shard(blocks(2), units=None, accumulation=accumulation)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        for fails in (False, True):
            if fails:  # when the gradients of the second block have arrived
                model.order = (0, 1)
                handle = model.units[0].linear.weight.register_hook(boom)
                with pytest.raises(LookupError):
                    one_pass(model, rank, 0)
                handle.remove()
                optimizer.zero_grad()
                assert _whole_bytes(model) == 0 and all(isinstance(p, DTensor) for p in model.parameters())
            model.order = (1, 0)  # those of the second block arrive last
            layerzero.traffic(model, reset=True)
            one_pass(model, rank, 1)
            sent = layerzero.traffic(model).calls
            assert (sent["hop1"], sent["hop2"]) == (1, 1), (accumulation, fails)
            optimizer.zero_grad()


@on_ranks(world_size=2)
def test_torch_compile_does_not_look_into_the_schedule(rank: int) -> None:
    """Assert why torch.compile did not compile a unit's full call as one graph."""
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
    reasons = list(counters["graph_break"])
    assert reasons and all("torch.compiler.disable" in reason for reason in reasons), reasons


@on_ranks(world_size=2)
def test_a_module_added_after_sharding_is_no_part_of_the_model(rank: int) -> None:
    model = shard(blocks(1))
    model.late = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"\[2, 2\].*before shard_model"):
        layerzero.shard_optimizer(sgd(model), model)
