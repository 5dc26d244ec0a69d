"""Varying calls to units: experts without tokens, random depth, ranks that differ."""

from __future__ import annotations

import copy
import itertools
import random
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.engine.used_params import PendingUsage
from tests.support.graphs import (
    MODES,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    assert_same_gradients,
    blocks,
    compare,
    message_of,
    one_pass,
    run_script,
    sgd,
    shard,
)
from tests.support.models import OptionalBias, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow


class Expert(nn.Module):
    """Expert that is a unit only in some tests."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Experts(nn.Module):
    """Sends each token to the expert that a fixed router chooses; an expert without tokens is not called."""

    UNIT = True

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(count))
        self.register_buffer("router", torch.randn(WIDTH, count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x @ self.router).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens = (chosen == index).nonzero().squeeze(-1)
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens]))
        return x + out


def _mixture() -> Chain:
    return Chain(Block(), Experts(), Block(), Experts(6))


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", ["F0 B0", "F0 F1 B0 F2 B1 B2"])
@on_ranks(world_size=WORLD)
def test_experts_without_tokens_on_some_ranks_train_like_one_process(rank: int, script: str) -> None:
    case, idle = Case(_mixture, partial(run_script, script=script)), []
    for each in range(WORLD):
        torch.manual_seed(0)
        one_pass(model := _mixture(), each, 0)
        idle.append(frozenset(name for name, p in model.named_parameters() if p.grad is None))
    assert len(set(idle)) > 1 and any(idle), "what the test is about"
    for settings in MODES:
        compare(rank, script, case, **settings)
    compare(rank, script, case, size=1, units={Block, Expert})  # nothing is gathered, so experts may be units
    compare(rank, script, case, size=4)


def _random_depth(model: nn.Module, rank: int, step: int) -> None:
    kept = torch.rand(4, generator=torch.Generator().manual_seed(step)) < 0.6
    model.order = [place for place in range(4) if kept[place]]
    one_pass(model, rank, step)


@on_ranks(world_size=WORLD)
def test_random_depth_with_one_seed_trains_like_one_process(rank: int) -> None:
    for settings in MODES:
        compare(rank, "random depth", Case(partial(blocks, 4), _random_depth), **settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("evaluates", [False, True])
@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_loop_that_repeats_itself_is_predicted(rank: int, evaluates: bool) -> None:
    """Count how often the ranks compare their gather orders, per step of a pipeline."""
    model = shard(blocks(4))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    counts = []
    for step in range(9):
        layerzero.traffic(model, reset=True)
        run_script(model, rank, step, script="F0 F1 B0 F2 B1 F3 B2 B3")
        if evaluates and step % 3 == 2:
            with torch.no_grad():
                model(torch.ones(1, WIDTH, dtype=torch.float64))
        update(optimizer)
        counts.append(layerzero.traffic(model).calls.get("gather_order", 0))
    assert max(counts[2:]) <= (3 if evaluates else 0), counts


def _swap_on_one_rank(rank: int, odd: int, steps: int, order: tuple[int, ...]) -> str:
    """Swap two blocks on one rank. They have equal sizes, so only a comparison of names detects it."""
    model = shard(blocks(3))
    for step in range(steps):
        one_pass(model, rank, step)
    model.order = order if rank == odd else (0, 1, 2)
    return message_of(lambda: one_pass(model, rank, steps))


class _CountedHistory(list):
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@on_ranks(world_size=2, shared_memory="off")
def test_a_prediction_among_random_gathers_reads_a_bounded_part_of_the_history(rank: int) -> None:
    """Experts that are units are gathered in an order that does not repeat itself."""
    model = shard(blocks(2), size=2)
    (order,), draw = get_state(model).scheduler._orders.values(), random.Random(0)
    order._history = history = _CountedHistory()
    most = 0
    with mock.patch.object(order, "_compare"):
        for _ in range(6000):
            history.reads = 0
            order.check(draw.randrange(3))
            most = max(most, history.reads)
    assert len(history) == 6000 and most < 4000, most


@on_ranks(world_size=2, shared_memory="off")
def test_a_loop_with_many_forward_passes_before_each_backward_is_predicted(rank: int) -> None:
    model = shard(blocks(2), size=2)
    (order,) = get_state(model).scheduler._orders.values()
    for step in range(4):
        with mock.patch.object(order, "_compare") as compare:
            for unit in (*(0, 1, 2) * 100, 2, 1, 0):
                order.check(unit)
        assert step < 2 or not compare.called, compare.call_count


@pytest.mark.sample(3)
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (0, 2), (0, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_order_that_differs_on_one_rank_is_an_error_that_names_both_orders(steps: int, order: Any) -> None:
    for odd in (0, 1):
        messages = run_ranks(_swap_on_one_rank, odd, steps, order, world_size=2, pg_timeout=3, shared_memory="off")
        assert any("different orders" in message for message in messages), messages
        for message in messages:
            assert message != "nothing was raised", messages
            if "different orders" in message:
                assert "rank 0: " in message and "rank 1: " in message and "units." in message, message


def _experts_as_units(rank: int) -> str:
    torch.manual_seed(0)
    model = shard(_mixture(), units={Expert})
    return message_of(lambda: [one_pass(model, rank, step) for step in range(4)])


def test_experts_as_units_that_only_some_ranks_call_are_an_error_that_says_what_to_do() -> None:
    messages = run_ranks(_experts_as_units, world_size=2, pg_timeout=3, shared_memory="off")
    assert any("different orders" in message for message in messages), messages
    assert any("experts" in message and "zero3_size=1" in message for message in messages), messages
    assert "nothing was raised" not in messages


class Optional(nn.Module):
    """Layer with a second weight that only some ranks use."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.expert = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.uses_expert = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x + torch.tanh(self.expert(x)) if self.uses_expert else x


