"""Modules and parameters that are added, removed or replaced after shard_model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.graphs import message_of
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    backward,
    backward_alone,
    exact_sgd,
    in_lockstep,
    integer_net,
    train,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 4


class Tower(nn.Module):
    """Units in a list, one of them without a bias, and an ignored part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=index != 1) for index in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.adapter = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.adapter(self.frozen(x))


def _tower(size: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return layerzero.shard_model(Tower(), mesh=mesh_of(size), units={nn.Linear}, ignored_modules=["adapter"])


def _x(rank: int = 0) -> Tensor:
    return torch.ones(2, 3) * (rank + 1)


def _add_bias(model: nn.Module) -> None:
    model.layers[1].bias = nn.Parameter(torch.zeros(3))  # it was None


def _tie(model: nn.Module) -> None:
    model.layers[2].extra = model.layers[0].weight


# Changes of a Tower, and text that the error must contain.
REFUSED: dict[str, tuple[Callable[[nn.Module], object], tuple[str, ...]]] = {
    "module": (lambda m: setattr(m, "head", nn.Linear(3, 1)), ("head.weight", "head.bias", "before shard_model")),
    "module in its place": (lambda m: setattr(m, "frozen", nn.Linear(3, 3)), ("frozen.weight",)),
    "register_parameter": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(3))),
        ("'scale'", "requires_grad_"),
    ),
    "parameter of a layer": (lambda m: setattr(m.layers[0], "lora", nn.Parameter(torch.ones(3))), ("layers.0.lora",)),
    "module in a layer": (lambda m: m.layers[0].add_module("lora", nn.Linear(3, 3)), ("layers.0.lora.weight",)),
    "ModuleList.append": (lambda m: m.layers.append(nn.Linear(3, 3)), ("layers.3.weight",)),
    "ModuleList item": (lambda m: m.layers.__setitem__(1, nn.Linear(3, 3)), ("layers.1.weight",)),
    "bias where there was none": (_add_bias, ("layers.1.bias",)),
    "tied": (_tie, ("layers.2.extra", "layers.0.weight", "before shard_model")),
    "deleted parameter": (lambda m: delattr(m.layers[0], "weight"), ("layers.0.weight", "replaced")),
}


@on_ranks(world_size=2)
def test_trainable_parameters_that_come_after_sharding_are_named_at_the_next_forward(rank: int) -> None:
    model = _tower()
    for name, (change, patterns) in REFUSED.items():
        model(_x()).sum().backward()
        held = [(d, dict(d)) for module in model.modules() for d in (module._parameters, module._modules)]
        change(model)
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                model(_x())
            assert all(re.search(pattern, str(caught.value)) for pattern in patterns), f"{name}: {caught.value}"
        for now, before in held:
            now.clear()
            now.update(before)
    model.head = nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="head"):
        model(_x())
    del model.head
    model(_x()).sum().backward()


@on_ranks(world_size=WORLD)
def test_what_the_error_says_works(rank: int) -> None:
    """Freeze, ignore and add before sharding; training of the others continues."""
    model = _tower()
    model.teacher = nn.Linear(3, 3)
    model.teacher.requires_grad_(False)
    model(_x())
    model.teacher.weight.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="teacher"):
            model(_x())
    net = integer_net()
    net.extra = nn.Linear(2, 2)
    ours = layerzero.shard_model(net, mesh=mesh_of(2), ignored_modules=["extra"])
    alone = integer_net()
    optimizer = layerzero.shard_optimizer(exact_sgd(p for n, p in ours.named_parameters() if "extra" not in n), ours)
    in_lockstep(rank, (ours, optimizer), (alone, exact_sgd(alone.parameters())), range(2))
    del ours.extra
    assert_same_bits(ours, alone, "extra")


@on_ranks(world_size=2)
def test_wrappers_hooks_and_what_has_no_trainable_parameters_may_come(rank: int) -> None:
    model = _tower()
    changes: list[Callable[[], object]] = [
        lambda: setattr(model, "act", nn.ReLU()),
        lambda: model.layers[0].register_forward_hook(lambda *_: None),
        lambda: model.layers[0].register_buffer("table", torch.ones(3)),
        lambda: model.requires_grad_(False).requires_grad_(True),
        lambda: setattr(model.adapter, "weight", nn.Parameter(torch.ones(3, 3))),  # left full, for the user
        lambda: setattr(model, "other", layerzero.shard_model(nn.Linear(3, 3), mesh=mesh_of(1))),
        lambda: model.layers.__setitem__(0, nn.Sequential(model.layers[0])),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it imports
        compiled = torch.compile(model.layers[2], backend="eager")
        changes.append(lambda: model.layers.__setitem__(2, compiled))
        for change in changes:
            change()
            model(_x(rank)).sum().backward()
            assert not get_state(model).status._structure._has_changed()
        torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = layerzero.shard_model(nn.Sequential(nn.Linear(3, 3)), mesh=mesh_of(2), units={nn.Linear}, mp_policy=policy)
    with torch.no_grad(), layerzero.full_precision(model), layerzero.gathered(model[0]):
        model.act = nn.ReLU()
        assert model(_x(rank)).dtype is torch.float32


class Shorter(IntegerNet):
    """May skip its second branch."""

    def forward(self, x: Tensor) -> Tensor:
        second = self.second(x.flip(1)) if self.second is not None else 0.0
        return self.head((self.first(x) + second + self.shift).relu())


def _shorter() -> Shorter:
    net = Shorter()
    net.load_state_dict(integer_net().state_dict())
    return net


@on_ranks(world_size=WORLD)
def test_a_module_that_goes_is_a_module_that_is_not_used(rank: int) -> None:
    for size in (1, 2, 4):
        for units in (IntegerNet.UNITS, None):
            ours, alone = layerzero.shard_model(_shorter(), mesh=mesh_of(size), units=units), _shorter()
            optimizer = layerzero.shard_optimizer(exact_sgd(ours.parameters()), ours)
            theirs = exact_sgd(alone.parameters())
            in_lockstep(rank, (ours, optimizer), (alone, theirs), [0])
            ours.second = alone.second = None
            in_lockstep(rank, (ours, optimizer), (alone, theirs), [1, 2])
            assert_same_bits(ours, alone, f"{size} {units}")


def _remove_on_one(rank: int, size: int) -> str:
    model = layerzero.shard_model(_shorter(), mesh=mesh_of(size), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    train(model, optimizer, rank, [0])
    if rank == 0:
        model.second = None
    message = message_of(lambda: backward(model, rank, 1))
    if message != "nothing was raised":
        return message
    alone = _shorter()
    theirs = exact_sgd(alone.parameters())
    backward_alone(alone, 0)
    theirs.step()
    gradients = []
    for r in range(WORLD):
        net = _shorter()
        net.load_state_dict(alone.state_dict())
        net.second = None if r == 0 else net.second
        backward(net, r, 1)
        gradients.append(net.second.weight.grad if r else torch.zeros(6, 5))
    expected = torch.stack(gradients).mean(0)
    held = next(m for n, m in get_state(model).members.items() if n == "second.weight").sharded
    assert torch.equal(held.grad.full_tensor(), expected)
    return ""


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_module_that_goes_on_one_rank_only_is_an_error_or_unused_there(size: int) -> None:
    messages = run_ranks(_remove_on_one, size, world_size=WORLD, pg_timeout=3, shared_memory="off")
    assert not any(messages) if size == 1 else all(messages[:2]), messages
    shared = run_ranks(_remove_on_one, size, world_size=WORLD, shared_memory="auto")
    assert not any(shared), "whose memory is read"
