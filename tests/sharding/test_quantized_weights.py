"""Adapters on frozen weights that cannot be sharded: integer weights and tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import layerzero
from layerzero.checkpoint.whole_model_files import export_model
from layerzero.engine.hooks import get_state
from tests.support.graphs import IN_FLIGHT, MODES, WIDTH, WORLD, Case, batch, compare, one_pass, sgd, shard
from tests.support.models import update
from tests.support.ranks import on_ranks, run_ranks, run_sharing

FP64 = torch.float64


class Int8(torch.Tensor):
    """Weight in 8 bits with a scale per row, as in quantization packages."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        """Do nothing: __new__ does everything."""

    def whole(self) -> Tensor:
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].numbers.clone(), args[0].scale.clone())
        return func(*tree_map_only(cls, lambda t: t.whole(), args), **(kwargs or {}))


class Flat(Int8):
    """Subclass that lists its inner tensors by torch's convention; one of them is a subclass, too."""

    bits = 8

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], {"bits": self.bits, "dtype": self.dtype}


class Nested(Flat):
    """Weight whose scales are a subclass, too."""

    outer: Flat

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Nested:
        made: Nested = Int8.__new__(cls, numbers, scale)  # type: ignore[assignment]
        made.outer = Flat(numbers[:2].clone(), scale[:2].clone())
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale", "outer"], None


def _quantized() -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), torch.rand(WIDTH, 1, dtype=FP64) / 100


class Odd(Flat):
    """Subclass whose description of itself depends on `way`."""

    way = "raises"

    @property
    def fresh(self) -> Tensor:
        return self.scale.clone()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.way == "raises":
            raise ArithmeticError("no way to say it")
        if self.way == "no tensor":
            return ["numbers", "way"], None
        if self.way == "made when asked for":
            return ["numbers", "fresh"], None
        return ["numbers", "scale"], {"a device": torch.device("cuda", 3), "a tensor": {"a table": self.scale}}


class OnDevice(Flat):
    """Subclass that describes its device, as torch's own tensor arguments do."""

    where = torch.device("cuda", 1)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], [self.where, self.dtype]


