"""Masters read and written from outside: both copies of a weight always agree."""

from __future__ import annotations

import contextlib
import copy
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.models import (
    TiedTransformer,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    union,
)
from tests.support.ranks import mesh_of, on_ranks

pytestmark = pytest.mark.slow

WORLD = 4
SIZES = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = [(size, dtype) for size in SIZES for dtype in DTYPES]


def _sharded(
    model: nn.Module | None = None, size: int = 2, dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    model = integer_net() if model is None else model
    units = getattr(model, "UNITS", None)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return layerzero.shard_model(model, mesh=mesh_of(size), units=units, mp_policy=policy, **settings)


def _output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(integer_batch(samples=6)[0])


def _output_alone(net: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the output of a one-process model whose weights and inputs are cast to `dtype`."""
    cast = copy.deepcopy(net).to(dtype)
    with torch.no_grad():
        return cast(integer_batch(samples=6)[0].to(dtype))


def _assert_same(model: nn.Module, alone: nn.Module, case: object, dtype: torch.dtype = torch.float32) -> None:
    """Assert that compute weights, as a forward on each rank sees them, and masters match the one-process model."""
    assert torch.equal(_output(model), _output_alone(alone, dtype)), case
    assert not different(full_parameters(model), dict(alone.named_parameters())), case


def _message_of(call: Callable[[], Any]) -> str:
    """Return the message of the error that `call` raises within seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - start < 10, f"took too long: {error}"
        return str(error)
    raise AssertionError("nothing was raised")


# --- writes by all ranks ---


def _set_local(p: Tensor) -> None:
    (p.to_local() if isinstance(p, DTensor) else p)[...] = 1


def _each(edit: Callable[[Tensor], Any], *, grad: bool = True) -> Callable[[nn.Module], None]:
    def edit_all(model: nn.Module) -> None:
        with torch.set_grad_enabled(grad):
            for p in model.parameters():
                edit(p)

    return edit_all


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.5)
    torch._foreach_add_(list(model.parameters()), 1.0)


# Applied one after the other to one model; all values stay small multiples of 1/4.
EDITS: dict[str, Callable[[nn.Module], None]] = {
    "p.mul_": _each(lambda p: p.mul_(2), grad=False),
    "p.data.copy_": _each(lambda p: p.data.copy_(-p.data)),
    "p.detach().add_": _each(lambda p: p.detach().add_(1)),
    "nn.init.constant_": lambda model: nn.init.constant_(model.second.weight, -1),
    "p.data.mul_": _each(lambda p: p.data.mul_(2)),
    "torch._foreach": _foreach,
    "one parameter only": lambda model: model.head.bias.detach().add_(2),
    "p.to_local()[...] =": _each(_set_local, grad=False),
    "nn.init.ones_": lambda model: nn.init.ones_(model.first.weight),
    "p.data.fill_": _each(lambda p: p.data.fill_(2)),
}


@on_ranks(world_size=WORLD)
def test_edit_in_every_idiom_shows_in_the_next_forward_of_all_replicas(rank: int) -> None:
    for size, dtype in SETTINGS:
        model, alone = _sharded(size=size, dtype=dtype), integer_net()
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for name, edit in EDITS.items():
            edit(model)
            edit(alone)
            _assert_same(model, alone, (name, size, dtype), dtype)
        model.load_state_dict(saved)
        _assert_same(model, integer_net(), ("load_state_dict", size, dtype), dtype)
        for parameter in model.parameters():
            rows, writes = parameter.detach().to_local(), parameter._local_tensor.tracker.write_count
            if len(rows):
                rows[(0,) * rows.ndim] = 1
                assert parameter._local_tensor.tracker.write_count > writes, "a write to one element"


@on_ranks(world_size=WORLD)
def test_edit_between_training_steps_is_kept_by_the_next_step(rank: int) -> None:
    for size in SIZES:
        model, alone = _sharded(size=size), integer_net()
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        optimizer_alone = exact_sgd(alone.parameters())
        for step in range(3):
            whole = union([integer_batch(step=step, rank=r) for r in range(WORLD)])
            mine = integer_batch(step=step, rank=rank)
            for net, sgd, batch in ((model, optimizer, mine), (alone, optimizer_alone, whole)):
                integer_loss(net, batch).backward()
                if step == 1:
                    EDITS["p.detach().add_"](net)
                sgd.step()
                sgd.zero_grad()
                EDITS["p.data.copy_"](net)
            _assert_same(model, alone, (size, step))


@on_ranks(world_size=WORLD)
def test_edit_on_one_rank_can_be_carried_by_refresh_on_all(rank: int) -> None:
    for size in SIZES:
        model = _sharded(size=size)
        _output(model)
        if rank == 3:
            EDITS["p.to_local()[...] ="](model.second)
        layerzero.refresh(model)
        alone = integer_net()
        alone.load_state_dict(full_parameters(model))
        assert different(dict(alone.named_parameters()), dict(integer_net().named_parameters())), size
        _assert_same(model, alone, size)


@pytest.mark.parametrize(
    ("size", "odd", "shared_memory", "follows_step"),
    [(1, 0, "auto", False), (2, 3, "auto", False), (2, 3, "off", False), (2, 3, "off", True)],
)
@on_ranks(world_size=WORLD, pg_timeout=3, timeout=30)
def test_edit_on_one_rank_only_is_an_error_there_that_names_the_other_ranks(
    rank: int, size: int, odd: int, shared_memory: str, follows_step: bool
) -> None:
    """Edit after a forward, or also after a step whose refresh is launched later."""
    model = _sharded(size=size, shared_memory=shared_memory)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    _output(model)
    if follows_step:
        get_state(model).refreshes.deferred = True
        integer_loss(model, integer_batch(rank=rank)).backward()
        optimizer.step()
    if rank != odd:
        with contextlib.suppress(Exception):  # with S = 1 no collective in a forward could detect these ranks
            _output(model)
        return
    message = _message_of(lambda: (EDITS["p.to_local()[...] ="](model), _output(model)))
    assert "refresh" in message and re.search(rf"\b{3 - odd}\b", message), message


# --- unsharded ---


@on_ranks(world_size=WORLD, pg_timeout=15)
def test_different_edits_on_different_ranks_are_refused_and_nothing_is_written(rank: int) -> None:
    for size in SIZES:
        model, alone = _sharded(size=size), integer_net()

        def edit(model: nn.Module = model) -> None:
            with layerzero.unsharded(model, writeback=True), torch.no_grad():
                model.second.weight.add_(1)
                model.head.bias.add_(rank == 2)

        assert re.search(r"head\.bias|\b2\b", message := _message_of(edit)), (size, message)
        _assert_same(model, alone, size)

        def misshape(model: nn.Module = model) -> None:
            with layerzero.unsharded(model, writeback=True), torch.no_grad():
                if rank == 1:
                    model.head.bias = nn.Parameter(torch.ones(1))

        assert "'head.bias' must have its original shape" in (message := _message_of(misshape)), (size, message)
        _assert_same(model, alone, size)


# --- full state ---


def _transformer(seed: int = 0) -> TiedTransformer:
    model = TiedTransformer(vocabulary=11, width=6, heads=1, seed=seed)
    model.blocks[1].requires_grad_(False).to(torch.bfloat16)
    model.register_buffer("count", torch.tensor(seed + 3))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


@on_ranks(world_size=WORLD)
def test_full_state_is_what_the_unsharded_model_would_save(rank: int) -> None:
    for size in SIZES:
        model, expected = _sharded(_transformer(), size), _transformer().state_dict()
        on_rank_0 = layerzero.full_state_dict(model)
        assert on_rank_0.keys() == (expected.keys() if rank == 0 else set()), size
        for cpu in (True, False):
            state = layerzero.full_state_dict(model, rank0_only=False, cpu=cpu)
            assert list(state) == list(expected) and not different(state, expected), size
            for name, value in state.items():
                assert type(value) is Tensor and value.dtype == expected[name].dtype, (size, name)
                assert value.device.type == "cpu" and not value.requires_grad, (size, name)
        fresh = _transformer(seed=1)
        fresh.load_state_dict(state)
        assert not different(fresh.state_dict(), expected), size


@on_ranks(world_size=WORLD)
def test_loaded_full_state_of_rank_0_shows_in_the_next_forward(rank: int) -> None:
    for size, dtype in SETTINGS:
        model, alone = _sharded(size=size, dtype=dtype), integer_net(seed=1)
        _output(model)
        layerzero.load_full_state_dict(model, alone.state_dict() if rank == 0 else [{}, None][rank % 2])
        _assert_same(model, alone, (size, dtype), dtype)
        model = _sharded(_transformer(), size)
        layerzero.load_full_state_dict(model, _transformer(seed=2).state_dict())
        expected = _transformer(seed=2).state_dict()
        assert not different(layerzero.full_state_dict(model, rank0_only=False), expected), size
        assert model.head.weight is model.embedding.weight, size


@on_ranks(world_size=WORLD, pg_timeout=15)
def test_wrong_full_state_is_one_error_with_all_names_and_changes_nothing(rank: int) -> None:
    model = _sharded(_transformer(), 2)
    state = _transformer(seed=1).state_dict()
    del state["norm.weight"], state["count"]
    state |= {"norm.scale": torch.zeros(6), "blocks.0.up.bias": torch.zeros(7)}
    message = _message_of(lambda: layerzero.load_full_state_dict(model, state if rank == 0 else {}))
    for name in (r"norm\.weight", "count", r"norm\.scale", r"blocks\.0\.up\.bias", "7", "24"):
        assert re.search(rf"\b{name}\b", message), (name, message)
    state = layerzero.full_state_dict(model, rank0_only=False)
    assert not different(state, _transformer().state_dict())


@on_ranks(world_size=WORLD)
def test_torch_checkpoint_of_the_state_dict_loads_into_any_zero3_size(rank: int, tmp_path: Path) -> None:
    for make in (integer_net, _transformer):
        for saved_size, sizes in {1: (4,), 2: (2, 1), 4: (2,)}.items():
            folder = f"{tmp_path}/{make.__name__}-{saved_size}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about its internals
                dcp.save(_sharded(make(1), saved_size).state_dict(), checkpoint_id=folder)
                for size in sizes:
                    model = _sharded(make(2), size)
                    dcp.load(model.state_dict(), checkpoint_id=folder)
                    state = layerzero.full_state_dict(model, rank0_only=False)
                    assert not different(state, make(1).state_dict()), (make.__name__, saved_size, size)
                    if make is integer_net:
                        _assert_same(model, make(1), (saved_size, size))
