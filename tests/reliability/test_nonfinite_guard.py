"""A step with NaN or Inf gradients is skipped on all ranks, and the message names the ranks and parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.utils.nonfinite import nonfinite_names
from tests.support.graphs import batch, blocks, loss_of, sgd, shard
from tests.support.logs import logged
from tests.support.models import IntegerNet, different, exact_sgd, full_parameters, integer_batch, integer_net, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks


def _net(zero3_size: int, **settings: Any) -> tuple[nn.Module, list[Any]]:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS, **settings)
    inner = [torch.optim.SGD(group, lr=2**-4, momentum=0.5) for group in _halves(model)]
    return model, [layerzero.shard_optimizer(each, model) for each in inner]


def _halves(model: nn.Module) -> list[list[Tensor]]:
    parameters = list(model.parameters())
    return [parameters[:3], parameters[3:]]


def _pass(model: nn.Module, rank: int, step: int, *, spoil: dict[int, float], where: str = "second") -> None:
    """Run a backward; the ranks of `spoil` get a bad number in the gradient of one unit's bias."""
    inputs, targets = integer_batch(step=step, rank=rank)
    value = spoil.get(rank)
    unit = model.get_submodule(where)
    handle = None
    if value is not None:
        bad = torch.zeros(unit.out_features)
        bad[-1] = value
        handle = unit.register_forward_hook(lambda m, a, out: out + (out * 0).detach() + _bad(out, bad))
    (8 * (model(inputs) * targets).sum(1).mean()).backward()
    if handle is not None:
        handle.remove()