class Stateful(nn.Module):
    """Module whose extra state is a tensor subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def get_extra_state(self) -> Tensor:
        return Flat(*_quantized())

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


class Adapted(nn.Module):
    """Low-rank adapter on a frozen weight: integers with a scale, or a tensor subclass."""

    UNIT = True

    def __init__(self, *, as_class: bool, kind: type[Int8] = Int8) -> None:
        super().__init__()
        numbers, scale = _quantized()
        if as_class:
            self.weight = nn.Parameter(kind(numbers, scale), requires_grad=False)
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
    def __init__(self, *, as_class: bool = False, kind: type[Int8] = Int8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(as_class=as_class, kind=kind) for _ in range(2))
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
        sharded = set(get_state(model).members)
        assert {name.rpartition(".")[2] for name in sharded} == {"down", "up"} | (set() if as_class else {"scale"})
        assert isinstance(model.layers[0].weight, Int8) == as_class
        assert not model.mask.is_floating_point()
        adapters = layerzero.full_state_dict(model, trainable_only=True, rank0_only=False)
        assert sorted(adapters) == [f"layers.{i}.{name}" for i in range(2) for name in ("down", "up")]


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_ranks, pytest.param(run_sharing, marks=pytest.mark.exhaustive)])
def test_adapters_are_trained_on_bases_that_cannot_be(run: Callable[..., Any]) -> None:
    run(_trained, world_size=WORLD)


@on_ranks(world_size=2)
def test_a_checkpoint_of_what_is_of_a_class_of_its_own_is_refused(rank: int, tmp_path: Path) -> None:
    model = shard(Base(as_class=True), ignored_params="unsupported")
    with pytest.raises(TypeError, match=r"layers.0.weight: a Int8, .*trainable_only=True"):
        layerzero.checkpoint.save(tmp_path / "saved", model)
    assert not (tmp_path / "saved").exists()


def _adapted(kind: type[Int8], seed: int, size: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = shard(Base(as_class=True, kind=kind), size=size, ignored_params="unsupported")
    return model, layerzero.shard_optimizer(torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), model)


@on_ranks(world_size=WORLD)
def test_bases_that_say_what_they_are_made_of_go_into_checkpoints_and_out(rank: int, tmp_path: Path) -> None:
    for kind in (Flat, Nested):
        path = tmp_path / kind.__name__
        model, optimizer = _adapted(kind, 0, 2)
        one_pass(model, rank, 0)
        update(optimizer)
        layerzero.checkpoint.save(path, model, optimizer)
        fresh, other = _adapted(kind, 1, 4)
        assert not torch.equal(fresh(batch(rank, 0)), model(batch(rank, 0)))
        layerzero.checkpoint.load(path, fresh, other)
        for one, two in zip(model.layers, fresh.layers, strict=True):
            assert torch.equal(one.weight.numbers, two.weight.numbers) and torch.equal(
                one.weight.scale, two.weight.scale
            )
            if kind is Nested:
                assert torch.equal(one.weight.outer.numbers, two.weight.outer.numbers)
        for net, its_optimizer in ((model, optimizer), (fresh, other)):
            one_pass(net, rank, 1)
            update(its_optimizer)
        assert torch.equal(fresh(batch(rank, 0)), model(batch(rank, 0)))
    flat, nested = tmp_path / "Flat", tmp_path / "Nested"
    before = fresh.layers[0].weight.numbers.clone()
    for path, model, match in (
        (flat, fresh, r"layers.0.weight: expected .*Nested of .*outer: .*Flat of .*the checkpoint has .*Flat of"),
        (nested, _adapted(Flat, 1, 2)[0], r"layers.0.weight: expected .*Flat of .*the checkpoint has .*Nested of"),
        (flat, shard(Base(), ignored_params="unsupported"), r"layers.0.weight: expected a tensor"),
    ):
        with pytest.raises(ValueError, match=match):
            layerzero.checkpoint.load(path, model)
    with mock.patch.object(Flat, "bits", 4), pytest.raises(ValueError, match=r"'bits': 4.* has .*'bits': 8"):
        layerzero.checkpoint.load(flat, _adapted(Flat, 1, 2)[0])
    assert torch.equal(fresh.layers[0].weight.numbers, before)
    with pytest.raises(ValueError, match=r"layers.0.weight is a tensor subclass \(one of 2\)"):
        export_model(flat, tmp_path / "whole.safetensors")
    with mock.patch.object(Flat, "bits", object()), pytest.raises(TypeError, match="a tensor subclass"):
        layerzero.checkpoint.save(tmp_path / "odd", _adapted(Flat, 1, 2)[0])
    with pytest.raises(TypeError, match=r"extra.base: a Flat, a tensor subclass"):
        layerzero.checkpoint.save(tmp_path / "odd", model, extra={"base": Flat(*_quantized())})


def _numbers(model: Any) -> list[Tensor]:
    return [part.clone() for layer in model.layers for part in (layer.weight.numbers, layer.weight.scale)]


@on_ranks(world_size=2)
def test_classes_that_say_less_than_what_they_are_are_refused(rank: int, tmp_path: Path) -> None:
    for way, match in (
        ("raises", r"layers.0.weight: .*Odd.__tensor_flatten__ failed: ArithmeticError: no way to say it"),
        ("no tensor", "layers.0.weight: a Odd, a tensor subclass"),
        ("made when asked for", "layers.0.weight: a Odd, a tensor subclass"),
        ("holds a tensor", "layers.0.weight: a Odd, a tensor subclass"),
    ):
        model = _adapted(Odd, 0, 2)[0]
        with mock.patch.object(Odd, "way", way), pytest.raises(TypeError, match=match):
            layerzero.checkpoint.save(tmp_path / "odd", model)
    with pytest.raises(TypeError, match=r"_extra_state: a Flat, a tensor subclass"):
        layerzero.checkpoint.save(tmp_path / "odd", layerzero.shard_model(Stateful(), zero3_size=1))
    with (
        mock.patch.object(Odd, "way", "raises" if rank == 1 else "no tensor"),
        pytest.raises((TypeError, RuntimeError)),
    ):
        layerzero.checkpoint.save(tmp_path / "odd", model)
    assert not (tmp_path / "odd").exists()
    # It is the same on every device.
    layerzero.checkpoint.save(tmp_path / "there", saved := _adapted(OnDevice, 0, 2)[0])
    here = _adapted(OnDevice, 1, 2)[0]
    with mock.patch.object(OnDevice, "where", torch.device("cuda", 2 + rank)):
        layerzero.checkpoint.load(tmp_path / "there", here)
        layerzero.checkpoint.save(tmp_path / "elsewhere", here)
    assert all(map(torch.equal, _numbers(here), _numbers(saved)))
    # One that cannot be filled, and a checkpoint with plain values under its name.
    torch.manual_seed(0)
    plain = Base()
    for layer in plain.layers:
        layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=FP64), requires_grad=False)
        del layer.scale
    layerzero.checkpoint.save(tmp_path / "plain", shard(plain, ignored_params="unsupported"))
    for kind, text in (
        (Int8, "a Int8, a tensor subclass, does not expose"),
        (Flat, "expected .*Flat of .* but the checkpoint has another kind of entry"),
    ):
        with pytest.raises(ValueError, match=rf"layers.0.weight: {text}"):
            layerzero.checkpoint.load(tmp_path / "plain", _adapted(kind, 0, 2)[0])


@on_ranks(world_size=2)
def test_a_tensor_of_a_class_is_loaded_in_all_its_parts_or_not_at_all(rank: int, tmp_path: Path) -> None:
    model, _ = _adapted(Flat, 0, 2)
    pending = layerzero.checkpoint.save_async(tmp_path / "saved", model)
    expected = _numbers(model)
    for layer in model.layers:
        layer.weight.numbers.zero_()  # the written value equals the old one
    pending.wait()
    whole = _adapted(Flat, 1, 2)[0]
    layerzero.checkpoint.load(tmp_path / "saved", whole)
    assert all(map(torch.equal, _numbers(whole), expected))
    other, _ = _adapted(Flat, 1, 2)
    other.layers[0].weight.scale = other.layers[0].weight.scale[:1].clone()  # nominally of the same settings
    before = _numbers(other)
    with pytest.raises(ValueError, match=r"scale of layers.0.weight: expected shape \[1, 1\]"):
        layerzero.checkpoint.load(tmp_path / "saved", other)
    assert all(map(torch.equal, _numbers(other), before))
    with pytest.warns(UserWarning, match="skipped the entries") if rank == 0 else nullcontext():
        layerzero.checkpoint.load(tmp_path / "saved", other, strict=False)
    assert all(map(torch.equal, _numbers(other), [*before[:2], *expected[2:]]))
    shared, _ = _adapted(Flat, 1, 2)
    shared.layers[1].weight.scale = shared.layers[0].weight.scale
    with pytest.raises(ValueError, match=r"scale of layers.0.weight and scale of layers.1.weight are one parameter"):
        layerzero.checkpoint.load(tmp_path / "saved", shared)
    layerzero.checkpoint.save(tmp_path / "shared", shared)
    layerzero.checkpoint.load(tmp_path / "shared", whole)
    assert all(map(torch.equal, _numbers(whole), _numbers(shared)))


@on_ranks(world_size=WORLD)
def test_integer_bases_go_into_checkpoints_and_out(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = shard(Base(), ignored_params="unsupported")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(trained), model)
    one_pass(model, rank, 0)
    layerzero.clip_grad_norm_(model, 1.0)
    optimizer.step()
    layerzero.checkpoint.save(tmp_path / "saved", model, optimizer)
    torch.manual_seed(1)
    fresh = shard(Base(), size=4, ignored_params="unsupported")
    other = layerzero.shard_optimizer(torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad]), fresh)
    layerzero.checkpoint.load(tmp_path / "saved", fresh, other)
    assert torch.equal(fresh(batch(rank, 0)), model(batch(rank, 0)))
    assert torch.equal(fresh.layers[1].weight, model.layers[1].weight)
    layerzero.load_full_state_dict(fresh, layerzero.full_state_dict(model))
    with layerzero.unsharded(model), torch.no_grad():
        assert torch.equal(model(batch(rank, 0)), fresh(batch(rank, 0)))


@on_ranks(world_size=1)
def test_what_is_left_out_is_frozen(rank: int) -> None:
    for as_class, text in ((False, r"mask.*integer"), (True, "mask.*integer")):
        with pytest.raises(ValueError, match=rf"{text}.*ignored_params='unsupported' ignores all such frozen"):
            shard(Base(as_class=as_class), size=1)
    with pytest.raises(
        TypeError, match=r"ignored_params='frozen' is not supported. Pass parameters of the model, or 'unsupported'"
    ):
        shard(Base(), size=1, ignored_params="frozen")
    # Trainable parameters are never left out silently.
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        model = Base()
        model.odd = nn.Parameter(torch.zeros(3, dtype=dtype))
        with pytest.raises(ValueError, match=r"odd.*(8-bit|complex)") as raised:
            shard(model, size=1, ignored_params="unsupported")
        assert "ignores all such frozen" not in str(raised.value)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape yet"):
        shard(lazy, size=1, ignored_params="unsupported")
    model = shard(Base(), size=1, ignored_params="unsupported")
    optimizer = layerzero.shard_optimizer(sgd(model), model)  # holds the frozen ones, too
    one_pass(model, rank, 0)
    optimizer.step()
