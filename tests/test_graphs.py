"""Graphs of every shape that a step can have, each against one-process PyTorch (invariants 4 to 7, D = 4, S = 2)."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from tests.models import different, full_parameters
from tests.ranks import run_ranks

WORLD, SIZE, WIDTH = 4, 2, 6
ACCUMULATIONS = ("sharded", "full")


def _x(rank: int, step: int, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def _loss(output: Tensor) -> Tensor:
    return (output * output).mean() + output.sum()


# --- parts ---


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Calls its units one after the other, in `order` if given."""

    def __init__(self, *units: nn.Module, order: tuple[int, ...] | None = None, own: bool = True) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.order = range(len(units)) if order is None else order
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64)) if own else None

    def forward(self, x: Tensor, **choices: Any) -> Any:
        for place in self.order:
            x = self.call(self.units[place], x, **choices)
        return x if self.scale is None else x * self.scale

    def call(self, unit: nn.Module, x: Tensor, **choices: Any) -> Tensor:
        return unit(x, **choices) if isinstance(unit, Fork) else unit(x)


class Outer(nn.Module):
    """A unit with a parameter of its own around another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.gain) + self.gain


class Pair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.linear.weight = self.first.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Fork(nn.Module):
    """Uses one parameter or the other, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor, *, left: bool = True, right: bool = True) -> Tensor:
        return (self.left(x) if left else x) + (self.right(x) if right else x)


class Odd(nn.Module):
    """Parameters that are empty, of one element, shorter than the world, non-contiguous, of another dtype."""

    SHAPES = ((0, 3), (0,), (1,), (1, WIDTH), (2, 1), (3, WIDTH), (5, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        values = [torch.linspace(-1, 1, torch.Size(s).numel(), dtype=torch.float64).view(s) for s in self.SHAPES]
        self.odd = nn.ParameterList(values)
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

    def __init__(self, wrap: Callable[..., Any], unwrap: Callable[[Any], list[Tensor]], *, inner: bool = True) -> None:
        super().__init__()
        self.part = Wrapping(wrap, unwrap, inner=False) if inner else Block()
        self.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.wrap, self.unwrap = wrap, unwrap if inner else lambda out: [out]

    def forward(self, x: Tensor) -> Any:
        hidden = sum(self.unwrap(self.part(x)))
        return self.wrap(hidden, x * self.bias)


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, lambda out: [out["a"], out["b"]["c"]]),
    "dataclass": (lambda a, b: Result(a + b, "text"), lambda out: [out.hidden]),
    "namedtuple": (Parts, lambda out: [out.hidden, out.extra]),
    "nested list": (lambda a, b: [[a], (None, [b])], lambda out: [out[0][0], out[1][1][0]]),
    "half of a tuple": (lambda a, b: (a, b), lambda out: [out[0]]),
}


