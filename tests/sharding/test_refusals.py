"""Unsupported changes of a model before, around and after sharding: each raises and names an alternative."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.utils._pytree import tree_map

import layerzero
from layerzero import PrecisionPolicy
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    exact_sgd,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Wrapped(torch.Tensor):
    """Tensor that keeps its values in another one, as quantized weights of libraries do."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.values if isinstance(value, Wrapped) else value

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return Wrapped(out) if func is torch.ops.aten.detach.default else out


class Asks(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """Tensor subclass without additional data."""


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _quiet(call: Callable[[], Any]) -> Any:
    """Suppress torch's warnings about deprecations and about random numbers of DTensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _shard(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    return layerzero.shard_model(integer_net() if model is None else model, mesh=mesh_of(2), **settings)


def _x() -> Tensor:
    return torch.ones(2, 5)


def _train(model: nn.Module) -> None:
    model(_x()).sum().backward()


def _with_part(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), part)


def _with_weight(weight: nn.Parameter) -> nn.Module:
    model = integer_net()
    model.first.weight = weight
    return model


def _with_fsdp(whole: bool = False) -> nn.Module:
    model = integer_net()
    fully_shard(model if whole else model.first, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


def _fsdp1(model: nn.Module) -> nn.Module:
    return _quiet(lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def _quantized() -> Tensor:
    return _quiet(lambda: torch.quantize_per_tensor(torch.ones(6, 5), 0.5, 0, torch.qint8))


def _after(change: Callable[[nn.Module], Any]) -> None:
    """Change a sharded model, then run a forward."""
    model = _shard(units=["first"])
    _quiet(lambda: change(model))
    _train(model)


def _buffer_of(tensor: Tensor) -> nn.Module:
    model = integer_net()
    model.first.register_buffer("table", tensor)
    return model


class Case(NamedTuple):
    call: Callable[[], Any]
    match: str


PLAIN_INSIDE = r"would manage the same parameters.*shard the plain module inside it.*ignored_modules"
TWICE = "layerzero has sharded.*Leave the wrapper out"
SUBCLASS = r"'first\.weight' is a {}, a tensor subclass.*ignored_params"
TRANSFORM = r"torch\.func \({}\) of the root.*not supported.*loss\.backward\(\).*unsharded copy"

CASES = {
    "DDP around": Case(lambda: DistributedDataParallel(_shard()), f"applying DistributedDataParallel to .*{TWICE}"),
    "DDP around something with it": Case(
        lambda: DistributedDataParallel(_with_part(_shard())), rf"'1\.shift'.*{TWICE}"
    ),
    "DataParallel around": Case(lambda: DataParallel(_shard()), f"^applying DataParallel to .*{TWICE}"),
    "fully_shard around": Case(lambda: fully_shard(_shard()), rf"fully_shard \(FSDP2\) to .*{TWICE}"),
    "fully_shard of a unit": Case(lambda: fully_shard(_shard(units=["first"]).first), rf"fully_shard .*{TWICE}"),
    "fully_shard of a part": Case(lambda: fully_shard(_shard().second), rf"fully_shard .*{TWICE}"),
    "FSDP1 around": Case(
        lambda: _train(_fsdp1(_shard())), r"parameter '\w+.*before shard_model, and do not combine it"
    ),
    "DDP inside": Case(
        lambda: _shard(_with_part(DistributedDataParallel(nn.Linear(5, 5)))),
        rf"module '1' is wrapped in DistributedDataParallel.*{PLAIN_INSIDE}",
    ),
    "DataParallel inside": Case(
        lambda: _shard(_with_part(DataParallel(nn.Linear(5, 5)))), rf"wrapped in DataParallel.*{PLAIN_INSIDE}"
    ),
    "sharding DDP": Case(
        lambda: _shard(DistributedDataParallel(integer_net())), rf"the model is wrapped in Distr.*{PLAIN_INSIDE}"
    ),
    "FSDP1 inside": Case(
        lambda: _shard(_with_part(_fsdp1(nn.Linear(5, 5)))), rf"wrapped in FullyShardedDataParallel.*{PLAIN_INSIDE}"
    ),
    "FSDP2 inside": Case(lambda: _shard(_with_fsdp()), r"module 'first' is sharded by torch's fully_shard.*leave out"),
    "sharding FSDP2": Case(lambda: _shard(_with_fsdp(whole=True)), r"the model is sharded by torch's fully_shard"),
    "weight_norm later": Case(lambda: _after(lambda m: parametrizations.weight_norm(m.first)), "before shard_model"),
    "old weight_norm later": Case(lambda: _after(lambda m: weight_norm(m.first)), "before shard_model"),
    "spectral_norm later": Case(
        lambda: _after(lambda m: parametrizations.spectral_norm(m.first)), "Apply parametrizations before shard_model"
    ),
    "parametrization later": Case(
        lambda: _after(lambda m: parametrize.register_parametrization(m.first, "weight", Double())),
        r"set_ is not supported for parameter 'first\.weight'.*parametrizations.*before shard_model",
    ),
    "old spectral_norm later": Case(lambda: _after(lambda m: spectral_norm(m.first)), "before shard_model"),
    "wrapper subclass": Case(
        lambda: _shard(_with_weight(nn.Parameter(Wrapped(torch.ones(6, 5))))), SUBCLASS.format("Wrapped")
    ),
    "parameter that asks": Case(lambda: _shard(_with_weight(Asks(torch.ones(6, 5)))), SUBCLASS.format("Asks")),
    "quantized parameter": Case(
        lambda: _shard(_with_weight(nn.Parameter(_quantized(), requires_grad=False))), r"first\.weight.*ignored_params"
    ),
    "sparse parameter": Case(
        lambda: _shard(_with_weight(nn.Parameter(torch.eye(6, 5).to_sparse()))), r"first\.weight.*ignored_params"
    ),
    "lazy parameter": Case(
        lambda: _shard(nn.Sequential(nn.LazyLinear(3))), r"'0\.weight' is lazy and has no shape yet.*a forward"
    ),
    "quantized buffer": Case(
        lambda: _shard(_buffer_of(_quantized())), r"buffer 'first\.table' is quantized.*sync_module_states=False"
    ),
    "foreign ignored parameter": Case(
        lambda: _shard(ignored_params=[nn.Parameter(torch.ones(7))]),
        r"ignored_params\[0\], of shape \[7\], is not a param",
    ),
    "name as ignored parameter": Case(
        lambda: _shard(ignored_params=["first.weight"]), r"ignored_params contains 'first\.weight'.*not their names"
    ),
    "foreign ignored module": Case(
        lambda: _shard(ignored_modules=[nn.Linear(2, 2)]),
        r"ignored_modules contains a Linear, which this model does not have.*modules first, second, head",
    ),
    "number as ignored module": Case(lambda: _shard(ignored_modules=[3]), "ignored_modules contains 3"),
    "ignored parameter on meta": Case(
        lambda: _shard(model := nn.Linear(2, 2, device="meta"), ignored_params=[model.bias]),
        "'bias' is ignored and on the meta device",
    ),
    "torch.func.grad": Case(lambda: _per_input(_shard()), TRANSFORM.format("grad")),
    "torch.func.vmap": Case(lambda: vmap(_shard())(torch.ones(3, 2, 5)), TRANSFORM.format("vmap")),
    "torch.func.grad of functional_call": Case(
        lambda: _per_parameter(_shard(units=["first"])), TRANSFORM.format("grad")
    ),
    "torch.export": Case(lambda: torch.export.export(_shard(), (_x(),)), r"torch\.export and make_fx of the root"),
    "make_fx": Case(lambda: make_fx(_shard())(_x()), r"torch\.export or make_fx of the root.*full_state_dict"),
    "torch.jit.trace": Case(
        lambda: _quiet(lambda: torch.jit.trace(_shard(), (_x(),))), r"torch\.jit\.trace of the root"
    ),
    "torch.jit.script": Case(
        lambda: _quiet(lambda: torch.jit.script(_shard())), r"torch\.jit\.script.*full_state_dict"
    ),
    "batch-norm in bf16": Case(
        lambda: _train(_shard(_normed(), mp_policy=BF16)), r"'1\.running_mean'.*buffer_dtype=torch\.bfloat16"
    ),
}


def _per_input(model: nn.Module) -> None:
    grad(lambda x: model(x).sum())(_x())


def _per_parameter(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    grad(lambda given: functional_call(model, given, (_x(),)).sum())(weights)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error).replace("\n", " ")
    return ""


def _refuse_all(rank: int) -> dict[str, str]:
    said = {name: _message(case.call) for name, case in CASES.items()}
    _train(_shard(units=["first"]))  # the process group still works
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(_refuse_all, world_size=WORLD, pg_timeout=20)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_on_every_rank(name: str, said: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(said):
        assert re.search(CASES[name].match, of_rank[name]), f"rank {rank}: {of_rank[name] or 'nothing was raised'}"


@on_ranks(world_size=WORLD)
def test_a_refused_transform_leaves_nothing_behind(rank: int) -> None:
    """Train exactly after a refused transform, which leaves nothing behind."""
    model, net = _shard(units=IntegerNet.UNITS), integer_net()
    optimizer, alone = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(net.parameters())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        vmap(model)(torch.ones(3, 2, 5))
    integer_loss(model, integer_batch(rank=rank)).backward()
    integer_loss(net, union([integer_batch(rank=each) for each in range(WORLD)])).backward()
    optimizer.step()
    alone.step()
    assert_same_bits(model, net, "after a refusal")


class Foreign(nn.Module):
    """Model with another framework's parameter: a DTensor on one axis, which the model gathers itself."""

    def __init__(self, group_mesh: Any) -> None:
        super().__init__()
        self.inner = integer_net()
        scale = torch.ones(3)
        self.scale = nn.Parameter(scale if group_mesh is None else distribute_tensor(scale, group_mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        return self.inner(x) * (scale.full_tensor() if isinstance(scale, DTensor) else scale)


@on_ranks(world_size=WORLD, shared_memory="off")
def test_ways_out_work(rank: int) -> None:
    # The class of the root among the units: nested instances are units, too.
    for units in ([IntegerNet], "IntegerNet", {IntegerNet, nn.Linear}):
        model = _shard(units=units)
        _train(model)
        expected = 4 if isinstance(units, set) else 1
        assert layerzero.traffic(model).calls["gather"] == 2 * expected, units
    nested = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5)))
    model = _shard(nested, units={nn.Sequential})
    _train(model)
    assert layerzero.traffic(model).calls["gather"] == 2 * 2

    # Buffers in the dtype of the computation.
    _train(_shard(_normed(), mp_policy=PrecisionPolicy.of(BF16, buffer_dtype=torch.bfloat16)))
    _shard(_buffer_of(_quantized()), sync_module_states=False)(_x())

    # Parameters of tensor subclasses.
    for weight in (nn.Parameter(Wrapped(torch.ones(6, 5))), Asks(torch.ones(6, 5))):
        model = _with_weight(weight)
        _train(_shard(model, ignored_params=[model.first.weight]))
        assert model.first.weight is weight
    _train(_shard(_with_weight(Named(torch.ones(6, 5)))))
    model = integer_net()
    model.first.extra = nn.Parameter(_quantized(), requires_grad=False)
    _train(_shard(model, ignored_params=[model.first.extra]))

    # Wrappers that manage parameters: DDP averages, FSDP2 shards.
    for wrap in (DistributedDataParallel, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (WORLD,)))):
        torch.manual_seed(3)
        net = _with_part(nn.Linear(5, 5))
        torch.manual_seed(3)
        model = _with_part(wrap(nn.Linear(5, 5)))
        _shard(model, ignored_modules=[model[1]])
        model(_x() * (rank + 1)).square().sum().backward()
        net(torch.cat([_x(), 2 * _x()])).square().sum().div(WORLD).backward()
        for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(gradient, theirs.grad)

    # A DTensor in ignored_params.
    mesh = init_device_mesh("cpu", (WORLD,))
    model, net = Foreign(mesh), Foreign(None)
    with pytest.raises(ValueError, match=r"'scale' is a DTensor of another framework.*ignored_params"):
        _shard(model)
    _shard(model, ignored_params=[model.scale], units=["inner.first"])
    integer_loss(model, integer_batch(rank=0)).backward()  # the same batch on every rank
    integer_loss(net, integer_batch(rank=0)).backward()
    assert torch.equal(model.inner.first.weight.grad.full_tensor(), net.inner.first.weight.grad)
    local = model.scale.grad.redistribute(placements=[Shard(0)]).to_local()
    assert torch.equal(local, net.scale.grad.chunk(WORLD)[rank])


ON_SOME = {
    "torch.func.vmap": lambda m: vmap(m)(torch.ones(3, 2, 5)),
    "torch.jit.trace": lambda m: torch.jit.trace(m, (_x(),)),
    "weight_norm": lambda m: (weight_norm(m.first), _train(m)),
    "parametrize": lambda m: (parametrize.register_parametrization(m.first, "weight", Double()), _train(m)),
}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("what", ON_SOME)
@on_ranks(world_size=WORLD, pg_timeout=5, timeout=90)
def test_what_one_rank_does_alone_is_an_error_on_the_others_within_the_timeout(rank: int, what: str) -> None:
    model = _shard(units=["first"])
    _train(model)
    with pytest.raises(RuntimeError):
        if rank == 0:
            _quiet(lambda: ON_SOME[what](model))
        else:
            _quiet(lambda: _train(model))
