"""Refusals: each mistake raises an error on every rank that names the value and what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from abc import ABCMeta
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import wrap as policies
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

WORLD, PAIR = 4, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Mixed(nn.Module):
    """A net with a part that cannot be sharded, or need not be."""

    def __init__(self, **parts: nn.Module | nn.Parameter | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


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
    if not {"mesh", "zero3_size"} & settings.keys():
        settings["zero3_size"] = 2
    return layerzero.shard_model(integer_net() if model is None else model, **settings)


def _with_own(**settings: Callable[[IntegerNet], Any]) -> nn.Module:
    """Shard a net with settings that refer to its modules and parameters."""
    net = integer_net()
    return _shard(net, **{name: make(net) for name, make in settings.items()})


def _x() -> Tensor:
    return torch.ones(2, 5)


def _train(model: nn.Module, x: Tensor | None = None) -> None:
    model(_x() if x is None else x).sum().backward()


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


@torch.no_grad()
def _halve_weight(module: nn.Module, args: object) -> None:
    module.weight.mul_(0.5)


def _change_weight_in_forward() -> None:
    model = _shard(units=["first"])
    model.first.register_forward_pre_hook(_halve_weight)
    _train(model)


def _shard_around_a_sharded_part() -> None:
    model = integer_net()
    _shard(model.second)
    _shard(model)


def _assign_parameter() -> None:
    model = _shard(units=["first"])
    model.first.weight = nn.Parameter(torch.ones(6, 5))
    _train(model)


def _enter(context: Callable[[nn.Module], Any], model: nn.Module) -> None:
    with context(model):
        pass


def _own_optimizer(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    layerzero.shard_optimizer(kind(model.parameters(), lr=1.0), model)


ON_A_MODEL: dict[str, Callable[[nn.Module], Any]] = {
    "no_sync": partial(_enter, layerzero.no_sync),
    "unsharded": partial(_enter, layerzero.unsharded),
    "clip_grad_norm_": lambda model: layerzero.clip_grad_norm_(model, 1.0),
    "full_state_dict": layerzero.full_state_dict,
    "load_full_state_dict": lambda model: layerzero.load_full_state_dict(model, model.state_dict()),
    "refresh": layerzero.refresh,
    "memory": layerzero.memory,
    "traffic": layerzero.traffic,
    "shard_optimizer": _own_optimizer,
}


PLAIN_INSIDE = r"would manage the same parameters.*shard the plain module inside it.*ignored_modules"
TWICE = "layerzero has sharded.*Leave the wrapper out"
SUBCLASS = r"'first\.weight' is a {}, a tensor subclass.*ignored_params"
TRANSFORM = r"torch\.func \({}\) of the root.*not supported.*loss\.backward\(\).*unsharded copy"


CHOICES = r"(?=.*\b1\b)(?=.*\b2\b)(?=.*\b4\b)"  # the divisors of 4

# Settings of shard_model and the error, as "class: message".
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"zero3_size": 3}, rf"^ValueError.*zero3_size.*3{CHOICES}"),
    ({"zero3_size": 8}, rf"^ValueError.*zero3_size.*8{CHOICES}"),
    ({"zero3_size": 0}, rf"^ValueError.*zero3_size.*0{CHOICES}"),
    ({"zero3_size": -2}, rf"^ValueError.*zero3_size.*-2{CHOICES}"),
    ({"zero3_size": "2"}, r"^TypeError.*zero3_size.*int.*'2'"),
    ({"zero3_size": 2.0}, r"^TypeError.*zero3_size.*int.*2\.0"),
    ({"zero3_size": True}, r"^TypeError.*zero3_size.*int.*True"),
    ({"mesh": None}, rf"^ValueError.*mesh.*zero3_size.*LOCAL_WORLD_SIZE{CHOICES}"),
    ({"units": ["first", "third"]}, "^ValueError.*units.*third"),
    ({"units": {nn.Conv2d}}, "^ValueError.*units.*Conv2d"),
    ({"units": "third"}, "^ValueError.*units.*third"),
    ({"units": 2}, "^TypeError.*units=2"),
    ({"units": [1, 2]}, "^TypeError.*units contains 1"),
    ({"units": {object}}, "^TypeError.*units contains <class 'object'>, which is not supported"),
    ({"units": int}, "^TypeError.*units contains <class 'int'>, which is not supported"),
    ({"units": [[]]}, "^ValueError.*units contains an empty list"),
    ({"units": [["first", 3]]}, "^TypeError.*units contains 3, which is not supported. Use modules, their classes"),
    ({"units": [["first", "absent"]]}, "^ValueError.*units contains 'absent', which this .*modules first, second"),
    ({"units": [["first", nn.Linear(2, 2)]]}, "^ValueError.*units contains a Linear, which this model does not have"),
    ({"units": [nn.Linear(2, 2)]}, "^ValueError.*units contains a Linear, which this model does not have.*names from"),
    ({"units": lambda module: True}, r"^TypeError.*cannot be called with a name and .*callable\(name, module\)"),
    (
        {"units": lambda n, m: "first" if n == "second" else n == "first"},
        "^ValueError.*'first' as a key, but .* is a unit, too",
    ),
    ({"accumulation": "shard"}, "^ValueError.*accumulation='shard'.*sharded.*full.*local"),
    ({"accumulation": 2}, "^ValueError.*accumulation=2.*sharded.*full.*local"),
    ({"accumulation": lambda name, module: "half"}, r"^ValueError.*accumulation\('', module\)='half'.*sharded"),
    (
        {"mp_policy": PrecisionPolicy(accumulation_dtype=torch.bfloat16), "accumulation": "local"},
        "^ValueError.*accumulation_dtype.*'local'.*sharded.*full",
    ),
    ({"offload": "grads"}, "^TypeError.*offload.*Offload.*grads"),
    ({"codecs": "int8"}, "^TypeError.*codecs.*Codecs.*int8"),
    ({"offload_grads": True}, r"^TypeError.*offload_grads.*offload=layerzero\.Offload\(grads="),
    ({"mp_policy": MixedPrecisionPolicy(torch.int32)}, "^TypeError.*param_dtype must be a floating.*int32"),
    ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int64)}, "^TypeError.*reduce_dtype.*float.*int64"),
    ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int8)}, "^TypeError.*output_dtype.*float.*int8"),
    ({"mp_policy": MixedPrecisionPolicy("bf16")}, "^TypeError.*param_dtype.*dtype.*bf16"),
    ({"mp_policy": torch.bfloat16}, "^TypeError.*mp_policy must be .*MixedPrecisionPolicy.*got dtype"),
    ({"mp_policy": lambda n, m: torch.bfloat16}, r"^TypeError.*result of mp_policy\('', module\) must.*got dtype"),
    ({"mp_policy": lambda n, m: MixedPrecisionPolicy(torch.int8)}, "^TypeError.*mp_policy.param_dtype must be a float"),
    ({"prefetch": -1}, "^ValueError.*prefetch.*0.*-1"),
    ({"prefetch": 0.5}, r"^ValueError.*prefetch.*int.*0\.5"),
    ({"reshard_after_forward": "2"}, "^TypeError.*reshard_after_forward must be a bool.*number of ranks.*'2'"),
    ({"reshard_after_forward": 3}, "^ValueError.*reshard_after_forward.*3.*zero3_size.*Use one of"),
    ({"reshard_after_forward": lambda n, m: 4}, r"^ValueError.*reshard_after_forward\('', module\).* is 4"),
    ({"param_init_fn": "reset"}, r"^TypeError.*param_init_fn must be a callable\(module\) or None, got 'reset'"),
    ({"ignored_params": [nn.Parameter(torch.ones(7))]}, r"ignored_params\[0\], of shape \[7\], is not a param"),
    ({"ignored_params": ["first.weight"]}, r"ignored_params contains 'first\.weight'.*not their names"),
    ({"ignored_modules": [nn.Linear(2, 2)]}, "ignored_modules contains a Linear, which this .*modules first, second"),
    ({"ignored_modules": [3]}, "^TypeError.*ignored_modules contains 3"),
    ({"ignored_modules": object}, "^TypeError.*ignored_modules contains <class 'object'>"),
    ({"ignored_modules": nn.Conv2d}, "^ValueError.*ignored_modules contains Conv2d, which this model does not have"),
]

STRIDED = [[0, 2], [1, 3]]
NEIGHBORS = r"\[\[0, 2\], \[1, 3\]\].*must be neighbors.*Use \[\[0, 1\], \[2, 3\]\]"
FORWARDLESS = "^ValueError.*unit 'parts' .Module(List|Dict).* does not define forward"


def _strided() -> DeviceMesh:
    return DeviceMesh("cpu", STRIDED, mesh_dim_names=("replica", "zero3"))


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> nn.Module:
    return _shard(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def _with_parts(parts: nn.Module, units: Any = ("parts",)) -> nn.Module:
    return _shard(Mixed(parts=parts), units=units)


def _fixed(values: Tensor) -> nn.Module:
    return _shard(Mixed(fixed=nn.Parameter(values, requires_grad=False)))


def _odd_policy(module: nn.Module) -> bool | dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, nn.Linear) else False


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "init_mesh that does not divide": (lambda: layerzero.init_mesh(3), rf"^ValueError.*zero3_size.*3{CHOICES}"),
    "init_mesh of text": (lambda: layerzero.init_mesh("2"), "^TypeError.*zero3_size.*int.*'2'"),
    "both": (lambda: _shard(mesh=layerzero.init_mesh(2), zero3_size=2), "^ValueError.*mesh.*zero3_size"),
    "mesh with other axes": (
        lambda: _mesh(2, 2, names=("dp", "tp")),
        r"^ValueError.*mesh.*\['tp'\] are not data-parallel.*mesh\[\"dp\"\].*dp_replicate",
    ),
    "mesh of swapped axes": (lambda: _mesh(2, 2, names=("zero3", "replica")), "^ValueError.*mesh.*(zero3|replica)"),
    "mesh of three axes": (lambda: _mesh(2, 2, 1), r"^ValueError.*mesh.*2, 2, 1.*mesh\[\"dp\"\]"),
    "ranks out of order": (lambda: _shard(mesh=DeviceMesh("cpu", [[0, 2], [3, 1]])), "^ValueError.*mesh.*3, 1.*ascend"),
    "process group as mesh": (lambda: _shard(mesh=dist.group.WORLD), "^TypeError.*mesh.*Mesh.*ProcessGroup"),
    "strided mesh": (lambda: _shard(mesh=_strided()), f"^ValueError.*{NEIGHBORS}"),
    "strided on one rank": (lambda: _shard(mesh=(_strided(), mesh_of(2))[dist.get_rank() != 2]), NEIGHBORS),
    "strided unit": (
        lambda: _shard(mesh=lambda name, m: _strided() if name else mesh_of(2), units=["head"]),
        f"^ValueError.*{NEIGHBORS}",
    ),
    "root ignored": (lambda: _with_own(ignored_modules=lambda m: [m]), "^ValueError.*all 7 .*leave shard_model"),
    "root ignored, bare": (lambda: _with_own(ignored_modules=lambda m: m), "^ValueError.*Pass only the parameters"),
    "parameters ignored": (lambda: _with_own(ignored_params=lambda m: m.parameters()), "^ValueError.*all 7 parameters"),
    "all ignored": (
        lambda: _with_own(ignored_modules=lambda m: ["Linear"], ignored_params=lambda m: [m.shift]),
        "^ValueError.*all 7 parameters of this IntegerNet.*no parameter would be sharded",
    ),
    "two lists": (
        lambda: _with_own(units=lambda m: [[m.first, m.second], [m.second, m.head]]),
        r"^ValueError.*'second' in 'first\+second' and in 'second\+head'.*Remove it from one of them",
    ),
    "root in a list": (
        lambda: _with_own(units=lambda m: [[m, m.head]]),
        r"^ValueError.*a list that includes the model itself \(IntegerNet\).*remove it from the list",
    ),
    "lists that differ": (
        lambda: _with_own(units=lambda m: [[m.first, m.second if dist.get_rank() else m.head]]),
        r"^ValueError.*ranks disagree.*modules that call unit 'first\+head'",
    ),
    "settings of fsdp1": (
        lambda: _shard(units=policies.CustomPolicy(_odd_policy)),
        "^ValueError.*returns the settings.*SHARD_GRAD_OP.*for module 'first'.*reshard_after_forward=",
    ),
    "reshards that differ": (
        lambda: _shard(reshard_after_forward=lambda name, module: dist.get_rank() == 0),
        "^ValueError.*ranks disagree.*reshard_after_forward of the root",
    ),
    "policies that differ": (
        lambda: _shard(mp_policy=lambda n, m: BF16 if dist.get_rank() else MixedPrecisionPolicy(torch.float32)),
        "^ValueError.*ranks disagree.*mp_policy of the root",
    ),
    "unit without parameters": (lambda: _with_parts(nn.ReLU()), "^ValueError.*unit 'parts'.*has no parameters"),
    "ModuleList": (lambda: _with_parts(nn.ModuleList([nn.Linear(2, 2)])), FORWARDLESS),
    "its class": (lambda: _with_parts(nn.ModuleList([nn.Linear(2, 2)]), {nn.ModuleList}), FORWARDLESS),
    "ModuleDict": (lambda: _with_parts(nn.ModuleDict({"a": nn.Linear(2, 2)})), FORWARDLESS),
    "keyed ModuleList": (
        lambda: _with_parts(nn.ModuleList([nn.Linear(2, 2)]), lambda n, m: "all" if n == "parts" else False),
        r"^ValueError.*unit 'all' \(ModuleList\) does not define forward",
    ),
    "integer parameter": (lambda: _fixed(torch.zeros(3, dtype=torch.int64)), "^ValueError.*fixed.*int64.*ignored"),
    "complex parameter": (
        lambda: _fixed(torch.zeros(3, dtype=torch.complex64)),
        "^ValueError.*fixed.*complex.*ignored",
    ),
    "sparse gradient": (
        lambda: _train(_shard(nn.Embedding(8, 2, sparse=True)), torch.tensor([1, 2])),
        "'weight' has a sparse gradient.*sparse=False",
    ),
    "weight changed in a forward": (_change_weight_in_forward, "^RuntimeError.*first.*in.?place"),
    "sharding twice": (lambda: _shard(_shard()), "^ValueError.*already"),
    "a model with a sharded part": (_shard_around_a_sharded_part, "^ValueError.*second.*already"),
    "a part of a sharded model": (lambda: _shard(_shard(units=["second"]).second), "^ValueError.*already"),
    "no module": (lambda: _shard([nn.Linear(2, 2)]), "^TypeError.*model.*Module.*list"),
    "parameter assigned": (_assign_parameter, r"^RuntimeError.*first\.weight.*replaced.*copy"),
    "functional_call": (
        lambda: functional_call(_shard(units=["first"]), dict(integer_net(1).named_parameters()), torch.ones(2, 5)),
        "^RuntimeError.*(?=.*functional_call)(weight|shift)",
    ),
    "deepcopy of the model": (lambda: copy.deepcopy(_shard()), "cop(y|ied).*(full_state_dict|unsharded|before)"),
    "deepcopy of a parameter": (
        lambda: copy.deepcopy(next(_shard().parameters())),
        "cop(y|ied).*(full_tensor|full_state|clone)",
    ),
    "pickling the model": (lambda: pickle.dumps(_shard()), "pickl.*state_dict"),
    "torch.save of the model": (lambda: torch.save(_shard(), io.BytesIO()), "pickl.*state_dict"),
    "verify": (
        lambda: layerzero.verify(integer_net, lambda *_: None, mp_policy=lambda name, module: BF16),
        "^TypeError.*one mp_policy for the full model",
    ),
    "optimizer of another model": (
        lambda: layerzero.shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), _shard()),
        "^ValueError.*param.*model",
    ),
    "optimizer that is not element-wise": (lambda: _own_optimizer(_shard(), torch.optim.LBFGS), "^ValueError.*LBFGS"),
    "DDP around": (lambda: DistributedDataParallel(_shard()), f"applying DistributedDataParallel to .*{TWICE}"),
    "DDP around something with it": (lambda: DistributedDataParallel(_with_part(_shard())), rf"'1\.shift'.*{TWICE}"),
    "DataParallel around": (lambda: DataParallel(_shard()), f"^ValueError: applying DataParallel to .*{TWICE}"),
    "fully_shard around": (lambda: fully_shard(_shard()), rf"fully_shard \(FSDP2\) or .*{TWICE}"),
    "fully_shard of a unit": (lambda: fully_shard(_shard(units=["first"]).first), rf"fully_shard .*{TWICE}"),
    "replicate of a unit": (lambda: replicate(_shard(units=["first"]).first), rf" or replicate .*{TWICE}"),
    "fully_shard of a part": (lambda: fully_shard(_shard().second), rf"fully_shard .*{TWICE}"),
    "FSDP1 around": (lambda: _train(_fsdp1(_shard())), r"parameter '\w+.*before shard_model, and do not combine it"),
    "DDP inside": (
        lambda: _shard(_with_part(DistributedDataParallel(nn.Linear(5, 5)))),
        rf"module '1' is wrapped in DistributedDataParallel.*{PLAIN_INSIDE}",
    ),
    "DataParallel inside": (
        lambda: _shard(_with_part(DataParallel(nn.Linear(5, 5)))),
        rf"wrapped in DataParallel.*{PLAIN_INSIDE}",
    ),
    "sharding DDP": (
        lambda: _shard(DistributedDataParallel(integer_net())),
        rf"the model is wrapped in Distr.*{PLAIN_INSIDE}",
    ),
    "FSDP1 inside": (
        lambda: _shard(_with_part(_fsdp1(nn.Linear(5, 5)))),
        rf"wrapped in FullyShardedDataParallel.*{PLAIN_INSIDE}",
    ),
    "FSDP2 inside": (lambda: _shard(_with_fsdp()), r"module 'first' is sharded by torch's fully_shard.*leave out"),
    "sharding FSDP2": (lambda: _shard(_with_fsdp(whole=True)), r"the model is sharded by torch's fully_shard"),
    "weight_norm later": (lambda: _after(lambda m: parametrizations.weight_norm(m.first)), "before shard_model"),
    "old weight_norm later": (lambda: _after(lambda m: weight_norm(m.first)), "before shard_model"),
    "spectral_norm later": (
        lambda: _after(lambda m: parametrizations.spectral_norm(m.first)),
        "Apply parametrizations before shard_model",
    ),
    "parametrization later": (
        lambda: _after(lambda m: parametrize.register_parametrization(m.first, "weight", Double())),
        r"set_ is not supported for parameter 'first\.weight'.*parametrizations.*before shard_model",
    ),
    "old spectral_norm later": (lambda: _after(lambda m: spectral_norm(m.first)), "before shard_model"),
    "wrapper subclass": (
        lambda: _shard(_with_weight(nn.Parameter(Wrapped(torch.ones(6, 5))))),
        SUBCLASS.format("Wrapped"),
    ),
    "parameter that asks": (lambda: _shard(_with_weight(Asks(torch.ones(6, 5)))), SUBCLASS.format("Asks")),
    "quantized parameter": (
        lambda: _shard(_with_weight(nn.Parameter(_quantized(), requires_grad=False))),
        r"first\.weight.*ignored_params",
    ),
    "sparse parameter": (
        lambda: _shard(_with_weight(nn.Parameter(torch.eye(6, 5).to_sparse()))),
        r"first\.weight.*ignored_params",
    ),
    "lazy parameter": (
        lambda: _shard(nn.Sequential(nn.LazyLinear(3))),
        r"'0\.weight' is lazy and has no shape yet.*a forward",
    ),
    "quantized buffer": (
        lambda: _shard(_buffer_of(_quantized())),
        r"buffer 'first\.table' is quantized.*sync_module_states=False",
    ),
    "ignored parameter on meta": (
        lambda: _shard(model := nn.Linear(2, 2, device="meta"), ignored_params=[model.bias]),
        "'bias' is ignored and on the meta device",
    ),
    "torch.func.grad": (lambda: _per_input(_shard()), TRANSFORM.format("grad")),
    "torch.func.vmap": (lambda: vmap(_shard())(torch.ones(3, 2, 5)), TRANSFORM.format("vmap")),
    "torch.func.grad of functional_call": (lambda: _per_parameter(_shard(units=["first"])), TRANSFORM.format("grad")),
    "torch.export": (lambda: torch.export.export(_shard(), (_x(),)), r"torch\.export and make_fx of the root"),
    "make_fx": (lambda: make_fx(_shard())(_x()), r"torch\.export or make_fx of the root.*full_state_dict"),
    "torch.jit.trace": (lambda: _quiet(lambda: torch.jit.trace(_shard(), (_x(),))), r"torch\.jit\.trace of the root"),
    "torch.jit.script": (lambda: _quiet(lambda: torch.jit.script(_shard())), r"torch\.jit\.script.*full_state_dict"),
    "batch-norm in bf16": (
        lambda: _train(_shard(_normed(), mp_policy=BF16)),
        r"'1\.running_mean'.*buffer_dtype=torch\.bfloat16",
    ),
    **{
        f"{name} of an unsharded model": (partial(call, nn.Linear(2, 2)), "^ValueError.*shard_model")
        for name, call in ON_A_MODEL.items()
    },
    **{
        f"{name} of a submodule": (
            lambda call=call: call(_shard(units=["second"]).second),
            "^ValueError.*(shard_model|root)",
        )
        for name, call in ON_A_MODEL.items()
        if name != "unsharded"  # which takes parts
    },
    **{str(settings): (partial(_shard, **settings), match) for settings, match in SETTINGS},
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
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "nothing was raised"


def _refuse_all(rank: int) -> list[str]:
    raised = [_message(call) for call, _ in CALLS.values()]
    model = _shard(units=["first"])  # the process group still works
    _train(model)
    return raised


def test_each_mistake_is_refused_on_every_rank() -> None:
    wrong = [
        f"{name} on rank {rank}: no {match} in: {message}"
        for rank, raised in enumerate(run_ranks(_refuse_all, world_size=WORLD, pg_timeout=20))
        for (name, (_, match)), message in zip(CALLS.items(), raised, strict=True)
        if not re.search(match, message)
    ]
    assert not wrong, "\n".join(wrong)


def test_function_of_an_unsharded_model_needs_no_process_group_to_refuse() -> None:
    for call in ON_A_MODEL.values():
        with pytest.raises(ValueError, match="shard_model"):
            call(nn.Linear(2, 2))


@on_ranks(world_size=PAIR)
def test_a_refused_transform_leaves_nothing_behind(rank: int) -> None:
    """Train exactly after a refused transform, which leaves nothing behind."""
    model, net = _shard(units=IntegerNet.UNITS), integer_net()
    optimizer, alone = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(net.parameters())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        vmap(model)(torch.ones(3, 2, 5))
    integer_loss(model, integer_batch(rank=rank)).backward()
    integer_loss(net, union([integer_batch(rank=each) for each in range(PAIR)])).backward()
    optimizer.step()
    alone.step()
    assert_same_bits(model, net, "after a refusal")


class Registered(nn.Module, metaclass=ABCMeta):
    """Abstract class with a virtual subclass."""


Registered.register(nn.Linear)


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


@on_ranks(world_size=PAIR, shared_memory="off")
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

    # A key of units that is the name of one of their modules.
    model = _shard(units=lambda name, module: "first" if name in ("first", "second") else name == "head")
    assert [unit.name for unit in layerzero.units(model)] == ["", "first", "head"]
    _train(model)

    # A class in ignored_modules, and a class that others are registered with.
    for entry in (nn.Linear, [nn.Linear], Registered, [Registered]):
        model = _shard(ignored_modules=entry)
        assert [name for name, p in model.named_parameters() if isinstance(p, DTensor)] == ["shift"]
        assert len(layerzero.units(_shard(units=entry))) == 4, entry

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
    for wrap in (DistributedDataParallel, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (PAIR,)))):
        torch.manual_seed(3)
        net = _with_part(nn.Linear(5, 5))
        torch.manual_seed(3)
        model = _with_part(wrap(nn.Linear(5, 5)))
        _shard(model, ignored_modules=[model[1]])
        model(_x() * (rank + 1)).square().sum().backward()
        net(torch.cat([_x(), 2 * _x()])).square().sum().div(PAIR).backward()
        for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(gradient, theirs.grad)

    # A DTensor in ignored_params.
    mesh = init_device_mesh("cpu", (PAIR,))
    model, net = Foreign(mesh), Foreign(None)
    with pytest.raises(ValueError, match=r"'scale' is a DTensor of another framework.*ignored_params"):
        _shard(model)
    _shard(model, ignored_params=[model.scale], units=["inner.first"])
    integer_loss(model, integer_batch(rank=0)).backward()  # the same batch on every rank
    integer_loss(net, integer_batch(rank=0)).backward()
    assert torch.equal(model.inner.first.weight.grad.full_tensor(), net.inner.first.weight.grad)
    local = model.scale.grad.redistribute(placements=[Shard(0)]).to_local()
    assert torch.equal(local, net.scale.grad.chunk(PAIR)[rank])


ON_SOME = {
    "torch.func.vmap": lambda m: vmap(m)(torch.ones(3, 2, 5)),
    "torch.jit.trace": lambda m: torch.jit.trace(m, (_x(),)),
    "weight_norm": lambda m: (weight_norm(m.first), _train(m)),
    "parametrize": lambda m: (parametrize.register_parametrization(m.first, "weight", Double()), _train(m)),
}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("what", ON_SOME)
@on_ranks(world_size=PAIR, pg_timeout=5, timeout=90)
def test_what_one_rank_does_alone_is_an_error_on_the_others_within_the_timeout(rank: int, what: str) -> None:
    model = _shard(units=["first"])
    _train(model)
    with pytest.raises(RuntimeError):
        if rank == 0:
            _quiet(lambda: ON_SOME[what](model))
        else:
            _quiet(lambda: _train(model))
