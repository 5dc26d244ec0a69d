"""Weights in shared memory: any unit in any order on each rank, and no write while another rank still reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.weight_stream import launch_slot_gather
from tests.support.graphs import WIDTH, batch, blocks, sgd, shard, train_step
from tests.support.models import (
    IntegerNet,
    assert_same_bits,
    exact_sgd,
    full_gradients,
    in_lockstep,
    integer_batch,
    integer_net,
)
from tests.support.ranks import on_ranks
from tests.support.ranks import run_sharing as run_ranks

pytestmark = pytest.mark.slow

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
LATE = 0.3  # seconds
FAILS_AFTER = 3.0  # seconds until a collective fails


# --- a late rank ---


class _Slow(nn.Module):
    """Records its weights before and after a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.naps = False
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        before = self.weight.detach().clone()
        if self.naps:
            time.sleep(LATE)
        self.seen.append(torch.equal(before, self.weight.detach()) and bool((before == before[0]).all()))
        return x + self.weight.float().sum()


def _write_by_step(model: nn.Module, optimizer: Any, turn: int) -> None:
    for parameter in model.parameters():  # no backward, which would wait for the late rank
        parameter.grad = torch.ones_like(parameter.detach())
    optimizer.step()


def _write_by_edit(model: nn.Module, optimizer: Any, turn: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def _write_data(model: nn.Module, optimizer: Any, turn: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _write_whole(model: nn.Module, optimizer: Any, turn: int) -> None:
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def _load(model: nn.Module, optimizer: Any, turn: int) -> None:
    layerzero.load_full_state_dict(model, {"weight": torch.full((64,), 2.0 + turn)})


def _load_plain(model: nn.Module, optimizer: Any, turn: int) -> None:
    model.load_state_dict({"weight": torch.full((64,), 2.0 + turn)})


def _swap(model: nn.Module, optimizer: Any, turn: int) -> None:
    ema = optimizer.param_groups[0].setdefault("ema", None) or layerzero.EMA(model, 0.5)
    optimizer.param_groups[0]["ema"] = ema
    with torch.no_grad():
        ema.update()
        for _, rows in ema._rows.values():
            rows.add_(1 + turn)
    with ema.swapped():
        time.sleep(2 * LATE)


WRITES = (_write_by_step, _write_by_edit, _write_data, _write_whole, _load, _load_plain, _swap)


def _late_reads(rank: int, write: Callable[..., None], policy: MixedPrecisionPolicy, late: int) -> bool:
    """Return whether all ranks saw unchanged, complete weights, with each of them late in turn."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=policy)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
    for turn in range(3):
        model.naps = rank % 2 == late
        with torch.no_grad():
            model(torch.zeros(2))
        write(model, optimizer, turn)
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.zeros(2))
    return all(model.seen)


@pytest.mark.sample(5)
@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_nobody_writes_what_a_late_rank_still_reads(write: Callable[..., None], policy: MixedPrecisionPolicy) -> None:
    for late in (0, 1):
        assert all(run_ranks(_late_reads, write, policy, late, world_size=4 if late else 2)), late


# --- a late refresh ---


def _publish_late(weights: Any, value: float | None = None) -> None:
    """Let the buffer of these weights publish late, with garbage in its shard until then."""
    own, publish = weights.zero3_shard, weights.buffer.publish

    def late(works: Any) -> None:
        fresh = own.clone() if value is None else torch.full_like(own, value)
        own.fill_(torch.nan)
        time.sleep(LATE)
        own.copy_(fresh)
        publish(works)

    weights.buffer.publish = late


@on_ranks(world_size=2, shared_memory="auto")
def test_weights_are_read_when_the_refresh_of_all_ranks_has_landed(rank: int) -> None:
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=BF16)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
    with torch.no_grad():
        model(torch.zeros(2))  # all ranks enter a first forward together
    if rank == 1:
        _publish_late(get_state(model).handles[0].weights)
    _write_by_step(model, optimizer, 0)
    with torch.no_grad():
        model(torch.zeros(2))
    dist.barrier()
    assert all(model.seen)


@on_ranks(world_size=2, shared_memory="auto")
def test_a_parameter_is_gathered_when_the_refresh_of_all_ranks_has_landed(rank: int) -> None:
    """Publish the weights of rank 1 late. Both ranks gather the new weights."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=BF16)
    handle = get_state(model).handles[0]
    if rank == 1:
        _publish_late(handle.weights, 1.0)
    dist.barrier()
    layerzero.refresh(model)
    if rank == 0:
        time.sleep(LATE / 3)
    handle.weights.finish_refresh(of_peers=True)
    full, _ = launch_slot_gather(handle, handle.layout.slots[0])
    dist.barrier()
    assert full.eq(1).all()


def _refresh_of_a_peer_fails(rank: int) -> str:
    """Rank 3 skips a refresh, so the refresh fails on rank 1. Rank 0 then waits for the weights of rank 1."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=BF16)
    weights = get_state(model).handles[0].weights
    if rank == 3:
        time.sleep(3 * FAILS_AFTER)
        return ""
    layerzero.refresh(model)
    try:
        weights.finish_refresh()
        time.sleep(1.5 * FAILS_AFTER)
        weights.finish_refresh(of_peers=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_refresh_that_has_failed_is_not_published() -> None:
    messages = run_ranks(_refresh_of_a_peer_fails, pg_timeout=FAILS_AFTER)
    for rank in (0, 1):
        assert f"refresh of 'the root' failed on rank {rank}" in messages[rank], messages


# --- another order on each rank ---


class _Choice(nn.Module):
    """Calls the units that a rank selects, in that order."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(count))
        self.order: tuple[int, ...] = ()
        with torch.no_grad():
            for index, unit in enumerate(self.units):
                unit.weight.copy_(torch.randint(-1, 2, (5, 5), generator=torch.Generator().manual_seed(index)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.units[index](x) for index in self.order]).sum(0)


ORDERS = (
    {0: (0, 1, 2, 3), 1: (3, 2, 1, 0)},
    {0: (0,), 1: (1, 2)},  # experts as units
    {0: (2, 0), 1: (0, 1, 3)},
    {0: (1,), 1: (0, 1, 2, 3, 1)},
)


@on_ranks(world_size=4, shared_memory="auto")
def test_the_ranks_of_a_node_may_call_different_units_in_any_order(rank: int) -> None:
    for policy, replicas in ((FP32, 1), (FP32, 2), (BF16, 2)):
        world = dist.get_world_size()
        size = world // replicas
        alone = _Choice()
        model = _Choice()
        model = layerzero.shard_model(
            model, zero3_size=size, units=[f"units.{index}" for index in range(4)], mp_policy=policy
        )
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        theirs = exact_sgd(alone.parameters())
        for step in range(8):
            orders = [ORDERS[step % len(ORDERS)][each % 2] for each in range(world)]
            for each in range(world):
                x, weights = _integers(step, each)
                alone.order = orders[each]
                (alone(x) * weights).sum().backward()
            for parameter in alone.parameters():
                if parameter.grad is not None:
                    parameter.grad /= world
            x, weights = _integers(step, rank)
            model.order = orders[rank]
            (model(x) * weights).sum().backward()
            ours = full_gradients(model)
            for name, parameter in alone.named_parameters():
                assert (parameter.grad is None) == (name not in ours), (step, name)
                assert parameter.grad is None or torch.equal(ours[name], parameter.grad), (step, name)
            optimizer.step()
            optimizer.zero_grad()
            if policy is FP32:
                theirs.step()
            theirs.zero_grad()
            if policy is FP32:
                assert_same_bits(model, alone, f"step {step}")
            if step % 3 == rank % 3:  # on some ranks only
                with torch.no_grad():
                    model(x)
        traffic = layerzero.traffic(model)
        assert "gather_order" not in traffic.calls and traffic.bytes["gather"] == 0, traffic


def _integers(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randint(-1, 2, (4, 5), generator=generator).float() * 4 for _ in range(2))  # type: ignore[return-value]


@on_ranks(world_size=4, shared_memory="auto")
def test_one_rank_may_evaluate_alone(rank: int) -> None:
    """Evaluate on rank 0 of a model with two replicas; the others wait for it outside the model."""
    model = shard(blocks(3), size=2)
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    outputs = []
    for step in range(3):
        train_step(model, optimizer, step)
        if rank == 0:
            with torch.no_grad():
                outputs.append(model(batch(0, step)))
        dist.barrier()
    if rank == 0:
        with torch.no_grad():
            assert torch.equal(outputs[-1], model(batch(0, 2)))
            assert not torch.equal(outputs[0], model(batch(0, 0)))


@on_ranks(world_size=2, pg_timeout=2, shared_memory="auto")
def test_an_evaluation_on_one_rank_alone_must_not_come_first(rank: int) -> None:
    model = shard(blocks(1), size=2)
    if rank == 0:
        with torch.no_grad(), pytest.raises(RuntimeError, match="rank"):
            model(batch(0, 0))


# --- remaining errors ---


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.edits = False

    def forward(self, x: Tensor) -> Tensor:
        if self.edits:
            with torch.no_grad():
                self.weight.add_(1)
        return x * self.weight


@on_ranks(world_size=2, shared_memory="auto")
def test_an_edit_in_a_forward_is_an_error(rank: int) -> None:
    model = layerzero.shard_model(_InPlace(), zero3_size=2)
    model.edits = True
    damaged = r"changed in place while it was gathered .* or has corrupted the compute weights"
    with torch.no_grad(), pytest.raises(RuntimeError, match=damaged):
        model(torch.ones(2, WIDTH))
    model.edits = False
    layerzero.load_full_state_dict(model, {"weight": torch.full((WIDTH,), 3.0)})
    with torch.no_grad():
        assert model(torch.ones(2, WIDTH)).eq(3).all(), "a load mends it"


@on_ranks(world_size=4, shared_memory="auto")
def test_a_step_that_raises_on_all_ranks_leaves_the_model_usable(rank: int) -> None:
    net = integer_net()
    alone = exact_sgd(net.parameters())
    model = layerzero.shard_model(integer_net(), zero3_size=2, units=IntegerNet.UNITS)
    inner = exact_sgd(model.parameters())
    optimizer = layerzero.shard_optimizer(inner, model)
    pair = (model, optimizer), (net, alone)
    in_lockstep(rank, *pair, range(2))

    def fail(*_: Any) -> None:
        raise OverflowError("a hook of the user")

    handle = inner.register_step_pre_hook(fail)
    loss = (model(integer_batch(step=2, rank=rank)[0])).sum()
    loss.backward()
    with pytest.raises(OverflowError):
        optimizer.step()
    optimizer.zero_grad()
    handle.remove()
    in_lockstep(rank, *pair, range(2, 5))
    assert_same_bits(model, net, "after a step that has raised")
