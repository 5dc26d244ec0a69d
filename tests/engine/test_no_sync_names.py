"""`no_sync` under the names that other loops use, and a hint if every micro-batch reduces."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import layerzero
from tests.support.logs import logged
from tests.support.models import IntegerNet, assert_same_bits, backward, backward_alone, exact_sgd, integer_net, update
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4


def _shard(zero3_size: int = 2, **settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS, **settings)
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


# --- methods of the model ---


@on_ranks(world_size=WORLD)
def test_the_model_has_no_sync_as_under_ddp_and_fsdp2(rank: int) -> None:
    net = integer_net()
    alone = exact_sgd(net.parameters())
    for step in range(2):
        for number in range(2):
            backward_alone(net, 2 * step + number)
        update(alone)

    def bound(model: nn.Module, first: bool) -> Any:
        return model.no_sync() if first else nullcontext()

    def compiled(model: nn.Module, first: bool) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, while it imports
            return torch.compile(model, backend="eager").no_sync() if first else nullcontext()

    def fsdp2(model: nn.Module, first: bool) -> Any:
        model.set_requires_gradient_sync(not first)
        return nullcontext()

    for quiet in (bound, compiled, fsdp2):
        model, optimizer = _shard()
        layerzero.traffic(model, reset=True)
        for step in range(2):
            for number in range(2):
                with quiet(model, number == 0):
                    backward(model, rank, 2 * step + number)
            update(optimizer)
        assert layerzero.traffic(model).calls["hop2"] == 2 * 4, quiet
        assert_same_bits(model, net, quiet.__name__)
    model, _ = _shard()
    assert model.state_dict().keys() == net.state_dict().keys()
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"sharded by layerzero is not supported"):
            attempt(model)


class _OwnNoSync(IntegerNet):
    def no_sync(self) -> str:
        return "its own"


@on_ranks(world_size=WORLD)
def test_a_no_sync_of_the_models_own_stays_and_the_log_says_so(rank: int) -> None:
    with logged() as heard:
        model = layerzero.shard_model(_OwnNoSync(), mesh=mesh_of(2))
    assert model.no_sync() == "its own"
    assert len(heard) == 1 and "defines its own no_sync" in heard[0] and "layerzero.no_sync(model)" in heard[0], heard
    backward(model, rank)
    with layerzero.no_sync(model):  # the remedy
        backward(model, rank)
    with pytest.raises(RuntimeError, match="no_sync"):
        _ = model.shift.grad + 0


# Loops of backward passes outside (r) and inside (u) no_sync, steps (s) of an optimizer and zero_grad (z): with two
# micro-batches, with one, as a discriminator, which drops the gradients of the generator's loss before its own
# backward, and with another optimizer of the same model, as if generator and discriminator were sharded together.
PLAIN, QUIET, SINGLE, ADVERSARY, TWO_OPTIMIZERS = "rrsz", "ursz", "rsz", "rzrs", "rsrsz"


def _loop(script: str, model: nn.Module, optimizer: Any, rank: int) -> None:
    for action in script:
        if action in "ru":
            with layerzero.no_sync(model) if action == "u" else nullcontext():
                backward(model, rank)
        elif action == "s":
            optimizer.step()
        else:
            optimizer.zero_grad()


@on_ranks(world_size=WORLD)
def test_the_first_rank_of_a_model_over_some_of_the_ranks_hears_of_it(rank: int) -> None:
    ranks = [[0, 1], [2, 3]]
    meshes = [DeviceMesh("cpu", [[each] for each in half], mesh_dim_names=("replica", "zero3")) for half in ranks]
    model = layerzero.shard_model(integer_net(), mesh=meshes[rank // 2], units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    with logged() as heard:
        for _ in range(2):
            _loop(PLAIN, model, optimizer, rank)
    assert len(heard) == (rank in (0, 2)), heard


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_who_reduces_every_micro_batch_hears_of_it_once(rank: int) -> None:
    cases = {
        "plain": (PLAIN, {}, 1),
        "plain, ZeRO-1": (PLAIN, {"zero3_size": 1}, 1),
        "plain, ZeRO-3, whole gradients": (PLAIN, {"zero3_size": 4, "accumulation": "full"}, 1),
        "plain, nothing to save": (PLAIN, {"zero3_size": 4}, 0),
        "no_sync": (QUIET, {}, 0),
        "one backward": (SINGLE, {}, 0),
        "adversary": (ADVERSARY, {}, 0),
        "two optimizers": (TWO_OPTIMIZERS, {}, 0),
    }
    for name, (script, settings, expected) in cases.items():
        model, optimizer = _shard(**settings)
        with logged() as heard:
            for _ in range(4):
                _loop(script, model, optimizer, rank)
        assert len(heard) == (expected if rank == 0 else 0), (name, heard)
        assert all("followed 2 backward passes" in text and "no_sync(model)" in text for text in heard), heard
