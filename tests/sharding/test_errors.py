"""Bad input: every mistake raises an error that names the value and the remedy."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero import Codecs, LayerZeroConfig, Offload, PrecisionPolicy
from tests.support.models import integer_net
from tests.support.ranks import on_ranks, run_ranks

WORLD = 4
BAD = (TypeError, ValueError)  # where either is acceptable


class Refusal(NamedTuple):
    """Exception of a call on one rank."""

    kinds: tuple[str, ...]  # names of the exception's class and of its bases
    message: str


class Case(NamedTuple):
    """A mistake, the classes that its error may have, and patterns that its message must contain."""

    call: Callable[[], Any]
    kind: type[Exception] | tuple[type[Exception], ...]
    patterns: tuple[str, ...]


class Mixed(nn.Module):
    """A net with a part that cannot be sharded, or need not be."""

    def __init__(self, **parts: nn.Module | nn.Parameter | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def _refusal(call: Callable[[], Any]) -> Refusal | None:
    try:
        call()
    except Exception as error:
        return Refusal(tuple(kind.__name__ for kind in type(error).__mro__), str(error))
    return None


def _shard(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    if not {"mesh", "zero3_size"} & settings.keys():
        settings["zero3_size"] = 2
    return layerzero.shard_model(integer_net() if model is None else model, **settings)


def _shard_at(*, mesh: Any = None, zero3_size: Any = None) -> nn.Module:
    return layerzero.shard_model(integer_net(), mesh=mesh, zero3_size=zero3_size)


def _shard_with_dtypes(**dtypes: Any) -> nn.Module:
    return _shard(mp_policy=MixedPrecisionPolicy(**dtypes))


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _shard_twice() -> None:
    model = _shard()
    _shard(model)


def _shard_around_a_sharded_part() -> None:
    model = integer_net()
    _shard(model.second)
    _shard(model)


def _shard_a_part_of_a_sharded_model() -> None:
    _shard(_shard(units=["second"]).second)


def _backward_through_sparse_embedding() -> None:
    model = _shard(Lookup())
    model(torch.tensor([1, 2])).sum().backward()


@torch.no_grad()
def _halve_weight(module: nn.Module, args: object) -> None:
    module.weight.mul_(0.5)


def _change_weight_in_forward() -> None:
    model = _shard(units=["first"])
    model.first.register_forward_pre_hook(_halve_weight)
    model(torch.ones(1, 5)).sum().backward()


def _assign_parameter() -> None:
    model = _shard(units=["first"])
    model.first.weight = nn.Parameter(torch.ones(6, 5))
    model(torch.ones(2, 5))


def _functional_call() -> None:
    model = _shard(units=["first"])
    torch.func.functional_call(model, dict(integer_net(1).named_parameters()), torch.ones(2, 5))


def _deepcopy_parameter() -> None:
    copy.deepcopy(next(_shard().parameters()))


def _torch_save() -> None:
    torch.save(_shard(), io.BytesIO())


def _enter(context: Callable[[nn.Module], Any], model: nn.Module) -> None:
    with context(model):
        pass


def _own_optimizer(model: nn.Module) -> None:
    layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)


def _optimizer_of_another_model() -> None:
    layerzero.shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), _shard())


def _lbfgs() -> None:
    model = _shard()
    layerzero.shard_optimizer(torch.optim.LBFGS(model.parameters()), model)


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

CHOICES = r"\b1\b.*\b2\b.*\b4\b"  # the divisors of 4

CASES: dict[str, Case] = {
    "zero3_size that does not divide": Case(
        partial(_shard, zero3_size=3), ValueError, (r"zero3_size.*3", r"\b4\b", CHOICES)
    ),
    "zero3_size beyond the world": Case(partial(_shard, zero3_size=8), ValueError, (r"zero3_size.*8", CHOICES)),
    "zero3_size of zero": Case(partial(_shard, zero3_size=0), ValueError, (r"zero3_size.*0", CHOICES)),
    "negative zero3_size": Case(partial(_shard, zero3_size=-2), ValueError, (r"zero3_size.*-2", CHOICES)),
    "zero3_size of text": Case(partial(_shard, zero3_size="2"), TypeError, ("zero3_size", "'2'|str", "int")),
    "fractional zero3_size": Case(partial(_shard, zero3_size=2.0), TypeError, ("zero3_size", r"2\.0|float", "int")),
    "boolean zero3_size": Case(partial(_shard, zero3_size=True), TypeError, ("zero3_size", "True|bool", "int")),
    "init_mesh that does not divide": Case(
        partial(layerzero.init_mesh, 3), ValueError, (r"zero3_size.*3", r"\b4\b", CHOICES)
    ),
    "init_mesh of text": Case(partial(layerzero.init_mesh, "2"), TypeError, ("zero3_size", "'2'|str", "int")),
    "neither mesh nor zero3_size": Case(_shard_at, ValueError, ("mesh", "zero3_size", "LOCAL_WORLD_SIZE", CHOICES)),
    "both mesh and zero3_size": Case(
        lambda: _shard_at(mesh=layerzero.init_mesh(2), zero3_size=2), ValueError, ("mesh", "zero3_size")
    ),
    "mesh with other axes": Case(
        lambda: _shard(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))),
        ValueError,
        ("mesh", "dp", r"\['tp'\] are not data-parallel", r'mesh\["dp"\]', "dp_replicate"),
    ),
    "mesh of swapped axes": Case(
        lambda: _shard(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("zero3", "replica"))),
        ValueError,
        ("mesh", "zero3.*replica", "replica.*zero3"),
    ),
    "mesh of three axes": Case(
        lambda: _shard(mesh=init_device_mesh("cpu", (2, 2, 1))), ValueError, ("mesh", "2, 2, 1", r'mesh\["dp"\]')
    ),
    "mesh of ranks out of order": Case(
        lambda: _shard(mesh=DeviceMesh("cpu", [[0, 2], [3, 1]])), ValueError, ("mesh", "3, 1", "ascend")
    ),
    "process group as mesh": Case(lambda: _shard(mesh=dist.group.WORLD), TypeError, ("mesh", "ProcessGroup", "Mesh")),
    "unknown unit name": Case(partial(_shard, units=["first", "third"]), ValueError, ("units", "third")),
    "unknown unit class": Case(partial(_shard, units={nn.Conv2d}), ValueError, ("units", "Conv2d")),
    "unknown unit name as one text": Case(partial(_shard, units="third"), ValueError, ("units", "third")),
    "units as number": Case(partial(_shard, units=2), TypeError, ("units", "2|int")),
    "units of numbers": Case(partial(_shard, units=[1, 2]), TypeError, ("units", "1|int")),
    "unit without parameters": Case(
        lambda: _shard(Mixed(act=nn.ReLU()), units=["act"]), ValueError, ("units?", "act", "parameter")
    ),
    "ModuleList as unit": Case(
        lambda: _shard(Mixed(blocks=nn.ModuleList([nn.Linear(2, 2)])), units=["blocks"]),
        ValueError,
        ("blocks", "ModuleList", "forward"),
    ),
    "ModuleList class as unit": Case(
        lambda: _shard(Mixed(blocks=nn.ModuleList([nn.Linear(2, 2)])), units={nn.ModuleList}),
        ValueError,
        ("ModuleList", "forward"),
    ),
    "ModuleDict as unit": Case(
        lambda: _shard(Mixed(blocks=nn.ModuleDict({"a": nn.Linear(2, 2)})), units=["blocks"]),
        ValueError,
        ("blocks", "ModuleDict", "forward"),
    ),
    "unknown accumulation": Case(
        partial(_shard, accumulation="shard"), ValueError, ("accumulation", "'shard'", "'?sharded", "full")
    ),
    "accumulation of wrong type": Case(
        partial(_shard, accumulation=2), BAD, ("accumulation", "2|int", "sharded", "full", "local")
    ),
    "accumulation callable that answers something else": Case(
        partial(_shard, accumulation=lambda name, module: "half"), ValueError, ("accumulation", "half", "sharded")
    ),
    "accumulation_dtype of fp16": Case(
        partial(PrecisionPolicy, accumulation_dtype=torch.float16),
        ValueError,
        ("accumulation_dtype", "float16", "bfloat16"),
    ),
    "accumulation_dtype with local accumulation": Case(
        partial(_shard, mp_policy=PrecisionPolicy(accumulation_dtype=torch.bfloat16), accumulation="local"),
        ValueError,
        ("accumulation_dtype", "'local'", "sharded", "full"),
    ),
    "integer parameter": Case(
        lambda: _shard(Mixed(count=_fixed(torch.zeros(3, dtype=torch.int64)))),
        ValueError,
        ("count", "int64", "buffer|ignored_params"),
    ),
    "complex parameter": Case(
        lambda: _shard(Mixed(phase=_fixed(torch.zeros(3, dtype=torch.complex64)))),
        ValueError,
        ("phase", "complex64", "ignored_params|view_as_real"),
    ),
    "sparse gradient": Case(
        _backward_through_sparse_embedding, Exception, ("sparse", r"table\.weight", "sparse=False|ignored_params")
    ),
    "weight changed in a forward": Case(_change_weight_in_forward, RuntimeError, ("first", "in.?place")),
    "sharding twice": Case(_shard_twice, ValueError, ("already|twice",)),
    "sharding a model with a sharded part": Case(_shard_around_a_sharded_part, ValueError, ("second", "already")),
    "sharding a part of a sharded model": Case(_shard_a_part_of_a_sharded_model, ValueError, ("already|part of",)),
    "something that is no module": Case(lambda: _shard([nn.Linear(2, 2)]), TypeError, ("model", "list", "Module")),
    "offload of wrong type": Case(partial(_shard, offload="grads"), TypeError, ("offload", "grads", "Offload")),
    "codecs of wrong type": Case(partial(_shard, codecs="int8"), TypeError, ("codecs", "int8", "Codecs")),
    "an old name": Case(
        partial(_shard, offload_grads=True),
        TypeError,
        ("offload_grads", r"offload=layerzero\.Offload\(grads="),
    ),
    "integer param_dtype": Case(
        partial(_shard_with_dtypes, param_dtype=torch.int32), BAD, ("param_dtype", "int32", "float")
    ),
    "integer reduce_dtype": Case(
        partial(_shard_with_dtypes, reduce_dtype=torch.int64), BAD, ("reduce_dtype", "int64", "float")
    ),
    "integer output_dtype": Case(
        partial(_shard_with_dtypes, output_dtype=torch.int8), BAD, ("output_dtype", "int8", "float")
    ),
    "param_dtype of text": Case(
        partial(_shard_with_dtypes, param_dtype="bf16"), TypeError, ("param_dtype", "bf16", "dtype")
    ),
    "mp_policy that is a dtype": Case(
        partial(_shard, mp_policy=torch.bfloat16), TypeError, ("mp_policy", "dtype", "MixedPrecisionPolicy")
    ),
    "integer replica_reduce_dtype": Case(
        partial(PrecisionPolicy, replica_reduce_dtype=torch.int32),
        BAD,
        ("replica_reduce_dtype", "int32", "float"),
    ),
    "negative prefetch": Case(partial(_shard, prefetch=-1), ValueError, ("prefetch", "-1", r"\b0\b|negative")),
    "fractional prefetch": Case(partial(_shard, prefetch=0.5), BAD, ("prefetch", r"0\.5|float", "int")),
    "reshard_after_forward of wrong type": Case(
        partial(_shard, reshard_after_forward="2"), TypeError, ("reshard_after_forward", "2", "bool", "number of ranks")
    ),
    "reshard_after_forward of no divisor": Case(
        partial(_shard, reshard_after_forward=3), ValueError, ("reshard_after_forward", "3", "zero3_size", "Use one of")
    ),
    "state assigned": Case(
        lambda: _shard().load_state_dict(integer_net().state_dict(), assign=True),
        RuntimeError,
        ("shift|first", "load_full_state_dict"),
    ),
    "parameter assigned": Case(_assign_parameter, RuntimeError, (r"first\.weight", "replaced", "copy")),
    "functional_call": Case(_functional_call, RuntimeError, (r"weight|shift", "functional_call")),
    "deepcopy of the model": Case(
        lambda: copy.deepcopy(_shard()), Exception, ("cop(y|ied)", "full_state_dict|unsharded|before")
    ),
    "deepcopy of a parameter": Case(
        _deepcopy_parameter, Exception, ("cop(y|ied)", "full_tensor|full_state_dict|clone")
    ),
    "pickling the model": Case(lambda: pickle.dumps(_shard()), Exception, ("pickl", "full_state_dict|state_dict")),
    "torch.save of the model": Case(_torch_save, Exception, ("pickl", "full_state_dict|state_dict")),
    "optimizer of another model": Case(_optimizer_of_another_model, ValueError, ("param", "model")),
    "optimizer that is not element-wise": Case(_lbfgs, ValueError, ("LBFGS", "element")),
    **{
        f"{name} of an unsharded model": Case(partial(call, nn.Linear(2, 2)), ValueError, ("shard_model",))
        for name, call in ON_A_MODEL.items()
    },
    **{
        f"{name} of a submodule": Case(
            lambda call=call: call(_shard(units=["second"]).second), ValueError, ("shard_model|root|whole model",)
        )
        for name, call in ON_A_MODEL.items()
        if name != "unsharded"  # which takes parts
    },
}


def _refusals(rank: int) -> dict[str, Refusal | None]:
    refusals = {name: _refusal(case.call) for name, case in CASES.items()}
    # The process group has survived them all.
    model = _shard(units=["first"])
    model(torch.ones(2, 5)).sum().backward()
    return refusals


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Refusal | None]]:
    return run_ranks(_refusals, world_size=WORLD)


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_refused_with_the_value_and_the_way_out(
    name: str, refusals: list[dict[str, Refusal | None]]
) -> None:
    _, kind, patterns = CASES[name]
    for rank, of_rank in enumerate(refusals):
        refusal = of_rank[name]
        assert refusal is not None, f"rank {rank}: nothing was raised"
        accepted = {k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))}
        assert accepted & set(refusal.kinds), f"rank {rank}: {refusal}"
        missing = [pattern for pattern in patterns if not re.search(pattern, refusal.message, re.DOTALL)]
        assert not missing, f"rank {rank}: no {missing} in {refusal}"


@on_ranks(world_size=WORLD)
def test_refused_model_is_unchanged_and_can_be_sharded(rank: int) -> None:
    model = integer_net()
    before = dict(model.named_parameters())
    for settings in ({"units": ["third"]}, {"prefetch": -1}, {"accumulation": "half"}, {"zero3_size": 3}):
        assert _refusal(partial(_shard, model, **settings)) is not None, settings
        after = dict(model.named_parameters())
        assert after.keys() == before.keys(), settings
        assert all(after[name] is p and not isinstance(p, DTensor) for name, p in before.items()), settings
    _shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_sharding_without_torch_distributed_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        layerzero.shard_model(integer_net(), zero3_size=1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        layerzero.init_mesh(1)


@pytest.mark.parametrize("name", ON_A_MODEL)
def test_function_of_an_unsharded_model_needs_no_process_group_to_refuse(name: str) -> None:
    with pytest.raises(ValueError, match="shard_model"):
        ON_A_MODEL[name](nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (LayerZeroConfig, {"zero3_size": "8"}),
        (LayerZeroConfig, {"zero3_size": 0}),
        (LayerZeroConfig, {"accumulation": "none"}),
        (LayerZeroConfig, {"prefetch": -3}),
        (LayerZeroConfig, {"mp_policy": torch.bfloat16}),
        (LayerZeroConfig, {"offload": True}),
        (LayerZeroConfig, {"codecs": "lossless"}),
        (LayerZeroConfig, {"sync_module_states": 1}),
        (LayerZeroConfig, {"reshard_after_forward": None}),
        (PrecisionPolicy, {"replica_reduce_dtype": torch.uint8}),
        (PrecisionPolicy, {"buffer_dtype": "bf16"}),
        (PrecisionPolicy, {"fp32_accumulation": 1}),
        (Offload, {"grads": "pinned"}),
        (Offload, {"pin_memory": False}),
        (Codecs, {"refresh": "zip"}),
    ],
    ids=str,
)
def test_policies_refuse_a_bad_setting_by_name(policy: type, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises((TypeError, ValueError), match=name):
        policy(**settings)


OLD_NAMES = {
    **dict.fromkeys(("replica_reduce_dtype", "buffer_dtype", "accumulation_dtype"), PrecisionPolicy),
    "reduce_scatter_with_fp32_accumulation": PrecisionPolicy,
    **dict.fromkeys(("offload_grads", "offload_optimizer", "offload_params", "pin_memory"), Offload),
    **dict.fromkeys(("gather_codec", "hop2_codec", "refresh_codec"), Codecs),
}


def test_an_old_name_is_refused_with_its_new_place() -> None:
    for name, policy in OLD_NAMES.items():
        with pytest.raises(TypeError, match=name) as raised:
            layerzero.shard_model(nn.Linear(2, 2), **{name: None})
        place = re.search(rf"=layerzero\.{policy.__name__}\((\w+)=\.\.\.\)$", str(raised.value))
        assert place is not None and hasattr(policy(), place[1]), raised.value
    with pytest.raises(TypeError, match=r"Use model\.set_gradient_divide_factor"):
        layerzero.shard_model(nn.Linear(2, 2), gradient_divide_factor=1.0)


def test_torchs_policies_are_accepted() -> None:
    config = LayerZeroConfig(offload=CPUOffloadPolicy(pin_memory=False), mp_policy=None, codecs=None)
    assert config.offload == Offload(grads=True, optimizer=True, params=True, pin_memory=False)
    assert LayerZeroConfig(offload=OffloadPolicy()) == LayerZeroConfig(offload=None) == LayerZeroConfig()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float16, cast_forward_inputs=False)
    ours = PrecisionPolicy.of(policy, fp32_accumulation=True)
    assert ours.torch_policy == policy and ours.fp32_accumulation


def test_fields_of_the_full_model_are_read_from_the_policy_of_the_root() -> None:
    root = PrecisionPolicy(torch.bfloat16, replica_reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    unit = PrecisionPolicy(accumulation_dtype=torch.bfloat16)
    model = integer_net()
    config = LayerZeroConfig(mp_policy=lambda name, module: unit if name else root)
    found = config.unit_settings("first", model.first, 2, config.root_policy(model)).policy
    assert (found.param_dtype, found.accumulation_dtype) == (None, torch.bfloat16)
    assert found.replica_reduce_dtype == found.buffer_dtype == torch.bfloat16
    other = LayerZeroConfig(mp_policy=lambda name, module: root if name else unit)
    with pytest.raises(ValueError, match=r"replica_reduce_dtype of mp_policy\('first', module\) is torch.bfloat16"):
        other.unit_settings("first", model.first, 2, unit)
