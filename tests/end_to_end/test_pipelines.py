"""Chunks of a model, called one by one in the orders of pipeline schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from tests.support.graphs import MODES, WORLD, Chain, assert_same_gradients, batch, blocks, loss_of, sgd, shard
from tests.support.models import full_parameters, update
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

# F1.0: forward of micro-batch 1 through chunk 0; B1.0: its backward. Schedules of a rank with two chunks whose inputs
# and gradients come from other ranks, as in interleaved 1F1B (Narayanan et al. 2021).
ONE_F_ONE_B = "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
INTERLEAVED = "F0.0 F1.0 F0.1 F1.1 B0.1 F2.0 B1.1 F3.0 B0.0 F2.1 B1.0 F3.1 B2.1 B3.1 B2.0 B3.0"
ALL_FORWARDS_FIRST = "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B2.1 B1.1 B0.1 B2.0 B1.0 B0.0"


def _run(chunks: Any, rank: int, step: int, script: str) -> None:
    """Run a schedule in which each chunk gets an input and returns a gradient, as between pipeline stages."""
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for action in script.split():
        place, micro_batch, chunk = action[1:], int(action[1]), int(action[3])
        if action[0] == "F":
            received = batch(rank, step, micro_batch + 4 * chunk).requires_grad_()
            outputs[place] = received, chunks[chunk](received)
        else:
            received, output = outputs.pop(place)
            gradient = batch(rank, step, 7)
            output.backward(gradient)
            assert received.grad is not None
    assert not outputs


def _chunks_of_one_model() -> nn.Module:
    return nn.ModuleList([blocks(2), blocks(2, own=False)])


def _dict_of_chunks() -> nn.Module:
    return nn.ModuleDict({"0": Chain(blocks(1), own=False), "1": blocks(2)})


def _train(rank: int, make: Callable[[], nn.Module], script: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    alone = make()
    model = shard(copy.deepcopy(alone), **settings)
    ours, theirs = _as_list(model), _as_list(alone)
    optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
    for step in range(2):
        with layerzero.no_sync(model):
            _run(ours, rank, step, script)
        _run(ours, rank, step + 5, script)
        for r in range(WORLD):
            _run(theirs, r, step, script)
            _run(theirs, r, step + 5, script)
        assert_same_gradients(model, alone, (script, settings, step))
        assert layerzero.memory(model).measured["full_buffer"] == 0
        update(*optimizers)


def _as_list(model: nn.Module) -> list[nn.Module]:
    return list(model.values() if isinstance(model, nn.ModuleDict) else model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "script"),
    [
        (_chunks_of_one_model, ONE_F_ONE_B),
        (_chunks_of_one_model, INTERLEAVED),
        (_chunks_of_one_model, ALL_FORWARDS_FIRST),
        (_dict_of_chunks, INTERLEAVED),
    ],
)
@on_ranks(world_size=WORLD)
def test_chunks_of_one_model_train_like_one_process(rank: int, make: Callable[[], nn.Module], script: str) -> None:
    for settings in MODES:
        _train(rank, make, script, settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", [INTERLEAVED, ALL_FORWARDS_FIRST])
@on_ranks(world_size=WORLD)
def test_chunks_that_are_models_of_their_own_train_like_one_process(rank: int, script: str) -> None:
    """Train chunks that are separate sharded models with an optimizer each and different S."""
    torch.manual_seed(0)
    alone = [blocks(2), blocks(2)]
    chunks = [shard(copy.deepcopy(model), size) for model, size in zip(alone, (2, 4), strict=True)]
    ours = [layerzero.shard_optimizer(sgd(chunk), chunk) for chunk in chunks]
    theirs = [sgd(model) for model in alone]
    for step in range(2):
        _run(chunks, rank, step, script)
        for r in range(WORLD):
            _run(alone, r, step, script)
        for chunk, model in zip(chunks, alone, strict=True):
            assert_same_gradients(chunk, model, (script, step))
        update(*ours, *theirs)


def _prefer(rank: int, order: str) -> dict[str, Tensor]:
    """Train a policy with a frozen reference; the loss compares pairs of samples (DPO, Rafailov et al. 2023)."""
    torch.manual_seed(0)
    policy, reference = shard(blocks()), shard(blocks().requires_grad_(False), 4)
    optimizer = layerzero.shard_optimizer(sgd(policy), policy)
    for step in range(3):
        chosen, rejected = batch(rank, step), batch(rank, step, 1)
        with torch.no_grad():
            anchors = [loss_of(reference(x)) for x in (chosen, rejected)]
        scores = [loss_of(policy(x)) for x in ((chosen, rejected) if order == "chosen first" else (rejected, chosen))]
        scores = scores if order == "chosen first" else scores[::-1]
        margin = (scores[0] - anchors[0]) - (scores[1] - anchors[1])
        (-torch.nn.functional.logsigmoid(0.01 * margin)).backward()
        update(optimizer)
    return full_parameters(policy)


def test_a_preference_loss_does_not_depend_on_the_order_of_its_forwards() -> None:
    first, second = (run_ranks(_prefer, order, world_size=WORLD)[0] for order in ("chosen first", "rejected first"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-10, atol=1e-12)


def _alone(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    policy, reference = blocks(), blocks().requires_grad_(False)
    optimizer = sgd(policy)
    for step in range(3):
        for r in range(WORLD):
            scores = [loss_of(policy(batch(r, step, m))) - loss_of(reference(batch(r, step, m))) for m in (0, 1)]
            (-torch.nn.functional.logsigmoid(0.01 * (scores[0] - scores[1])) / WORLD).backward()
        update(optimizer)
    return {name: p.detach() for name, p in policy.named_parameters()}


def test_a_preference_loss_trains_like_one_process() -> None:
    ours, alone = run_ranks(_prefer, "chosen first", world_size=WORLD)[0], _alone(0)
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-12)
