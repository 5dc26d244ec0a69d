"""Graphs of every shape that a step can have, each against one-process PyTorch (invariants 4 to 7, D = 4, S = 2)."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.models import different, full_gradients, full_parameters
from tests.ranks import run_ranks

WORLD, SIZE, WIDTH = 4, 2, 6


def _x(rank: int, step: int, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def _loss(output: Tensor) -> Tensor:
    return (output * output).mean() + output.sum()


class Block(nn.Module):
    """A layer, which is recomputed in the backward pass if `reentrant` is given."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(_call(self.linear, x, self.reentrant))


def _call(module: nn.Module, x: Tensor, reentrant: bool | None) -> Tensor:
    return module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)


class Chain(nn.Module):
    """Calls its units one after the other, in `order` if given. Serves as root and as nested unit."""

    def __init__(self, *units: nn.Module, order: Any = None, own: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.order = range(len(units)) if order is None else order
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64)) if own else None
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = _call(self.units[place], x, self.reentrant)
        return x if self.scale is None else x * self.scale


class Odd(nn.Module):
    """Parameters that are empty, of one element, shorter than the world, non-contiguous, of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((0, 3), (1,), (1, WIDTH), (2, 1), (5, 1, 1))
        self.odd = nn.ParameterList(torch.full(shape, 0.5, dtype=torch.float64) for shape in shapes)
        self.turned = nn.Parameter(torch.linspace(0, 1, 2 * WIDTH, dtype=torch.float64).view(WIDTH, 2).t())
        self.narrow = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        odd = sum((p * p).sum() for p in self.odd) / 100
        return x + odd + self.turned.prod(0) + (x.float() * self.narrow).double()


@dataclass
class Result:
    hidden: Tensor
    name: str


Parts = namedtuple("Parts", "hidden extra")


class Wrapping(nn.Module):
    """A unit that returns its outputs in a container, and a root that does so too."""

    def __init__(self, wrap: Callable[..., Any], unwrap: Callable[[Any], list[Tensor]], *, root: bool = True) -> None:
        super().__init__()
        self.part = Wrapping(wrap, unwrap, root=False) if root else Block()
        self.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(_join(self, self.part(x)), x * self.bias)


def _join(model: nn.Module, output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else sum(model.unwrap(output))


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, lambda out: [out["a"], out["b"]["c"]]),
    "dataclass": (lambda a, b: Result(a + b, "text"), lambda out: [out.hidden]),
    "namedtuple": (Parts, lambda out: [out.hidden, out.extra]),
    "nested list": (lambda a, b: [[a], (None, [b])], lambda out: [out[0][0], out[1][1][0]]),
    "half of a tuple": (lambda a, b: (a, b), lambda out: [out[0]]),
}


def _run_script(model: nn.Module, rank: int, step: int, *, script: str) -> None:
    """F0: the forward of micro-batch 0; B0: its backward; R0: the same, but the graph is kept; B01: of both losses."""
    losses = {}
    for action, *micro_batches in script.split():
        if action == "F":
            x = _x(rank, step, int(micro_batches[0])).requires_grad_()
            losses[micro_batches[0]] = _loss(_join(model, model(x)))
        else:
            sum(losses[m] for m in micro_batches).backward(retain_graph=action == "R")


_pass = partial(_run_script, script="F0 B0")
IN_FLIGHT = partial(_run_script, script="F0 F1 B0 F2 B1 B2")


def _choose(model: nn.Module, rank: int, step: int, *, used: Callable[[int, int], bool]) -> None:
    """Whether the first half of the second unit is used, depends on rank and step."""
    model.units[1].order = (0, 1) if used(rank, step) else (1,)
    _pass(model, rank, step)


def _blocks(count: int = 3, **settings: Any) -> Chain:
    return Chain(*(Block() for _ in range(count)), **settings)


def _tied() -> Chain:
    model = _blocks()
    model.units[2].linear.weight = model.units[0].linear.weight
    return model


def _fork() -> Chain:
    return Chain(Block(), _blocks(2), Block())


def _freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


# --- against one process ---


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, int, int], None] = _pass
    settings: dict[str, Any] | None = None


UNITS = {Block, Chain, Odd}
OUTER = {"units": ["units.0", "units.1"]}

CASES: dict[str, Case] = {
    "several forwards before their backwards": Case(_blocks, IN_FLIGHT),
    "two forwards and one backward": Case(_blocks, partial(_run_script, script="F0 F1 B01")),
    "two backwards through one graph": Case(_blocks, partial(_run_script, script="F0 R0 B0")),
    "forward without a backward": Case(_blocks, partial(_run_script, script="F0 F1 B1")),
    "unit called twice": Case(lambda: _blocks(order=(0, 1, 0, 2))),
    "unit called twice in flight": Case(lambda: _blocks(order=(0, 0, 1, 1)), IN_FLIGHT),
    "nested units": Case(lambda: Chain(Chain(Block()), Block(), Chain(Block()))),
    "nested units in flight": Case(lambda: Chain(Chain(Block()), Chain(Block()), order=(0, 1, 0)), IN_FLIGHT),
    "root without parameters": Case(lambda: _blocks(own=False)),
    "root only": Case(_blocks, settings={"units": None}),
    "tied within a unit": Case(lambda: Chain(_tied(), Block()), settings=OUTER),
    "tied across units": Case(_tied, IN_FLIGHT),
    "tied across nested units": Case(lambda: Chain(_tied(), Block())),
    "parameters used on one rank": Case(_fork, partial(_choose, used=lambda rank, step: rank == 3), OUTER),
    "parameters unused on a rank once": Case(_fork, partial(_choose, used=lambda rank, step: rank + step > 0), OUTER),
    "parameters used in one step": Case(_fork, partial(_choose, used=lambda rank, step: step == 1), OUTER),
    "unit used in one step": Case(_fork, partial(_choose, used=lambda rank, step: step == 1)),
    "unit used in one node": Case(_fork, partial(_choose, used=lambda rank, step: rank < 2)),
    "unit used on one rank, S = 1": Case(_fork, partial(_choose, used=lambda rank, step: rank == 3), {"size": 1}),
    "never used": Case(lambda: _blocks(order=(0, 2))),
    "frozen unit first": Case(lambda: _freeze(_blocks(), "units.0")),
    "frozen unit last": Case(lambda: _freeze(_blocks(), "units.2", "scale")),
    "partly frozen units": Case(lambda: _freeze(_blocks(), "units.0.linear.weight", "units.1.linear.bias"), IN_FLIGHT),
    "odd shapes and several dtypes": Case(lambda: Chain(Odd(), Block()), IN_FLIGHT),
    "partly frozen odd shapes": Case(lambda: _freeze(Chain(Odd()), "units.0.odd.3", "units.0.odd.5")),
    **{
        f"outputs in a {name}": Case(partial(Wrapping, *container), settings={"units": ["part"]})
        for name, container in CONTAINERS.items()
    },
    **{
        f"{what}, {'' if reentrant else 'non-'}reentrant checkpoint": Case(make)
        for reentrant in (True, False)
        for what, make in {
            "whole units": lambda r=reentrant: _blocks(reentrant=r),
            "nested units": lambda r=reentrant: Chain(Chain(Block()), Block(), reentrant=r),
            "parts of units": lambda r=reentrant: Chain(Block(reentrant=r), Block()),
        }.items()
    },
}


def _shard(model: nn.Module, size: int = SIZE, **settings: Any) -> nn.Module:
    present = UNITS & {type(module) for module in model.children() for module in module.modules()}
    return layerzero.shard_model(model, zero3_size=size, **({"units": present} | settings))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _assert_same_gradients(model: nn.Module, alone: nn.Module, case: object) -> None:
    """`alone` has added up the gradients of all ranks. In fp64, with its fp64 masters, rounding hides nothing."""
    theirs = {name: p.grad.div_(WORLD) for name, p in alone.named_parameters() if p.grad is not None}
    exact = all(p.dtype == torch.float64 for p in alone.parameters())
    close = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(full_gradients(model), theirs, msg=lambda text: f"{case}: {text}", **close)


def _compare(rank: int, name: str, case: Case, **settings: Any) -> None:
    torch.manual_seed(0)
    alone = case.make()
    model = _shard(copy.deepcopy(alone), **((case.settings or {}) | settings))
    optimizer, optimizer_alone = layerzero.shard_optimizer(_sgd(model), model), _sgd(alone)
    for step in range(2):
        case.step(model, rank, step)
        for r in range(WORLD):
            case.step(alone, r, step)
        _assert_same_gradients(model, alone, (name, settings, step))
        assert layerzero.memory(model).measured["full_buffer"] == 0, (name, settings, step)
        for sgd in (optimizer, optimizer_alone):
            sgd.step()
            sgd.zero_grad()


MODES = (
    {"accumulation": "sharded"},
    {"accumulation": "full", "prefetch": 0},
    {"accumulation": "sharded", "prefetch": 3, "reshard_after_forward": False},
)


def _compare_modes(rank: int, name: str) -> None:
    for settings in MODES:
        _compare(rank, name, CASES[name], **settings)


@pytest.mark.parametrize("name", CASES)
def test_graph_has_the_gradients_of_one_process(name: str) -> None:
    run_ranks(_compare_modes, name, world_size=WORLD, pg_timeout=20)


# --- the same bits, whatever happens between the steps ---


def _train(rank: int, make: Callable[[], nn.Module] = _blocks, disturb: Any = None, **settings: Any) -> Any:
    """Train for 3 steps, after `disturb(model)` each; the parameters, and the number of gathers in the last step."""
    torch.manual_seed(0)
    model = _shard(make(), **settings)
    optimizer = layerzero.shard_optimizer(_sgd(model), model)
    for step in range(3):
        if disturb is not None:
            disturb(model)
            optimizer.zero_grad()
            assert layerzero.memory(model).measured["full_buffer"] == 0 or "reshard_after_forward" in settings, step
        layerzero.traffic(model, reset=True)
        _pass(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), layerzero.traffic(model).calls.get("gather", 0)


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        unrecorded = model(_x(0, 9))
    with torch.inference_mode():
        assert torch.equal(model(_x(0, 9)), unrecorded)
    model.train()


def _fail(place: str, *, backward: bool, micro_batches: int) -> Callable[[nn.Module], None]:
    def boom(*_: object) -> NoReturn:
        raise LookupError("boom")

    def disturb(model: nn.Module) -> None:
        for micro_batch in range(micro_batches):
            with layerzero.no_sync(model):
                _pass(model, 0, micro_batch)
        hook = (lambda module, args, output: output.register_hook(boom) and None) if backward else boom
        handle = model.get_submodule(place).register_forward_hook(hook)
        with pytest.raises(LookupError, match="boom"):
            _pass(model, 0, 9)
        handle.remove()

    return disturb


def _disturb(rank: int) -> None:
    for settings in ({}, {"accumulation": "full", "prefetch": 0}, {"reshard_after_forward": False}):
        expected, _ = _train(rank, **settings)
        disturbances = {"evaluation": _evaluate}
        for place in ("units.0.linear", "units.2.linear", "units.1", ""):
            for backward in (False, True):
                disturbances[f"{place} {backward}"] = _fail(place, backward=backward, micro_batches=len(place) % 2)
        for name, disturb in disturbances.items():
            parameters, _ = _train(rank, disturb=disturb, **settings)
            assert not different(parameters, expected), (name, settings)


def test_evaluation_and_failures_between_the_steps_change_no_bit() -> None:
    run_ranks(_disturb, world_size=WORLD, pg_timeout=20)


def _count_gathers(rank: int) -> None:
    names = [f"units.{i}" for i in range(3)]
    expected, gathers = _train(rank, units={Block})
    assert gathers <= 2 * 4  # 3 units and the root, forward and backward
    for units in (names, lambda name, module: name in names, [Block]):
        parameters, again = _train(rank, units=units)
        assert not different(parameters, expected) and again == gathers, units
    assert _train(rank, reshard_after_forward=False)[1] <= 4
    for reentrant in (True, False):
        _, again = _train(rank, lambda r=reentrant: _blocks(reentrant=r))
        assert again <= gathers + 3, (reentrant, again)


def test_gathers_are_few_however_units_are_given_and_recomputation_adds_one_per_unit() -> None:
    run_ranks(_count_gathers, world_size=WORLD)


# --- several models, and their end ---


def _play(models: list[nn.Module], ranks: list[int], place: int, step: int) -> None:
    """The backward of the discriminator (place 1), or of the generator (0)."""
    generator, discriminator = models
    for rank in ranks:
        made = generator(_x(rank, step))
        _loss(discriminator(made.detach() if place else made) * (place - 0.5)).backward()


def _train_adversaries(rank: int) -> None:
    torch.manual_seed(0)
    alone = [_blocks(2), _blocks(2)]
    models = [_shard(copy.deepcopy(model), size) for model, size in zip(alone, (2, 4), strict=True)]
    optimizers = [layerzero.shard_optimizer(_sgd(model), model) for model in models]
    optimizers_alone = [_sgd(model) for model in alone]
    for step in range(3):
        for place in (1, 0):
            _play(models, [rank], place, step)
            _play(alone, list(range(WORLD)), place, step)
            for model, expected in zip(models, alone, strict=True):
                _assert_same_gradients(model, expected, (place, step))
            for sgds in (optimizers, optimizers_alone):
                sgds[place].step()
                for sgd in sgds:
                    sgd.zero_grad()


def test_two_models_of_different_zero3_size_train_alternately() -> None:
    run_ranks(_train_adversaries, world_size=WORLD)


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _train_and_forget(rank: int) -> None:
    before = _live_tensors()
    model = _shard(Chain(Chain(Block()), _blocks(reentrant=False)))
    optimizer = layerzero.shard_optimizer(_sgd(model), model)
    counts = []
    for step in range(50):
        IN_FLIGHT(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if step in (5, 49):
            counts.append(_live_tensors())
    assert counts[1] <= counts[0] + 8, counts  # scratch buffers that timing has not asked for before
    dead = [weakref.ref(thing) for thing in (model, optimizer, model.units[0], *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead if ref() is not None] == []
    assert _live_tensors() <= before


def test_nothing_grows_over_steps_and_a_deleted_model_is_freed() -> None:
    run_ranks(_train_and_forget, world_size=WORLD)
