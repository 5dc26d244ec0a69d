"""Weights that stay gathered until the optimizer step: ``reshard_after_forward="step"``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.config import LayerZeroConfig
from layerzero.device.buffer_pools import FullBufferPool
from tests.support.graphs import (
    WORLD,
    Block,
    Chain,
    batch,
    blocks,
    boom,
    freeze,
    loss_of,
    message_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import BF16, different, full_parameters, update
from tests.support.ranks import on_ranks, run_ranks

STEPS, MICRO_BATCHES, UNITS = 3, 4, 4  # three blocks and the root

Accumulating = Callable[[nn.Module, int, int], None]


def gathers(model: nn.Module) -> int:
    """Return the number of gathers since the last call."""
    return layerzero.traffic(model, reset=True).calls.get("gather", 0)


def full_buffers(model: nn.Module) -> int:
    return layerzero.memory(model).measured["full_buffer"]


def gathered_bytes(model: nn.Module) -> int:
    return sum(unit.gathered_bytes for unit in layerzero.units(model))


def frozen_units(model: nn.Module) -> list[int]:
    """Return the bytes of the gathered weights of each unit without trained parameters, which a step does not free."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        each.gathered_bytes for each in layerzero.units(model) if trained.isdisjoint(p.name for p in each.parameters)
    ]


