"""Calls of `fully_shard` with different meshes in one model, as for experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import layerzero
from layerzero import FSDPModule, fully_shard
from layerzero.engine.hooks import get_state
from tests.sharding.test_expert_parallel import Net, meshes, mine
from tests.support.models import (
    different,
    exact_sgd,
    follow_exactly,
    full_parameters,
    integer_batch,
    integer_loss,
    union,
    update,
)
from tests.support.ranks import on_ranks, run_ranks


def sharded_by_calls(
    ep: int, size: int, expert_size: int, *, root: bool = True, divides: bool = True, **settings: Any
) -> nn.Module:
    """Return a model whose experts are on a mesh of their own, with the calls of torchtitan."""
    own, axis = meshes(ep, expert_size)
    rest = layerzero.init_mesh(size)
    model = Net(axis, **settings)
    for layer in model.layers:
        fully_shard(layer.experts, mesh=own)
        fully_shard(layer, mesh=rest)
    for unit in (model.head, model) if root else (model.head,):
        fully_shard(unit, mesh=rest)
    for layer in model.layers if divides else ():
        layer.experts.set_gradient_divide_factor(float(rest.size()))
    return model


CASES = [(2, 1, 1, {}), (2, 2, 2, {}), (2, 4, 1, {"dtensor": False}), (4, 2, 1, {}), (1, 2, 4, {})]


@pytest.mark.parametrize("first", ["optimizer", "forward"])
@on_ranks(world_size=4)
def test_experts_on_a_mesh_of_their_own_train_as_one_process(rank: int, first: str) -> None:
    """With `first="optimizer"`, one of the models has no call of its own."""
    for ep, size, expert_size, settings in CASES:
        has_call = ep < 4 or first == "forward"
        model, alone = sharded_by_calls(ep, size, expert_size, root=has_call, **settings), Net()
        is_dtensor = settings.get("dtensor", True)
        if is_dtensor:
            assert not different(full_parameters(model), dict(alone.named_parameters()))
        if first == "forward":
            with torch.no_grad():
                assert torch.equal(model(integer_batch()[0]), alone(integer_batch()[0]))
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        part = dict if is_dtensor else partial(mine, ep=ep, rank=rank)
        follow_exactly(model, optimizer, alone, rank=rank, ranks=range(4), micro_batches=2, part=part, case=settings)
        report = layerzero.memory(model)
        assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted
        layerzero.close(model)


@on_ranks(world_size=4)
def test_one_call_may_place_parameters_on_several_meshes(rank: int) -> None:
    own, axis = meshes(2, 1)
    rest, model, alone = layerzero.init_mesh(2), Net(axis, skips=True), Net()
    experts = {parameter for layer in model.layers for parameter in layer.experts.parameters()}
    elsewhere = SimpleNamespace(placement=Shard(0), mesh_info=SimpleNamespace(mesh=own))  # as ShardPlacementResult
    with pytest.raises(ValueError, match="another mesh for some parameters of a MixtureOfExperts"):
        fully_shard(model, mesh=rest, shard_placement_fn=lambda p: elsewhere if p is model.layers[0].scale else None)
    for layer in model.layers:
        fully_shard(layer, mesh=rest, shard_placement_fn=lambda p: elsewhere if p in experts else None)
        assert isinstance(layer, FSDPModule) and not isinstance(layer.experts, FSDPModule)
        layer.set_gradient_divide_factor(4.0)
    fully_shard(model, mesh=rest).set_modules_to_forward_prefetch([model.layers[0], model.layers[0].experts])
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    assert [unit.name for unit in get_state(model).units][2:] == ["layers.0.experts", "layers.1", "layers.1.experts"]
    assert [each.name for each in get_state(model).units[2].enclosing] == ["layers.0", ""]
    follow_exactly(model, optimizer, alone, rank=rank, ranks=range(4))


@on_ranks(world_size=4)
def test_the_default_divisor_is_the_size_of_the_mesh_as_in_fsdp2(rank: int) -> None:
    model, alone = sharded_by_calls(2, 2, 1, divides=False), Net()
    integer_loss(model, integer_batch(rank=rank)).backward()
    integer_loss(alone, union([integer_batch(rank=each) for each in range(4)])).backward()
    for name, parameter in alone.named_parameters():
        expected = parameter.grad * (2 if "experts" in name else 1)
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), expected), name


def _saves(rank: int, folder: Path, ep: int) -> None:
    model = sharded_by_calls(ep, 2, 1)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    integer_loss(model, integer_batch(rank=rank)).backward()
    update(optimizer)
    layerzero.checkpoint.save(folder / "saved", model, optimizer)


def _loads(rank: int, folder: Path, ep: int) -> None:
    model, alone = sharded_by_calls(ep, 1, 1, seed=1), Net()
    layerzero.checkpoint.load(folder / "saved", model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model))
    integer_loss(alone, union([integer_batch(rank=each) for each in range(4)])).backward()
    update(exact_sgd(alone.parameters()))
    assert not different(full_parameters(model), dict(alone.named_parameters()))


def test_a_checkpoint_has_all_experts_and_goes_to_other_sizes(tmp_path: Path) -> None:
    run_ranks(_saves, tmp_path, 2, world_size=4)
    for world, ep in (4, 4), (2, 1):
        run_ranks(_loads, tmp_path, ep, world_size=world)


@on_ranks(world_size=4, pg_timeout=20)
def test_meshes_that_do_not_fit_are_errors_on_all_ranks(rank: int) -> None:
    own, axis = meshes(2, 1)
    rest = layerzero.init_mesh(2)

    def refused(match: str, mesh: Any, *, add: bool = False, experts: Any = own) -> None:
        model = Net(axis, dtensor=add)
        if add:
            model.layers[0].experts.bias = nn.Parameter(torch.zeros(3))
        for layer in model.layers:
            fully_shard(layer.experts, mesh=experts)
        fully_shard(model, mesh=mesh)
        with pytest.raises((ValueError, RuntimeError), match=match):
            layerzero.shard_optimizer(exact_sgd(model.parameters()), model)

    refused("'layers.0.experts.bias' is a plain tensor in unit", rest, add=True)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "other"))
    refused("mesh is .* for some units on", rest, experts=pairs["pair" if rank < 2 else "other"])
    refused("mesh is .* for some units on", pairs["other"], experts=rest)
    refused("shape of the mesh", rest, experts=rest if rank else own)
