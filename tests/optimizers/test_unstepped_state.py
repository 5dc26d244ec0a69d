"""A parameter has no state before its first step, in every form of the optimizer's state, as in one process."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.support.models import OptionalBias, different, integer_batch, update, whole
from tests.support.ranks import mesh_of, on_ranks, run_ranks

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=2**-3, momentum=0.5, dampening=0.5, weight_decay=0.25),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=2**-3, t0=1),
    "Adam": lambda p: torch.optim.Adam(p, lr=2**-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=2**-3),
}
LOOSE = StateDictOptions(strict=False)  # torch refuses trainable parameters without state otherwise


def _pair(kind: str, zero3_size: int | None = None) -> tuple[OptionalBias, Any]:
    net = OptionalBias(2)
    if zero3_size is None:
        return net, OPTIMIZERS[kind](net.parameters())
    model = layerzero.shard_model(net, mesh=mesh_of(zero3_size), units=("units.0", "units.1"))
    return model, layerzero.shard_optimizer(OPTIMIZERS[kind](model.parameters()), model)


def _again(kind: str, model: nn.Module) -> Any:
    return layerzero.shard_optimizer(OPTIMIZERS[kind](model.parameters()), model)


def _step(model: nn.Module, optimizer: Optimizer, number: int, *, uses_own: bool = True) -> None:
    """Train on the same batch on all ranks."""
    inputs, targets = integer_batch(step=number)
    (model(inputs, uses_own=uses_own) * targets).sum().backward()
    update(optimizer)


def _everything(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    found = {f"model.{name}": whole(parameter) for name, parameter in model.named_parameters()}
    return found | {f"{key}.{entry}": whole(value) for key, values in state.items() for entry, value in values.items()}


def _alone(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return _everything(model, {names[parameter]: values for parameter, values in optimizer.state.items()})


def _ours(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    by_number = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    assert {names[number] for number in by_number} == optimizer.state_dict_by_name()["state"].keys()
    return _everything(model, optimizer.state_dict_by_name()["state"])


def _pass_on(form: str, model: nn.Module, optimizer: Any, kind: str, path: str) -> Any:
    """Return a new optimizer of the same model with the state of `optimizer`, which travels in the given form."""
    new = _again(kind, model)
    if form == "torch":
        set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, optimizer, options=LOOSE), options=LOOSE)
    elif form == "save":
        checkpoint.save(path, model, optimizer)
        checkpoint.load(path, model, new)
    elif form == "dcp":
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict_by_name()}, checkpoint_id=path)
        checkpoint.load_dcp(path, model, new)
    elif form == "full_state_dict":
        new.load_state_dict(optimizer.full_state_dict(rank0_only=False))
    else:
        new.load_state_dict(copy.deepcopy(getattr(optimizer, form)()))
    return new


FORMS = ("state_dict", "state_dict_by_name", "full_state_dict", "torch", "save", "dcp")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_a_state_from_before_the_first_step_is_passed_on_as_no_state(
    rank: int, tmp_path: Path, world_size: int
) -> None:
    world = dist.get_world_size()
    for kind in OPTIMIZERS:
        alone, plain = _pair(kind)
        for number in range(2):
            _step(alone, plain, number)
        for form in FORMS if kind == "SGD" else FORMS[:1]:
            model, optimizer = _pair(kind, min(2, world))
            new = _pass_on(form, model, optimizer, kind, f"{tmp_path}/{form}-{world}")
            for number in range(2):
                _step(model, new, number)
            assert not (wrong := different(_ours(model, new), _alone(alone, plain))), (kind, form, wrong)


def _programs(rank: int, folder: str, seeds: range) -> None:
    for seed in seeds:
        kind, draw = ("SGD", "Adam")[seed % 2], random.Random(seed)
        alone, plain = _pair(kind)
        model, optimizer = _pair(kind, draw.choice((1, 2)))
        kept: tuple[Any, Any] | None = None
        done: list[str] = []
        for number in range(60):
            done.append(draw.choice(("step", "step", "window", "freeze", "keep", "back", "reset", "ask", *FORMS)))
            uses_own = draw.random() < 0.02
            if done[-1] == "step":
                _step(alone, plain, number, uses_own=uses_own)
                _step(model, optimizer, number, uses_own=uses_own)
            elif done[-1] == "window":  # gradients of a part of a window that are dropped
                with layerzero.no_sync(model):
                    model(integer_batch(step=number)[0], uses_own=uses_own).sum().backward()
                optimizer.zero_grad()
            elif done[-1] == "freeze":
                for net in (alone, model):
                    net.units[0].bias.requires_grad_(not net.units[0].bias.requires_grad)
            elif done[-1] == "keep":
                kept = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
            elif done[-1] == "back" and kept is not None:
                plain.load_state_dict(copy.deepcopy(kept[0]))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="the loaded optimizer state has no entry for the frozen")
                    optimizer.load_state_dict(kept[1])
            elif done[-1] == "reset":
                plain.state.clear()
                optimizer.state.clear()
            elif done[-1] == "ask":
                get_optimizer_state_dict(model, optimizer)
            elif done[-1] in FORMS and (done[-1] != "torch" or model.units[0].bias.requires_grad):
                optimizer = _pass_on(done[-1], model, optimizer, kind, f"{folder}/{seed}-{number}")
            assert not (wrong := different(_ours(model, optimizer), _alone(alone, plain))), (seed, done, wrong)


def test_random_programs_have_the_same_state_as_in_one_process(tmp_path: Path) -> None:
    run_ranks(_programs, str(tmp_path), range(3), world_size=2)


@pytest.mark.slow
def test_more_random_programs_have_the_same_state_as_in_one_process(tmp_path: Path) -> None:
    run_ranks(_programs, str(tmp_path), range(3, 16), world_size=4)


def _texts(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in seen if "torch.distributed" in str(warning.message)]


def state_of(optimizer: Any, named: dict[str, Any]) -> dict[str, Any]:
    return {**optimizer.state_dict_by_name(), "state": named["state"]}


@on_ranks(world_size=2)
def test_what_torchs_functions_would_do_wrong_is_one_warning(rank: int, tmp_path: Path) -> None:
    model, optimizer = _pair("SGD", 2)
    full = StateDictOptions(full_state_dict=True)
    for act in (
        lambda: dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{tmp_path}/first"),
        lambda: get_optimizer_state_dict(model, optimizer, options=full),
        lambda: copy.deepcopy(get_optimizer_state_dict(model, optimizer)),
    ):
        texts = _texts(act)
        assert len(texts) == (rank == 0), texts
        assert all("has not stepped" in text and "Use layerzero.checkpoint.save" in text for text in texts)
    for number in range(2):
        _step(model, optimizer, number)
    frozen = model.units[0].bias.requires_grad_(False)
    state = get_state_dict(model, optimizer)[1]
    new = _again("SGD", model)
    for target, options in ((new, None), (optimizer, None), (_again("SGD", model), full)):
        kept = copy.deepcopy(state) if options is None else get_optimizer_state_dict(model, optimizer, options=full)
        texts = _texts(lambda: set_optimizer_state_dict(model, target, kept, options=options))  # noqa: B023
        assert len(texts) == (rank == 0), texts
        assert all("frozen parameters units.0.bias" in text and "load_dcp" in text for text in texts)
        assert frozen not in target.state, "torch has left it out"
        optimizer.load_state_dict(state_of(optimizer, state))
    path = f"{tmp_path}/frozen"
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, model, new)
    assert torch.equal(
        _ours(model, new)["units.0.bias.momentum_buffer"], whole(state["state"]["units.0.bias"]["momentum_buffer"])
    )


@on_ranks(world_size=2)
def test_a_first_step_with_a_learning_rate_of_zero_is_a_step(rank: int) -> None:
    """Take first steps with a learning rate of 0, which are no steps of torch's functions."""
    for assigns in (False, True):
        (alone, plain), (model, optimizer) = _pair("Adam"), _pair("Adam", 2)
        for number in range(3):
            inputs, targets = integer_batch(step=number)
            for net, each in ((alone, plain), (model, optimizer)):
                each.param_groups[0]["lr"] = number / 8
                (net(inputs, uses_own=True) * targets).sum().backward()
                for parameter in net.parameters() if assigns else ():
                    parameter.grad = parameter.grad.clone()
                update(each)
        assert not (wrong := different(_ours(model, optimizer), _alone(alone, plain))), wrong
    model, optimizer = _pair("Adam", 2)
    state = get_state_dict(model, optimizer)
    _step(model, optimizer, 0)
    assert all(values["step"] == 1 for values in optimizer.state_dict_by_name()["state"].values())
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    assert not optimizer.state


