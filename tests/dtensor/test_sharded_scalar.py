"""0-dim parameters, such as a learned temperature: one row on one rank, presented as a scalar."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from tests.support.graphs import IN_FLIGHT, MODES, WIDTH, WORLD, Case, batch, compare, freeze, sgd, shard
from tests.support.models import full_gradients, full_parameters, update, whole
from tests.support.ranks import on_ranks, run_ranks, run_sharing

pytestmark = pytest.mark.slow

NUMBERS = ("images.gate", "texts.gate", "logit_bias", "logit_scale")


class Tower(nn.Module):
    """Unit with a scalar among its parameters."""

    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate.shape == ()
        return x + self.gate * torch.tanh(self.linear(x))


class Clip(nn.Module):
    """Two towers, and the temperature and bias of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = Tower(), Tower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        images, texts = F.normalize(self.images(x), dim=-1), F.normalize(self.texts(x.flip(1)), dim=-1)
        return self.logit_scale.exp() * images @ texts.t() + self.logit_bias


def _parity(rank: int) -> None:
    for settings in (*MODES, {"size": 1}, {"size": 4}, {"units": None}):
        for make in (Clip, lambda: freeze(Clip(), "logit_bias", "images")):
            compare(rank, "clip", Case(make, IN_FLIGHT), **settings)
    model = shard(Clip())
    assert {n: p.shape for n, p in model.named_parameters() if n in NUMBERS} == dict.fromkeys(NUMBERS, torch.Size([]))
    IN_FLIGHT(model, rank, 0)
    report = layerzero.memory(model)
    for kind in ("zero1_shard", "zero3_shard", "accumulator", "gradient_shard"):  # scratch: as many as are in flight
        assert report.measured[kind] == report.predicted[kind], kind


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", [run_ranks, run_sharing])
def test_numbers_are_trained_as_in_one_process(run: Any) -> None:
    run(_parity, world_size=WORLD)


@on_ranks(world_size=WORLD)
def test_numbers_compute_in_low_precision_beside_fp32_masters(rank: int) -> None:
    torch.manual_seed(0)
    alone = Clip().float()
    model = shard(
        copy.deepcopy(alone), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    optimizer, optimizer_alone = layerzero.shard_optimizer(sgd(model), model), sgd(alone)
    model(batch(rank, 0).float()).sum().backward()
    for r in range(WORLD):
        (alone(batch(r, 0).float()).sum() / WORLD).backward()
    optimizer.step()
    optimizer_alone.step()
    assert model.logit_scale.dtype == torch.float32
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, alone.get_parameter(name).detach(), rtol=2e-2, atol=2e-2)


def _torchs_clip(model: nn.Module, max_norm: float, norm_type: float, foreach: bool | None = None) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)


@on_ranks(world_size=WORLD)
def test_numbers_count_once_in_the_norm_of_all_gradients(rank: int) -> None:
    torch.manual_seed(0)
    alone = Clip()
    for r in range(WORLD):
        (alone(batch(r, 0)).sum() / WORLD).backward()
    for norm_type in (2.0, 1.0, math.inf):
        theirs = copy.deepcopy(alone)
        for mine, other in zip(theirs.parameters(), alone.parameters(), strict=True):
            mine.grad = other.grad.clone()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type)
        for clip in (layerzero.clip_grad_norm_, _torchs_clip, partial(_torchs_clip, foreach=False)):
            model = shard(copy.deepcopy(alone).requires_grad_())
            model(batch(rank, 0)).sum().backward()
            norm = clip(model, 0.5, norm_type)
            torch.testing.assert_close(whole(norm).double(), expected, rtol=1e-5, atol=0)
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-5, atol=1e-12)


# --- usage of a temperature ---


