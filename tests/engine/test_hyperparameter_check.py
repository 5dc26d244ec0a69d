"""Differences of learning rates and other group settings between ranks are detected without another collective."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.engine.hyperparameter_check import HyperparameterCheck
from tests.support.graphs import message_of
from tests.support.models import IntegerNet, integer_batch, integer_loss, integer_net, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 4


def _sharded(make: Callable[[list[dict[str, Any]]], Optimizer]) -> tuple[nn.Module, Optimizer]:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2]}, {"params": vectors}]
    return model, layerzero.shard_optimizer(make(groups), model)


def _step(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> str:
    """Return the message of the error that a step raises, or an empty string."""
    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
    message = message_of(optimizer.step)
    optimizer.zero_grad()
    return "" if message == "nothing was raised" else message


def _same_on_all_ranks(said: list[str]) -> None:
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, said)
    assert all(of_rank == said for of_rank in by_rank), "the same on every rank, at the same step"


@on_ranks(world_size=WORLD)
def test_a_scheduler_that_follows_a_ranks_own_loss_is_refused_on_all_ranks_at_once(rank: int) -> None:
    model, optimizer = _sharded(lambda groups: torch.optim.SGD(groups, lr=2**-4, momentum=0.5))
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    said = []
    for step in range(6):
        said.append(_step(model, optimizer, rank, step))
        scheduler.step(float(step if rank == 3 else -step))  # rank 3's own loss gets worse
    for group in optimizer.param_groups:
        group["lr"] = 2**-4
    said += [_step(model, optimizer, rank, step) for step in range(6, 10)]
    _same_on_all_ranks(said)
    first = next(step for step, text in enumerate(said) if text)
    assert first <= 4, "unequal since the step of number 2"
    for part in (
        "'lr' of parameter group 0 is 0.0625 on ranks 0, 1, 2 and 0.03125 on rank 3",
        "'lr' of parameter group 1 is 0.0625 on ranks 0, 1, 2",
        "average the loss over the ranks before you pass it to ReduceLROnPlateau",
        "load the last checkpoint",
    ):
        assert part in said[first], said[first]
    assert not any(said[8:]), "alike again"


@on_ranks(world_size=2)
def test_the_group_and_the_field_are_named(rank: int) -> None:
    model, optimizer = _sharded(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    further = layerzero.shard_optimizer(torch.optim.SGD([model.head.bias], lr=0.5), model)
    said = []
    for step in range(5):
        if step == 2 and rank == 1:
            optimizer.param_groups[1]["weight_decay"] = 0.125
        said.append(_step(model, optimizer, rank, step))
        further.step()
    text = next(filter(None, said))
    part = "'weight_decay' of parameter group 1 of optimizer 0 is 0.01 on rank 0 and 0.125 on rank 1. Rows of"
    assert part in text, text


@on_ranks(world_size=2)
def test_another_class_of_optimizer_is_named_instead_of_its_fields(rank: int) -> None:
    model, optimizer = _sharded(torch.optim.SGD if rank else torch.optim.AdamW)
    text = next(filter(None, (_step(model, optimizer, rank, step) for step in range(5))))
    assert 'model: the class of the optimizer is "AdamW" on rank 0 and "SGD" on rank 1. Rows of' in text, text


@on_ranks(world_size=WORLD)
def test_equal_settings_cost_no_collective_and_raise_nothing(rank: int) -> dict[str, int]:
    """Cover schedulers, accumulation, skipped steps, and a replaced optimizer."""
    model, optimizer = _sharded(lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.5)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(6):
        with layerzero.no_sync(model):
            integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        if step == 3:
            optimizer.zero_grad()
            optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        before = dict(layerzero.traffic(model).calls)
        assert not _step(model, optimizer, rank, step)
        calls = layerzero.traffic(model).calls
        axes = len(get_state(model).ranks.control_comms)
        assert calls["metadata"] - before.get("metadata", 0) == axes or step == 0, "no collective of its own"
        scheduler.step()
    return dict(layerzero.traffic(model).calls)


@on_ranks(world_size=2)
def test_equal_settings_of_other_types_are_equal(rank: int) -> None:
    forms = [1, np.float64(1.0)] if rank else [1.0, torch.tensor(1.0)]
    for form, betas in zip(forms, ([0.5, 0.75], (0.5, 0.75)), strict=True):
        model, optimizer = _sharded(lambda groups: torch.optim.AdamW(groups, lr=form, betas=betas))  # noqa: B023
        for step in range(3):
            assert not _step(model, optimizer, rank, step)


_NONE, _ONE = bytes(16), bytes([1] * 8 + [254] * 8)


def _check_of_two_axes() -> HyperparameterCheck:
    ranks = SimpleNamespace(control_comms=(None, None), ranks=(0,), all_gather_text=lambda text: [text])
    return HyperparameterCheck(ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("digests", [[_NONE, _ONE], [_ONE, _ONE], [_NONE, _NONE]])
def test_a_rank_whose_optimizer_is_gone_says_nothing(digests: list[bytes]) -> None:
    check = _check_of_two_axes()
    for _ in range(3):
        check.digests()
        check.receive([torch.tensor([list(each) for each in digests], dtype=torch.uint8)] * 2)
        check.gradients_final(None)


def _has_one_batch_fewer(rank: int) -> str:
    """Accumulate two backward passes before each step, but on the last rank only one of them before the third step."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS, shared_memory="off")
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2**-4), model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch in range(4, 16):
        if batch != 9 or rank != torch.distributed.get_world_size() - 1:
            try:
                integer_loss(model, integer_batch(step=batch, rank=rank)).backward()
            except RuntimeError as error:
                return f"{batch}: {error}"
        if batch % 2:
            update(optimizer)
            schedule.step()
    return "nothing was raised"


