"""Changes of trainable parameters: freezing between steps, and adapters beside frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from tests.support.graphs import (
    IN_FLIGHT,
    MODES,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    assert_same_gradients,
    batch,
    blocks,
    compare,
    freeze,
    loss_of,
    message_of,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import full_gradients, update
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


class Adapted(nn.Module):
    """Frozen layer with its own low-rank adapter (LoRA, Hu et al. 2021)."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
        self.up = nn.Linear(1, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def _train_only(model: nn.Module, rank: int, step: int, *, frozen: Callable[[int], tuple[str, ...]]) -> None:
    """Freeze the parameters under these prefixes, train the others."""
    freeze(model, *frozen(step))
    IN_FLIGHT(model, rank, step)


def _off_for_reference(model: nn.Module, rank: int, step: int, *, with_graph: bool) -> None:
    """Freeze some parameters between a forward and its backward, as PEFT disables adapters for a while."""
    for micro_batch in range(2):
        freeze(model)
        loss = loss_of(model(batch(rank, step, micro_batch)))
        freeze(model, "units.1.linear.weight", "units.2", "scale")
        with torch.set_grad_enabled(with_graph):
            reference = loss_of(model(batch(rank, step, 1 - micro_batch)))
        freeze(model)
        (loss + reference if with_graph else loss).backward()


def _freeze_in_flight(model: nn.Module, rank: int, step: int) -> None:
    """Freeze after the forward: torch drops the gradient of such a parameter, and so must layerzero."""
    freeze(model)
    first = loss_of(model(batch(rank, step)))
    freeze(model, "units.1.linear.weight", "units.2")
    second = loss_of(model(batch(rank, step, 1)))
    first.backward()
    second.backward()


CHANGES: dict[str, Callable[[int], tuple[str, ...]]] = {
    "unfrozen: a unit": lambda step: ("units.0",) if step < 1 else (),
    "unfrozen: one parameter of a unit": lambda step: ("units.1.linear.bias",) if step < 1 else (),
    "unfrozen: all but one": lambda step: ("units.0", "units.1", "scale") if step < 1 else (),
    "frozen: a unit": lambda step: ("units.2",) if step >= 1 else (),
    "frozen: one parameter of a unit": lambda step: ("units.0.linear.weight",) if step >= 1 else (),
    "frozen: the root": lambda step: ("scale",) if step >= 1 else (),
    "in turns": lambda step: (f"units.{step % 3}", f"units.{(step + 1) % 3}.linear.weight"),
}

CASES: dict[str, Case] = {
    **{name: Case(blocks, partial(_train_only, frozen=frozen)) for name, frozen in CHANGES.items()},
    "off for a forward for reference": Case(blocks, partial(_off_for_reference, with_graph=False)),
    "off for another graph": Case(blocks, partial(_off_for_reference, with_graph=True)),
    "frozen in flight": Case(blocks, _freeze_in_flight),
    "adapters": Case(lambda: Chain(Adapted(), Block(), Adapted()), IN_FLIGHT),
    "adapters only": Case(lambda: freeze(Chain(Adapted(), Adapted()), "scale", "units.0.base", "units.1.base")),
    **{
        f"frozen unit, {'' if reentrant else 'non-'}reentrant checkpoint": Case(
            lambda r=reentrant: freeze(blocks(reentrant=r), "units.1", "units.2.linear.bias")
        )
        for reentrant in (True, False)
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
@on_ranks(world_size=WORLD)
def test_what_is_frozen_and_unfrozen_trains_like_one_process(rank: int, name: str) -> None:
    compare(rank, name, CASES[name], *MODES, {"size": 1}, {"size": 4})


def _traffic_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, int]:
    layerzero.traffic(model, reset=True)
    one_pass(model, rank, 0)
    update(optimizer)
    return layerzero.traffic(model).calls


@on_ranks(world_size=WORLD, shared_memory="off")
def test_what_is_frozen_is_not_reduced_or_refreshed(rank: int) -> None:
    model = shard(blocks())
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    units = 4  # three blocks and the root
    _traffic_of(model, optimizer, rank)
    for frozen, trained in ((("units.0",), 3), (("units.0", "units.1", "units.2"), 1), ((), 4)):
        freeze(model, *frozen)
        for _ in range(2):  # the first step after a change agrees on the order again
            calls = _traffic_of(model, optimizer, rank)
        assert [calls.get(name, 0) for name in ("hop1", "hop2", "refresh")] == [trained] * 3, (frozen, calls)
        assert calls["gather"] <= 2 * units


@on_ranks(world_size=WORLD)
def test_gradients_from_before_a_freeze_are_not_lost(rank: int) -> None:
    """Keep gradients from before a freeze, as in torch; the step still reduces them."""
    torch.manual_seed(0)
    alone = blocks(2)
    model = shard(copy.deepcopy(alone))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    with layerzero.no_sync(model):
        one_pass(model, rank, 0)
    freeze(model, "units.0")
    with layerzero.no_sync(model):
        one_pass(model, rank, 1)
    layerzero.clip_grad_norm_(model, float("inf"))
    gradients = full_gradients(model)
    optimizer.step()
    for each in range(WORLD):
        loss_of(alone(batch(each, 0))).backward()
    assert sorted(gradients) == sorted(dict(alone.named_parameters()))
    name = "units.0.linear.weight"
    torch.testing.assert_close(gradients[name], alone.get_parameter(name).grad / WORLD, rtol=1e-10, atol=1e-12)


@on_ranks(world_size=WORLD)
def test_what_is_frozen_between_backward_and_step_is_stepped_and_refreshed(rank: int) -> None:
    """Freeze after the backward: the gradient stays, and the step still updates the parameter."""
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        torch.manual_seed(0)
        alone = blocks()
        model = shard(copy.deepcopy(alone), **settings)
        optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
        one_pass(model, rank, 0)
        for r in range(WORLD):
            one_pass(alone, r, 0)
        for parameter in alone.parameters():
            parameter.grad /= WORLD
        for net in (model, alone):
            freeze(net, "units.0", "units.1.linear.bias", "scale")
            with torch.no_grad():
                net(batch(rank, 1))
        update(*optimizers)
        torch.testing.assert_close(model(batch(0, 5)), alone(batch(0, 5)), rtol=1e-10, atol=1e-12)


@on_ranks(world_size=WORLD)
def test_an_average_takes_in_what_is_unfrozen(rank: int) -> None:
    model = shard(freeze(blocks(), "units.0"))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    ema = layerzero.EMA(model, decay=0.5)
    for step in range(3):
        if step == 1:
            freeze(model)
        one_pass(model, rank, step)
        update(optimizer)
        ema.update()
        assert ("units.0.linear.weight" in ema.state_dict()["averages"]) == (step > 0)
    trained = model.units[0].linear.weight.full_tensor()
    with ema.swapped():
        assert not torch.equal(model.units[0].linear.weight.full_tensor(), trained)


@on_ranks(world_size=WORLD)
def test_freezing_what_only_some_ranks_have_used_is_agreed_upon(rank: int) -> None:
    """Freeze inside no_sync, where no rank knows which parameters the others have used."""
    for settings in MODES:
        torch.manual_seed(0)
        alone = Chain(Block(), blocks(1), Block())
        model = shard(copy.deepcopy(alone), units=["units.0", "units.2"], **settings)
        with layerzero.no_sync(model):
            model.order = (0, 1, 2) if rank == 1 else (0, 2)
            one_pass(model, rank, 0)
        freeze(model, "units.1")
        model.order = (0, 1, 2)
        one_pass(model, rank, 1)
        for r in range(WORLD):
            alone.order = (0, 1, 2) if r == 1 else (0, 2)
            one_pass(alone, r, 0)
        freeze(alone, "units.1")
        alone.order = (0, 1, 2)
        for r in range(WORLD):
            one_pass(alone, r, 1)
        assert_same_gradients(model, alone, settings)


@on_ranks(world_size=WORLD, pg_timeout=3)
def test_unfreezing_on_one_rank_only_is_an_error_there(rank: int) -> None:
    model = shard(freeze(blocks(), "units.0"))
    one_pass(model, rank, 0)
    if rank == 1:
        model.units[0].linear.weight.requires_grad_(True)
        message = message_of(lambda: one_pass(model, rank, 1))
        assert "frozen or unfrozen" in message and "All ranks must make this call" in message


@on_ranks(world_size=WORLD)
def test_parameters_that_are_frozen_on_some_ranks_are_named_on_all(rank: int) -> None:
    for unequally, expected in (
        (False, 'frozen or unfrozen: units.0.linear.weight" on rank 1. Make the same calls'),
        (True, "units.0.linear.weight is absent on ranks 0, 2, 3 and false on rank 1. Set equal values"),
    ):
        model = shard(blocks())
        if rank == 1:
            model.units[0].linear.weight.requires_grad_(False)
        elif unequally:
            model.units[0].linear.bias.requires_grad_(False)
        assert expected in (message := message_of(lambda model=model: one_pass(model, rank, 0))), message


@on_ranks()
def test_what_is_too_coarse_to_train_leaves_the_rest_as_it_was(rank: int) -> None:
    """Freeze everything and unfreeze everything, with frozen layers before or after trainable ones."""
    for first in (torch.float32, torch.bfloat16):
        other = torch.bfloat16 if first is torch.float32 else torch.float32
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        net[0].to(first).requires_grad_(False)
        net[1].to(other).requires_grad_(False)
        exact = {name: p.detach().clone() for name, p in net.named_parameters()}
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=True)
        model = layerzero.shard_model(net, zero3_size=2, units=["0", "1"], mp_policy=policy)
        optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
        x = torch.full((2, 5), 1.0 + rank)
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError), match="too coarse for training"):
                model(x)
        coarse = "0" if first is torch.bfloat16 else "1"
        model.get_submodule(coarse).requires_grad_(False)
        optimizer.zero_grad()
        model(x).sum().backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == name.startswith(coarse), name
        optimizer.step()
        for name, parameter in model.named_parameters():
            moved = not torch.equal(parameter.full_tensor().float(), exact[name].float())
            assert moved != name.startswith(coarse), name