@on_ranks(world_size=WORLD)
def test_a_temperature_is_clamped_set_and_looked_at(rank: int) -> None:
    torch.manual_seed(0)
    model = shard(Clip())
    start = math.log(1 / 0.07)
    with torch.no_grad():
        model.logit_scale.clamp_(0, 2.0)  # as CLIP does after each step
        assert model.logit_scale.exp().full_tensor().item() == pytest.approx(math.exp(2.0))
        model.logit_bias.copy_(torch.tensor(3.0, dtype=torch.float64))
        model.images.gate.fill_(0.25)
        model.texts.gate.data.add_(1.0)
        nn.init.constant_(model.texts.gate, 2.0)
    torch.manual_seed(0)
    alone = Clip()
    with torch.no_grad():
        for name, value in zip(("logit_scale", "logit_bias"), (2.0, 3.0), strict=True):
            getattr(alone, name).fill_(value)
        alone.images.gate.fill_(0.25)
        alone.texts.gate.fill_(2.0)
    torch.testing.assert_close(model(batch(rank, 0)), alone(batch(rank, 0)))
    assert start > 2.0

    value = model.logit_scale.exp().full_tensor()  # outside of no_grad
    assert value.item() == pytest.approx(math.exp(2.0))
    assert (2 * model.logit_scale).shape == (model.logit_scale > 0).shape == ()
    assert model.logit_scale.mean().full_tensor().item() == 2.0
    assert (model.logit_scale * 2 + model.logit_scale).norm().full_tensor().item() == 6.0
    with pytest.raises(NotImplementedError, match="logit_scale"):  # one row and none
        model.logit_scale + model.logit_bias
    with pytest.raises(NotImplementedError, match="logit_scale"):
        model.logit_scale * model.texts.linear.weight
    for read in (float, bool, Tensor.item, "{:.2f}".format, lambda p: p.detach().item(), lambda p: p.exp().item()):
        with pytest.raises(RuntimeError, match=r"logit_scale.*full_tensor\(\) first, on all ranks"):
            read(model.logit_scale)
    for reshape in (lambda p: p.view(1), lambda p: p.unsqueeze(0), lambda p: p.expand(3), Tensor.flatten):
        with pytest.raises(NotImplementedError, match="logit_scale"):
            reshape(model.logit_scale)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model.logit_scale.add_(1.0)
    with pytest.raises(TypeError, match="this rank has"):
        model.logit_scale.tolist()
    assert model.to(torch.device("cpu")) is model
    assert len({*model.parameters()}) == len([*model.parameters()])

    torch.manual_seed(7)
    expected = torch.empty((), dtype=torch.float64).normal_()
    torch.manual_seed(7)
    with torch.no_grad():
        model.logit_scale.normal_()
    assert torch.equal(model.logit_scale.detach().full_tensor(), expected)
    # A penalty on this rank's rows, of which there may be none.
    model.zero_grad()
    penalty = 0.5 * sum(p.to_local().square().sum() for p in (model.logit_scale, model.logit_bias))
    (penalty + 0 * model(batch(rank, 0)).sum()).backward()
    assert torch.equal(model.logit_scale.grad.full_tensor(), model.logit_scale.detach().full_tensor())


@on_ranks(world_size=WORLD)
def test_a_temperature_has_penalties_and_hooks(rank: int) -> None:
    """Penalize twice in each loss, while the parameter has a gradient. Autograd processes these terms first."""
    torch.manual_seed(0)
    model = shard(Clip())
    for _ in range(2):
        loss = 0 * model(batch(rank, 0)).sum()
        for _ in range(2):
            loss = loss + 0.5 * sum(p.to_local().square().sum() for p in (model.logit_scale, model.logit_bias))
        loss.backward()
    value = model.logit_scale.detach().full_tensor()
    torch.testing.assert_close(model.logit_scale.grad.full_tensor(), 4 * value)
    # autograd.grad returns the gradient and leaves .grad as it is.
    (alone,) = torch.autograd.grad(0.5 * model.logit_scale.to_local().square().sum(), model.logit_scale)
    assert torch.equal(alone.full_tensor(), value)
    torch.testing.assert_close(model.logit_scale.grad.full_tensor(), 4 * value)
    with pytest.raises(RuntimeError, match=r"autograd\.grad found no gradient"):
        torch.autograd.grad(model(batch(rank, 0)).sum(), [model.logit_scale])

    # Autograd passes one gradient to all terms of a sum; each must have its own .grad.
    model.zero_grad()
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    scale, bias = model.logit_scale, model.logit_bias
    for _ in range(2):
        (leaf * 1 + scale.to_local().sum() + scale.to_local().sum() + bias.to_local().sum()).backward()
    assert leaf.grad.item() == 2
    assert scale.grad.full_tensor().item() == 4 and bias.grad.full_tensor().item() == 2
    model.zero_grad()
    loss = scale.to_local().sum() + bias.to_local().sum()
    scale.requires_grad_(False)
    loss.backward()
    assert scale.grad is None and bias.grad.full_tensor().item() == 1
    scale.requires_grad_(True)

    model.zero_grad()
    calls: list[Tensor] = []
    with torch.no_grad():  # as hooks may be registered anywhere
        model.logit_scale.register_post_accumulate_grad_hook(calls.append)
    model(batch(rank, 0)).sum().backward()
    assert len(calls) == 1 and calls[0] is model.logit_scale