def test_ranks_that_step_after_different_numbers_of_backwards_are_named() -> None:
    """One replica: a step communicates nothing, so the ranks would stay one batch apart until the end."""
    first, second = run_ranks(_has_one_batch_fewer, world_size=2)
    assert first[: first.index(":")] in ("10", "11") and first.partition(": ")[2] == second.partition(": ")[2]
    assert "different numbers of optimizer steps before the same backward: 2 on rank 0 and 3 on rank 1." in first, first
    assert "Run the same number of backward passes before each step on all ranks" in first, first


def _first_message(rank: int, change: Callable[[nn.Module, Optimizer], Callable[[], Any]]) -> str:
    """Return the first message after `change` has been called once, and what it returns before each step."""
    model, optimizer = _sharded(lambda groups: torch.optim.AdamW(groups, foreach=rank == 0))
    assert not any(_step(model, optimizer, rank, step) for step in range(3)), "foreach changes no result"
    before_step = change(model, optimizer)
    for step in range(3, 6):
        before_step()
        if message := _step(model, optimizer, rank, step):
            return message
    return ""


@on_ranks(world_size=2)
def test_an_optimizer_that_one_rank_alone_steps_is_named_and_long_lists_are_cut(rank: int) -> None:
    def steps_alone(model: nn.Module, optimizer: Optimizer) -> Callable[[], Any]:
        biases = layerzero.shard_optimizer(torch.optim.SGD([model.head.bias], lr=0.5), model)
        return biases.step if rank else lambda: None

    def has_other_settings(model: nn.Module, optimizer: Optimizer) -> Callable[[], Any]:
        for group in optimizer.param_groups:
            group.update(lr=0.5**rank, eps=0.25**rank, weight_decay=0.5 * rank)
        return lambda: None

    alone, many = (_first_message(rank, change) for change in (steps_alone, has_other_settings))
    _same_on_all_ranks([alone, many])
    assert "'lr' of parameter group 0 of optimizer 1 is 0.5 on rank 1" in alone, alone
    assert many.count(" of parameter group ") == 4 and "; and 2 more. Rows of" in many, many


class _Stepped:
    """Optimizer with one learning rate."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def comparable_settings(self) -> list[list[tuple[str, Any]]]:
        return [[("lr", self.lr)]]


def test_a_digest_is_of_the_optimizers_that_have_stepped_since_the_last_one() -> None:
    check = _check_of_two_axes()

    def digest() -> bytes:
        return bytes(check.digests()[0].tolist())

    nothing, one, other = digest(), _Stepped(0.5), _Stepped(0.25)
    assert not any(nothing)
    for optimizer in (one, other, one):
        check.after_update(optimizer)
    both = digest()
    assert any(both) and digest() == both, "backwards without a step say the same"
    check.after_update(one)
    alone = digest()
    assert any(alone) and alone != both
    one.lr = 0.125
    assert digest() not in (alone, both, nothing)
    check.after_update(one)
    check.after_update(other)
    del one, optimizer
    assert digest() == nothing, "ranks collect an optimizer at different times"
    check.after_update(other)
    assert any(digest()), "the next step is compared again"