class Checkpointed(Chain):
    """Recomputes its units in the backward pass."""

    def __init__(self, *units: nn.Module, reentrant: bool) -> None:
        super().__init__(*units)
        self.reentrant = reentrant

    def call(self, unit: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(unit, x, use_reentrant=self.reentrant)


class Recomputing(Block):
    """A unit that recomputes a part of itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.linear, x, use_reentrant=self.reentrant)


# --- what a rank does in a step ---


def _pass(model: nn.Module, rank: int, step: int) -> None:
    _loss(model(_x(rank, step).requires_grad_())).backward()


def _interleave(model: nn.Module, rank: int, step: int) -> None:
    first, second = _loss(model(_x(rank, step, 0))), _loss(model(_x(rank, step, 1)))
    first.backward()
    third = _loss(model(_x(rank, step, 2)))
    second.backward()
    third.backward()


def _join(model: nn.Module, rank: int, step: int) -> None:
    (_loss(model(_x(rank, step, 0))) + _loss(model(_x(rank, step, 1)))).backward()


def _feed_back(model: nn.Module, rank: int, step: int) -> None:
    _loss(model(model(_x(rank, step)))).backward()


def _repeat_backward(model: nn.Module, rank: int, step: int) -> None:
    loss = _loss(model(_x(rank, step)))
    loss.backward(retain_graph=True)
    loss.backward()


def _drop_a_forward(model: nn.Module, rank: int, step: int) -> None:
    kept, dropped = model(_x(rank, step, 0)), model(_x(rank, step, 1))
    del dropped
    _loss(kept).backward()


def _choose(model: nn.Module, rank: int, step: int, *, left: Callable[[int, int], bool]) -> None:
    _loss(model(_x(rank, step), left=left(rank, step))).backward()


def _use_outputs(model: nn.Module, rank: int, step: int, *, unwrap: Callable[[Any], list[Tensor]]) -> None:
    _loss(sum(unwrap(model(_x(rank, step))))).backward()


def _blocks(count: int = 3, **settings: Any) -> Chain:
    return Chain(*(Block() for _ in range(count)), **settings)


def _tied() -> Chain:
    model = _blocks()
    model.units[2].linear.weight = model.units[0].linear.weight
    return model


def _fork() -> Chain:
    return Chain(Block(), Fork(), Block())


def _freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


# --- against one process ---


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, int, int], None] = _pass
    settings: Mapping[str, Any] = MappingProxyType({})


UNITS = {Block, Outer, Pair, Fork, Odd, Recomputing}

CASES: dict[str, Case] = {
    "several forwards before their backwards": Case(_blocks, _interleave),
    "two forwards and one backward": Case(_blocks, _join),
    "output fed back": Case(_blocks, _feed_back),
    "two backwards through one graph": Case(_blocks, _repeat_backward),
    "forward without a backward": Case(_blocks, _drop_a_forward),
    "unit called twice": Case(lambda: _blocks(order=(0, 1, 0, 2))),
    "unit called twice in a row, in flight": Case(lambda: _blocks(order=(0, 0, 1, 1)), _interleave),
    "nested units": Case(lambda: Chain(Outer(), Block(), Outer())),
    "nested units in flight": Case(lambda: Chain(Outer(), Outer(), order=(0, 1, 0)), _interleave),
    "root without parameters": Case(lambda: _blocks(own=False)),
    "root only": Case(_blocks, settings={"units": None}),
    "tied within a unit": Case(lambda: Chain(Pair(), Block()), settings={"units": {Pair}}),
    "tied between nested units": Case(lambda: Chain(Pair(), Block())),
    "tied across units": Case(_tied, _interleave),
    "parameters used on one rank": Case(_fork, partial(_choose, left=lambda rank, step: rank == 3), {"units": {Fork}}),
    "parameters unused on one rank in one step": Case(
        _fork, partial(_choose, left=lambda rank, step: step == 0 or rank != 0), {"units": {Fork}}
    ),
    "parameters used in one step": Case(_fork, partial(_choose, left=lambda rank, step: step == 1), {"units": {Fork}}),
    "unit used in one step": Case(_fork, partial(_choose, left=lambda rank, step: step == 1)),
    "unit used in one node": Case(_fork, partial(_choose, left=lambda rank, step: rank < 2)),
    "unit used on one rank, S = 1": Case(_fork, partial(_choose, left=lambda rank, step: rank == 3), {"size": 1}),
    "never used": Case(lambda: _blocks(order=(0, 2))),
    "frozen unit first": Case(lambda: _freeze(_blocks(), "units.0")),
    "frozen unit last": Case(lambda: _freeze(_blocks(), "units.2", "scale")),
    "partly frozen units": Case(
        lambda: _freeze(_blocks(), "units.0.linear.weight", "units.1.linear.bias"), _interleave
    ),
    "odd shapes and several dtypes": Case(lambda: Chain(Odd(), Block()), _interleave),
    "partly frozen odd shapes": Case(lambda: _freeze(Chain(Odd()), "units.0.odd.3", "units.0.odd.5")),
    **{
        f"outputs in a {name}": Case(
            partial(Wrapping, *container), partial(_use_outputs, unwrap=container[1]), {"units": ["part"]}
        )
        for name, container in CONTAINERS.items()
    },
    **{
        f"{what}, {'' if reentrant else 'non-'}reentrant checkpoint": Case(make)
        for reentrant in (True, False)
        for what, make in {
            "whole units": lambda r=reentrant: Checkpointed(Block(), Block(), reentrant=r),
            "nested units": lambda r=reentrant: Checkpointed(Outer(), Block(), reentrant=r),
            "parts of units": lambda r=reentrant: Chain(Recomputing(reentrant=r), Block()),
        }.items()
    },
}


def _shard(model: nn.Module, size: int = SIZE, **settings: Any) -> nn.Module:
    present = {type(module) for module in model.modules()}
    return layerzero.shard_model(model, zero3_size=size, **({"units": UNITS & present} | settings))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _gathered_bytes(model: nn.Module) -> int:
    return layerzero.memory(model).measured["full_buffer"]


def _assert_same_gradients(model: nn.Module, alone: nn.Module, case: object) -> None:
    """`alone` has added up the gradients of all ranks. In fp64, with its fp64 masters, rounding hides nothing."""
    exact = all(p.dtype == torch.float64 for p in alone.parameters())
    close = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), (case, name, ours.grad, theirs.grad)
        if theirs.grad is not None:
            theirs.grad /= WORLD
            torch.testing.assert_close(
                ours.grad.full_tensor(), theirs.grad, msg=lambda text, n=name: f"{case} {n} {text}", **close
            )


def _compare(rank: int, name: str, case: Case, **settings: Any) -> None:
    torch.manual_seed(0)
    alone = case.make()
    torch.manual_seed(0)
    model = _shard(case.make(), **{**case.settings, **settings})
    optimizer, optimizer_alone = layerzero.shard_optimizer(_sgd(model), model), _sgd(alone)
    for step in range(3):
        case.step(model, rank, step)
        for r in range(WORLD):
            case.step(alone, r, step)
        _assert_same_gradients(model, alone, (name, settings, step))
        assert _gathered_bytes(model) == 0, (name, settings, step)
        for sgd in (optimizer, optimizer_alone):
            sgd.step()
            sgd.zero_grad()


def _compare_modes(rank: int, name: str) -> None:
    for accumulation in ACCUMULATIONS:
        _compare(rank, name, CASES[name], accumulation=accumulation)


@pytest.mark.parametrize("name", CASES)
def test_graph_has_the_gradients_of_one_process(name: str) -> None:
    run_ranks(_compare_modes, name, world_size=WORLD, pg_timeout=20)


SCHEDULES = [{"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}]


def _compare_schedules(rank: int) -> None:
    for settings in [*SCHEDULES, {"reshard_after_forward": False, "prefetch": 0}]:
        for name in ("several forwards before their backwards", "nested units in flight", "unit called twice"):
            _compare(rank, name, CASES[name], **settings)


def test_every_schedule_has_the_gradients_of_one_process() -> None:
    run_ranks(_compare_schedules, world_size=WORLD, pg_timeout=20)


# --- the same bits, whatever happens between the steps ---


def _run(rank: int, make: Callable[[], nn.Module] = _blocks, disturb: Any = None, **settings: Any) -> dict[str, Tensor]:
    """Train for 3 steps, after `disturb(model)` each; the parameters at the end, and the gathers of the last step."""
    torch.manual_seed(0)
    model = _shard(make(), **settings)
    optimizer = layerzero.shard_optimizer(_sgd(model), model)
    for step in range(3):
        if disturb is not None:
            disturb(model)
            optimizer.zero_grad()
            assert _gathered_bytes(model) == 0, (disturb, settings, step)
        layerzero.traffic(model, reset=True)
        _pass(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return {"gathers": torch.tensor(layerzero.traffic(model).calls["gather"]), **full_parameters(model)}


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        unrecorded = model(_x(0, 9))
    with torch.inference_mode():
        assert torch.equal(model(_x(0, 9)), unrecorded)
    model.train()


def _fail(place: str, *, backward: bool, micro_batches: int) -> Callable[[nn.Module], None]:
    def boom(*_: object) -> None:
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
    for settings in ({}, {"accumulation": "full"}, {"reshard_after_forward": False}, {"prefetch": 0}):
        expected = _run(rank, **settings)
        assert not different(_run(rank, disturb=_evaluate, **settings), expected), settings
        for place in ("units.0.linear", "units.2.linear", "units.1", ""):
            for backward in (False, True):
                disturb = _fail(place, backward=backward, micro_batches=int(place == "units.1"))
                assert not different(_run(rank, disturb=disturb, **settings), expected), (place, backward, settings)


def test_evaluation_and_failures_between_the_steps_change_no_bit() -> None:
    run_ranks(_disturb, world_size=WORLD, pg_timeout=20)


def _choose_units(rank: int) -> None:
    names = [f"units.{i}" for i in range(3)]
    expected = _run(rank, units={Block})
    for units in (names, lambda name, module: name in names, [Block], tuple(names)):
        assert not different(_run(rank, units=units), expected), units


def test_units_given_as_classes_names_or_callable_are_the_same() -> None:
    run_ranks(_choose_units, world_size=WORLD)


def _count_gathers(rank: int) -> None:
    plain = _run(rank)["gathers"]
    assert plain <= 2 * 4  # 3 units and the root, forward and backward
    assert _run(rank, reshard_after_forward=False)["gathers"] <= 4
    for reentrant in (True, False):
        again = _run(rank, lambda r=reentrant: Checkpointed(Block(), Block(), Block(), reentrant=r))["gathers"]
        assert again <= plain + 3, (reentrant, again)


def test_recomputation_gathers_each_unit_at_most_once_more() -> None:
    run_ranks(_count_gathers, world_size=WORLD)


# --- several models, births and deaths ---


def _play(models: list[nn.Module], optimizers: list[Any], ranks: list[int], step: int) -> None:
    """A step of the discriminator and one of the generator."""
    generator, discriminator = models
    for place in (1, 0):
        for rank in ranks:
            made = generator(_x(rank, step))
            _loss(discriminator(made.detach() if place else made) * (place - 0.5)).backward()
        for p in models[place].parameters():
            p.grad /= len(ranks)
        optimizers[place].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _train_adversaries(rank: int) -> None:
    torch.manual_seed(0)
    alone = [_blocks(2), _blocks(2)]
    torch.manual_seed(0)
    models = [_shard(_blocks(2), size) for size in (2, 4)]
    optimizers = [layerzero.shard_optimizer(_sgd(model), model) for model in models]
    optimizers_alone = [_sgd(model) for model in alone]
    for step in range(3):
        _play(models, optimizers, [rank], step)
        _play(alone, optimizers_alone, list(range(WORLD)), step)
        for model, expected in zip(models, alone, strict=True):
            for (name, whole), p in zip(full_parameters(model).items(), expected.parameters(), strict=True):
                torch.testing.assert_close(whole, p.detach(), rtol=1e-9, atol=1e-11, msg=lambda t, n=name: f"{n} {t}")


def test_two_models_of_different_zero3_size_train_alternately() -> None:
    run_ranks(_train_adversaries, world_size=WORLD)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape))


def _build_on_meta(rank: int) -> None:
    with torch.device("meta"):
        models = [Chain(Outer(), Block()), _blocks(own=False)]
    filled = _shard(models[0], param_init_fn=_fill)
    expected = Chain(Outer(), Block()).apply(_fill)
    assert not different(full_parameters(filled), dict(expected.named_parameters()))
    torch.manual_seed(rank)
    reset = full_parameters(_shard(models[1]))
    assert all(value.abs().max() <= WIDTH**-0.5 and value.std() > 0.05 for value in reset.values()), reset
    with torch.no_grad():
        torch.testing.assert_close(filled(_x(rank, 0)), expected(_x(rank, 0)))
        expected = _blocks(own=False)
        expected.load_state_dict(reset)
        torch.testing.assert_close(models[1](_x(rank, 0)), expected(_x(rank, 0)))


def test_meta_model_is_initialised_by_reset_parameters_or_param_init_fn() -> None:
    run_ranks(_build_on_meta, world_size=WORLD)


def _change_in_forward(rank: int) -> None:
    model = _shard(_blocks())
    model.units[1].linear.register_forward_pre_hook(lambda module, args: module.weight.data.mul_(0.5) and None)
    with pytest.raises(RuntimeError, match=r"units\.1.*in.?place"):
        _pass(model, rank, 0)


def test_weight_changed_in_place_by_a_forward_raises() -> None:
    run_ranks(_change_in_forward, world_size=WORLD)


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _train_and_forget(rank: int) -> None:
    before = _live_tensors()
    model = _shard(Chain(Outer(), Checkpointed(Block(), Fork(), reentrant=False)))
    optimizer = layerzero.shard_optimizer(_sgd(model), model)
    counts = []
    for step in range(50):
        _interleave(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if step in (5, 49):
            counts.append((_live_tensors(), layerzero.memory(model).total))
    assert counts[0] == counts[1]
    dead = [weakref.ref(thing) for thing in (model, optimizer, model.units[0], *model.parameters())]
    dead += [weakref.ref(p.to_local().untyped_storage()) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead if ref() is not None] == []
    assert _live_tensors() <= before


def test_nothing_grows_over_steps_and_a_deleted_model_is_freed() -> None:
    run_ranks(_train_and_forget, world_size=WORLD)
