"""Parameters that were taken before ``shard_model``, which replaces them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.utils.weak import WeakIdKeyDictionary

import layerzero
from tests.dtensor.test_extensions import Rounded
from tests.support.models import LayerwiseScaling, assert_same_bits, exact_sgd, in_lockstep, integer_net
from tests.support.ranks import on_ranks

STALE = r"was parameter '{}' until shard_model replaced it.*model\.parameters\(\) again, after shard_model"
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    size = torch.distributed.get_world_size()
    return layerzero.shard_model(model, mesh=init_device_mesh("cpu", (max(1, size // 2), min(2, size))), **settings)


def _freeze(p: Tensor) -> None:
    p.requires_grad = False


def _set_grad(p: Tensor) -> None:
    p.grad = None


def _set_data(p: Tensor) -> None:
    p.data = torch.ones(3)


def _set_attribute(p: Tensor) -> None:
    p.lr_mul = 10


@torch.no_grad()
def _add_noise(p: Tensor) -> None:
    p.add_(torch.randn(6, 5))


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clip_grad_norm_": lambda p: clip_grad_norm_([p], 0.1),
    "clip_grad_value_": lambda p: clip_grad_value_([p], 0.1),
    "grad": lambda p: p.grad,
    "set grad": _set_grad,
    "delete grad": lambda p: delattr(p, "grad"),
    "requires_grad": lambda p: p.requires_grad,
    "freeze": _freeze,
    "requires_grad_": lambda p: p.requires_grad_(False),
    "shape": lambda p: p.shape,
    "dtype": lambda p: p.dtype,
    "numel": lambda p: p.numel(),
    "len": len,
    "iter": list,
    "bool": bool,
    "data": lambda p: p.data,
    "set data": _set_data,
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "noise": _add_noise,
    "average": lambda p: torch.ones(6, 5).lerp_(p, 0.5),
    "foreach": lambda p: torch._foreach_norm([p]),
    "forward": lambda p: nn.functional.linear(torch.ones(2, 5), p),
    "out": lambda p: torch.add(torch.ones(6, 5), 1, out=p),
    "subclass": lambda p: p.as_subclass(Tensor),
    "array": np.asarray,
    "vector": lambda p: parameters_to_vector([p]),
    "from vector": lambda p: vector_to_parameters(torch.ones(30), [p]),
    "in a list": lambda p: torch.ones(1) in [p],
    "another parameter": nn.Parameter,
    "registered": lambda p: nn.Linear(5, 6).register_parameter("other", p),
    "new optimizer": lambda p: torch.optim.SGD([p], lr=1.0),
    "backward": lambda p: torch.ones(1, requires_grad=True).sum().backward(inputs=[p]),
    "autograd.grad": lambda p: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), [p]),
    "hook": lambda p: p.register_hook(print),
    "accumulation hook": lambda p: p.register_post_accumulate_grad_hook(print),
    "set attribute": _set_attribute,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
}


class Scaled(nn.Module):
    """Linear layer with tied weights, a buffer and a parameter that shard_model ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(5, 6), nn.Linear(5, 6)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.ignored = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))


@WORLDS
@on_ranks()
def test_every_use_of_a_stale_parameter_raises_and_names_it(rank: int, world_size: int) -> None:
    model = Scaled()
    model.first.weight.lr_mul = 2
    old = dict(model.named_parameters())
    weight, buffer = old["first.weight"], model.table
    table, by_id, weak = {weight: 1}, {id(weight): 2}, WeakIdKeyDictionary({weight: 3})
    _shard(model, ignored_params=[model.ignored])
    for use, call in USES.items():
        with pytest.raises(RuntimeError, match=STALE.format(r"first\.weight")):
            call(weight)
            pytest.fail(f"{use} raises nothing")
    for name, parameter in old.items():
        if name != "ignored":
            with pytest.raises(RuntimeError, match=STALE.format(name.replace(".", r"\."))):
                parameter.add(1)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, Tensor)
    assert (table[weight], by_id[id(weight)], weak[weight]) == (1, 2, 3)
    assert weight in [weight] and weight.lr_mul == vars(weight)["lr_mul"] == 2
    assert "first.weight" in repr(weight) and "shard_model" in f"{[weight]} {weight}" and "grad" in dir(weight)
    assert old["ignored"] is model.ignored and buffer is model.table
    assert old["ignored"].add(1).sum() == 4 and clip_grad_norm_([old["ignored"]], 1.0) == 0