@on_ranks(world_size=WORLD, pg_timeout=15)
def test_a_rank_that_leaves_out_a_parameter_of_the_last_unit_keeps_nobody_waiting(rank: int) -> None:
    for mode, place in itertools.product(("sharded", "full", "local"), (5, 3, 0)):
        torch.manual_seed(0)
        alone = Chain(*(Optional() for _ in range(6)))
        model = shard(copy.deepcopy(alone), accumulation=mode)
        for step in range(3):
            without = step % 2
            model.units[place].uses_expert = rank != without
            one_pass(model, rank, step)
            for r in range(WORLD):
                alone.units[place].uses_expert = r != without
                one_pass(alone, r, step)
            assert_same_gradients(model, alone, (mode, place, step))
            model.zero_grad()
            alone.zero_grad()


class Chosen(nn.Module):
    """Two rows of parameters. Each call says whether they are used; gradients are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.ones(4))
        self.pair = nn.ParameterList([nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))])

    def forward(self, *use: bool) -> Tensor:
        return self.root.sum() + sum(p.sum() for p, used in zip(self.pair, use, strict=True) if used)


@on_ranks(world_size=WORLD, pg_timeout=15)
def test_what_only_another_rank_of_the_node_used_is_dropped_too(rank: int) -> None:
    odd = rank % 2 == 1
    for mode, zero3_size in itertools.product(("sharded", "full", "local"), (1, 2, 4)):
        case = f"{mode} S={zero3_size}"
        model = layerzero.shard_model(Chosen(), zero3_size=zero3_size, accumulation=mode)
        for drop in (lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)):
            with layerzero.no_sync(model):
                model(odd, False).backward()
            drop(model)
            model(True, True).backward()
            assert _gradients(model) == {"root": 1.0, "pair.0": 1.0, "pair.1": 1.0}, case
            model.zero_grad()

        with layerzero.no_sync(model):
            model(odd, not odd).backward()
        model.pair[0].grad = None
        model(True, True).backward()
        assert _gradients(model) == {"root": 2.0, "pair.0": 1.0, "pair.1": 1.5}, f"{case}: the other one stays"
        model.zero_grad()

        with layerzero.no_sync(model):
            model(odd, False).backward()
        layerzero.clip_grad_norm_(model, float("inf"))
        assert _gradients(model) == {"root": 1.0, "pair.0": 0.5}, f"{case}: nobody used pair.1"
        model.zero_grad()


def _gradients(model: nn.Module) -> dict[str, float]:
    whole = {name: p.grad.full_tensor().unique() for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in whole.items()}


@on_ranks(world_size=WORLD)
def test_what_only_another_rank_adds_to_a_gradient_that_was_shown_is_told_here(rank: int) -> None:
    for mode, zero3_size in itertools.product(("sharded", "full", "local"), (1, 2, 4)):
        model = layerzero.shard_model(Chosen(), zero3_size=zero3_size, accumulation=mode)
        told: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, told=told: told.append(name))
        model(True, True).backward()
        assert sorted(told) == ["pair.0", "pair.1", "root"]
        told.clear()
        model(rank == 2, False).backward()  # this rank already has a gradient of everything, and uses less
        assert sorted(told) == ["pair.0", "root"], f"{mode} S={zero3_size}: {told}"
        assert _gradients(model) == {"root": 2.0, "pair.0": 1.25, "pair.1": 1.0}


@on_ranks(world_size=WORLD)
def test_other_control_messages_wait_for_the_usage_bytes_that_a_thread_sends(rank: int) -> None:
    """Rank 0 does not use a parameter. Its thread sends the message along the second axis late."""
    model = layerzero.shard_model(OptionalBias(2), mesh=mesh_of(2), units=["units.0", "units.1"])
    ranks, relay = get_state(model).ranks, PendingUsage.relay

    def late_relay(pending: PendingUsage) -> None:
        time.sleep(0.2 if rank == 0 else 0)
        relay(pending)

    for step in range(3):
        with mock.patch.object(PendingUsage, "relay", late_relay):
            model(torch.ones(2, 5), uses_own=rank != 0).sum().backward()
            assert ranks.all_gather_text(f"{step} {rank}") == [f"{step} {each}" for each in range(WORLD)]
        assert model.last.grad is not None, "the other ranks have used it"
        model.zero_grad()
