"""Every shape of autograd graph in a step, compared with one-process PyTorch, on D = 4 ranks with S = 2.

Memory does not grow, forwards may overlap, unused parameters do not hang, and a model is usable after an exception.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import time
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero.comm.process_groups import drop_idle_groups
from layerzero.engine.handle import GatherState
from layerzero.engine.hooks import get_state
from layerzero.engine.passes import ForwardPass, UnitCall
from tests.support.graphs import (
    IN_FLIGHT,
    MODES,
    SIZE,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    EncoderDecoder,
    SideBySide,
    assert_same_gradients,
    batch,
    blocks,
    boom,
    compare,
    freeze,
    join,
    loss_of,
    one_pass,
    run_script,
    sgd,
    shard,
)
from tests.support.models import (
    IntegerNet,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    union,
    update,
)
from tests.support.ranks import BOTH, mesh_of, on_ranks

pytestmark = pytest.mark.slow


class Odd(nn.Module):
    """Parameters that are empty, of one element, shorter than the world, non-contiguous, of another dtype."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        shapes = ((0, 3), (1,), (1, WIDTH), (2, 1), (5, 1, 1))
        self.odd = nn.ParameterList(torch.full(shape, 0.5, dtype=torch.float64) for shape in shapes)
        self.turned = nn.Parameter(torch.linspace(0, 1, 2 * WIDTH, dtype=torch.float64).view(WIDTH, 2).t())
        self.narrow = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        odd = sum((p * p).sum() for p in self.odd) / 100
        return x + odd + self.turned.prod(0) + (x.float() * self.narrow).double()


class Through(nn.Module):
    """Root whose own weight is used between a nested unit and the loss.

    Gradients flow through this use to the unit. The weight gets its own gradient early, or none.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.unit = Block()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64), requires_grad=how != "frozen")
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.unit(x.detach())
        x = x @ self.weight.detach() if self.how == "detached" else x @ self.weight
        x = torch.tanh(self.last(x))
        return x @ self.weight if self.how == "detached" else x


class Recomputing(nn.Module):
    """Root that recomputes parts of itself that are not units, one after the other."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.unit = Block(reentrant=reentrant)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.parts, self.unit, self.parts[0]):
            x = checkpoint(lambda y, part=part: torch.tanh(part(y)), x, use_reentrant=self.reentrant)
        return x


@dataclass
class Result:
    hidden: Tensor
    name: str


Parts = namedtuple("Parts", "hidden extra")


class Plain:
    """Class that is not registered as a pytree."""

    def __init__(self, hidden: Tensor) -> None:
        self.inner = {"hidden": hidden}
        self.me = self


class Wrapping(nn.Module):
    """Unit that returns its outputs in a container; so does the root."""

    def __init__(self, wrap: Callable[..., Any], unwrap: Callable[[Any], list[Tensor]], *, root: bool = True) -> None:
        super().__init__()
        self.part = Wrapping(wrap, unwrap, root=False) if root else Block()
        self.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(join(self, self.part(x)), x * self.bias)


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, lambda out: [out["a"], out["b"]["c"]]),
    "dataclass": (lambda a, b: Result(a + b, "text"), lambda out: [out.hidden]),
    "namedtuple": (Parts, lambda out: [out.hidden, out.extra]),
    "nested list": (lambda a, b: [[a], (None, [b])], lambda out: [out[0][0], out[1][1][0]]),
    "class of its own": (lambda a, b: Plain(a + b), lambda out: [out.inner["hidden"]]),
    "half of a tuple": (lambda a, b: (a, b), lambda out: [out[0]]),
}


def _choose(model: nn.Module, rank: int, step: int, *, used: Callable[[int, int], bool]) -> None:
    """Run a pass in which rank and step decide whether the first half of the second unit is used."""
    model.units[1].order = (0, 1) if used(rank, step) else (1,)
    one_pass(model, rank, step)


def _deafen(model: nn.Module, rank: int, step: int) -> None:
    """Run a pass in which rank and step decide which layers of the decoder use the encoder's output."""
    for index, layer in enumerate(model.decoder):
        layer.is_deaf = (rank + step + index) % 3 == 0
    one_pass(model, rank, step)


def _tied(reentrant: bool | None = None) -> Chain:
    model = blocks(reentrant=reentrant)
    model.units[2].linear.weight = model.units[0].linear.weight
    return model


def _fork() -> Chain:
    return Chain(Block(), blocks(2), Block())


# --- against one process ---


OUTER = {"units": ["units.0", "units.1"]}

