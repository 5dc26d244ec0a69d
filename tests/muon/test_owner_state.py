"""State of full parameters: on their owners only, by name for all ranks, and in checkpoints for any number of ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from tests.muon.test_owner_step import CASES as FLAT
from tests.muon.test_owner_step import Wide, matrices, owned_sgd, rows, shard_all
from tests.support.models import LayerwiseScaling, different, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

TOPOLOGIES = ((2, 1), (1, 1), (2, 2), (4, 2), (4, 1), (4, 4))
BATCHES = 4  # batches of a step, for any number of ranks


class Factored(Optimizer):
    """Divides by sums of squares along each dim, kept in a list, as SOAP keeps its matrices."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if (gradient := parameter.grad) is None:
                continue
            state = self.state[parameter]
            if not state:
                sums = [torch.zeros(size) for size in parameter.shape]
                state["factors"] = [[], *sums, (0, torch.zeros(())), None]
            _, *sums, (steps, total), _ = state["factors"]
            for dim, each in enumerate(sums):
                each.mul_(0.5).add_(
                    (gradient**2).transpose(0, dim).flatten(1).sum(1) if dim or gradient.ndim > 1 else 0
                )
            total.add_(gradient.abs().sum())
            state["factors"][-2] = (steps + 1, total)
            parameter.sub_(gradient / (1 + sum(each.sum() for each in sums) + total + steps), alpha=0.5)


CASES = {**FLAT, "state in lists": lambda model: [Factored(model.parameters())]}
NAMES = [name for name in ("Adafactor", "groups of one", "state in lists", "Muon, then AdamW") if name in CASES]