class CountsInGroups(torch.optim.SGD):
    """Counts its steps in its groups, as many optimizers do, and divides the learning rate by the count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * 2.0 ** -group["step"])
                    self.state[parameter]["last"] = parameter.grad.clone()


@on_ranks(world_size=2)
def test_torchs_functions_load_counts_in_groups_into_a_new_optimizer(rank: int, tmp_path: Path) -> None:
    def pair() -> tuple[OptionalBias, Any]:
        model = layerzero.shard_model(OptionalBias(2), mesh=mesh_of(2), units=("units.0", "units.1"))
        return model, layerzero.shard_optimizer(CountsInGroups(model.parameters(), lr=0.5), model, elementwise=True)

    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = pair()
        for number in range(4):
            _step(model, optimizer, number)
            if number == 1:
                states = get_state_dict(model, optimizer, options=options)
                dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=f"{tmp_path}/{flat}")
        other, new = pair()
        states = get_state_dict(other, new, options=options)
        assert "step" not in new.param_groups[0]
        if not flat:
            set_optimizer_state_dict(other, new, states[1])
            assert not new.state and "step" not in new.param_groups[0], "nothing was loaded"
        state = {"model": states[0], "optimizer": states[1]}
        dcp.load(state, checkpoint_id=f"{tmp_path}/{flat}")
        set_state_dict(
            other, new, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )
        for number in range(2, 4):
            _step(other, new, number)
        assert not (wrong := different(_ours(other, new), _ours(model, optimizer))), (flat, wrong)


def _recipe(rank: int, path: str) -> None:
    """Save with torch's functions an optimizer that has not stepped all parameters."""
    model, optimizer = _pair("SGD", 2)
    _step(model, optimizer, 0, uses_own=False)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    expected = _ours(model, optimizer)
    other, new = _pair("SGD", 1)
    fresh = get_state_dict(other, new)
    with pytest.raises(
        dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer\.state\.last"
    ):
        dcp.load({"model": fresh[0], "optimizer": fresh[1]}, checkpoint_id=path)
    with pytest.raises(RuntimeError, match="Missing optimizer state for parameter 'last'"):
        set_optimizer_state_dict(model, optimizer, states[1])
    checkpoint.load_dcp(path, other, new)
    assert not (wrong := different(_ours(other, new), expected)), wrong


def test_a_checkpoint_of_torchs_functions_says_which_parameters_have_state(tmp_path: Path) -> None:
    run_ranks(_recipe, str(tmp_path / "dcp"), world_size=2)
