"""Units for each kind of ``units``, and their list."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import wrap as policies

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    exact_sgd,
    integer_batch,
    integer_loss,
    integer_net,
    train,
    union,
    update,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Layers of unequal size, a container without forward, and a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Layer(width) for width in (4, 8, 16))
        self.act, self.norm, self.head = nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.act(x)))


def _stages() -> nn.Module:
    """Return layers in containers that have a forward, so a container can be wrapped with the rest of its layers."""
    first, second = nn.Sequential(Layer(4), Layer(8)), nn.Sequential(Layer(16), nn.LayerNorm(4))
    return nn.Sequential(nn.Linear(3, 4), first, second, nn.Linear(4, 2))


def _names(model: nn.Module) -> list[str]:
    return [unit.name for unit in layerzero.units(model)]


def _by_size(**settings: Any) -> Any:
    return functools.partial(policies.size_based_auto_wrap_policy, **settings)


def _subtree(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Wrap each layer without inspecting its submodules."""
    return not isinstance(module, Layer) if recurse else isinstance(module, Layer)


POLICIES: dict[str, Any] = {
    "by size, 100": _by_size(min_num_params=100),
    "by size, 40": _by_size(min_num_params=40),
    "by size, 40, leaves": _by_size(min_num_params=40, force_leaf_modules={Layer}),
    "by size, the default": policies.size_based_auto_wrap_policy,
    "classes": policies.ModuleWrapPolicy({Layer, nn.LayerNorm}),
    "transformer": functools.partial(policies.transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
    "lambda": functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
    "custom": policies.CustomPolicy(lambda module: isinstance(module, Layer)),
    "one of two": functools.partial(
        policies._or_policy, policies=[_subtree, policies.ModuleWrapPolicy({nn.LayerNorm})]
    ),
    "sub-tree": _subtree,
}


def _policies(rank: int) -> None:
    for (name, policy), make in itertools.product(POLICIES.items(), (Tower, _stages)):
        theirs = FSDP(make(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
        wrapped = [
            each.replace("_fsdp_wrapped_module.", "") for each, m in theirs.named_modules() if isinstance(m, FSDP)
        ]
        expected = {each.replace("._fsdp_wrapped_module", "").removeprefix("_fsdp_wrapped_module") for each in wrapped}
        model = layerzero.shard_model(make(), mesh=mesh_of(1), units=policy)
        assert set(_names(model)) == expected, (name, _names(model), expected)
    everything = layerzero.shard_model(Tower(), mesh=mesh_of(1), units=policies.always_wrap_policy)
    assert _names(everything)[:3] == ["", "embed", "layers.0"]
    assert not {"layers", "act"} & set(_names(everything)), "which gather nothing, or hold nothing"
    # A container without a forward is not a unit; its layers belong to the module around it.
    policy = _by_size(min_num_params=100, exclude_wrap_modules=set())
    inside = layerzero.shard_model(nn.Sequential(Tower()), mesh=mesh_of(1), units=policy)
    assert _names(inside) == ["", "0", "0.layers.2"]
    tower = Tower()
    ignoring = layerzero.shard_model(
        tower, mesh=mesh_of(1), units=_by_size(min_num_params=40), ignored_modules=[tower.layers[2].up]
    )
    assert "layers.2.down" in _names(ignoring) and not {"layers.2", "layers.2.up"} & set(_names(ignoring))


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated
@on_ranks(world_size=1)
def test_a_policy_of_fsdp1_chooses_the_units_that_fsdp1_wraps(rank: int) -> None:
    import warnings  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _policies(rank)


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_lists_of_modules_are_one_unit_each_beside_classes_and_names(rank: int) -> None:
    for make, expected in (
        (lambda m: [Layer, [m.norm, m.head], "embed"], ["", "embed", "layers.0", "layers.1", "layers.2", "norm+head"]),
        (lambda m: [Layer, [m.layers[0], "embed"]], ["", "embed+layers.0", "layers.1", "layers.2"]),
        (lambda m: m.layers, ["", "layers.0", "layers.1", "layers.2"]),
        (lambda m: m.layers[1], ["", "layers.1"]),
        (lambda m: [m, m.head], ["", "head"]),
        (lambda m: [["norm", "head"]], ["", "norm+head"]),
        (lambda m: ([m.head], {m.norm}), ["", "norm", "head"]),
        (lambda m: [m.head, "head", m.head, ["norm", m.embed], [m.embed, m.norm]], ["", "embed+norm", "head"]),
        (lambda m: [tuple(m.layers)], ["", "layers.0+layers.1+layers.2"]),
        (lambda m: [[Layer, "head"]], ["", "layers.0+layers.1+layers.2+head"]),
    ):
        model = Tower()
        model = layerzero.shard_model(model, mesh=mesh_of(2), units=make(model))
        assert _names(model) == expected
    # One unit is gathered once, and trains as one process does.
    model, alone = integer_net(), integer_net()
    model = layerzero.shard_model(model, mesh=mesh_of(2), units=[nn.Linear, [model.first, model.second], "head"])
    optimizer, its = layerzero.shard_optimizer(exact_sgd(model.parameters()), model), exact_sgd(alone.parameters())
    for step in range(3):
        before = layerzero.traffic(model).calls.get("gather", 0)
        integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        gathers = layerzero.traffic(model).calls["gather"] - before  # the root's, the pair's, the head's
        assert gathers == 2 * 3 or step == 0, "from the second forward on it is known that the pair is called at once"
        integer_loss(alone, union([integer_batch(step=step, rank=each) for each in range(WORLD)])).backward()
        update(optimizer, its)
    assert_same_bits(model, alone, "a pair")


def _list_units(rank: int) -> dict[str, list[range]]:
    net = integer_net()
    net.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    net.first.bias.requires_grad_(False)
    model = layerzero.shard_model(
        net, mesh=mesh_of(2), units=[[net.first, net.second], net.head], ignored_params=[net.head.bias]
    )
    found = layerzero.units(model)
    root, pair, head = found
    assert root.modules == {"": "IntegerNet"} and pair.modules == {"first": "Linear", "second": "Linear"}
    assert [each.name for each in pair.parameters] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert [each.name for each in root.parameters] == ["shift", "scale"] and found.ignored == ("head.bias",)
    assert (root.numel, pair.numel, head.numel) == (7, 72, 18)
    assert (pair.zero3_size, pair.data_parallel, pair.reshard_after_forward) == (2, WORLD, True)
    assert [each.requires_grad for each in pair.parameters] == [True, False, True, True]
    assert pair.parameters[0].dtype is torch.float32 and pair.gathered_bytes >= 4 * pair.numel
    held = dict(model.named_parameters())
    for unit in found:
        for each in unit.parameters:
            assert each.shape == held[each.name].shape
            assert each.local_numel == held[each.name].to_local().numel()
            whole = integer_net().state_dict().get(each.name)
            if whole is not None:  # the rows have the stated sizes
                assert torch.equal(held[each.name].to_local().cpu(), whole[each.rows.start : each.rows.stop])
    shown = str(found)
    assert "first+second (Linear)" in shown and "first.bias" in shown and "float32, frozen" in shown
    assert "ignored: head.bias" in shown and "the root (IntegerNet)" in shown and "[6, 5]" in shown
    header, of_root = shown.splitlines()[:2]
    assert of_root[: header.index("elements") + len("elements")].endswith("  7"), "numbers are on the right"
    printed = repr(model)
    assert "  layerzero root, zero3_size=2 of 4 ranks\n" in printed
    assert printed.count("bias=True, layerzero unit 'first+second')") == 2
    assert "out_features=3, bias=True, layerzero unit 'head')" in printed
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    low = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=["head"], mp_policy=policy)
    for unit, its in zip(layerzero.units(low), get_state(low).units, strict=True):
        assert (
            unit.gathered_bytes
            == sum(handle.weights.full_buffer.nbytes for handle in its.handles)
            < 4 * unit.numel + 64
        )
        assert {each.dtype for each in unit.parameters} == {torch.float32}
    with pytest.raises(ValueError, match="not sharded"):
        layerzero.units(integer_net())
    return {each.name: each.rows for unit in found for each in unit.parameters}


def test_units_lists_parameters_and_the_rows_of_this_rank_and_print_marks_them() -> None:
    rows = run_ranks(_list_units, world_size=WORLD)
    for name in rows[0]:
        held = sorted(row for of_rank in rows for row in of_rank[name])
        assert held == list(range(len(held))) and held, f"{name}: each row is on one rank"


@pytest.mark.slow
@on_ranks(world_size=2)
def test_compiled_modules_may_be_units(rank: int) -> None:
    choices: list[Callable[[nn.Module], Any]] = [
        lambda model: [model.first, model.head],
        lambda model: ["first"],
        lambda model: [[model.first, model.second]],
        lambda model: lambda name, module: name == "first",
        lambda model: {nn.Linear},
        lambda model: None,
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # of Dynamo
        for index, choose in enumerate(choices):
            model, net = integer_net(), integer_net()
            for name in IntegerNet.UNITS:
                setattr(model, name, torch.compile(getattr(model, name), backend="eager"))
            whole = torch.compile(model, backend="eager") if index == 5 else model
            layerzero.shard_model(whole, mesh=mesh_of(2), units=choose(model))
            train(whole, layerzero.shard_optimizer(exact_sgd(whole.parameters()), whole), rank, range(2))
            alone = exact_sgd(net.parameters())
            for step in range(2):
                integer_loss(net, union([integer_batch(step=step, rank=r) for r in range(2)])).backward()
                update(alone)
            state = {
                name.replace("_orig_mod.", ""): t
                for name, t in layerzero.full_state_dict(whole, rank0_only=False).items()
            }
            assert all(torch.equal(state[name], parameter) for name, parameter in net.named_parameters()), index