@pytest.mark.slow
@on_ranks(world_size=2)
def test_a_compiled_function_of_a_stale_parameter_raises(rank: int) -> None:
    model = integer_net()
    weight = model.first.weight
    _shard(model)
    for fullgraph in (False, True):
        forward = torch.compile(lambda x: x @ weight.t(), backend="eager", fullgraph=fullgraph)
        with pytest.raises(RuntimeError, match=STALE.format(r"first\.weight")):
            forward(torch.ones(2, 5))


class Meta(nn.Linear):
    """Linear layer that keeps a reference to its weight when it is initialized."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.kept = [self.weight]


def _parts(mesh: DeviceMesh) -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    return model


@on_ranks()
def test_stale_dtensors_parameters_on_meta_and_tensor_subclasses_raise(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    extended = nn.Linear(4, 4)
    extended.weight = nn.Parameter(Rounded(extended.weight.detach()))
    with torch.device("meta"):
        on_meta = Meta(4, 4)
    for model, own_mesh in ((_parts(mesh), mesh["dp"]), (extended, mesh["dp"]), (on_meta, mesh["dp"])):
        weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=1.0)
        layerzero.shard_model(model, mesh=own_mesh)
        calls: list[Callable[[], Any]] = [lambda p=weight: p.sum(), lambda p=weight: p.shape]
        if isinstance(weight, DTensor):
            calls += [lambda p=weight: p.full_tensor(), lambda p=weight: p.to_local(), lambda p=weight: p.placements]
        if isinstance(model, Meta):
            calls += [lambda m=model: m.kept[0].sum()]
        for call in calls:
            with pytest.raises(RuntimeError, match=STALE.format("weight")):
                call()
        assert layerzero.shard_optimizer(optimizer, model).param_groups[0]["params"][0] is model.weight


class Summing(torch.optim.Optimizer):
    """Optimizer with a table of parameters, and with state that it creates in its constructor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2**-4})
        self.known = {p: None for group in self.param_groups for p in group["params"]}
        for p in self.known:
            self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["sum"].add_(p.grad), alpha=group["lr"])


OPTIMIZERS = (exact_sgd, Summing, LayerwiseScaling, lambda p: torch.optim.Adagrad(p, lr=0.1))


@on_ranks()
def test_optimizers_and_groups_of_stale_parameters_are_sharded(rank: int) -> None:
    for factory in OPTIMIZERS:
        model, net = integer_net(), integer_net()
        before = factory(model.parameters())
        _shard(model, units=["first"])
        optimizer = layerzero.shard_optimizer(before, model)
        in_lockstep(rank, (model, optimizer), (net, factory(net.parameters())), range(2))
        if factory in (exact_sgd, Summing):
            assert_same_bits(model, net, str(factory))
    model = integer_net()
    shift, *others = model.parameters()
    _shard(model)
    optimizer = layerzero.shard_optimizer(exact_sgd([model.shift]), model)
    optimizer.add_param_group({"params": others})
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))
    with pytest.raises(ValueError, match="appears twice"):
        optimizer.add_param_group({"params": [shift]})


@on_ranks(world_size=2)
def test_a_failed_shard_model_leaves_parameters_usable_and_stale_ones_cannot_be_sharded(rank: int) -> None:
    model = integer_net()
    weight = model.first.weight
    with pytest.raises(ValueError, match="units contains 'absent'"):
        _shard(model, units=["absent"])
    with pytest.raises((RuntimeError, ValueError), match="prefetch"):
        _shard(model, prefetch=rank)
    assert model.first.weight is weight and type(weight) is nn.Parameter and weight.sum().requires_grad
    other = nn.Linear(5, 6)
    other.weight = weight
    _shard(model)
    with pytest.raises(RuntimeError, match=STALE.format(r"first\.weight")):
        _shard(other)


class Lister(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.list = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.list[0]


@on_ranks(world_size=2)
def test_a_module_that_reads_its_weight_from_a_list_raises(rank: int) -> None:
    model = nn.Sequential(Lister())
    _shard(model, units=["0"])
    with pytest.raises(RuntimeError, match=STALE.format(r"0\.weight") + r".*self\.weight.*in forward.*ParameterList"):
        model(torch.ones(1, 3))
