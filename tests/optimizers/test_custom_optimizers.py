"""An optimizer's own code sees in ``step()`` the attributes of its parameters and its tables of parameters."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import layerzero
from layerzero import Offload
from tests.support.models import Rule, assert_close, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks


class Net(nn.Module):
    """Every gradient of the sum of its outputs for an input of ones is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.second = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(()))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(x).sum() + self.gain


class Scaled(Rule):
    """SGD whose rate is multiplied by the parameter's attribute `lr_mul`."""

    def factor(self, parameter: Tensor) -> float:
        return getattr(parameter, "lr_mul", 1.0)

    def change(self, parameter: Tensor) -> Tensor:
        return parameter.grad * self.factor(parameter)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(1, 3)).backward()
    update(optimizer)


def sharded(model: nn.Module, zero3_size: int, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():  # on the CPU, offloading has no effect
        warnings.filterwarnings("ignore", message="Offload.optimizer=True. on cpu")
        return layerzero.shard_model(model, mesh=mesh_of(zero3_size), units=["first", "second"], **settings)


def set_factors(model: nn.Module) -> None:
    model.first.weight.lr_mul = 10
    model.second.bias.lr_mul = 4
    model.gain.lr_mul = 2


def expect_factors(model: nn.Module, case: Any) -> None:
    expected = {"first.weight": 1 - 10.0, "second.weight": 0.0, "second.bias": 1 - 4.0, "gain": 1 - 2.0}
    found = {name: set(parameter.flatten().tolist()) for name, parameter in full_parameters(model).items()}
    assert found == {name: {value} for name, value in expected.items()}, case


def _attributes(zero3_size: int) -> None:
    for set_at in ("before shard_model", "after shard_model", "after shard_optimizer"):
        for settings, elementwise in (({}, None), ({"offload": Offload(optimizer=True)}, None), ({}, False)):
            model = Net()
            early = Scaled(model.parameters())
            if set_at == "before shard_model":
                set_factors(model)
            sharded(model, zero3_size, **settings)
            if set_at == "after shard_model":
                set_factors(model)
            optimizer = layerzero.shard_optimizer(
                early if elementwise is None else Scaled(model.parameters()), model, elementwise=elementwise
            )
            if set_at == "after shard_optimizer":
                set_factors(model)
            step(model, optimizer)
            expect_factors(model, (set_at, settings, elementwise))
            del model.gain.lr_mul
            step(model, optimizer)
            assert full_parameters(model)["gain"] == -2, "a deleted attribute has no effect"


class Holder:
    def __init__(self, table: Any) -> None:
        self.table = table


# By kind of table: a function that makes a table of factors, and one that finds a parameter's factor in the table.
TABLES: dict[str, tuple[Callable[[dict[Tensor, float]], Any], Callable[[Any, Tensor], float]]] = {
    "by parameter": (dict, lambda table, p: table.get(p, 1.0)),
    "by id": (lambda factors: {id(p): f for p, f in factors.items()}, lambda table, p: table.get(id(p), 1.0)),
    "default": (lambda factors: defaultdict(lambda: 1.0, factors), lambda table, p: table[p]),
    "weak": (WeakIdKeyDictionary, lambda table, p: table.get(p, 1.0)),
    "counter": (Counter, lambda table, p: table[p] or 1.0),
    "nested": (
        lambda factors: {"first": [{"second": factors}]},
        lambda table, p: table["first"][0]["second"].get(p, 1.0),
    ),
    "set": (
        lambda factors: {factor: {p for p, f in factors.items() if f == factor} for factor in factors.values()},
        lambda table, p: next((factor for factor, chosen in table.items() if p in chosen), 1.0),
    ),
    "ids": (
        lambda factors: [(f, frozenset(id(p) for p, g in factors.items() if f == g)) for f in factors.values()],
        lambda table, p: next((factor for factor, chosen in table if id(p) in chosen), 1.0),
    ),
    "lists": (
        lambda factors: (list(factors), list(factors.values())),
        lambda table, p: next((factor for each, factor in zip(*table, strict=True) if each is p), 1.0),
    ),
    "of an object": (Holder, lambda table, p: table.table.get(p, 1.0)),
    "values": (
        lambda factors: {str(index): (p, factor) for index, (p, factor) in enumerate(factors.items())},
        lambda table, p: next((factor for each, factor in table.values() if each is p), 1.0),
    ),
}


class Looked(Scaled):
    """SGD whose rates are multiplied by the factors in a table."""

    def __init__(self, params: Iterable[Any], kind: str, table: Any = None) -> None:
        super().__init__(params)
        self.kind = kind
        if table is not None:
            self.table = table

    def factor(self, parameter: Tensor) -> float:
        table = getattr(self, "table", None) or self.param_groups[0].get("table") or self.state.get("table")
        return 1.0 if table is None else TABLES[self.kind][1](table, parameter)


def _factors(model: nn.Module) -> dict[Tensor, float]:
    return {model.first.weight: 10.0, model.second.bias: 4.0, model.gain: 2.0}


CASES = (
    "built before",
    "table from before",
    "built after",
    "in a group",
    "in the state",
    "owners",
    "assigned later",
    "changed later",
)


def _build(case: str, kind: str, model: nn.Module, early: dict[str, Any]) -> Any:
    if case == "built before":
        return layerzero.shard_optimizer(early["optimizer"], model, elementwise=True)
    make = TABLES[kind][0]
    tables = {
        "table from before": early["table"],
        "changed later": make({}),
        "assigned later": None,
        "in the state": None,
    }
    table = tables[case] if case in tables else make(_factors(model))
    groups: Any = [{"params": list(model.parameters()), "table": table}] if case == "in a group" else model.parameters()
    inner = Looked(groups, kind, None if case == "in a group" else table)
    if case == "in the state":
        inner.state["table"] = make(_factors(model))
    optimizer = layerzero.shard_optimizer(inner, model, elementwise=case != "owners")
    if case == "changed later" and isinstance(optimizer.table, dict):
        optimizer.table.update(make(_factors(model)))
    elif case in ("changed later", "assigned later"):
        optimizer.table = make(_factors(model))
    return optimizer


def _tables(zero3_size: int) -> None:
    for kind, (make, find) in TABLES.items():
        model = Net()
        early = {"table": make(_factors(model)), "optimizer": Looked(model.parameters(), kind, make(_factors(model)))}
        sharded(model, zero3_size)
        for case in CASES:
            if (kind, case) == ("weak", "table from before"):
                continue  # its keys have been freed
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            optimizer = _build(case, kind, model, early)
            step(model, optimizer)
            expect_factors(model, f"{kind}, {case}")
            table = getattr(optimizer, "table", None) or optimizer.param_groups[0].get("table")
            table = table or optimizer.state["table"]
            found = {name: find(table, parameter) for name, parameter in model.named_parameters()}
            expected = {"first.weight": 10.0, "second.weight": 1.0, "second.bias": 4.0, "gain": 2.0}
            assert found == expected, f"{kind}, {case}: read between steps"


class Chosen(Scaled):
    """Divides the updates of chosen parameters by the norms of their gradients, which needs the full parameters."""

    def __init__(self, params: Iterable[Any], kind: str) -> None:
        super().__init__(params)
        self.kind, self.chosen = kind, set()

    def factor(self, parameter: Tensor) -> float:
        chosen = {
            "attribute": lambda: getattr(parameter, "is_chosen", False),
            "required attribute": lambda: parameter.role == "matrix",
            "set": lambda: parameter in self.chosen,
            "ids": lambda: id(parameter) in self.chosen,
        }[self.kind]
        return 1 / (1 + parameter.grad.norm()) if chosen() else 1.0


def _choose(zero3_size: int) -> None:
    for kind in ("attribute", "required attribute", "set", "ids"):
        for is_early in (True, False):
            net, model = Net(), Net()
            theirs, optimizer = Chosen(net.parameters(), kind), Chosen(model.parameters(), kind)
            if not is_early:
                sharded(model, zero3_size)
                optimizer = Chosen(model.parameters(), kind)
            for each, its_optimizer in ((net, theirs), (model, optimizer)):
                for index, parameter in enumerate(each.parameters()):
                    parameter.role, parameter.label = "matrix" if parameter.ndim == 2 else "other", str(index)
                each.second.weight.is_chosen = True
                its_optimizer.chosen.add(each.second.weight if kind == "set" else id(each.second.weight))
            if is_early:
                sharded(model, zero3_size)
            optimizer = layerzero.shard_optimizer(optimizer, model)
            assert optimizer.has_owners, f"{kind}: the trial has seen that some parameters are updated in full"
            step(model, optimizer)
            step(net, theirs)
            assert_close(full_parameters(model), dict(net.named_parameters()), kind)


class Masked(Rule):
    """SGD whose gradients are multiplied by tensors in a table, and which counts steps in a table."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.masks: dict[Tensor, Tensor] = {p: torch.full_like(p, 2.0) for p in self.param_groups[0]["params"]}
        self.counts: dict[Tensor, int] = {}

    def change(self, parameter: Tensor) -> Tensor:
        self.counts[parameter] = self.counts.get(parameter, 0) + 1
        return parameter.grad * self.masks[parameter]


def _masked(zero3_size: int) -> None:
    model = sharded(Net(), zero3_size)
    optimizer: Any = layerzero.shard_optimizer(Masked(model.parameters()), model, elementwise=True)
    step(model, optimizer)
    with torch.no_grad():
        optimizer.masks[model.gain].fill_(4.0)
    step(model, optimizer)
    found = {name: parameter.unique().tolist() for name, parameter in full_parameters(model).items()}
    assert found == {"first.weight": [-3.0], "second.weight": [-3.0], "second.bias": [-3.0], "gain": [-5.0]}
    assert optimizer.counts == dict.fromkeys(model.parameters(), 2), "a table that the steps fill"
    assert optimizer.masks[model.first.weight].full_tensor().eq(2.0).all() and model.gain in optimizer.masks


@pytest.mark.parametrize(("world_size", "zero3_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@on_ranks()
def test_a_step_and_a_trial_see_attributes_and_tables_of_parameters(
    rank: int, zero3_size: int, world_size: int
) -> None:
    _attributes(zero3_size)
    _tables(zero3_size)
    _choose(zero3_size)
    _masked(zero3_size)


class Replacing(Masked):
    """SGD that replaces the tensors in its table."""

    def change(self, parameter: Tensor) -> Tensor:
        self.masks[parameter] = self.masks[parameter] * 2
        return super().change(parameter)


@on_ranks(world_size=2)
def test_a_tensor_that_a_step_replaces_is_freed(rank: int) -> None:
    model = sharded(Net(), 2)
    optimizer: Any = layerzero.shard_optimizer(Replacing(model.parameters()), model, elementwise=True)
    replaced = weakref.ref(optimizer.masks[model.gain])
    step(model, optimizer)
    gc.collect()
    assert replaced() is None
    assert full_parameters(model)["gain"].unique().tolist() == [-3.0], "the mask was doubled"


OUTSIDE: dict[Tensor, float] = {}


class Outside(Scaled):
    """SGD whose rates are multiplied by factors that it does not have itself."""

    def factor(self, parameter: Tensor) -> float:
        return OUTSIDE.get(parameter, 1.0)


class WithMasks(Rule):
    """SGD whose gradients are multiplied by attributes of parameters."""

    def change(self, parameter: Tensor) -> Tensor:
        return parameter.grad * parameter.mask


@on_ranks(world_size=2)
def test_tables_outside_of_the_optimizer_and_tensors_in_attributes_have_a_way_out(rank: int) -> None:
    model = sharded(Net(), 2)
    OUTSIDE.update(_factors(model))
    step(model, layerzero.shard_optimizer(Outside(model.parameters()), model, elementwise=True))
    assert full_parameters(model)["gain"] == 0.0, "the factor 2 is not found"
    model.first.weight.mask = torch.ones_like(model.first.weight)
    optimizer = layerzero.shard_optimizer(WithMasks([model.first.weight]), model, elementwise=True)
    with pytest.raises(RuntimeError, match=r"mul mixes a plain tensor with parameter 'first\.weight'"):
        step(model, optimizer)