CASES: dict[str, Case] = {
    "several forwards before their backwards": Case(blocks, IN_FLIGHT),
    "two forwards and one backward": Case(blocks, partial(run_script, script="F0 F1 B01")),
    "two backwards through one graph": Case(blocks, partial(run_script, script="F0 R0 B0")),
    "forward without a backward": Case(blocks, partial(run_script, script="F0 F1 B1")),
    "unit called twice": Case(lambda: blocks(order=(0, 1, 0, 2))),
    "unit called twice in flight": Case(lambda: blocks(order=(0, 0, 1, 1)), IN_FLIGHT),
    "unit called three times in checkpoints": Case(lambda: blocks(order=(0, 1, 0, 2, 0), reentrant=True)),
    "nested units": Case(lambda: Chain(Chain(Block()), Block(), Chain(Block()))),
    "nested units in flight": Case(lambda: Chain(Chain(Block()), Chain(Block()), order=(0, 1, 0)), IN_FLIGHT),
    "root without parameters": Case(lambda: blocks(own=False)),
    "root only": Case(blocks, settings={"units": None}),
    "tied within a unit": Case(lambda: Chain(_tied(), Block()), settings=OUTER),
    "tied across units": Case(_tied, IN_FLIGHT),
    "tied across nested units": Case(lambda: Chain(_tied(), Block())),
    "parameters used on one rank": Case(_fork, partial(_choose, used=lambda rank, step: rank == 3), OUTER),
    "parameters unused on a rank once": Case(_fork, partial(_choose, used=lambda rank, step: rank + step > 0), OUTER),
    "parameters used in one step": Case(_fork, partial(_choose, used=lambda rank, step: step == 1), OUTER),
    "unit used in one step": Case(_fork, partial(_choose, used=lambda rank, step: step == 1)),
    "unit used in one node": Case(_fork, partial(_choose, used=lambda rank, step: rank < 2)),
    "unit used on one rank, S = 1": Case(_fork, partial(_choose, used=lambda rank, step: rank == 3), {"size": 1}),
    "never used": Case(lambda: blocks(order=(0, 2))),
    "frozen unit first": Case(lambda: freeze(blocks(), "units.0")),
    "frozen unit last": Case(lambda: freeze(blocks(), "units.2", "scale")),
    "partly frozen units": Case(lambda: freeze(blocks(), "units.0.linear.weight", "units.1.linear.bias"), IN_FLIGHT),
    "odd shapes and several dtypes": Case(lambda: Chain(Odd(), Block()), IN_FLIGHT),
    "partly frozen odd shapes": Case(lambda: freeze(Chain(Odd()), "units.0.odd.3", "units.0.odd.5")),
    **{
        f"encoder and decoder, {', '.join(f'{key} {value}' for key, value in options.items())}": Case(
            partial(EncoderDecoder, **options), IN_FLIGHT
        )
        for options in (
            {"in_place": False},
            {"in_place": True},
            {"listed": True},
            {"reentrant": True},
            {"reentrant": False},
        )
    },
    "inputs used by some layers on each rank": Case(EncoderDecoder, _deafen),
    "units with the same input": Case(SideBySide, IN_FLIGHT),
    **{
        f"a {how} weight of the root in the middle": Case(partial(Through, how))
        for how in ("frozen", "detached", "used")
    },
    **{
        f"tied and frozen, {reentrant}": Case(lambda r=reentrant: freeze(_tied(r), "units.0.linear.weight"), IN_FLIGHT)
        for reentrant in (None, True, False)
    },
    **{
        f"own modules of the root, {'' if r else 'non-'}reentrant checkpoint": Case(partial(Recomputing, reentrant=r))
        for r in (True, False)
    },
    **{
        f"outputs in a {name}": Case(partial(Wrapping, *container), settings={"units": ["part"]})
        for name, container in CONTAINERS.items()
    },
    **{
        f"{what}, {'' if reentrant else 'non-'}reentrant checkpoint": Case(make)
        for reentrant in (True, False)
        for what, make in {
            "whole units": lambda r=reentrant: blocks(reentrant=r),
            "nested units": lambda r=reentrant: Chain(Chain(Block()), Block(), reentrant=r),
            "parts of units": lambda r=reentrant: Chain(Block(reentrant=r), Block()),
        }.items()
    },
}


# In shared memory nothing is gathered, ahead or again, and a unit that stays costs nothing.
SHARED: tuple[dict[str, Any], ...] = (
    {"accumulation": "sharded"},
    {"accumulation": "full", "prefetch": 0, "reshard_after_forward": False},
)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CASES)
@on_ranks(world_size=WORLD, pg_timeout=20, shared_memory=None)
def test_graph_has_the_gradients_of_one_process(rank: int, name: str) -> None:
    compare(rank, name, CASES[name], *(mode | {"shared_memory": "off"} for mode in MODES), *SHARED)


# --- the same bits with any calls between the steps ---


