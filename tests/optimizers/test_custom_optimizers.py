"""An optimizer's own code sees in ``step()`` the attributes of its parameters and its tables of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from tests.support.models import full_parameters
from tests.support.ranks import mesh_of, run_ranks

# (ranks, zero3_size)
MESHES = [(1, 1), (2, 1), (2, 2), (4, 2)]


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


class Scaled(Optimizer):
    """SGD whose rate is multiplied by the parameter's attribute `lr_mul`."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self, parameter: Tensor) -> float:
        return getattr(parameter, "lr_mul", 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor(parameter))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(1, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(model: nn.Module, zero3_size: int, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():  # on the CPU, offloading has no effect
        warnings.filterwarnings("ignore", message="offload_optimizer=True on cpu")
        return layerzero.shard_model(model, mesh=mesh_of(zero3_size), units=["first", "second"], **settings)


def set_factors(model: nn.Module) -> None:
    model.first.weight.lr_mul = 10
    model.second.bias.lr_mul = 4
    model.gain.lr_mul = 2


def expect_factors(model: nn.Module, case: Any) -> None:
    expected = {"first.weight": 1 - 10.0, "second.weight": 0.0, "second.bias": 1 - 4.0, "gain": 1 - 2.0}
    found = {name: set(parameter.flatten().tolist()) for name, parameter in full_parameters(model).items()}
    assert found == {name: {value} for name, value in expected.items()}, case


def _attributes(rank: int, zero3_size: int) -> None:
    for set_at in ("before shard_model", "after shard_model", "after shard_optimizer"):
        for settings, elementwise in (({}, None), ({"offload_optimizer": True}, None), ({}, False)):
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


@pytest.mark.parametrize(("world_size", "zero3_size"), MESHES)
def test_a_step_sees_attributes_of_parameters_whenever_they_were_set(world_size: int, zero3_size: int) -> None:
    run_ranks(_attributes, zero3_size, world_size=world_size)
