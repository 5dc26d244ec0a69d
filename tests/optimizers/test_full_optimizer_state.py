"""Full optimizer state on the first rank, and back into a plain optimizer, owned parameters included."""

from __future__ import annotations

import copy
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from tests.support.models import (
    IntegerNet,
    Rule,
    assert_same_bits,
    different,
    exact_model,
    exact_sgd,
    integer_batch,
    integer_loss,
    integer_net,
    union,
    update,
)
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4


class Momentum(Rule):
    """Needs full matrices: the update depends on the largest momentum, which a rank with rows does not know. Exact."""

    def change(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        state["momentum"] = state.get("momentum", torch.zeros_like(parameter)) / 2 + parameter.grad
        state.setdefault("count", torch.zeros(())).add_(1)
        return state["momentum"] - state["momentum"].max()


def _pair(net: nn.Module, kind: str) -> Optimizer:
    if kind == "SGD":
        return exact_sgd(net.parameters())
    return Momentum([{"params": [p for p in net.parameters() if p.ndim == 2]}], lr=2**-4)


def _train(model: nn.Module, optimizer: Optimizer, rank: int | None, steps: range) -> None:
    for step in steps:
        batches = [integer_batch(step=step, rank=each) for each in range(WORLD)]
        integer_loss(model, union(batches) if rank is None else batches[rank]).backward()
        update(optimizer)
        if rank is not None and isinstance(optimizer, layerzero.ShardedOptimizer):
            model.zero_grad()


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{n}.{k}": torch.as_tensor(v) for n, values in state["state"].items() for k, v in values.items()}


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("kind", ["SGD", "owned"])
@on_ranks(world_size=WORLD)
def test_a_whole_optimizer_state_goes_to_a_plain_optimizer_and_back(rank: int, kind: str) -> None:
    for size in (1, 2, 4):
        model, alone = integer_net(), integer_net()
        model = layerzero.shard_model(model, mesh=mesh_of(size), units=IntegerNet.UNITS)
        elementwise = None if kind == "SGD" else False
        optimizer = layerzero.shard_optimizer(_pair(model, kind), model, elementwise=elementwise)
        plain = _pair(alone, kind)
        _train(model, optimizer, rank, range(2))
        _train(alone, plain, None, range(2))
        alone.zero_grad()
        state = optimizer.full_state_dict()
        everywhere = optimizer.full_state_dict(rank0_only=False)
        assert (state == {}) is (rank != 0)
        expected = plain.state_dict()
        assert not (wrong := different(_flat(everywhere), _flat(expected))), (size, wrong)
        assert all(type(value) is Tensor for value in _flat(everywhere).values())
        if rank == 0:
            assert not different(_flat(state), _flat(expected))
            # The recipe: a plain model and a plain optimizer continue from there.
        weights = layerzero.full_state_dict(model, rank0_only=False)
        fresh = integer_net(seed=1)
        fresh.load_state_dict(weights)
        its = _pair(fresh, kind)
        its.load_state_dict(copy.deepcopy(everywhere))
        assert [group["lr"] for group in its.param_groups] == [group["lr"] for group in plain.param_groups]
        # And back: every rank passes the full state.
        again = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
        its_optimizer = layerzero.shard_optimizer(_pair(again, kind), again, elementwise=elementwise)
        layerzero.load_full_state_dict(again, weights)
        its_optimizer.load_state_dict(everywhere)
        kept = copy.deepcopy(everywhere)
        for net, each, of in (
            (model, optimizer, rank),
            (alone, plain, None),
            (fresh, its, None),
            (again, its_optimizer, rank),
        ):
            _train(net, each, of, range(2, 3))
        assert not different(_flat(everywhere), _flat(kept)), "a state that was taken does not follow the optimizer"
        for other in (model, again):
            assert_same_bits(other, alone, f"{kind} {size}")
        assert not different(dict(fresh.named_parameters()), dict(alone.named_parameters()))


@on_ranks(world_size=WORLD)
def test_a_rank_that_gets_no_state_holds_one_gathered_tensor_at_a_time(rank: int) -> None:
    model, optimizer = exact_model(mesh=mesh_of(2))
    _train(model, optimizer, rank, range(1))
    full_tensor, seen = RowShardedTensor.full_tensor, []

    def noting(tensor: RowShardedTensor, **options: Any) -> Tensor:
        assert not any(reference() is not None for reference in seen), "the one before is still there"
        seen.append(weakref.ref(gathered := full_tensor(tensor, **options)))
        return gathered

    with mock.patch.object(RowShardedTensor, "full_tensor", noting):
        optimizer.full_state_dict()
    assert len(seen) == len(list(model.parameters()))
