"""Optimizers that need full parameters: the owner rank updates each one as one process would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import BOTH_SHARED_EXHAUSTIVE, mesh_of, run_ranks

pytestmark = pytest.mark.slow

GRIDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # D, S


class Wide(nn.Module):
    """Units side by side whose gradients are small integers for any weights: exact for any optimizer."""

    UNITS = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.a, self.b = nn.Linear(6, 9), nn.Linear(6, 4)
        self.c, self.d = nn.Linear(6, 16, bias=False), nn.Linear(6, 9)
        fill_with_integers(self)

    def forward(self, x: Tensor, use: str = "abcd") -> Tensor:
        """Return the sum of the outputs of some units, each element times an integer."""
        total = (x * self.scale).sum()
        for name in use:
            y = getattr(self, name)(x)
            total = total + (y * (torch.arange(y.numel()).view(y.shape) % 5 - 2)).sum()
        return total


def fill_with_integers(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))


def rows(rank: int, step: int, width: int = 6) -> Tensor:
    return torch.randint(-2, 3, (4, width), generator=torch.Generator().manual_seed(10 * step + rank)).float()


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


def others(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim != 2]


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Grouped(Optimizer):
    """Scales matrices by their norms and leaves other parameters, in groups of one optimizer that counts steps."""

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {"lr": 0.1, "by_norm": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                    moment.mul_(0.5).add_(parameter.grad)
                    by = moment.norm() if group["by_norm"] else 1.0
                    parameter.sub_(moment / by, alpha=group["lr"] / group["step"])


def grouped(model: nn.Module) -> list[Optimizer]:
    return [Grouped([{"params": matrices(model), "by_norm": True}, {"params": others(model), "lr": 0.25}])]


CASES: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.1)],
    "Adafactor, then AdamW": lambda model: [torch.optim.Adafactor(matrices(model)), adamw(others(model))],
    "groups of one": grouped,
}
if hasattr(torch.optim, "Muon"):
    CASES["Muon, then AdamW"] = lambda model: [torch.optim.Muon(matrices(model), lr=0.1), adamw(others(model))]
    CASES["AdamW, then Muon"] = lambda model: [adamw(others(model)), torch.optim.Muon(matrices(model), lr=0.1)]
    CASES["two of Muon"] = lambda model: [torch.optim.Muon(matrices(model)[at::2], lr=0.1) for at in (0, 1)]


def shard_all(optimizers: list[Optimizer], model: nn.Module) -> list[layerzero.ShardedOptimizer]:
    return [layerzero.shard_optimizer(optimizer, model) for optimizer in optimizers]


def used_in(step: int) -> str:
    """Return the units that nodes with even numbers use in a step. The others skip the last one: see `step_of`."""
    return ("abcd", "abc", "acd", "abcd")[step]


def step_of(
    model: nn.Module, optimizers: list[Optimizer], ranks: Iterable[int], step: int, share: float, zero3_size: int
) -> None:
    for rank in ranks:
        use = used_in(step)
        (model(rows(rank, step), use[:-1] if rank // zero3_size % 2 else use) * share).backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _like_one_process(rank: int, world: int, zero3_size: int, name: str) -> None:
    mesh, build = mesh_of(zero3_size), CASES[name]
    for accumulation, units, dtype in (("sharded", Wide.UNITS, None), ("full", None, torch.bfloat16)):
        net = Wide()
        theirs = build(net)
        model = layerzero.shard_model(
            Wide(),
            mesh=mesh,
            accumulation=accumulation,
            units=units,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        )
        ours = shard_all(build(model), model)
        for step in range(4):
            step_of(model, ours, [rank], step, 1.0, zero3_size)
            step_of(net, theirs, range(world), step, 1.0 / world, zero3_size)
            wrong = different(full_parameters(model), dict(net.named_parameters()))
            assert not wrong, f"{name} D={world} S={zero3_size} {units} step {step}: {wrong}"
        for optimizer, their in zip(ours, theirs, strict=True):
            for group, alone in zip(optimizer.param_groups, their.param_groups, strict=True):
                assert group.get("step") == alone.get("step"), "counted once a step, on every rank"


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("world", "zero3_size"),
    [pytest.param(*grid, marks=[pytest.mark.exhaustive] * (grid in [(2, 2), (4, 4)])) for grid in GRIDS],
)
def test_matrix_optimizers_have_the_bits_of_one_process(world: int, zero3_size: int, name: str) -> None:
    run_ranks(_like_one_process, world, zero3_size, name, world_size=world)


def owned_sgd(model: nn.Module) -> layerzero.ShardedOptimizer:
    """Return SGD that has to step full parameters."""
    return layerzero.shard_optimizer(exact_sgd(model.parameters()), model, elementwise=False)


def _follow_one_process(rank: int, world: int, zero3_size: int) -> None:
    for mode in ("sharded", "full", "local"):
        for units in (IntegerNet.UNITS, None):
            case = f"{mode} {units}"
            net = integer_net()
            theirs = exact_sgd(net.parameters())
            model = layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=units, accumulation=mode)
            held = dict(model.named_parameters())
            optimizer = owned_sgd(model)
            assert all(held[name] is p for name, p in model.named_parameters()), "the same objects"
            for step in range(4):
                batches = []
                for micro_batch in range(2):
                    with layerzero.no_sync(model) if micro_batch == 0 and step != 2 else nullcontext():
                        integer_loss(model, integer_batch(step=step, micro_batch=micro_batch, rank=rank)).backward()
                    batches += [integer_batch(step=step, micro_batch=micro_batch, rank=r) for r in range(world)]
                (2 * integer_loss(net, union(batches))).backward()
                if step == 3:  # the last step, whose result is not exact. The largest gradient is
                    ours = layerzero.clip_grad_norm_(model, 2.0**-3, float("inf"))
                    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0**-3, float("inf"))
                    assert torch.equal(ours, norm), case
                optimizer.step()
                theirs.step()
                assert_same_bits(model, net, f"{case} step {step}")
                wrong = different(full_gradients(model), {n: p.grad for n, p in net.named_parameters()})
                assert not wrong, wrong
                optimizer.zero_grad()
                theirs.zero_grad()


@pytest.mark.sample(3)
@BOTH_SHARED_EXHAUSTIVE
@pytest.mark.parametrize(("world", "zero3_size"), GRIDS)
def test_sgd_through_owners_has_the_bits_of_one_process(world: int, zero3_size: int, shared_memory: str) -> None:
    run_ranks(_follow_one_process, world, zero3_size, world_size=world, shared_memory=shared_memory)


def _tied_and_frozen(rank: int, world: int, zero3_size: int, name: str) -> None:
    """Train with one weight in two units, and with matrices frozen and unfrozen between steps."""

    def built() -> Wide:
        net = Wide()
        net.d.weight = net.a.weight
        net.c.weight.requires_grad_(False)
        return net

    for accumulation in ("sharded", "full", "local"):
        net = built()
        theirs = CASES[name](net)
        model = layerzero.shard_model(
            built(), mesh=mesh_of(zero3_size), accumulation=accumulation, units=("a", "b", "c", "d")
        )
        ours = shard_all(CASES[name](model), model)
        frozen = net.c.weight.detach().clone()
        for step in range(4):
            if step == 2:
                for each in (net, model):
                    each.c.weight.requires_grad_(True)
                    each.b.weight.requires_grad_(False)
            step_of(model, ours, [rank], step, 1.0, zero3_size)
            step_of(net, theirs, range(world), step, 1.0 / world, zero3_size)
            assert torch.equal(net.c.weight, frozen) is (step < 2)
            wrong = different(full_parameters(model), dict(net.named_parameters()))
            assert not wrong, f"{name} D={world} S={zero3_size} {accumulation} step {step}: {wrong}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in CASES if name in ("Adafactor", "groups of one", "Muon, then AdamW")])
@pytest.mark.parametrize(("world", "zero3_size"), [(2, 2), (4, 1), (4, 2)])
def test_tied_and_frozen_parameters_are_owned_too(world: int, zero3_size: int, name: str) -> None:
    run_ranks(_tied_and_frozen, world, zero3_size, name, world_size=world)
