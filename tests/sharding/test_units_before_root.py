"""Units are built one by one, before the root of their model exists; then the root is made from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import layerzero
from layerzero.config import PrecisionPolicy
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.hooks import get_state
from layerzero.extend import ModelGroups, ParamInfo, SharedResources, UnitDefinition, build_unit, make_root, plan_unit
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    backward,
    backward_alone,
    different,
    exact_sgd,
    full_parameters,
    integer_net,
    update,
)
from tests.support.ranks import mesh_of, on_ranks

ORDER = ("second", "first", "head")  # not the order of the model
STEPS = 3


def define(name: str, module: nn.Module, mesh: DeviceMesh) -> UnitDefinition:
    """Return a unit of `module` with those of its parameters that no unit has yet."""
    prefix = f"{name}." if name else ""
    parameters = [
        ParamInfo(prefix + attribute, parameter, ((module, attribute),))
        for attribute, parameter in module._parameters.items()
    ]
    return UnitDefinition(name, mesh, [module], parameters, modules={module: name})


def builder(*, size: int = 2, **settings: Any) -> tuple[SharedResources, Callable[..., Any]]:
    """Return what units share, and a function that builds the unit of a module."""
    mesh, config = mesh_of(size), layerzero.LayerZeroConfig(**{"sync_module_states": False} | settings)
    shared = SharedResources.create({mesh: None}, config, ModelGroups(), sums_locally=False)

    def build(name: str, module: nn.Module) -> Any:
        chosen = config.unit_settings(name, module, mesh.size(1), PrecisionPolicy())
        return build_unit(plan_unit(define(name, module, mesh), chosen, shared), shared)

    return shared, build


@pytest.mark.parametrize(("size", "reshards"), [(4, 2), (2, "step"), (2, True)])
@on_ranks(world_size=4)
def test_units_that_are_built_one_by_one_train_like_those_of_shard_model(
    rank: int, size: int, reshards: bool | int | str
) -> None:
    """Build the units in another order than that of the model; `reshards` applies to one of them."""
    shared, build = builder(size=size, reshard_after_forward=lambda name, module: name != "first" or reshards)
    parts, built = integer_net(), []
    for name in ORDER:
        module = getattr(parts, name)
        built.append(build(name, module))
        sharded = [isinstance(parameter, RowShardedTensor) for parameter in parts.parameters()]
        assert sum(sharded) == 2 * len(built), "the parameters of later units are still plain"
    listed = list(parts.parameters())[1:]  # of all units; the first parameter belongs to the root
    model = IntegerNet()
    model.load_state_dict({"shift": parts.shift.detach()}, strict=False)
    for name in ORDER:
        setattr(model, name, getattr(parts, name))
    built.append(build("", model))
    lz_state = make_root(model, built, shared)
    assert lz_state is get_state(model) and [unit.name for unit in lz_state.units] == ["", *IntegerNet.UNITS]
    assert all(ours is theirs for ours, theirs in zip(list(model.parameters())[1:], listed, strict=True))

    alone, together = integer_net(), integer_net()
    layerzero.shard_model(together, mesh=mesh_of(size), units=IntegerNet.UNITS)
    nets = {net: exact_sgd(net.parameters()) for net in (model, together, alone)}
    for net in (model, together):
        nets[net] = layerzero.shard_optimizer(nets[net], net)
    for step in range(STEPS):
        for net in (model, together):
            backward(net, rank, step)
        backward_alone(alone, step, world_size=dist.get_world_size())
        update(*nets.values())
        assert_same_bits(model, alone, f"step {step}")
        assert not different(full_parameters(model), full_parameters(together))
    traffic, expected = layerzero.traffic(model), layerzero.traffic(together)
    assert traffic.bytes.get("hop2") == expected.bytes.get("hop2") == traffic.predicted.get("hop2")
    assert ("regather" in traffic.calls) is (reshards == 2)
    report = layerzero.memory(model)
    assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted
    layerzero.close(model)


@on_ranks(world_size=2)
def test_units_that_do_not_fit_the_model_are_refused(rank: int) -> None:
    shared, build = builder()
    model, other = nn.Sequential(nn.Linear(5, 6)), nn.Linear(5, 6)
    with pytest.raises(ValueError, match="unit 'first' is outside of the model"):
        make_root(model, [build("first", other), build("", model)], shared)
    with pytest.raises(ValueError, match="the model is not one of the units"):
        make_root(model, [build("first", model[0])], shared)