def kept(model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Return a sharded model of three blocks, or `model`, whose weights stay gathered, and its optimizer."""
    torch.manual_seed(0)
    model = shard(blocks() if model is None else model, **({"reshard_after_forward": "step"} | settings))
    return model, layerzero.shard_optimizer(sgd(model), model)


def accumulate(model: nn.Module, rank: int, step: int) -> None:
    for index in range(MICRO_BATCHES):
        with layerzero.no_sync(model) if index + 1 < MICRO_BATCHES else nullcontext():
            x = batch(rank, step, index).to(next(model.parameters()).dtype)
            loss_of(model(x.requires_grad_(bool(model.reentrant)))).backward()


def in_context(model: nn.Module, rank: int, step: int) -> None:
    """Compute the loss from a block's weight, with the backward inside the context or after it."""
    for index in range(MICRO_BATCHES):
        with layerzero.no_sync(model) if index + 1 < MICRO_BATCHES else nullcontext():
            output = model(batch(rank, step, index))
            with layerzero.gathered(model.units[0]):
                loss = loss_of(output @ model.units[0].linear.weight)
                if index % 2:
                    loss.backward()
            if not index % 2:
                loss.backward()


def in_flight(model: nn.Module, rank: int, step: int) -> None:
    losses = [loss_of(model(batch(rank, step, index))) for index in range(MICRO_BATCHES)]
    sum(losses).backward()


def with_reference(model: nn.Module, rank: int, step: int) -> None:
    """Run a forward without gradients before each one with gradients, as for a reference model."""
    for index in range(MICRO_BATCHES):
        with torch.no_grad():
            expected = model(batch(rank, step, index))
        loss_of(model(batch(rank, step, index)) - expected).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Accumulating, dict[str, Any]]] = {
    "sharded": (blocks, accumulate, {}),
    "full": (blocks, accumulate, {"accumulation": "full"}),
    "local, no prefetch": (blocks, accumulate, {"accumulation": "local", "prefetch": 0}),
    "one group": (blocks, accumulate, {"size": 4, "accumulation": "full", "prefetch": 3}),
    "one group, accumulated on one rank": (blocks, accumulate, {"size": 4, "accumulation": "local"}),
    "reentrant checkpoints": (functools.partial(blocks, reentrant=True), accumulate, {"accumulation": "full"}),
    "checkpoints": (functools.partial(blocks, reentrant=False), accumulate, {}),
    "a frozen block first": (lambda: freeze(blocks(), "units.0"), accumulate, {"accumulation": "full"}),
    "called twice": (lambda: Chain(*(Block() for _ in range(3)), order=(0, 1, 1, 2, 0)), accumulate, {}),
    "bf16, encoded gathers": (
        lambda: blocks().float(),
        accumulate,
        {"mp_policy": BF16, "accumulation": "full", "codecs": layerzero.Codecs(gather=layerzero.Float8Rows())},
    ),
    "weights outside of forwards": (blocks, in_context, {}),
    "several forwards before a backward": (blocks, in_flight, {"accumulation": "full"}),
    "a reference without gradients": (blocks, with_reference, {}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(world_size=WORLD)
def test_each_unit_is_gathered_once_per_step_and_no_bit_changes(rank: int, case: str) -> None:
    make, accumulating, settings = CASES[case]
    found = []
    for reshards in (True, "step"):
        torch.manual_seed(0)
        model, optimizer = kept(make(), **settings, reshard_after_forward=reshards)
        for step in range(STEPS):
            gathers(model)
            accumulating(model, rank, step)
            count, frozen = gathers(model), frozen_units(model)
            assert (count == UNITS - len(frozen) * bool(step)) == (reshards == "step"), (reshards, step, count)
            assert full_buffers(model) == (gathered_bytes(model) if reshards == "step" else 0)
            update(optimizer)
            assert full_buffers(model) == (sum(frozen) if reshards == "step" else 0)
        if frozen:
            report = layerzero.memory(model)
            assert report.measured_peak == report.predicted_peak, report
        found.append(full_parameters(model))
    assert not different(*found)


@on_ranks(world_size=WORLD, shared_memory="auto")
def test_ranks_that_share_memory_compute_the_same(rank: int) -> None:
    found = []
    for reshards in (True, "step"):
        model, optimizer = kept(reshard_after_forward=reshards)
        for step in range(STEPS):
            accumulate(model, rank, step)
            update(optimizer)
        found.append(full_parameters(model))
        assert gathers(model) == (UNITS * STEPS if reshards == "step" else 2 * UNITS * STEPS * MICRO_BATCHES)
    assert not different(*found)


def chosen(name: str, module: nn.Module) -> Any:
    return {"": True, "units.0": "step", "units.1": False, "units.2": 2}[name]


@on_ranks(world_size=WORLD)
def test_a_callable_chooses_for_each_unit_and_memory_is_as_predicted(rank: int) -> None:
    for reshards in ("step", chosen, lambda name, module: name != "units.2" or "step"):
        for settings in ({"size": 4}, {"size": 2, "prefetch": 3}):
            if reshards is chosen and settings["size"] == 2:
                continue
            model, optimizer = kept(reshard_after_forward=reshards, accumulation="full", **settings)
            for step in range(STEPS):
                accumulate(model, rank, step)
                update(optimizer)
            report = layerzero.memory(model)
            assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted, report
            assert report.measured_peak == report.predicted_peak, report
            if FullBufferPool.can_cache and reshards == "step":
                assert report.measured["cached_buffer"] == gathered_bytes(model)
    model, _ = kept(size=4, reshard_after_forward=chosen)
    assert {unit.name: unit.reshard_after_forward for unit in layerzero.units(model)} == {
        name: chosen(name, model) for name in ("", "units.0", "units.1", "units.2")
    }
    accumulate(model, rank, 0)
    assert full_buffers(model) == layerzero.units(model)[1].gathered_bytes


# --- what ends a use, and what does not ---


def _evaluate(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(batch(rank, 9))


def _gathered_without_gradients(model: nn.Module, rank: int) -> None:
    with torch.no_grad(), layerzero.gathered(model.units[1]):
        batch(rank, 9) @ model.units[1].linear.weight


def _forward_alone(model: nn.Module, rank: int) -> None:
    model(batch(rank, 9))


def _in_a_forward(model: nn.Module, rank: int) -> None:
    def fail(*_: object) -> None:
        raise LookupError("boom")

    hook = model.units[1].register_forward_hook(fail)
    with pytest.raises(LookupError):
        model(batch(rank, 9))
    hook.remove()


def _in_a_backward(model: nn.Module, rank: int) -> None:
    def fail(*_: object) -> None:
        raise LookupError("boom")

    output = model(batch(rank, 9))
    output.register_hook(fail)
    with pytest.raises(LookupError), layerzero.no_sync(model):
        loss_of(output).backward()


@on_ranks(world_size=WORLD)
def test_evaluation_and_failed_passes_keep_the_weights_even_on_one_rank(rank: int) -> None:
    model, optimizer = kept(accumulation="full")
    one_pass(model, rank, 0)
    update(optimizer)
    for end in (_evaluate, _gathered_without_gradients, _forward_alone, _in_a_forward, _in_a_backward):
        _evaluate(model, rank)
        gathers(model)
        if rank == 1:  # the weights are there, so that the other ranks need not do the same
            end(model, rank)
        one_pass(model, rank, 1)
        assert gathers(model) == 0 and full_buffers(model) == gathered_bytes(model), end
        update(optimizer)
        assert full_buffers(model) == 0, end
    assert not torch.isnan(next(iter(full_parameters(model).values()))).any()


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_an_evaluation_on_one_rank_may_leave_out_units_or_call_them_in_another_order(rank: int) -> None:
    orders = ((0, 2), (1,), (2, 1, 0), (0, 1, 2))
    model, optimizer = kept()
    for step in range(2 * len(orders)):
        gathers(model)
        one_pass(model, rank, step)
        assert gathers(model) == UNITS
        if rank == 1:
            model.order = orders[step % len(orders)]
            _evaluate(model, rank)
            model.order = range(3)
        update(optimizer)


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_a_rank_may_repeat_a_forward_that_failed_while_the_next_unit_was_gathered(rank: int) -> None:
    for place, prefetch in itertools.product((0, 1, 2), (1, 2)):
        found = []
        for fails in (False, True):
            model, optimizer = kept(accumulation="full", prefetch=prefetch)
            for step in range(4):
                if fails and rank == 1 and step % 2:
                    hook = model.units[place].register_forward_hook(boom)
                    with pytest.raises(LookupError):
                        model(batch(rank, step))
                    hook.remove()
                gathers(model)
                one_pass(model, rank, step)
                assert gathers(model) <= UNITS
                assert full_buffers(model) == gathered_bytes(model), place
                update(optimizer)
            found.append(full_parameters(model))
        assert not different(*found), (place, prefetch)


def _load(model: nn.Module) -> None:
    layerzero.load_full_state_dict(model, {name: 0.5 * value for name, value in full_parameters(model).items()})


def _edit(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _edit_full(model: nn.Module) -> None:
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("change", [_load, _edit, _edit_full])
@on_ranks(world_size=WORLD)
def test_changed_weights_are_gathered_again(rank: int, change: Callable[[nn.Module], None]) -> None:
    outputs: list[Tensor] = []
    for reshards in (True, "step"):
        model, _ = kept(reshard_after_forward=reshards)
        one_pass(model, rank, 0)
        change(model)
        gathers(model)
        with torch.no_grad():
            outputs.append(model(batch(rank, 1)))
        assert gathers(model) == UNITS
    assert outputs[0].equal(outputs[1])


@on_ranks(world_size=WORLD)
def test_full_precision_and_reshard_free_the_weights(rank: int) -> None:
    torch.manual_seed(0)
    model, _ = kept(blocks().float(), mp_policy=BF16)
    model(batch(rank, 0).float())
    with layerzero.full_precision(model):
        assert full_buffers(model) == 0
        with torch.no_grad():
            model(batch(rank, 0).float())
        assert full_buffers(model) == 0, "in fp32, the weights would take twice the memory"
    gathers(model)
    model(batch(rank, 0).float())
    assert gathers(model) == UNITS
    model.units[0].reshard()
    assert full_buffers(model) == gathered_bytes(model) - layerzero.units(model)[1].gathered_bytes
    layerzero.close(model)


@on_ranks(world_size=WORLD)
def test_the_first_of_several_optimizers_frees_the_weights(rank: int) -> None:
    model = shard(blocks(), reshard_after_forward="step")
    halves = list(model.units[0].parameters()), [p for n, p in model.named_parameters() if not n.startswith("units.0")]
    first, second = (layerzero.shard_optimizer(torch.optim.SGD(each, lr=0.1), model) for each in halves)
    for step in range(STEPS):  # from the second step on, the first optimizer expects the second one
        gathers(model)
        accumulate(model, rank, step)
        assert gathers(model) == UNITS
        first.step()
        assert full_buffers(model) == 0
        second.step()
        first.zero_grad()
        second.zero_grad()


# --- the methods, which change one half of the setting ---


@on_ranks(world_size=WORLD)
def test_the_last_call_of_a_method_wins(rank: int) -> None:
    model, optimizer = kept()
    for step in range(STEPS):  # a loop for FSDP2
        gathers(model)
        for index in range(MICRO_BATCHES):
            model.set_reshard_after_backward(index + 1 == MICRO_BATCHES)
            loss_of(model(batch(rank, step, index))).backward()
        assert gathers(model) == UNITS and full_buffers(model) == 0
        update(optimizer)
    assert {unit.reshard_after_forward for unit in layerzero.units(model)} == {False}
    model.set_reshard_after_backward(False)
    assert {unit.reshard_after_forward for unit in layerzero.units(model)} == {"step"}
    one_pass(model, rank, 0)
    assert full_buffers(model) == gathered_bytes(model)
    model.units[0].set_reshard_after_forward(True)
    gathers(model)
    one_pass(model, rank, 1)
    assert gathers(model) == 1 and full_buffers(model) == gathered_bytes(model), "again after the forward"
    _evaluate(model, rank)
    assert full_buffers(model) == gathered_bytes(model) - layerzero.units(model)[1].gathered_bytes


# --- errors ---


class Changing(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.bias.add_(1)
        return super().forward(x)


def _wrong_programs(rank: int) -> None:
    assert "got 'never'" in message_of(lambda: LayerZeroConfig(reshard_after_forward="never"))
    assert "'step', or a callable" in message_of(lambda: LayerZeroConfig(reshard_after_forward=None))
    model, optimizer = kept(Chain(Block(), Changing()))
    in_place = "a parameter of unit 'units.1'.* was changed in place while it was gathered"
    with pytest.raises(RuntimeError, match=in_place):
        one_pass(model, rank, 0)
    optimizer.zero_grad()
    with torch.no_grad(), pytest.raises(RuntimeError, match=in_place):
        model(batch(rank, 0))
    with pytest.raises(ValueError, match=r"expects a bool, got 'step'.*or 'step', to shard_model"):
        model.set_reshard_after_forward("step")
    with pytest.raises(ValueError, match=r"ranks disagree.*reshard_after_forward.*'?step"):
        shard(blocks(), reshard_after_forward="step" if rank == 1 else False)
    with pytest.raises(ValueError, match=r"ranks disagree.*reshard_after_forward.*'?step"):
        shard(blocks(), reshard_after_forward=lambda name, module: "step" if rank == 1 else False)


def test_wrong_programs_raise_errors_that_say_what_to_do() -> None:
    run_ranks(_wrong_programs, world_size=WORLD)


@on_ranks(world_size=WORLD, pg_timeout=10)
def test_a_rank_that_frees_its_weights_alone_is_an_error(rank: int) -> None:
    model, optimizer = kept()
    for step in range(2):
        accumulate(model, rank, step)
        update(optimizer)
    one_pass(model, rank, 2)
    if rank == 1:
        model.units[1].reshard()
    message = message_of(lambda: one_pass(model, rank, 3))
    assert "units.1" in message or rank > 1, message
