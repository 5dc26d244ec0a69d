"""Units are built one by one, before the root of their model exists; then the root is made from them."""

from __future__ import annotations

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


@on_ranks(world_size=4)
def test_units_that_are_built_one_by_one_train_like_those_of_shard_model(rank: int) -> None:
    alone, together, mesh = integer_net(), integer_net(), mesh_of(2)
    config = layerzero.LayerZeroConfig(sync_module_states=False)
    shared = SharedResources.connect({mesh: None}, config, ModelGroups(), sums_locally=False)

    def build(name: str, module: nn.Module):
        unit = define(name, module, mesh)
        settings = config.unit_settings(name, module, mesh.size(1), PrecisionPolicy())
        return build_unit(plan_unit(unit, settings, shared), shared)

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
    lz_state = make_root(model, [*built, build("", model)], shared)
    assert lz_state is get_state(model) and [unit.name for unit in lz_state.units] == ["", *IntegerNet.UNITS]
    assert all(ours is before for ours, before in zip(list(model.parameters())[1:], listed, strict=True))

    layerzero.shard_model(together, mesh=mesh, units=IntegerNet.UNITS)
    nets = {net: exact_sgd(net.parameters()) for net in (model, together, alone)}
    for net in (model, together):
        nets[net] = layerzero.shard_optimizer(nets[net], net)
    for step in range(STEPS):
        for net in (model, together):
            backward(net, rank, step)
        backward_alone(alone, step, world_size=dist.get_world_size())
        for optimizer in nets.values():
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(model, alone, f"step {step}")
        assert not different(full_parameters(model), full_parameters(together))
    traffic, expected = layerzero.traffic(model), layerzero.traffic(together)
    assert traffic.predicted["hop2"] == expected.predicted["hop2"] == traffic.bytes["hop2"] == expected.bytes["hop2"]
    layerzero.close(model)
