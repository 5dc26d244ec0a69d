"""``optimizer.state`` shows the whole state of a parameter, on all ranks, and edits of it take effect."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from tests.support.models import Rule, assert_same_bits, full_parameters, update, whole
from tests.support.ranks import mesh_of, on_ranks

# (ranks, zero3_size)
MESHES = [(1, 1), (2, 1), (2, 2), (4, 2)]


class Net(nn.Module):
    """Elements of a parameter have different gradients, which are small integers."""

    def __init__(self, *, has_scalar: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.second = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.zeros(() if has_scalar else 2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.cat([self.first(x), self.second(x)])
        return (outputs * torch.arange(1.0, 8.0)).sum() + 3 * self.gain.sum()


class Momentum(Rule):
    """SGD with momentum, which is not one of torch's classes."""

    resets_itself = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.resets_itself:
            self.state = defaultdict(dict)
        super().step()

    def change(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"].mul_(0.5).add_(parameter.grad)


sgd = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
# (optimizer, its `elementwise`): of torch, with placeholders for parameters without rows, and with owners
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], bool | None]] = {
    "rows": (sgd, None),
    "fused": (partial(sgd, fused=True), None),
    "placeholders": (Momentum, None),
    "owners": (Momentum, False),
}


def sharded(kind: str, zero3_size: int) -> tuple[nn.Module, Any]:
    factory, elementwise = OPTIMIZERS[kind]
    model = layerzero.shard_model(Net(has_scalar=kind != "owners"), mesh=mesh_of(zero3_size), units=["first", "second"])
    return model, layerzero.shard_optimizer(factory(model.parameters()), model, elementwise=elementwise)


def alone(kind: str) -> tuple[nn.Module, Any]:
    net = Net(has_scalar=kind != "owners")
    return net, OPTIMIZERS[kind][0](net.parameters())


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.tensor([1.0, 2.0, 4.0])).backward()
    update(optimizer)


def by_name(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Return the whole state that ``optimizer.state`` shows."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: whole(value) for key, value in values.items()}
        for parameter, values in optimizer.state.items()
    }


def _assign_to_inner(optimizer: Any) -> None:
    getattr(optimizer, "inner", optimizer).state = defaultdict(dict)


def _reset_itself(optimizer: Any) -> None:
    optimizer.resets_itself = True


RESETS: dict[str, Callable[[Any], Any]] = {
    "assigned": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "__setstate__": lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)}),
    "clear": lambda optimizer: optimizer.state.clear(),
    "assigned to the inner optimizer": _assign_to_inner,
    "one by one": lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
    "emptied": lambda optimizer: [values.clear() for values in optimizer.state.values()],
    "by its own step": _reset_itself,
}


def _reset(zero3_size: int) -> None:
    for kind in ("rows", "placeholders", "owners"):
        for name, reset in RESETS.items():
            if reset is _reset_itself and kind != "placeholders":
                continue
            (model, optimizer), (net, theirs) = sharded(kind, zero3_size), alone(kind)
            for each, its_optimizer in ((model, optimizer), (net, theirs)):
                step(each, its_optimizer)
                step(each, its_optimizer)
                reset(its_optimizer)
                step(each, its_optimizer)
            assert_same_bits(model, net, f"{kind}, {name}")
            assert full_parameters(model)["gain"].eq(3 * -3.5).all(), "the third step moves by exactly the gradient"
            expected = {name: net.get_parameter(name).grad for name, _ in net.named_parameters()}
            saved = optimizer.state_dict_by_name()["state"]
            assert saved.keys() == expected.keys() == by_name(model, optimizer).keys(), f"{kind}, {name}"
            step(model, optimizer)
            step(net, theirs)
            assert_same_bits(model, net, f"{kind}, {name}")


