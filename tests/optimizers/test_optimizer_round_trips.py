"""Optimizers with thresholds and with any state train, save and resume as in one process, or are refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.compatibility import kinds_that_need_full_params
from layerzero.optimizers.compatibility_trial import group_kind
from tests.support.models import Rule
from tests.support.surveying import survey_and_resume

CPU = torch.device("cpu")


class Updated(Rule):
    """Optimizer whose subclass computes the update from a gradient and the state of its parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def change(self, parameter: Tensor) -> Tensor:
        return self.update(parameter.grad, self.state[parameter])


class FactorsFrom16(Updated):
    """Stores the second moments of matrices by row and column if both sides are long enough, as AdafactorBigVision."""

    SIDE = 16

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        square = gradient.square() + 1e-6
        if gradient.ndim < 2 or min(gradient.shape) < self.SIDE:
            moments = {"moment": square}
        else:
            moments = {"rows": square.mean(1, keepdim=True), "columns": square.mean(0, keepdim=True)}
        for key, value in moments.items():
            state[key] = value if key not in state else state[key].lerp(value, 0.5)
        if "moment" in state:
            return gradient / state["moment"].sqrt()
        return gradient / (state["rows"] * state["columns"] / state["columns"].mean()).sqrt()


class FactorsFrom128(FactorsFrom16):
    SIDE = 128


class QuantizesFrom4096(Updated):
    """Stores momentum in 8 bits, with a scale for each block of 256 elements, if the parameter is large enough."""

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        moment = torch.zeros_like(gradient)
        if "scales" in state:
            blocks = state["bytes"].float().flatten().split(256)
            moment = torch.cat([block * scale for block, scale in zip(blocks, state["scales"], strict=True)])
        moment = state.get("moment", moment.view_as(gradient)).lerp(gradient, 0.5)
        if gradient.numel() < 4096:
            state["moment"] = moment
        else:
            blocks = moment.flatten().split(256)
            state["scales"] = torch.stack([block.abs().max() / 127 + 1e-9 for block in blocks])
            quantized = [(block / scale).round() for block, scale in zip(blocks, state["scales"], strict=True)]
            state["bytes"] = torch.cat(quantized).to(torch.int8).view_as(gradient)
        return moment


class Lists(Updated):
    """Stores several moments in a list, as AggMo, and a table of them."""

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["moments"] = [torch.zeros_like(gradient) for _ in range(3)]
            state["table"] = {"step": 0, "moment": torch.zeros_like(gradient)}
        for weight, moment in zip((0.25, 0.5, 1.0), [*state["moments"][1:], state["table"]["moment"]], strict=True):
            moment.lerp_(gradient, weight)
        state["table"]["step"] += 1
        return sum(state["moments"]) / state["table"]["step"] + state["table"]["moment"]


class NoneInState(Updated):
    """Has an entry that is None, and an attribute that torch's copy of an optimizer drops, as StableAdamW."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.weight = 0.5

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("compensation", None)
        state["moment"] = gradient * self.weight + state.get("moment", 0)
        return state["moment"] / state["moment"].norm().clamp(min=1e-3)  # needs full parameters


class FactorOfEachDim(Updated):
    """Divides by a factor for each dim, as Shampoo: a parameter without dims has none."""

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", torch.zeros(())) + 1
        state["moment"] = gradient.lerp(state["moment"], 0.5) if "moment" in state else gradient.clone()
        for dim in range(gradient.ndim):
            gradient = gradient / (1 + state["moment"].square().transpose(0, dim)[0].sum())
        return gradient


class CountsInAttribute(Updated):
    """Has a rate that depends on a count, which neither torch nor layerzero saves."""

    count = 0

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        self.count += 1
        return gradient / (1 + self.count // 8)


class StateOnParameter(Updated):
    """Keeps momentum in an attribute of each parameter, which neither torch nor layerzero saves."""

    def change(self, parameter: Tensor) -> Tensor:
        parameter.momentum = getattr(parameter, "momentum", 0) * 0.5 + parameter.grad
        return parameter.momentum


class ObjectInState(Updated):
    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["codec"] = object()
        return gradient


class QueueInState(Updated):
    """Has a container that is neither a list nor a table, as AdaShift."""

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("queue", deque([torch.zeros_like(gradient)])).append(gradient.clone())
        return state["queue"].popleft() + gradient


class FromSide(Updated):
    """Normalizes matrices with sides from a class attribute, which a test changes."""

    SIDE = 1000

    def update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm() if gradient.ndim == 2 and min(gradient.shape) >= self.SIDE else gradient


OUTCOMES = {
    FactorsFrom16: "whole",
    FactorsFrom128: "whole",
    QuantizesFrom4096: "whole",
    Lists: "on rows",
    NoneInState: "whole",
    FactorOfEachDim: "whole",
    CountsInAttribute: "refused",
    ObjectInState: "refused",
    StateOnParameter: "refused",
    QueueInState: "refused",
    torch.optim.Adafactor: "whole",
    torch.optim.NAdam: "on rows",
}


def test_an_optimizer_trains_and_resumes_on_any_ranks_as_in_one_process_or_is_refused(tmp_path: Path) -> None:
    names = {f"{kind.__module__}.{kind.__name__}": outcome for kind, outcome in OUTCOMES.items()}
    found = survey_and_resume(list(names), tmp_path, loads=((1, 1), (2, 2)))
    assert {name: text.split(":")[0] for name, text in found.items()} == names, found


def needs_full(kind: type[Optimizer], *shapes: tuple[int, ...], **settings: Any) -> bool:
    optimizer = kind([nn.Parameter(torch.ones(shape)) for shape in shapes or [(3, 2)]], **settings)
    kinds = kinds_that_need_full_params(optimizer, CPU)
    assert kinds in (set(), {group_kind(group) for group in optimizer.param_groups})
    return bool(kinds)


def test_sides_from_some_size_on_and_other_dims_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not needs_full(FromSide)
    assert not needs_full(FromSide, (2, 1, 2, 1, 2)), "other dims than in the trial"
    monkeypatch.setattr(FromSide, "SIDE", 100)
    assert needs_full(FromSide), "another attribute of the class"
    assert needs_full(FactorOfEachDim)
    monkeypatch.setattr(FactorOfEachDim, "update", lambda self, gradient, state: gradient if gradient.ndim else 0)
    assert not needs_full(FactorOfEachDim)
    assert needs_full(FactorOfEachDim, (3, 2), ()), "a parameter without dims"
