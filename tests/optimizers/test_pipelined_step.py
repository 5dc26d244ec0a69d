"""Pipelined step: masters are updated in parts, each followed by its refresh; the same bits, no extra waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero import Offload
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from tests.support.graphs import WORLD, Block, batch, blocks, one_pass, train_step
from tests.support.models import different
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

UNITS = 12


def _sharded(size: int = 2, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = blocks(UNITS)
    if "offload" in settings:
        warnings.filterwarnings("ignore", message="Offload.optimizer=True. on")
    return layerzero.shard_model(model, mesh=mesh_of(size), units={Block}, **settings)


def _masters(handle: Handle) -> Tensor:
    return torch.cat([member.master.detach().reshape(-1) for member in handle.members]).clone()


@contextmanager
def _seen_at_refreshes(model: nn.Module) -> Iterator[dict[int, list[bool]]]:
    """Return, by index of a handle, which handles' masters had been updated when its refresh was launched."""
    handles = get_state(model).handles
    before = [_masters(handle) for handle in handles]
    seen: dict[int, list[bool]] = {}
    launch = Handle.launch_refresh

    def spied(handle: Handle, *, outside_step: bool) -> None:
        updated = [not torch.equal(_masters(each), old) for each, old in zip(handles, before, strict=True)]
        seen[handles.index(handle)] = updated
        launch(handle, outside_step=outside_step)

    with mock.patch.object(Handle, "launch_refresh", spied):
        yield seen


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "settings", "in_parts"),
    [
        (2, {}, True),
        (2, {"shared_memory": "off"}, True),
        (1, {}, True),
        (2, {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, True),
        (4, {}, False),  # nothing is sent
        (4, {"offload": Offload(optimizer=True)}, True),
    ],
)
@on_ranks(world_size=WORLD)
def test_the_first_units_travel_while_the_last_are_updated(
    rank: int, size: int, settings: dict[str, Any], in_parts: bool
) -> None:
    model = _sharded(size, **settings)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5), model)
    for step in range(2):
        one_pass(model, rank, step)
        with _seen_at_refreshes(model) as seen:
            optimizer.step()
        optimizer.zero_grad()
        handles = get_state(model).handles
        assert list(seen) == list(range(len(handles))), "each once, in the order of the next forward"
        has_rows = [bool(len(_masters(handle))) for handle in handles]
        for index, updated in seen.items():
            assert updated[index] or not has_rows[index], f"unit {index} travels before it was updated"
        others = [seen[index][-1] for index in seen if index < len(handles) // 2]
        assert any(has_rows[-1:]), "the last one tells"
        assert any(others) is not in_parts, "the first half travels before the last unit is updated"


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.25},
        {"params": [p for n, p in named if "weight" not in n], "lr": 0.125},
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "settings"), [(2, {}), (1, {"shared_memory": "off"}), (2, {"offload": Offload(optimizer=True)})]
)
@on_ranks(world_size=WORLD)
def test_parts_have_the_bits_of_the_whole(rank: int, size: int, settings: dict[str, Any]) -> None:
    for make in (
        lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5),
        lambda groups: torch.optim.AdamW(groups, lr=0.25, fused=True),
        lambda groups: torch.optim.RMSprop(groups, lr=0.25, foreach=True),
    ):
        weights = []
        for at_once in (False, True):
            model = _sharded(size, **settings)
            frozen = next(p for n, p in model.named_parameters() if n.endswith("units.3.linear.bias"))
            frozen.requires_grad_(False)
            inner = make(_groups(model))
            optimizer = layerzero.shard_optimizer(inner, model)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            looked: list[int] = []
            if at_once:  # readers of all parameters before their refresh
                inner.register_step_post_hook(lambda *_, to=looked: to.append(1))
            for step in range(3):
                one_pass(model, rank, step)
                with _seen_at_refreshes(model) as seen:
                    optimizer.step()
                assert seen[0][-1] is at_once
                scheduler.step()
                optimizer.zero_grad()
            assert len(looked) == (3 if at_once else 0)
            assert {int(state["step"]) for state in inner.state.values() if "step" in state} <= {3}
            weights.append((layerzero.full_state_dict(model), optimizer.state_dict_by_name()["state"]))
        (whole, state), (expected, expected_state) = weights
        if rank == 0:
            assert not different(whole, expected)
        assert state.keys() == expected_state.keys()
        for name, values in state.items():
            for key, value in values.items():
                other = expected_state[name][key]
                local = [v.to_local() if hasattr(v, "to_local") else torch.as_tensor(v) for v in (value, other)]
                assert torch.equal(torch.as_tensor(local[0]), torch.as_tensor(local[1])), (name, key)


@on_ranks(world_size=WORLD)
def test_a_hook_of_the_optimizer_inside_sees_masters_that_have_not_traveled(rank: int) -> None:
    model = _sharded()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = layerzero.shard_optimizer(inner, model)

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for master in group["params"]:
                master.clamp_(-0.0625, 0.0625)

    inner.register_step_post_hook(clamp)
    one_pass(model, rank, 0)
    optimizer.step()
    with layerzero.unsharded(model):
        largest = max(p.abs().max().item() for p in model.parameters())
    assert largest == 0.0625, "what a hook of the optimizer inside does is refreshed"


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@on_ranks(world_size=WORLD)
def test_an_update_that_fails_halfway_leaves_a_model_that_can_be_loaded(rank: int, shared_memory: str) -> None:
    model = _sharded(shared_memory=shared_memory)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    train_step(model, optimizer, 0)
    start = layerzero.full_state_dict(model, rank0_only=False)
    one_pass(model, rank, 1)
    optimizer.param_groups[0]["lr"], calls = 0.25, []

    class Interrupted(Exception):
        pass

    def failing(*_: Any, **__: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted

    with mock.patch("torch.optim.sgd.sgd", failing), pytest.raises(Interrupted):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(list(model.parameters()))]
    optimizer.zero_grad()
    layerzero.load_full_state_dict(model, start)
    for step in range(2):
        train_step(model, optimizer, step)
    other = _sharded(shared_memory=shared_memory)
    layerzero.load_full_state_dict(other, start)
    plain = layerzero.shard_optimizer(torch.optim.SGD(other.parameters(), lr=0.25), other)
    for step in range(2):
        train_step(other, plain, step)
    got, expected = (layerzero.full_state_dict(each, rank0_only=False) for each in (model, other))
    assert not different(got, expected)


class Halfway(torch.optim.SGD):
    """Updates all parameters except the last one of its first group, then raises."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"][:-1]:
            parameter.sub_(parameter.grad)
        raise ArithmeticError("halfway")


def _halfway(rank: int, size: int) -> None:
    model = _sharded(size)
    optimizer = layerzero.shard_optimizer(Halfway(model.parameters(), lr=1.0), model, elementwise=True)
    x = batch(rank, 0)
    for steps in (1, 2, 1):  # the last one expects another one, and leaves the refresh to it
        one_pass(model, rank, steps)
        for _ in range(steps):
            with pytest.raises(ArithmeticError):
                optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            y = model(x)
            alone = blocks(UNITS)
            alone.load_state_dict(layerzero.full_state_dict(model, rank0_only=False))
            assert torch.equal(y, alone(x))


def test_what_an_optimizer_that_raised_has_updated_is_what_all_replicas_compute_with() -> None:
    run_ranks(_halfway, 1, world_size=2)
    run_ranks(_halfway, 2, world_size=WORLD)