# Edits of an optimizer's state for one parameter with momentum.
EDITS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mul_": lambda state, p: state[p]["momentum_buffer"].mul_(2),
    "zero_": lambda state, p: state[p]["momentum_buffer"].zero_(),
    "in place through get": lambda state, p: state.get(p).get("momentum_buffer").add_(2),
    "zeros_like": lambda state, p: state[p].update(momentum_buffer=torch.zeros_like(p)),
    "full_like": lambda state, p: state[p].__setitem__("momentum_buffer", torch.full_like(p, 2.0)),
    "full tensor": lambda state, p: state[p].update(momentum_buffer=torch.arange(float(p.numel())).view(p.shape)),
    "the parameter's own values": lambda state, p: state[p].update(momentum_buffer=p.detach().clone()),
    "*=": lambda state, p: state[p].__setitem__("momentum_buffer", state[p]["momentum_buffer"] * 2),
    "new values": lambda state, p: state.__setitem__(p, {"momentum_buffer": torch.ones_like(p)}),
    "its own values": lambda state, p: state.__setitem__(p, state[p]),
    "a copy": lambda state, p: state.__setitem__(p, copy.deepcopy(state[p])),
    "a mapped copy": lambda state, p: state.__setitem__(p, type(state[p])({k: v * 2 for k, v in state[p].items()})),
    "|": lambda state, p: state.__setitem__(p, state[p] | {"momentum_buffer": state[p]["momentum_buffer"] * 2}),
    "| of a dict": lambda state, p: state.__setitem__(p, {"momentum_buffer": torch.ones_like(p)} | state[p]),
    "|=": lambda state, p: operator.ior(state[p], {"momentum_buffer": torch.full_like(p, 3.0)}),
    "popped": lambda state, p: state.setdefault(p, state.pop(p)),
    "removed": lambda state, p: state[p].pop("momentum_buffer"),
    "no default": lambda state, p: state.setdefault(p, {}),
    "of all": lambda state, p: [values["momentum_buffer"].mul_(2) for values in state.values()],
    "of all by items": lambda state, p: [
        values["momentum_buffer"].mul_(2) for key, values in state.items() if key is p
    ],
}


def _edit(zero3_size: int) -> None:
    for kind in OPTIMIZERS:
        (model, optimizer), (net, theirs) = sharded(kind, zero3_size), alone(kind)
        step(model, optimizer)
        step(net, theirs)
        for name, edit in EDITS.items():
            for parameter, other in zip(model.parameters(), net.parameters(), strict=True):
                if name == "full tensor" and not other.ndim:
                    continue
                edit(optimizer.state, parameter)
                edit(theirs.state, other)
            case = f"{kind}, {name}"
            found, expected = by_name(model, optimizer), by_name(net, theirs)
            assert found.keys() == expected.keys(), case
            for parameter_name, values in expected.items():
                assert found[parameter_name].keys() == values.keys(), case
                for key, value in values.items():
                    assert torch.equal(found[parameter_name][key], value), f"{case}: {parameter_name}"
            step(model, optimizer)
            step(net, theirs)
            assert_same_bits(model, net, case)


def _read(zero3_size: int) -> None:
    for kind in OPTIMIZERS:
        (model, optimizer), (net, theirs) = sharded(kind, zero3_size), alone(kind)
        step(model, optimizer)
        step(net, theirs)
        assert len(optimizer.state) == 4 and set(optimizer.state) == set(model.parameters())
        for parameter, other in zip(model.parameters(), net.parameters(), strict=True):
            found, expected = optimizer.state[parameter], theirs.state[other]
            buffer, its = found["momentum_buffer"], expected["momentum_buffer"]
            assert list(found) == list(expected) and len(found) == 1 and found.get("other") is None
            assert (buffer.shape, buffer.numel(), buffer.dtype) == (its.shape, its.numel(), its.dtype), kind
            copies = [found | {"other": 1}, {"other": 1} | found, found.copy()]
            assert all(type(each) is dict and each["momentum_buffer"].shape == its.shape for each in copies), kind
            for function in (Tensor.norm, Tensor.mean, Tensor.sum, Tensor.max):
                torch.testing.assert_close(whole(function(buffer)), function(its))
        with pytest.raises(KeyError, match=r"no parameter that is this tensor of shape \[1\]"):
            optimizer.state[torch.zeros(1)]


@pytest.mark.parametrize(("world_size", "zero3_size"), MESHES)
@on_ranks()
def test_resets_edits_and_reads_of_the_state_are_those_of_one_process(
    rank: int, zero3_size: int, world_size: int
) -> None:
    _reset(zero3_size)
    _edit(zero3_size)
    _read(zero3_size)
