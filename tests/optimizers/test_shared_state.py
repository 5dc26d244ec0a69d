"""State under keys that are not parameters, as MADGRAD keeps its step count, in every form of the optimizer's state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.support.models import update, whole
from tests.support.ranks import mesh_of, on_ranks, run_ranks


class Counting(Optimizer):
    """Divides the learning rate by the number of steps, which it counts in four ways under keys of its own."""

    def __init__(self, params: Any, lr: float = 2**-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        count = int(self.state["k"]) + int(self.state[-1].get("number", 0)) + int(self.state["nested"].get((1, 2), 0))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * 2**-count)
                    self.state[parameter]["last"] = parameter.grad.clone()
        self.state["k"] += 1
        self.state[-1]["number"] = self.state[-1].get("number", 0) + 1
        self.state["nested"][1, 2] = self.state["nested"].get((1, 2), torch.zeros(())) + 1


def _net() -> nn.Linear:
    net = nn.Linear(3, 5, bias=False)
    nn.init.ones_(net.weight)
    return net


def _pair(zero3_size: int, elementwise: bool = True) -> tuple[nn.Module, Any]:
    model = layerzero.shard_model(_net(), mesh=mesh_of(zero3_size))
    return model, layerzero.shard_optimizer(Counting(model.parameters()), model, elementwise=elementwise)


def _train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        update(optimizer)


def _weight(model: nn.Module) -> Tensor:
    return whole(model.weight)


def _copied_by(form: str, source: tuple[nn.Module, Any], target: tuple[nn.Module, Any], path: str) -> None:
    """Copy the weights and the optimizer state of `source` to `target` in the given form."""
    (model, optimizer), (other, its_optimizer) = source, target
    if form in ("save", "save_async"):
        pending = getattr(checkpoint, form)(path, model, optimizer)
        if pending is not None:
            pending.wait()
        checkpoint.load(path, other, its_optimizer)
        return
    if form == "dcp":
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict_by_name()}, checkpoint_id=path)
        checkpoint.load_dcp(path, other, its_optimizer)
        return
    layerzero.load_full_state_dict(other, layerzero.full_state_dict(model))
    if form == "full":
        its_optimizer.load_state_dict(optimizer.full_state_dict(rank0_only=False))
    else:
        its_optimizer.load_state_dict(copy.deepcopy(getattr(optimizer, form)()))


FORMS = ("save", "save_async", "dcp", "state_dict", "state_dict_by_name", "full")


@pytest.mark.parametrize("zero3_size", [1, 2])
@on_ranks(world_size=2)
def test_every_form_of_the_state_has_what_is_under_other_keys(rank: int, tmp_path: Path, zero3_size: int) -> None:
    alone = _net()
    plain = Counting(alone.parameters())
    _train(alone, plain, 4)
    for elementwise in (True, False):
        for form in FORMS[: len(FORMS) if elementwise else 2]:
            source, target = _pair(zero3_size, elementwise), _pair(zero3_size, elementwise)
            _train(*source, 2)
            if form == "save_async":  # into an optimizer that has stepped
                _train(*target, 3)
            if form == "dcp":  # torch writes keys as text, and tensors into tensors
                source[1].inner.state.pop(-1), source[1].inner.state["nested"].clear()
                source[1].inner.state["k"] *= 3
            _copied_by(form, source, target, f"{tmp_path}/{form}-{elementwise}-{zero3_size}")
            if form != "dcp":
                assert target[1].state[-1] == {"number": 2} and target[1].state["nested"] == {(1, 2): torch.tensor(2.0)}
                _train(*target, 2)
                assert torch.equal(_weight(target[0]), alone.weight), form
            assert target[1].state["k"].tolist() == ([6] if form == "dcp" else [4])


def _save(rank: int, path: str) -> None:
    model, optimizer = _pair(2)
    _train(model, optimizer, 2)
    checkpoint.save(path, model, optimizer)


def _resume(rank: int, path: str) -> Tensor:
    model, optimizer = _pair(1)
    checkpoint.load(path, model, optimizer)
    _train(model, optimizer, 2)
    return _weight(model)


def test_a_checkpoint_loads_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    alone = _net()
    _train(alone, Counting(alone.parameters()), 4)
    run_ranks(_save, str(tmp_path / "saved"), world_size=2)
    for world_size in (1, 4):
        (found, *_) = run_ranks(_resume, str(tmp_path / "saved"), world_size=world_size)
        assert torch.equal(found, alone.weight), world_size


@on_ranks(world_size=2)
def test_other_keys_are_where_torch_has_them_and_a_rollback_restores_them(rank: int) -> None:
    """Compare the forms with those of one process, load the plain state, and go back in the running process."""
    alone, (model, optimizer) = _net(), _pair(2)
    plain = Counting(alone.parameters())
    for net, each in ((alone, plain), (model, optimizer)):
        _train(net, each, 2)
    expected = plain.state_dict()["state"]
    assert optimizer.state_dict()["state"].keys() == expected.keys() == {0, "k", -1, "nested"}
    assert optimizer.state_dict_by_name()["state"].keys() == {"weight", "k", -1, "nested"}
    assert optimizer.full_state_dict(rank0_only=False)["state"]["k"].tolist() == [2]
    assert set(optimizer.state) - {model.weight} == {"k", -1, "nested"} and optimizer.state["k"].tolist() == [2]
    assert layerzero.memory(model)
    for net, each in ((alone, plain), (model, optimizer)):
        with pytest.raises(KeyError, match="k"):  # torch expects keys to be parameters
            get_optimizer_state_dict(net, each)
    kept = copy.deepcopy((plain.state_dict(), optimizer.state_dict(), _weight(model)))
    _train(alone, plain, 2)
    for state in (kept[1], kept[0]):  # of this optimizer, and of the plain one
        _train(model, optimizer, 1)
        optimizer.load_state_dict(state)
        layerzero.load_full_state_dict(model, {"weight": kept[2]})
        _train(model, optimizer, 2)
        assert torch.equal(_weight(model), alone.weight)
    assert kept[1]["state"]["k"].tolist() == [2], "the state that was loaded does not follow the optimizer"
    optimizer.load_state_dict({**kept[1], "state": {}})
    assert not len(optimizer.state), "as in torch, a load replaces all state"
    optimizer.state["weight"] = 1
    with pytest.raises(ValueError, match="state under 'weight', the name of a parameter"):
        optimizer.state_dict_by_name()
    del optimizer.state["weight"]
    optimizer.state[0] = 1
    _train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"equals the number of a parameter.*state_dict_by_name"):
        optimizer.state_dict()


def _own_values(rank: int, path: str) -> None:
    model, optimizer = _pair(2)
    _train(model, optimizer, 1)
    optimizer.state["rows"] = torch.full((2,), float(rank))
    with pytest.raises(ValueError, match=r"optimizer\.shared_state\.rows"):
        checkpoint.save(path, model, optimizer)
    assert dist.get_rank() == rank


def test_values_that_differ_between_ranks_are_not_saved_as_those_of_the_first(tmp_path: Path) -> None:
    run_ranks(_own_values, str(tmp_path / "saved"), world_size=2)
