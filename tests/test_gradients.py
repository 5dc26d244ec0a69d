"""Gradients that people write themselves, and graphs through parameters that are sharded at the moment."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import layerzero
from tests.support.graphs import (
    MODES,
    WORLD,
    Chain,
    assert_same_gradients,
    batch,
    blocks,
    loss_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.ranks import run_ranks


def _decay(model: nn.Module) -> None:
    """Weight decay by hand: the gradient of a penalty, added where there is a gradient and put where there is none."""
    for parameter in model.parameters():
        pull = parameter.detach() * 0.25
        if parameter.grad is None:
            parameter.grad = pull
        else:
            parameter.grad.add_(pull)


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 2


def _write(rank: int) -> None:
    """r: a backward outside no_sync; d, x: gradients changed by hand; s: a step. Of the sum over ranks' gradients."""
    for settings in (*MODES[:2], {"size": 1}, {"size": 4}):
        for script in ("drd", "rdr", "rxr", "d", "drsrd", "rsdr"):
            torch.manual_seed(0)
            alone = blocks(3, order=(0, 2))  # one unit is never used: its gradient is what is written, or none
            model = shard(copy.deepcopy(alone), **settings)
            optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
            for step, action in enumerate(script):
                if action == "r":
                    one_pass(model, rank, step)
                    for parameter in alone.parameters():
                        parameter.grad = None if parameter.grad is None else parameter.grad * WORLD
                    for r in range(WORLD):
                        one_pass(alone, r, step)
                    for parameter in alone.parameters():
                        parameter.grad = None if parameter.grad is None else parameter.grad / WORLD
                elif action in "dx":
                    for net in (model, alone):
                        (_decay if action == "d" else _replace)(net)
                else:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            layerzero.clip_grad_norm_(model, float("inf"))
            for parameter in alone.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * WORLD
            assert_same_gradients(model, alone, (settings, script))


def test_gradients_written_by_hand_count_like_those_of_a_backward() -> None:
    run_ranks(_write, world_size=WORLD)


def _penalise(rank: int) -> None:
    """A penalty in the loss, on this rank's rows: each row counts once, on the rank that holds it."""
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        for inside_no_sync in (False, True):
            torch.manual_seed(0)
            alone = blocks(3, order=(0, 2))
            model = shard(copy.deepcopy(alone), **settings)
            for step in range(2):
                penalty = sum(p.to_local().square().sum() for p in model.parameters())
                (loss_of(model(batch(rank, step))) + 0.1 * penalty).backward()
                for r in range(WORLD):
                    penalty = sum(p.square().sum() for p in alone.parameters())
                    (loss_of(alone(batch(r, step))) + 0.1 * penalty).backward()
                if inside_no_sync:
                    with layerzero.no_sync(model):
                        one_pass(model, rank, step + 5)
                    for r in range(WORLD):
                        one_pass(alone, r, step + 5)
                    layerzero.clip_grad_norm_(model, float("inf"))
            assert_same_gradients(model, alone, (settings, inside_no_sync))


def test_a_penalty_on_local_rows_is_a_part_of_the_loss() -> None:
    run_ranks(_penalise, world_size=WORLD)


def _penalise_while_accumulating(rank: int) -> None:
    """Autograd gives a penalty's gradient to ``.grad`` in the midst of a backward, after others have come."""
    for settings in (*MODES[:2], {"size": 1}, {"size": 4}):
        for pattern in ("uur", "rur", "rr"):  # u: inside no_sync
            torch.manual_seed(0)
            alone = blocks(3, order=(0, 2))
            model = shard(copy.deepcopy(alone), **settings)
            for step, where in enumerate(pattern):
                with layerzero.no_sync(model) if where == "u" else nullcontext():
                    penalty = sum(p.to_local().square().sum() for p in model.parameters())
                    (loss_of(model(batch(rank, step))) + 0.1 * penalty).backward()
                for r in range(WORLD):
                    penalty = sum(p.square().sum() for p in alone.parameters())
                    (loss_of(alone(batch(r, step))) + 0.1 * penalty).backward()
            assert_same_gradients(model, alone, (settings, pattern))


def test_a_penalty_in_every_micro_batch() -> None:
    run_ranks(_penalise_while_accumulating, world_size=WORLD)


def _edit_in_flight(rank: int) -> str:
    for size in (1, 2, 4):
        model = shard(blocks(), size)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        loss = loss_of(model(batch(rank, 0)))
        with torch.no_grad():
            model.units[1].linear.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"units\.1.*changed between a forward and its backward") as caught:
            loss.backward()
        optimizer.zero_grad()
        one_pass(model, rank, 1)
    return str(caught.value)


def test_an_edit_between_forward_and_backward_is_an_error() -> None:
    run_ranks(_edit_in_flight, world_size=WORLD)


MISUSES: dict[str, Callable[[Chain, Tensor], Tensor]] = {
    "full_tensor in a loss": lambda model, x: model.units[0].linear.weight.full_tensor().square().sum(),
    "a weight in a loss": lambda model, x: (x @ model.units[0].linear.weight).sum(),
    "a submodule of a unit": lambda model, x: model.units[0].linear(x).sum(),
    "a penalty": lambda model, x: model.units[0].linear.weight.square().sum() + x.sum(),
}


def _misuse(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")  # torch's, on how it reduces such sums
    messages = {}
    for name, term in MISUSES.items():
        model = shard(blocks())
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
            (loss_of(model(batch(rank, 0))) + term(model, batch(rank, 1))).backward()
        messages[name] = str(caught.value)
    assert model.units[0].linear.weight.full_tensor().shape == (6, 6), "to look at it is fine"
    warnings.simplefilter("error")
    return messages


def test_a_loss_on_sharded_parameters_is_an_error() -> None:
    for messages in run_ranks(_misuse, world_size=WORLD):
        assert "no gradient can flow" in messages["full_tensor in a loss"]
        for name in ("a weight in a loss", "a submodule of a unit"):
            assert "units.0.linear.weight" in messages[name] and "call the model as a whole" in messages[name]
        assert "p.to_local()" in messages["a penalty"] or "DTensor" in messages["a penalty"]
