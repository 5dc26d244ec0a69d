"""Adapters on frozen bases that cannot be sharded: integer weights, tensors of classes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import layerzero
from layerzero.engine.hooks import runtime_of
from tests.support.graphs import IN_FLIGHT, MODES, WIDTH, WORLD, Case, batch, compare, one_pass, sgd, shard
from tests.support.ranks import run_ranks, run_sharing

FP64 = torch.float64


class Int8(torch.Tensor):
    """A weight in 8 bits with a scale for each row, as packages for quantisation make them."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        """All is in __new__."""

    def whole(self) -> Tensor:
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].numbers.clone(), args[0].scale.clone())
        return func(*tree_map_only(cls, lambda t: t.whole(), args), **(kwargs or {}))


def _quantised() -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), torch.rand(WIDTH, 1, dtype=FP64) / 100


class Adapted(nn.Module):
    """A low-rank adapter on a frozen weight, which is integers with a scale, or a tensor of a class."""

    UNIT = True

    def __init__(self, *, as_class: bool) -> None:
        super().__init__()
        numbers, scale = _quantised()
        if as_class:
            self.weight = nn.Parameter(Int8(numbers, scale), requires_grad=False)
        else:
            self.weight = nn.Parameter(numbers, requires_grad=False)
            self.scale = nn.Parameter(scale, requires_grad=False)  # frozen, and sharded
        self.down = nn.Parameter(torch.randn(2, WIDTH, dtype=FP64) / 10)
        self.up = nn.Parameter(torch.randn(WIDTH, 2, dtype=FP64) / 10)
        self.as_class = as_class

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.whole() if self.as_class else self.weight * self.scale
        return x + torch.tanh(F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up))


class Base(nn.Module):
    def __init__(self, *, as_class: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(as_class=as_class) for _ in range(2))
        self.mask = nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.mask


def _trained(rank: int) -> None:
    for as_class in (False, True):
        make = lambda as_class=as_class: Base(as_class=as_class)  # noqa: E731
        for settings in (*MODES, {"size": 1}, {"size": 4}, {"units": None}):
            compare(rank, "adapters", Case(make, IN_FLIGHT), ignored_params="unsupported", **settings)
        torch.manual_seed(0)
        model = shard(make(), ignored_params="unsupported")
        sharded = set(runtime_of(model).members)
        assert {name.rpartition(".")[2] for name in sharded} == {"down", "up"} | (set() if as_class else {"scale"})
        assert isinstance(model.layers[0].weight, Int8) == as_class
        assert not model.mask.is_floating_point()
        adapters = layerzero.full_state_dict(model, trainable_only=True, rank0_only=False)
        assert sorted(adapters) == [f"layers.{i}.{name}" for i in range(2) for name in ("down", "up")]


@pytest.mark.parametrize("run", [run_ranks, run_sharing])
def test_adapters_are_trained_on_bases_that_cannot_be(run: Callable[..., Any]) -> None:
    run(_trained, world_size=WORLD)


def _saved(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = shard(Base(), ignored_params="unsupported")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(trained), model)
    one_pass(model, rank, 0)
    layerzero.clip_grad_norm_(model, 1.0)
    optimizer.step()
    layerzero.checkpoint.save(folder / "saved", model, optimizer)
    torch.manual_seed(1)
    fresh = shard(Base(), size=4, ignored_params="unsupported")
    other = layerzero.shard_optimizer(torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad]), fresh)
    layerzero.checkpoint.load(folder / "saved", fresh, other)
    assert torch.equal(fresh(batch(rank, 0)), model(batch(rank, 0)))
    assert torch.equal(fresh.layers[1].weight, model.layers[1].weight)
    layerzero.load_full_state_dict(fresh, layerzero.full_state_dict(model))
    with layerzero.unsharded(model), torch.no_grad():
        assert torch.equal(model(batch(rank, 0)), fresh(batch(rank, 0)))


def _not_saved(rank: int, folder: Path) -> None:
    model = shard(Base(as_class=True), ignored_params="unsupported")
    with pytest.raises(TypeError, match=r"layers.0.weight: a Int8, .*trainable_only=True"):
        layerzero.checkpoint.save(folder / "saved", model)
    assert not (folder / "saved").exists()


def test_a_checkpoint_of_what_is_of_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    run_ranks(_not_saved, tmp_path, world_size=2)


def test_integer_bases_go_into_checkpoints_and_out(tmp_path: Path) -> None:
    run_ranks(_saved, tmp_path, world_size=WORLD)


def _refused(rank: int) -> None:
    for as_class, text in ((False, r"mask.*integer"), (True, "mask.*integer")):
        with pytest.raises(ValueError, match=rf"{text}.*ignored_params='unsupported' leaves all frozen"):
            shard(Base(as_class=as_class), size=1)
    with pytest.raises(TypeError, match="ignored_params='frozen'; give parameters of the model, or 'unsupported'"):
        shard(Base(), size=1, ignored_params="frozen")
    # What is to be trained is not left out in silence.
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        model = Base()
        model.odd = nn.Parameter(torch.zeros(3, dtype=dtype))
        with pytest.raises(ValueError, match=r"odd.*(8-bit|complex)") as raised:
            shard(model, size=1, ignored_params="unsupported")
        assert "leaves all frozen" not in str(raised.value)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        shard(lazy, size=1, ignored_params="unsupported")
    model = shard(Base(), size=1, ignored_params="unsupported")
    optimizer = layerzero.shard_optimizer(sgd(model), model)  # holds the frozen ones, too
    one_pass(model, rank, 0)
    optimizer.step()


def test_what_is_left_out_is_frozen() -> None:
    run_ranks(_refused, world_size=1)