# --- full states, checkpoints, averages ---


def _adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _trained(size: int, seed: int = 0, make: Any = _adam) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = shard(Clip(), size=size)
    return model, layerzero.shard_optimizer(make(model), model)


def _steps(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(0, step)).sum().backward()
        update(optimizer)


def _everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    for name, values in optimizer.state_dict_by_name()["state"].items():
        for key, value in values.items():
            found[f"{name}.{key}"] = whole(value)
    return found


def _assert_goes_on(ours: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer], case: str) -> None:
    """Assert that both models are equal, now and after another step."""
    for steps in (range(0), range(3, 4)):
        for each in (ours, theirs):
            _steps(*each, steps)
        mine, other = _everything(*ours), _everything(*theirs)
        assert mine.keys() == other.keys(), case
        assert mine["logit_scale.exp_avg"].shape == () and mine["logit_scale.step"].shape == ()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-9, atol=0, msg=f"{case}: {name}")


@on_ranks(world_size=WORLD)
def test_whole_states_go_in_and_out(rank: int) -> None:
    torch.manual_seed(0)
    alone = Clip()
    adam = _adam(alone)
    _steps(alone, adam, range(2))
    whole = copy.deepcopy(alone.state_dict())
    for size in (1, 2, 4):
        model, optimizer = ours = _trained(size)
        _steps(*ours, range(2))
        assert full_parameters(model).keys() == whole.keys()
        for name, value in layerzero.full_state_dict(model, rank0_only=False).items():
            assert value.shape == whole[name].shape
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=0)

        fresh = _trained(size, seed=1)
        layerzero.load_full_state_dict(fresh[0], whole if rank == 0 else None)
        fresh[1].load_state_dict(adam.state_dict())  # of an unsharded optimizer, by number
        _assert_goes_on(_copy_of(ours), fresh, "one process's")
        fresh = _trained(size, seed=1)
        fresh[0].load_state_dict(whole)
        fresh[1].load_state_dict(optimizer.state_dict())
        _assert_goes_on(_copy_of(ours), fresh, "own")

        with layerzero.unsharded(model, writeback=True), torch.no_grad():
            assert model.logit_scale.item() == pytest.approx(whole["logit_scale"].item())
            model.logit_scale.fill_(1.5)
        assert model.logit_scale.detach().full_tensor().item() == 1.5

    # An optimizer that stepped before the model was sharded.
    model_copy, stepped = copy.deepcopy(alone), _trained(2)
    _steps(*stepped, range(2))
    inner = _adam(model_copy)
    inner.load_state_dict(adam.state_dict())
    model = shard(model_copy)
    _assert_goes_on((model, layerzero.shard_optimizer(inner, model)), stepped, "stepped before")