class _AddsToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return torch.zeros_like(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.saved_tensors[0], None


def _bad(out: Tensor, bad: Tensor) -> Tensor:
    return _AddsToGradient.apply(out, bad)


def _skipped(rank: int, size: int, settings: dict[str, Any]) -> list[str]:
    with logged() as lines:
        _skips_and_goes_on(rank, size, settings)
    return lines


def _skips_and_goes_on(rank: int, size: int, settings: dict[str, Any]) -> None:
    model, optimizers = _net(size, **settings)
    guard = layerzero.guard_steps(model, *optimizers, skips=2)
    plain, theirs = _net(size, **settings)
    for step, value in enumerate((None, math.nan, None, math.inf, -math.inf, None)):
        _pass(model, rank, step, spoil={} if value is None else {1: value})
        before = full_parameters(model)
        update(*optimizers)
        assert (not different(full_parameters(model), before)) == (value is not None)
        if value is None:  # a run without the other batches
            _pass(plain, rank, step, spoil={})
            update(*theirs)
        assert guard.in_a_row == (0, 1, 0, 1, 2, 0)[step]
        assert not different(full_parameters(model), full_parameters(plain)), step
    assert guard.skipped == 3
    assert "rank 1: 'second." in guard.found and "unit 'second'" in guard.found, guard.found
    assert "rank 0" not in guard.found and "first" not in guard.found
    for turn in range(3):
        _pass(model, rank, turn, spoil={1: math.nan, 3: math.nan})
        if turn == 2:
            with pytest.raises(layerzero.NonFiniteGradients, match=r"3 times in a row.*rank 1: .*; rank 3: 'second"):
                optimizers[0].step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert not different(full_parameters(model), full_parameters(plain)), "the model is usable, and as it was"
    guard.close()
    assert all(handle.inspector is None for handle in get_state(model).handles), "gradients are read no more"
    _pass(model, rank, 0, spoil={1: math.nan})
    for optimizer in optimizers:
        optimizer.step()
    assert any(p.isnan().any() for p in full_parameters(model).values()), "who closes it gets what he asks for"


@pytest.mark.default_sample(1)
@pytest.mark.parametrize(
    ("size", "accumulation", "shared_memory"),
    [(1, "full", "off"), (2, "sharded", None), (2, "full", "off"), (4, "sharded", "off")],
)
def test_a_step_is_skipped_on_all_ranks_and_whose_it_was_is_said(
    size: int, accumulation: str, shared_memory: Any
) -> None:
    lines = run_ranks(_skipped, size, {"accumulation": accumulation}, shared_memory=shared_memory)
    assert len(lines[0]) == 5 and all("a step is skipped" in line and "rank 1: 'second." in line for line in lines[0])
    assert lines[1:] == [[], [], []], "it is logged once"


@on_ranks()
def test_raise_names_the_rank_or_says_that_the_sum_overflowed(rank: int) -> None:
    model, optimizers = _net(2)
    guard = layerzero.guard_steps(model, *optimizers, nonfinite="raise")
    with pytest.raises(ValueError, match="already has a guard"):
        layerzero.guard_steps(model, optimizers[0])
    _pass(model, rank, 0, spoil=dict.fromkeys(range(4), 1.6e38))  # two samples: finite on each rank
    assert guard.in_a_row == 0
    with pytest.raises(
        layerzero.NonFiniteGradients, match=r"'second.bias'.* own gradient is finite, but their sum overflow"
    ):
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    with layerzero.no_sync(model):
        _pass(model, rank, 1, spoil={3: math.nan}, where="head")  # reported at the step that reduces it
    with pytest.raises(layerzero.NonFiniteGradients, match=r"rank 3: .*'head"):
        optimizers[0].step()
    with pytest.raises(ValueError, match="another model"):
        layerzero.guard_steps(model, *_net(2)[1])
    with pytest.raises(ValueError, match='"skip" or "raise"'):
        layerzero.guard_steps(model, *optimizers, nonfinite="ignore")
    with pytest.raises(TypeError, match="shard_optimizer"):
        layerzero.guard_steps(model, exact_sgd([nn.Parameter(torch.ones(1))]))


@on_ranks()
def test_nobody_is_blamed_for_an_earlier_step(rank: int) -> None:
    """Let a scaler skip a step; the next step must not blame its rank."""
    model, (first, second) = _net(2)
    guard = layerzero.guard_steps(model, first, second)
    _pass(model, rank, 0, spoil={1: math.inf}, where="first")
    for optimizer in (first, second):
        optimizer.zero_grad()  # as after a step that the scaler has skipped
    _pass(model, rank, 0, spoil={2: math.inf}, where="head")
    for optimizer in (first, second):
        optimizer.step()
    assert "rank 2" in guard.found and "rank 1" not in guard.found, guard.found


@on_ranks()
def test_an_evaluation_before_the_step_forgets_no_blame(rank: int) -> None:
    """Evaluate before the step. No rank uses all parameters, so the used parameters are not known yet."""
    model = shard(blocks(3))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    guard = layerzero.guard_steps(model, optimizer)
    model.order = (0, 2) if rank < 2 else (0, 1)
    for step in range(3):
        loss = loss_of(model(batch(rank, step)))
        (loss * math.nan if (rank, step) == (1, 2) else loss).backward()
        with torch.no_grad():
            model(batch(rank, step))
        update(optimizer)
    assert "rank 1" in guard.found and "rank 0" not in guard.found, guard.found


@on_ranks(world_size=1)
def test_one_process_is_guarded_too(rank: int) -> None:
    model, optimizers = _net(1)
    layerzero.guard_steps(model, *optimizers, nonfinite="raise")
    _pass(model, rank, 0, spoil={0: math.nan})
    with pytest.raises(layerzero.NonFiniteGradients, match=r"no parameter has been updated: 'second\.weight"):
        optimizers[0].step()


def test_every_number_that_is_not_finite_is_found_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        for numel in (1, 7, 64, 1000):
            for place in {0, numel // 2, numel - 1}:
                fine = torch.randn(numel, generator=generator).to(dtype)
                for number in (math.nan, math.inf, -math.inf, largest, -largest):
                    tensor = fine.clone()
                    tensor[place] = number
                    assert nonfinite_names({"a": fine, "b": tensor}) == ([] if math.isfinite(number) else ["b"])
        assert nonfinite_names({"all": torch.full((3,), largest, dtype=dtype)}) == [], "though their sum overflows"


@on_ranks()
def test_where_one_optimizer_skips_all_do_for_that_batch(rank: int) -> None:
    """Spoil only gradients of the first optimizer, which are gone when the second one checks."""
    model, optimizers = _net(2)
    guard = layerzero.guard_steps(model, *optimizers, skips=9)
    for turn, order in enumerate(((0, 1), (1, 0), (0, 1))):
        _pass(model, rank, turn, spoil={1: math.inf}, where="first")
        before = full_parameters(model)
        for number in order:
            update(optimizers[number])
        assert not different(full_parameters(model), before), f"where one skips, all do: {order}"
        assert guard.skipped == guard.in_a_row == turn + 1, "of a batch, it counts once"
    for order in ((1, 0), (0, 1)):
        _pass(model, rank, 3, spoil={})
        for number in order:
            before = full_parameters(model)
            optimizers[number].step()
            assert different(full_parameters(model), before), "a verdict is of one batch"
            optimizers[number].zero_grad()
    assert guard.in_a_row == 0
    _pass(model, rank, 4, spoil={1: math.inf}, where="first")
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    _pass(model, rank, 5, spoil={})  # optimizers that alternate by batch
    before = full_parameters(model)
    optimizers[1].step()
    assert different(full_parameters(model), before)
