"""Models that are sharded by one call for each unit train like those of `shard_model`, and like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import FSDPModule, fully_shard
from layerzero.comm.process_groups import current_groups
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.hooks import get_state
from tests.support.models import (
    BF16,
    IntegerNet,
    assert_same_bits,
    backward,
    backward_alone,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_net,
    update,
)
from tests.support.ranks import on_ranks

STEPS = 3


def mesh_with(axes: int) -> DeviceMesh:
    """Return a mesh of all four ranks with one axis, or with a replica axis and a shard axis."""
    shape, names = ((4,), ("dp",)) if axes == 1 else ((2, 2), ("replicate", "shard"))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_units(net: nn.Module, *, root: bool = True, **settings: Any) -> nn.Module:
    """Call `fully_shard` for each unit of an IntegerNet, in another order than that of the model, and for the model."""
    for name in ("second", "first", "head"):
        assert fully_shard(getattr(net, name), **settings) is getattr(net, name)
    return fully_shard(net, **settings) if root else net


def have_values_of(model: nn.Module, net: nn.Module) -> bool:
    """Return whether the full tensors of the parameters are those of `net`. The model need not be complete."""
    full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return all(torch.equal(full[name], parameter) for name, parameter in net.named_parameters())


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("first", ["optimizer", "forward"])
@pytest.mark.parametrize("reshards", [None, True, False])
@on_ranks(world_size=4)
def test_units_train_like_those_of_shard_model_and_like_one_process(
    rank: int, axes: int, first: str, reshards: bool | None
) -> None:
    """The model is complete after `first`."""
    mesh, model, alone, together = mesh_with(axes), integer_net(), integer_net(), integer_net()
    shard_units(model, mesh=mesh, reshard_after_forward=reshards)
    parameters = list(model.parameters())
    used = {held.name for held in current_groups() if len(held.ranks) > 1 and held.name}
    assert used <= {group.group_name for group in mesh.get_all_groups()}, "no group was created"
    assert isinstance(model, FSDPModule) and isinstance(model.head, FSDPModule) and isinstance(model, IntegerNet)
    assert have_values_of(model, alone), "before the model is complete"
    layerzero.shard_model(together, mesh=mesh, units=IntegerNet.UNITS)
    nets = {net: exact_sgd(net.parameters()) for net in (model, together, alone)}
    if first == "forward":
        with torch.no_grad():
            model(integer_batch()[0])
    for net in (model, together):
        nets[net] = layerzero.shard_optimizer(nets[net], net)
    for step in range(STEPS):
        for net in (model, together):
            backward(net, rank, step)
        backward_alone(alone, step)
        update(*nets.values())
        assert_same_bits(model, alone, f"step {step}")
        assert not different(full_parameters(model), full_parameters(together))
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert [unit.name for unit in get_state(model).units] == ["", *IntegerNet.UNITS]
    assert layerzero.traffic(model).bytes.get("hop2") == layerzero.traffic(together).bytes.get("hop2")
    report = layerzero.memory(model)
    assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted
    layerzero.close(model)


@on_ranks(world_size=2)
def test_a_model_without_a_call_of_its_own_is_the_root(rank: int) -> None:
    """Its own parameter stays full on every rank, and its gradient is not averaged, as in FSDP2."""
    model, alone = shard_units(integer_net(), root=False), integer_net()
    assert isinstance(model.shift, nn.Parameter) and not isinstance(model.shift, RowShardedTensor)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    assert [unit.name for unit in get_state(model).units] == ["", *IntegerNet.UNITS]
    with torch.no_grad():
        assert torch.equal(model(integer_batch()[0]), alone(integer_batch()[0]))
    backward(model, rank)
    optimizer.step()


@on_ranks(world_size=2)
def test_values_written_before_the_first_forward_are_used(rank: int) -> None:
    """Values are loaded, drawn or assigned after the calls, as on meta, with and without mixed precision."""
    for policy in (MixedPrecisionPolicy(), BF16):
        source = integer_net(seed=3)
        with torch.device("meta"):
            model = IntegerNet()
        shard_units(model, mp_policy=policy)
        model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="no values were written to"):
            model(integer_batch()[0])
        model.load_state_dict(source.state_dict())
        assert have_values_of(model, source)
        with torch.no_grad():
            assert torch.equal(model(integer_batch()[0]).float(), source(integer_batch()[0]))
        loaded = shard_units(integer_net(), mp_policy=policy)
        loaded.load_state_dict(source.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded(integer_batch()[0]).float(), source(integer_batch()[0]))
            loaded.head.weight.mul_(2)
            source.head.weight.mul_(2)
            assert torch.equal(loaded(integer_batch()[0]).float(), source(integer_batch()[0]))
