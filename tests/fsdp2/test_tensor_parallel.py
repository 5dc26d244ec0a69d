"""Calls of `fully_shard` for units whose parameters are DTensors on a model-parallel axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import layerzero
from layerzero.engine.hooks import get_state
from tests.dtensor.test_tensor_parallel import PLAN, Net, net, parallel, train
from tests.support.models import different, full_parameters, integer_batch, integer_loss
from tests.support.ranks import on_ranks


def sharded_by_calls(model: nn.Module, **settings: object) -> nn.Module:
    for unit in (*model.blocks, model.head, model):
        layerzero.fully_shard(unit, **settings)
    return model


@pytest.mark.parametrize("first", ["optimizer", "forward"])
@on_ranks(world_size=4)
def test_a_tensor_parallel_model_trains_as_one_process(rank: int, first: str) -> None:
    """With `first="optimizer"`, the head and the root have only plain parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], PLAN) if first == "optimizer" else parallel(mesh["tp"])
    model = sharded_by_calls(model, mesh=mesh["dp"])
    full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert all(torch.equal(full[name], value) for name, value in net().named_parameters())
    if first == "forward":
        together = layerzero.shard_model(parallel(mesh["tp"]), mesh=mesh["dp"], units=["Block", "head"])
        with torch.no_grad():
            assert torch.equal(model(integer_batch()[0]), net()(integer_batch()[0]))
        specs = [
            [member.spec.model_parallel for member in get_state(each).members.values()] for each in (model, together)
        ]
        assert all(ours.same_sharding(theirs) for ours, theirs in zip(*specs, strict=True))
    train(model, mesh["dp"])
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.ndim == 2 and parameter.shape == net().get_parameter(name).shape


@on_ranks(world_size=4)
def test_muon_updates_matrices_that_both_axes_cut(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    by_calls = sharded_by_calls(parallelize_module(net(), mesh["tp"], PLAN), mesh=mesh["dp"])
    together = parallelize_module(net(), mesh["tp"], PLAN)
    together = layerzero.shard_model(together, mesh=mesh["dp"], units=["Block", "head"])
    for model in (by_calls, together):
        matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
        optimizer = layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=0.5), model)
        integer_loss(model, integer_batch(rank=mesh["dp"].get_local_rank())).backward()
        optimizer.step()
    assert not different(full_parameters(by_calls), full_parameters(together))
    assert different(full_parameters(together), dict(net().named_parameters()))


@on_ranks(world_size=4)
def test_a_tensor_parallel_model_on_meta_is_sharded_and_loaded(rank: int) -> None:
    mesh, source = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), net()
    with torch.device("meta"):
        model = sharded_by_calls(parallelize_module(Net(), mesh["tp"], PLAN), mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(integer_batch()[0]), source(integer_batch()[0]))


@on_ranks(world_size=4, pg_timeout=20)
def test_axes_that_do_not_fit_together_are_errors_on_all_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = init_device_mesh("cpu", (4,))
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), whole, [Replicate()]))
    with pytest.raises(ValueError, match="a DTensor of another framework"):
        layerzero.fully_shard(linear, mesh=mesh["dp"])
    frozen = parallel(mesh["tp"])
    frozen.head.requires_grad_(rank != 3)
    with pytest.raises((ValueError, RuntimeError), match="ranks disagree"):
        sharded_by_calls(frozen, mesh=mesh["dp"])(integer_batch()[0])
