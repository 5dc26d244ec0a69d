"""Parameters and buffers of unusual shapes, strides and places."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import PrecisionPolicy
from layerzero.sharding.module_methods import set_gradient_divide_factor
from tests.support.graphs import (
    IN_FLIGHT,
    MODES,
    WIDTH,
    WORLD,
    Block,
    Case,
    Chain,
    batch,
    blocks,
    compare,
    one_pass,
    sgd,
    shard,
)
from tests.support.models import full_gradients, full_parameters, update
from tests.support.ranks import every_nth_setting, mesh_of, on_ranks

FP64 = torch.float64


class Strided(nn.Module):
    """Weights that are transposed, channels_last, permuted, or views with gaps."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 5, dtype=FP64).t())
        self.conv = nn.Conv2d(2, 3, 2, dtype=FP64).to(memory_format=torch.channels_last)
        self.permuted = nn.Parameter(torch.randn(2, 3, WIDTH, dtype=FP64).permute(1, 2, 0))
        self.plain = nn.Linear(5, WIDTH, dtype=FP64)
        self.gaps = nn.Parameter(torch.randn(WIDTH, 4, dtype=FP64)[:, ::2])
        self.strides: dict[str, tuple[int, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.strides = {name: parameter.stride() for name, parameter in self.named_parameters()}
        image = x.new_ones(1, 2, 3, 3).to(memory_format=torch.channels_last) * x.mean()
        curved = self.conv(image).mean() + (x @ self.permuted.sum(0)).mean() + (x @ self.gaps).mean()
        return x + torch.tanh(self.plain(F.linear(x, self.turned))) * curved


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_strides_of_parameters_are_kept_in_compute(rank: int) -> None:
    torch.manual_seed(0)
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        model = Chain(Strided(), Block(), Strided())
        compare(rank, "strided", Case(partial(copy.deepcopy, model), IN_FLIGHT), **settings)
    expected = {name: p.stride() for name, p in model.units[0].named_parameters()}
    sharded = shard(copy.deepcopy(model))
    sharded(batch(rank, 0))
    ours = sharded.units[0].strides
    assert {n: s for n, s in ours.items() if n != "gaps"} == {n: s for n, s in expected.items() if n != "gaps"}
    for name, whole in full_parameters(sharded).items():
        assert torch.equal(whole, model.get_parameter(name)), name


@on_ranks(world_size=WORLD)
def test_an_edit_of_a_gathered_weight_with_strides_of_its_own_is_noticed(rank: int) -> None:
    model = layerzero.shard_model(Chain(Strided()), zero3_size=2, units={Strided})

    def edit(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.turned.mul_(2)

    model.units[0].register_forward_pre_hook(edit)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(batch(rank, 0))


class Small(nn.Module):
    """Parameters with fewer rows than ranks: one row, one element, no element."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, WIDTH, dtype=FP64))
        self.one = nn.Parameter(torch.randn(1, dtype=FP64))
        self.none = nn.Parameter(torch.randn(0, WIDTH, dtype=FP64))
        self.flat = nn.Parameter(torch.randn(3, 0, dtype=FP64))
        self.two = nn.Parameter(torch.randn(2, 1, 1, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.none.sum() + self.flat.sum()
        return torch.tanh(x * self.row + self.one + self.two.sum() + nothing)


@every_nth_setting(3)
@on_ranks(world_size=WORLD)
def test_fewer_rows_than_ranks_and_no_elements(rank: int, stride: int) -> None:
    chains = (lambda: Chain(Small(), own=False), lambda: Chain(Small(), Block(), Small()))
    cases = [*itertools.product(chains, (*MODES, {"size": 1}, {"size": 4}, {"units": None}))]
    for make, settings in cases[::stride]:
        compare(rank, "small", Case(make, IN_FLIGHT), **settings)


# --- sums instead of means ---


@on_ranks(world_size=WORLD)
def test_a_divide_factor_of_one_sums_gradients_as_per_token_losses_need(rank: int) -> None:
    """Train with a different number of tokens per rank; the loss is divided by all tokens of the step."""
    torch.manual_seed(0)
    alone = blocks()
    model = shard(copy.deepcopy(alone))
    model.set_gradient_divide_factor(1)
    counts = [[1 + r, 5 - r] for r in range(WORLD)]
    total = sum(map(sum, counts))

    def loss(net: nn.Module, of_rank: int, micro_batch: int) -> Tensor:
        tokens = batch(of_rank, 0, micro_batch).repeat(2, 1)[: counts[of_rank][micro_batch]]
        return net(tokens).sum() / total

    for micro_batch in range(2):
        with layerzero.no_sync(model):
            loss(model, rank, micro_batch).backward()
        for each in range(WORLD):
            loss(alone, each, micro_batch).backward()
    layerzero.clip_grad_norm_(model, float("inf"))
    theirs = {name: p.grad for name, p in alone.named_parameters()}
    torch.testing.assert_close(full_gradients(model), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_the_divide_factor_replaces_the_number_of_ranks(rank: int, world_size: int) -> None:
    """Check that gradients are exactly the mean's times D / factor, on every path of a gradient."""
    fp16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for settings in (*MODES, {"mp_policy": fp16}):
        for size in (s for s in (1, 2, 4) if world_size % s == 0):
            gradients = []
            for factor in (None, 2.0, 0.5):
                model = layerzero.shard_model(nn.Linear(4, 4), mesh=mesh_of(size), **settings)
                if factor is not None:
                    model.set_gradient_divide_factor(factor)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(1.0)
                for _ in range(2):
                    model(torch.full((2, 4), float(rank + 1))).sum().backward()
                gradients.append(full_gradients(model)["weight"] * (factor or world_size) / world_size)
            assert gradients[0].any() and torch.equal(gradients[0], gradients[1]), (settings, size)
            assert torch.equal(gradients[0], gradients[2]), (settings, size)


@on_ranks(world_size=WORLD)
def test_a_unit_may_have_its_own_divide_factor(rank: int) -> None:
    model = shard(blocks(2))
    one_pass(model, rank, 0)
    expected = full_gradients(model)
    model.zero_grad()
    model.units[0].set_gradient_divide_factor(float(WORLD) / 4)
    one_pass(model, rank, 0)
    for name, gradient in full_gradients(model).items():
        scale = 4 if name.startswith("units.0.") else 1
        torch.testing.assert_close(gradient, scale * expected[name], rtol=0, atol=0)
    with layerzero.no_sync(model):
        one_pass(model, rank, 0)
    with pytest.raises(RuntimeError, match=r"while gradients are accumulated.*before the first backward"):
        model.set_gradient_divide_factor(1.0)


@on_ranks(world_size=WORLD)
def test_divide_factors_that_differ_between_ranks_are_refused(rank: int) -> None:
    model = shard(blocks(2))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    model.set_gradient_divide_factor(2.0 if rank == 1 else 1.0)
    text = r"gradient_divide_factor of unit 'units.0' is 1\.0 on ranks? .* and 2\.0 on rank 1"
    with pytest.raises(RuntimeError, match=text):
        for step in range(4):
            one_pass(model, rank, step)
            update(optimizer)


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan"), "4", True])
def test_a_divide_factor_that_is_no_positive_number_is_refused(factor: object) -> None:
    with pytest.raises((TypeError, ValueError), match="gradient_divide_factor"):
        set_gradient_divide_factor(nn.Linear(2, 2), factor)


# --- buffers ---


class Buffered(nn.Module):
    UNIT = True

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=FP64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=FP64)
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH, dtype=FP64) + rank)
        self.register_buffer("scratch", torch.zeros(2, dtype=torch.float32), persistent=False)
        self.register_buffer("table", torch.tensor([3, 1 + rank], dtype=torch.int32))
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.scratch += 1
        return x + self.norm(self.linear(x) * self.angles.to(x.dtype))


