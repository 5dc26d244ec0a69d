"""Optimizer states in checkpoints: all that an optimizer keeps comes back, and an entry of another kind is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.support.checkpointing import everything, train
from tests.support.damaging import sign
from tests.support.models import IntegerNet, different, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks

State = dict[str, Any]


def _state(entry: str, value: Any, name: str = "head.weight") -> Callable[[State], None]:
    return lambda optimizer: optimizer["state"][name].__setitem__(entry, value)


def _group(**changes: Any) -> Callable[[State], None]:
    return lambda optimizer: optimizer["param_groups"][0].update(changes)


REFUSED: dict[str, tuple[Callable[[State], None], str]] = {
    "lr": (_group(lr="boom"), "lr of parameter group 0 in the optimizer: expected a number, .* a str: 'boom'"),
    "lr list": (
        _group(lr=[0.1]),
        "lr of parameter group 0 .* expected a number, but the checkpoint has a list of values",
    ),
    "betas": (_group(betas=0.9), "betas of parameter group 0 .* expected a list of values, .* a number: 0.9"),
    "maximize": (_group(maximize="no"), "maximize of parameter group 0 .* expected a number, .* a str: 'no'"),
    "rows": (_group(eps={"$tensor": "model.head.weight"}), "eps of parameter group 0 .* the checkpoint has a tensor"),
    "number": (_state("exp_avg", 0.5), "exp_avg of head.weight .*: expected a tensor of the .*, .* has a number"),
    "text": (_state("exp_avg", "x"), "exp_avg of head.weight .* the checkpoint has a str"),
    "of a bias": (_state("exp_avg", 1, "head.bias"), "exp_avg of head.bias .*: expected a tensor"),
    "other shape": (
        _state("exp_avg", {"$sharded": "optimizer.state.first.weight.exp_avg", "like": "first.weight"}),
        r"exp_avg of head.weight in the optimizer: expected shape \[3, 6\]",
    ),
}
ACCEPTED: dict[str, Callable[[State], None]] = {
    "as it was": lambda optimizer: None,
    "whole lr": _group(lr=1),
    "true": _group(maximize=0, eps=1e-8, amsgrad=False),
    "more": _group(initial_lr=0.5, schedule="cosine"),
    "list of betas": _group(betas=[0.5, 0.75]),
    "number of steps": _state("step", 3),
    "more states": _state("seen", 7),
    "never stepped": lambda optimizer: optimizer["state"].__delitem__("head.weight"),
    "no state": lambda optimizer: optimizer["state"].__setitem__("head.weight", {}),
}


def _adam(seed: int = 1, **settings: Any) -> tuple[nn.Module, Optimizer]:
    model = layerzero.shard_model(integer_net(seed), mesh=mesh_of(1), units=IntegerNet.UNITS)
    return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2**-4, **settings), model)


def _judged(rank: int, folder: Path) -> None:
    content = json.loads((folder / "contents.json").read_text())
    model, optimizer = _adam()
    train(model, optimizer, range(1))
    before, group = everything(model, optimizer), copy.deepcopy({**optimizer.param_groups[0], "params": None})

    def rewrite(change: Callable[[State], None]) -> None:
        changed = copy.deepcopy(content)
        change(changed["document"]["optimizer"])
        (folder / "contents.json").write_text(json.dumps(changed))
        sign(folder)

    for case, (change, said) in REFUSED.items():
        rewrite(change)
        with pytest.raises(ValueError, match=said):
            checkpoint.load(folder, model, optimizer)
        assert not different(everything(model, optimizer), before), case
        assert {**optimizer.param_groups[0], "params": None} == group, case
        with pytest.warns(UserWarning, match="skipped the entries that do not match"):
            checkpoint.load(folder, model, optimizer, strict=False)
        train(model, optimizer, range(1))  # the loaded state can be stepped
        model, optimizer = _adam()
        train(model, optimizer, range(1))
    for case, change in ACCEPTED.items():
        rewrite(change)
        other, its_optimizer = _adam()
        checkpoint.load(folder, other, its_optimizer)
        assert its_optimizer.param_groups[0]["lr"] == (1 if case == "whole lr" else 2**-4), case
        train(other, its_optimizer, range(1))
        if case == "number of steps":  # a number would not advance
            assert its_optimizer.state_dict_by_name()["state"]["head.weight"]["step"].item() == 4


def test_an_entry_of_another_kind_is_refused_by_name(intact: Path, tmp_path: Path) -> None:
    run_ranks(_judged, Path(shutil.copytree(intact, tmp_path / "one")), world_size=1)


class Odd(Optimizer):
    """Optimizer with different states for matrices and the rest, and a string; it draws random numbers."""

    def __init__(self, params: Any, *, limit: float | None = None) -> None:
        super().__init__(params, {"lr": 0.5, "limit": limit})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state and p.ndim > 1:
                    state |= {"kind": "matrix", "mean": torch.zeros_like(p)}
                elif not state:
                    state |= {"kind": "vector", "count": 0}
                if p.ndim > 1:
                    state["mean"] = (state["mean"] + p.grad) / 2
                else:
                    state["count"] += 1
                p.sub_(p.grad + torch.rand(()) * 0, alpha=group["lr"])


def _words(optimizer: Optimizer) -> list[str]:
    """Remove the strings from the state and return them, so that the rest can be compared as tensors."""
    return [values.pop("kind", "") for values in optimizer.state.values()]


@pytest.mark.slow
@on_ranks(world_size=2)
def test_whatever_an_optimizer_keeps_comes_back(rank: int, tmp_path: Path) -> None:
    """Load valid but unusual states, each into an optimizer that has stepped and one that has not."""
    cases: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], dict[str, Any]]] = {
        "amsgrad on": (torch.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
        "amsgrad off": (torch.optim.AdamW, {"amsgrad": False}, {"amsgrad": True}),
        "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5}, {"lr": 0.5}),
        "no momentum": (torch.optim.SGD, {"lr": 0.5}, {"lr": 0.5, "momentum": 0.5}),
        "fused": (torch.optim.AdamW, {"fused": True}, {"foreach": True}),
        "single": (torch.optim.AdamW, {"foreach": True}, {"foreach": False, "fused": False}),
        "tensor lr": (torch.optim.AdamW, {"lr": 0.5}, {"lr": torch.tensor(0.25)}),
        "Adagrad": (torch.optim.Adagrad, {}, {"lr": 0.5}),
        "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {}),
        "Rprop": (torch.optim.Rprop, {}, {}),
        "ASGD": (torch.optim.ASGD, {}, {}),
        "NAdam": (torch.optim.NAdam, {}, {}),
        "Odd": (Odd, {"limit": 0.5}, {"limit": None}),
        "odder": (Odd, {"limit": None}, {"limit": 0.5}),
    }
    for number, (case, (kind, saved, here)) in enumerate(cases.items()):
        late = bool(number % 2)  # a parameter has had no gradient
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
        model.shift.requires_grad_(not late)
        optimizer = layerzero.shard_optimizer(kind(model.parameters(), **saved), model)
        train(model, optimizer, range(1))
        path = tmp_path / f"{case}-{late}"
        checkpoint.save(path, model, optimizer)
        words = _words(optimizer)
        for stepped in (False, True):
            other = layerzero.shard_model(integer_net(1), mesh=mesh_of(1), units=IntegerNet.UNITS)
            its_optimizer = layerzero.shard_optimizer(kind(other.parameters(), **here), other)
            if stepped:
                train(other, its_optimizer, range(1))
            random = torch.get_rng_state()
            checkpoint.load(path, other, its_optimizer)
            assert torch.equal(torch.get_rng_state(), random), case
            assert _words(its_optimizer) == words, case
            wrong = different(everything(other, its_optimizer), everything(model, optimizer))
            assert not wrong, f"{case} late={late} stepped={stepped}: {wrong}"
            train(other, its_optimizer, range(1))


@on_ranks(world_size=1)
def test_a_buffer_that_is_none_stays_none(rank: int, tmp_path: Path) -> None:
    """Load a state of older versions of SGD, which keep None before the first step."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(1), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model)
    train(model, optimizer, range(1))
    for values in optimizer.state.values():
        values["momentum_buffer"] = None
    checkpoint.save(tmp_path / "one", model, optimizer)
    checkpoint.load(tmp_path / "one", model, optimizer)
    assert all(values["momentum_buffer"] is None for values in optimizer.state.values())
    train(model, optimizer, range(1))