def _copy_of(source: tuple[nn.Module, Optimizer]) -> tuple[nn.Module, Optimizer]:
    made = _trained(source[0].logit_scale.device_mesh.size(0), seed=3)
    made[0].load_state_dict(copy.deepcopy(source[0].state_dict()))
    made[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
    return made


@on_ranks(world_size=WORLD)
def test_torchs_state_dicts_have_numbers(rank: int) -> None:
    for options in (None, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        source = _trained(2)
        _steps(*source, range(2))
        state = get_model_state_dict(source[0], options=options and StateDictOptions(full_state_dict=True))
        stepped = get_optimizer_state_dict(*source, options=options and StateDictOptions(full_state_dict=True))
        fresh = _trained(2, seed=1)
        set_model_state_dict(fresh[0], state if options is None or rank == 0 else {}, options=options)
        set_optimizer_state_dict(*fresh, stepped if options is None or rank == 0 else {}, options=options)
        _assert_goes_on(source, fresh, f"options {options}")


def _save(rank: int, folder: Path) -> dict[str, Tensor]:
    source = _trained(2)
    _steps(*source, range(3))
    ema = layerzero.EMA(source[0], decay=0.5)
    ema.update()
    extra = {"averages": ema.state_dict(), "scale": source[0].logit_scale.detach()}
    layerzero.checkpoint.save(folder / "own", *source, extra=extra)
    state = {"model": get_model_state_dict(source[0]), "optimizer": get_optimizer_state_dict(*source)}
    dcp.save(state, checkpoint_id=folder / "torch")
    return _everything(*source)


def _load(rank: int, folder: Path, size: int, expected: dict[str, Tensor]) -> None:
    fresh = _trained(size, seed=1)
    extra = layerzero.checkpoint.load(folder / "own", *fresh)
    _assert_equal(_everything(*fresh), expected)
    ema = layerzero.EMA(fresh[0], decay=0.5)
    ema.load_state_dict(extra["averages"])
    averages = {name: value.full_tensor() for name, value in ema.state_dict()["averages"].items()}
    _assert_equal(averages, {name: expected[name] for name in averages})
    assert torch.equal(extra["scale"].full_tensor(), expected["logit_scale"])
    with ema.swapped():
        assert torch.equal(fresh[0].logit_scale.detach().full_tensor(), expected["logit_scale"])

    fresh = _trained(size, seed=1)
    state = {"model": get_model_state_dict(fresh[0]), "optimizer": get_optimizer_state_dict(*fresh)}
    dcp.load(state, checkpoint_id=folder / "torch")
    set_model_state_dict(fresh[0], state["model"])
    set_optimizer_state_dict(*fresh, state["optimizer"])
    _assert_equal(_everything(*fresh), expected)
    _steps(*fresh, range(3, 4))


def _assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.exhaustive
def test_checkpoints_of_numbers_load_into_any_sharding(tmp_path: Path) -> None:
    expected = run_ranks(_save, tmp_path, world_size=WORLD)[0]
    for world, size in ((1, 1), (2, 1), (2, 2), (4, 4), (3, 3)):
        run_ranks(_load, tmp_path, size, expected, world_size=world)


@on_ranks(world_size=WORLD)
def test_a_loss_scaler_unscales_numbers(rank: int) -> None:
    model, optimizer = _trained(2, make=sgd)
    torch.manual_seed(0)
    alone = Clip()
    optimizer_alone = sgd(alone)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    for scaler, net, each in ((ours, model, optimizer), (theirs, alone, optimizer_alone)):
        scaler.scale(net(batch(0, 0)).sum()).backward()
        scaler.unscale_(each)
        scaler.step(each)
        scaler.update()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, alone.get_parameter(name).detach(), rtol=1e-9, atol=0)


@on_ranks(world_size=WORLD)
def test_each_kernel_of_an_optimizer_steps_numbers(rank: int) -> None:
    expected = None
    for settings in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        trained = _trained(2, make=lambda m, s=settings: torch.optim.AdamW(m.parameters(), lr=0.01, **s))
        _steps(*trained, range(2))
        found = _everything(*trained)
        expected = expected or found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-12, msg=f"{settings} {name}")


@on_ranks(world_size=WORLD)
def test_numbers_on_meta_are_initialized(rank: int) -> None:
    with torch.device("meta"):
        model = Clip()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    shard(model, param_init_fn=fill)
    assert all(bool((whole == 0.25).all()) for whole in full_parameters(model).values())