@on_ranks(world_size=WORLD)
def test_buffers_are_left_alone_or_cast_once(rank: int) -> None:
    for settings in MODES:
        compare(rank, "buffers", Case(lambda: Chain(Buffered(), Block(), Buffered())), **settings)
    model = shard(Chain(Buffered(rank)))
    unit = model.units[0]
    assert unit.angles.dtype == FP64 and unit.scratch.dtype == torch.float32 and unit.table.dtype == torch.int32
    assert unit.table.tolist() == [3, 1] and unit.angles[0] == 0, "of the first rank"
    model(batch(rank, 0))
    assert unit.norm.num_batches_tracked == 1 and unit.norm.running_mean.any() and unit.scratch.tolist() == [1, 1]
    assert "units.0.scratch" not in model.state_dict() and "units.0.table" in model.state_dict()

    model = shard(Chain(Buffered(rank)), mp_policy=PrecisionPolicy(buffer_dtype=torch.bfloat16))
    unit = model.units[0]
    assert {unit.angles.dtype, unit.scratch.dtype, unit.norm.running_mean.dtype} == {torch.bfloat16}
    assert unit.table.dtype == torch.int32 and unit.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(unit.angles, Buffered().angles.bfloat16())


# --- the meta device ---

BIG = 64


class Big(nn.Module):
    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(BIG, BIG))
        self.bias = nn.Parameter(torch.empty(BIG))
        self.register_buffer("shift", torch.empty(BIG))

    def reset_parameters(self) -> None:
        _peaks.append(_settled_bytes())
        with torch.no_grad():
            self.weight.copy_(torch.randn(BIG, BIG, generator=_generator) / 8)
            self.bias.zero_()
            self.shift.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight, self.bias) + self.shift)