def _train(rank: int, make: Callable[[], nn.Module] = blocks, disturb: Sequence[Any] = (), **settings: Any) -> Any:
    """Train for 3 steps with `disturb` before each; return the parameters and the gathers of the last step."""
    torch.manual_seed(0)
    model = shard(make(), **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    for step in range(3):
        if disturb:
            disturb[step](model)
            optimizer.zero_grad()
            assert layerzero.memory(model).measured["full_buffer"] == 0 or "reshard_after_forward" in settings, step
        layerzero.traffic(model, reset=True)
        one_pass(model, rank, step)
        update(optimizer)
    return full_parameters(model), layerzero.traffic(model).calls.get("gather", 0)


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        unrecorded = model(batch(0, 9))
    with torch.inference_mode():
        assert torch.equal(model(batch(0, 9)), unrecorded)
    model.train()


def _fail(place: str, *, backward: bool, micro_batches: int) -> Callable[[nn.Module], None]:
    def disturb(model: nn.Module) -> None:
        for micro_batch in range(micro_batches):
            with layerzero.no_sync(model):
                one_pass(model, 0, micro_batch)
        hook = (lambda module, args, output: output.register_hook(boom) and None) if backward else boom
        handle = model.get_submodule(place).register_forward_hook(hook)
        with pytest.raises(LookupError, match="boom"):
            one_pass(model, 0, 9)
        handle.remove()

    return disturb


@pytest.mark.sample(1)
@BOTH
@on_ranks(world_size=WORLD, pg_timeout=20)
def test_evaluation_and_failures_between_the_steps_change_no_bit(rank: int, shared_memory: str | None) -> None:
    disturbances = {"evaluation": _evaluate}
    for place in ("units.0.linear", "units.2.linear", "units.1", ""):
        for backward in (False, True):
            disturbances[f"{place} {backward}"] = _fail(place, backward=backward, micro_batches=len(place) % 2)
    names = list(disturbances)
    # Three disturbances at a time, each before another step in each of three settings.
    for turn, settings in enumerate(({}, {"accumulation": "full", "prefetch": 0}, {"reshard_after_forward": False})):
        expected, _ = _train(rank, **settings)
        for first in range(3):
            some = [names[first + 3 * ((turn + step) % 3)] for step in range(3)]
            parameters, _ = _train(rank, disturb=[disturbances[name] for name in some], **settings)
            assert not different(parameters, expected), (some, settings)


class Beside(nn.Module):
    """Unit that also returns one of its inputs."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)), kept


class PassedOn(nn.Module):
    """Net whose input is passed through all units, and used by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Beside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = kept = x * 0.5
        for unit in self.units:
            x, kept = unit(x, kept)
        return x + kept


@on_ranks(world_size=WORLD, shared_memory="off")
def test_gathers_are_few_however_units_are_given_and_recomputation_adds_none(rank: int) -> None:
    names = [f"units.{i}" for i in range(3)]
    expected, gathers = _train(rank, units={Block})
    assert gathers <= 2 * 4  # 3 units and the root, forward and backward
    for units in (names, lambda name, module: name in names, [Block]):
        parameters, again = _train(rank, units=units)
        assert not different(parameters, expected) and again == gathers, units
    assert _train(rank, PassedOn)[1] <= 2 * 3
    assert _train(rank, reshard_after_forward=False)[1] <= 4
    for frozen in ((), ("units.1",), ("units.0", "units.1"), ("units.0.linear.bias",)):
        plain, again, once_more = (
            _train(rank, lambda r=reentrant, f=frozen: freeze(blocks(reentrant=r), *f))[1]
            for reentrant in (None, True, False)
        )
        assert plain == again == once_more, f"{frozen}: the gather of a recomputation serves the backward, too"


@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_backward_holds_few_units_also_under_checkpoints(rank: int) -> None:
    """Assert that a backward holds only the root, the unit that ends, the one that begins, and prefetched ones."""
    for reentrant, prefetch in itertools.product((None, True, False), (0, 1)):
        model = shard(blocks(6, reentrant=reentrant), prefetch=prefetch)
        gathered: list[int] = []

        def watch(gradient: Tensor, model: nn.Module = model, gathered: list[int] = gathered) -> None:
            states = [handle.state for handle in get_state(model).handles]
            gathered.append(sum(state is not GatherState.SHARDED for state in states))

        def attach(module: nn.Module, args: Any, output: Tensor, watch: Callable[[Tensor], None] = watch) -> None:
            if output.requires_grad:
                output.register_hook(watch)

        for unit in model.units:
            unit.register_forward_hook(attach)
        for step in range(2):
            one_pass(model, rank, step)
        assert len(gathered) >= 12
        assert max(gathered) <= 3 + prefetch, (reentrant, prefetch, gathered)


# --- several models, and their release ---


def _play(models: list[nn.Module], ranks: list[int], place: int, step: int) -> None:
    """Run the backward of the discriminator (place 1) or of the generator (0)."""
    generator, discriminator = models
    for rank in ranks:
        made = generator(batch(rank, step))
        loss_of(discriminator(made.detach() if place else made) * (place - 0.5)).backward()


@on_ranks(world_size=WORLD)
def test_two_models_of_different_zero3_size_train_alternately(rank: int) -> None:
    torch.manual_seed(0)
    alone = [blocks(2), blocks(2)]
    models = [shard(copy.deepcopy(model), size) for model, size in zip(alone, (2, 4), strict=True)]
    optimizers = [layerzero.shard_optimizer(sgd(model), model) for model in models]
    optimizers_alone = [sgd(model) for model in alone]
    for step in range(3):
        for place in (1, 0):
            _play(models, [rank], place, step)
            _play(alone, list(range(WORLD)), place, step)
            for model, expected in zip(models, alone, strict=True):
                assert_same_gradients(model, expected, (place, step))
            for sgds in (optimizers, optimizers_alone):
                sgds[place].step()
                for each in sgds:
                    each.zero_grad()


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@on_ranks(world_size=WORLD, shared_memory="off")
def test_nothing_grows_over_steps_and_a_deleted_model_is_freed(rank: int) -> None:
    mesh_of(SIZE)  # outlives the model
    before = _live_tensors()
    model = shard(Chain(Chain(Block()), blocks(reentrant=False)))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    counts = []
    for step in range(50):
        (IN_FLIGHT if step % 3 == 0 else one_pass)(model, rank, step)
        update(optimizer)
        if step in (16, 49):
            counts.append(_live_tensors())
    # Timing decides which scratch buffers were used; a leak would be at least one tensor per step.
    assert counts[1] - counts[0] < 49 - 16, counts
    dead = [weakref.ref(thing) for thing in (model, optimizer, model.units[0], *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead if ref() is not None] == []
    end = time.monotonic() + 30
    while _live_tensors() > before and time.monotonic() < end:  # the last refresh is in flight, and holds its buffers
        time.sleep(0.05)
        drop_idle_groups()  # as the next shard_model does
    assert _live_tensors() <= before


@on_ranks()
def test_two_models_of_one_mesh_may_share_a_backward(rank: int) -> None:
    """Train two models on one mesh; their reductions end in a different order on each rank."""
    draw = random.Random(rank)
    mesh = layerzero.init_mesh(2)
    seeds = (0, 1)
    models = [layerzero.shard_model(integer_net(seed), mesh=mesh, units=IntegerNet.UNITS) for seed in seeds]
    alone = [integer_net(seed) for seed in seeds]
    optimizers = [
        *(layerzero.shard_optimizer(exact_sgd(model.parameters()), model) for model in models),
        *(exact_sgd(net.parameters()) for net in alone),
    ]

    def late(gradient: Tensor) -> None:
        time.sleep(draw.choice((0.0, 0.02)))

    def watch(unit: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(late)

    for model, name in itertools.product(models, IntegerNet.UNITS):
        model.get_submodule(name).register_forward_hook(watch)
    for step in range(3):
        for each, given in (
            (models, integer_batch(step=step, rank=rank)),
            (alone, union([integer_batch(step=step, rank=r) for r in range(4)])),
        ):
            (integer_loss(each[0], given) + integer_loss(each[1], given)).backward()
        for model, net in zip(models, alone, strict=True):
            assert not different(full_gradients(model), {name: p.grad for name, p in net.named_parameters()}), step
        update(*optimizers)
        for model, net in zip(models, alone, strict=True):
            assert not different(full_parameters(model), dict(net.named_parameters())), step


@on_ranks(world_size=1)
def test_a_call_that_is_in_no_graph_is_passed_over(rank: int) -> None:
    """Check that a call with an unused output drops out of the chain of calls."""
    model = layerzero.shard_model(integer_net(), zero3_size=1, units=IntegerNet.UNITS)
    root, first, second, head = get_state(model).units
    for dead in range(4):
        forward = ForwardPass(root, get_state(model).units, expected=[])
        forward.called = [root, first, second]
        calls = [UnitCall(unit, around=()) for unit in (first, second, first, root)]
        for call in calls:
            call.record_return(forward)
        del calls[dead], call
        assert [call.next_call for call in calls] == [*calls[1:], None], dead
        assert list(calls[-1].ended_handles()) == list(head.handles), "the unit that was not called"
        for call, follower in itertools.pairwise(calls):
            again = any(each.unit is follower.unit for each in calls[: calls.index(follower)])
            assert list(call.ended_handles()) == ([] if again else list(follower.unit.handles)), "of the last call only"