def train(model: nn.Module, optimizers: Iterable[Any], steps: Iterable[int]) -> None:
    """Train the same steps on any number of ranks, and in one process without ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if hasattr(model, "no_sync") else (0, 1)
    for step in steps:
        for batch in range(rank, BATCHES, world):
            (model(rows(batch, step)) * (world / BATCHES)).backward()
        update(*optimizers)


def flat(key: str, value: Any) -> dict[str, Tensor]:
    """Return the full tensors in a value, by key."""
    if isinstance(value, (list, tuple)):
        found = {f"{key} of": torch.tensor(len(value))}
        for index, item in enumerate(value):
            found |= flat(f"{key}.{index}", item)
        return found
    if isinstance(value, DTensor):
        return {key: value.full_tensor().clone()}
    return {} if value is None else {key: torch.as_tensor(value).clone()}


def whole_state(optimizer: layerzero.ShardedOptimizer) -> dict[str, Tensor]:
    """Return all full states by name, on every rank."""
    found = {}
    for name, values in optimizer.state_dict_by_name()["state"].items():
        for key, value in values.items():
            found |= flat(f"{name} {key}", value)
    return found


def state_alone(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            found |= flat(f"{names[parameter]} {key}", value)
    return found


def alone(name: str, steps: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    net = Wide()
    optimizers = CASES[name](net)
    train(net, optimizers, range(steps))
    return net, optimizers


def sharded(name: str, zero3_size: int) -> tuple[nn.Module, list[layerzero.ShardedOptimizer]]:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(zero3_size), units=Wide.UNITS)
    return model, shard_all(CASES[name](model), model)


def expect(model: nn.Module, optimizers: Iterable[Any], alone: tuple[nn.Module, list[Optimizer]], case: str) -> None:
    """Compare parameters and states with those of training in one process."""
    net, theirs = alone
    wrong = different(full_parameters(model), dict(net.named_parameters()))
    for ours, their in zip(optimizers, theirs, strict=True):
        wrong += different(whole_state(ours), state_alone(their, net))
    assert not wrong, f"{case}: {wrong}"


def put_back(
    model: nn.Module,
    optimizers: list[Any],
    alone: Callable[[int], tuple[nn.Module, list[Optimizer]]],
    train: Callable[[range], None],
    case: str,
) -> None:
    """Put states of two steps back by name after four steps, then those of three steps of one process by number."""
    kept = [copy.deepcopy(optimizer.state_dict_by_name()) for optimizer in optimizers]
    parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    train(range(2, 4))
    expect(model, optimizers, alone(4), case)
    for optimizer, state in zip(optimizers, kept, strict=True):
        optimizer.load_state_dict(state)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(parameters[key])
    expect(model, optimizers, alone(2), f"{case}, put back")
    net, theirs = alone(3)
    for optimizer, their in zip(optimizers, theirs, strict=True):
        optimizer.load_state_dict(their.state_dict())  # full values
    layerzero.load_full_state_dict(model, net.state_dict())
    expect(model, optimizers, alone(3), f"{case}, from one process")
    train(range(3, 4))
    expect(model, optimizers, alone(4), f"{case}, went on")


def _save(rank: int, path: str, zero3_size: int, name: str) -> None:
    model, optimizers = sharded(name, zero3_size)
    train(model, optimizers, range(2))
    expect(model, optimizers, alone(name, 2), "trained")
    for index, optimizer in enumerate(optimizers):
        checkpoint.save(f"{path}-{index}", model, optimizer)
    first, *others = optimizers
    checkpoint.save(path, model, first, {"others": [other.state_dict() for other in others]})


def _resume(rank: int, path: str, zero3_size: int, name: str) -> None:
    model, optimizers = sharded(name, zero3_size)
    train(model, optimizers, range(5, 6))  # has a state already, none of which may remain
    for index, optimizer in enumerate(optimizers):
        checkpoint.load(f"{path}-{index}", model, optimizer)
    case = f"D={dist.get_world_size()} S={zero3_size}"
    expect(model, optimizers, alone(name, 2), f"{case} loaded")
    train(model, optimizers, range(2, 4))
    expect(model, optimizers, alone(name, 4), f"{case} resumed")
    if len(optimizers) > 1:
        first, *others = optimizers
        extra = checkpoint.load(path, model, first)
        for other, state in zip(others, extra["others"], strict=True):
            other.load_state_dict(state)
        expect(model, optimizers, alone(name, 2), f"{case} loaded with the states of the others in extra")


# A file is cut by its ranks, for any optimizer: each is saved with both axes, some elsewhere.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "saved_on"),
    [*((name, (4, 2)) for name in NAMES), *itertools.product(("state in lists", NAMES[-1]), ((2, 2), (1, 1)))],
)
def test_a_checkpoint_of_whole_parameters_loads_on_any_topology(
    tmp_path: Path, name: str, saved_on: tuple[int, int]
) -> None:
    path = str(tmp_path / "step-2")
    run_ranks(_save, path, saved_on[1], name, world_size=saved_on[0])
    for world_size, zero3_size in TOPOLOGIES if name == "Adafactor" else TOPOLOGIES[:4]:
        if (world_size, zero3_size) != saved_on:
            run_ranks(_resume, path, zero3_size, name, world_size=world_size)


def _states(rank: int, zero3_size: int) -> None:
    for name in NAMES:
        model, optimizers = sharded(name, zero3_size)
        train(model, optimizers, range(2))
        put_back(model, optimizers, partial(alone, name), partial(train, model, optimizers), name)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "zero3_size"), [(2, 2), (4, 2), (2, 1)])
def test_states_by_name_and_of_one_process_can_be_put_back(world: int, zero3_size: int) -> None:
    run_ranks(_states, zero3_size, world_size=world)


@on_ranks()
def test_a_state_from_before_sharding_goes_to_the_owners(rank: int) -> None:
    source = Wide()
    name = NAMES[-1]
    optimizers = CASES[name](source)
    train(source, optimizers, range(2))
    model = layerzero.shard_model(source, mesh=mesh_of(2), units=Wide.UNITS)
    ours = shard_all(optimizers, model)
    expect(model, ours, alone(name, 2), "taken over")
    train(model, ours, range(2, 4))
    expect(model, ours, alone(name, 4), "went on")


class Keeping(LayerwiseScaling):
    """Keeps a value that is neither a tensor nor a number, as some packages do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["factors"] = [torch.ones(2), {"a": object()}]


def _objects(rank: int, path: str) -> None:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=Wide.UNITS)
    optimizer = layerzero.shard_optimizer(Keeping(model.parameters()), model, elementwise=False)
    train(model, [optimizer], range(2))
    with pytest.raises(TypeError, match=r"optimizer.state.[a-z.]*.factors.1.a is a object"):
        optimizer.state_dict_by_name()
    with pytest.raises((TypeError, RuntimeError), match=r"factors.1.a is a object"):
        checkpoint.save(path, model, optimizer)


def test_objects_in_the_state_of_whole_parameters_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_objects, str(tmp_path / "step"))


def _once(rank: int, zero3_size: int) -> tuple[int, int]:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(zero3_size), units=Wide.UNITS)
    optimizer = owned_sgd(model)
    train(model, [optimizer], range(1))
    held = layerzero.memory(model).measured["optimizer"]
    return held, sum(p.numel() for p in matrices(model))


@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_the_state_of_whole_parameters_exists_once_in_the_cluster(zero3_size: int) -> None:
    numel = sum(parameter.numel() for parameter in Wide().parameters())
    assert sum(held for held, _ in run_ranks(_once, zero3_size)) == 4 * numel