_generator = torch.Generator()
_peaks: list[int] = []


def _live_bytes() -> int:
    """Return the bytes of all storages on the CPU."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and type(thing) in _PLAIN]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return sum(storages.values())


def _settled_bytes() -> int:
    """Return the least of some counts. For a moment, threads of gloo refer to tensors of completed collectives."""
    counts = [_live_bytes()]
    for _ in range(4):
        time.sleep(0.01)
        counts.append(_live_bytes())
    return min(counts)


_PLAIN = (Tensor, nn.Parameter)


@pytest.mark.parametrize("init", ["param_init_fn", "reset_parameters"])
@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_model_on_meta_is_initialized_unit_by_unit(rank: int, init: str) -> None:
    count = 6
    torch.manual_seed(rank)  # ranks that draw different values must start alike
    _generator.manual_seed(rank)
    with torch.device("meta"):
        model = nn.Sequential(*(Big() for _ in range(count)))
    assert all(parameter.is_meta for parameter in model.parameters())
    _peaks.clear()
    gc.collect()
    before = _live_bytes()
    chosen: Callable[[nn.Module], None] | None = (lambda m: m.reset_parameters()) if init == "param_init_fn" else None
    layerzero.shard_model(model, zero3_size=2, units={Big}, param_init_fn=chosen)
    unit = 4 * (BIG * BIG + 2 * BIG)
    shards = [unit * index / 2 for index in range(count)]  # of earlier units: N/S in fp32, masters included
    assert len(_peaks) == count
    for index, (peak, held) in enumerate(zip(_peaks, shards, strict=True)):
        assert peak - before <= held + 1.5 * unit, f"{index} units done: {peak - before} bytes, {held} of them shards"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    whole = full_parameters(model)
    starts = [torch.empty_like(whole["0.weight"]) for _ in range(WORLD)]
    dist.all_gather(starts, whole["0.weight"])
    assert all(torch.equal(start, starts[0]) for start in starts) and starts[0].std() > 0.05
    expected = [torch.randn(BIG, BIG, generator=torch.Generator().manual_seed(0)) / 8]
    assert torch.equal(whole["0.weight"], expected[0]), "of the first rank"

    plain = nn.Sequential(*(Big() for _ in range(count)))
    plain.load_state_dict(layerzero.full_state_dict(model, rank0_only=False))
    x = torch.randn(WORLD, 3, BIG, generator=torch.Generator().manual_seed(1))
    optimizers = layerzero.shard_optimizer(sgd(model), model), sgd(plain)
    for _ in range(2):
        model(x[rank]).pow(2).mean().backward()
        plain(x.flatten(0, 1)).pow(2).mean().backward()
        update(*optimizers)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)
