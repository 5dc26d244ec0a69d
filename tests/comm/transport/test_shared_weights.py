"""Weights in shared memory: any unit in any order on each rank, and no write while another rank still reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.comm.transport.shared_memory import SharedFullBuffer, SharedMemoryTransport
from layerzero.engine.hooks import get_state
from tests.support.graphs import WIDTH, Block, Chain, batch, blocks, loss_of, sgd, shard, train_step
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
VERY_LATE = 1.5  # long enough that a rank that does not wait writes too early even on a busy machine


# --- a late rank ---


class _Slow(nn.Module):
    """Records its weights before and after a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.late = LATE
        self.naps = False
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        before = self.weight.detach().clone()
        if self.naps:
            time.sleep(self.late)
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
        time.sleep(2 * model.late)


WRITES = (_write_by_step, _write_by_edit, _write_data, _write_whole, _load, _load_plain, _swap)
# No collective orders these. In bf16 a write goes to the masters only; a refresh follows an agreement of all ranks.
OWN_TIMES = [
    *((write, FP32) for write in (_write_by_step, _write_by_edit, _write_data, _load_plain, _swap)),
    *((write, BF16) for write in (_write_by_step, _swap)),
]


def _late_reads(rank: int, write: Callable[..., None], policy: MixedPrecisionPolicy, late: int, honest: bool) -> bool:
    """Return whether all ranks saw unchanged, complete weights, with each of them late in turn."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=policy)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
    if not honest:
        model.late = VERY_LATE
        _be_careless()
    try:
        for turn in range(3 if honest else 1):
            model.naps = rank % 2 == late
            with torch.no_grad():
                model(torch.zeros(2))
            write(model, optimizer, turn)
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.zeros(2))
    finally:
        _be_careful()
    return all(model.seen)


_WAIT = SharedMemoryTransport.wait


def _be_careless() -> None:
    SharedMemoryTransport.wait = lambda *_: None  # type: ignore[method-assign]


def _be_careful() -> None:
    SharedMemoryTransport.wait = _WAIT  # type: ignore[method-assign]


@pytest.mark.sample(5)
@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_nobody_writes_what_a_late_rank_still_reads(write: Callable[..., None], policy: MixedPrecisionPolicy) -> None:
    for late in (0, 1):
        assert all(run_ranks(_late_reads, write, policy, late, True, world_size=4 if late else 2)), late


@pytest.mark.sample(3)
@pytest.mark.parametrize(("write", "policy"), OWN_TIMES)
def test_the_test_notices_where_nobody_waits(write: Callable[..., None], policy: MixedPrecisionPolicy) -> None:
    assert not all(all(run_ranks(_late_reads, write, policy, 1, False, world_size=2)) for _ in range(3))


# --- a late refresh ---


def _read_early(rank: int, honest: bool) -> bool:
    """Publish the weights of one rank late; return whether the other rank read its new weights."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=BF16)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
    with torch.no_grad():
        model(torch.zeros(2))  # all ranks enter a first forward together
    (handle,) = get_state(model).handles
    own = handle.weights.zero3_shard
    publish = SharedFullBuffer.publish

    def late(self: SharedFullBuffer, works: Any) -> None:
        value = own.clone()
        own.fill_(torch.nan)
        time.sleep(LATE if honest else VERY_LATE)
        own.copy_(value)
        publish(self, works)

    if rank == 1:
        handle.weights.buffer.publish = late.__get__(handle.weights.buffer)
    if not honest:
        handle.weights.buffer.wait_published = lambda name: None
    _write_by_step(model, optimizer, 0)
    with torch.no_grad():
        model(torch.zeros(2))
    dist.barrier()
    return all(model.seen)


def test_weights_are_read_when_the_refresh_of_all_ranks_has_landed() -> None:
    assert all(run_ranks(_read_early, True, world_size=2))
    # On a busy machine, the reader may itself be late.
    tries = (all(run_ranks(_read_early, False, world_size=2)) for _ in range(3))
    assert not all(tries), "the test notices where nobody waits"


def _gather_slot_early(rank: int) -> bool:
    """Publish the weights of rank 1 late. Return whether this rank gathers the new weights of both ranks."""
    model = layerzero.shard_model(_Slow(), zero3_size=2, mp_policy=BF16)
    weights = get_state(model).handles[0].weights
    own, publish = weights.zero3_shard, SharedFullBuffer.publish

    def late(self: SharedFullBuffer, works: Any) -> None:
        own.fill_(torch.nan)
        time.sleep(LATE)
        own.fill_(1)
        publish(self, works)

    if rank == 1:
        weights.buffer.publish = late.__get__(weights.buffer)
    dist.barrier()
    layerzero.refresh(model)
    if rank == 0:
        time.sleep(LATE / 3)
    weights.finish_refresh(of_peers=True)
    full, _ = weights.launch_slot_gather(weights.layout.slots[0])
    dist.barrier()
    return bool(full.eq(1).all())


def test_a_parameter_is_gathered_when_the_refresh_of_all_ranks_has_landed() -> None:
    assert all(run_ranks(_gather_slot_early, world_size=2))


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


# --- the same bits as with collectives ---


@on_ranks(world_size=4, shared_memory="auto")
def test_training_gives_the_bits_that_collectives_give(rank: int) -> None:
    for settings in (
        {},
        {"accumulation": "full"},
        {"reshard_after_forward": False},
        {"prefetch": 3},
        {"mp_policy": BF16},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "accumulation": "full"},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    ):
        results = []
        for memory in ("off", "auto"):
            model = shard(_mixed(), shared_memory=memory, **settings)
            optimizer = layerzero.shard_optimizer(sgd(model), model)
            for step in range(3):
                for micro_batch in range(3):
                    with layerzero.no_sync(model) if micro_batch < 2 else nullcontext():
                        loss_of(model(batch(rank, step, micro_batch).float())).backward()
                layerzero.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            results.append(layerzero.full_state_dict(model, rank0_only=False))
        off, auto = results
        assert all(torch.equal(off[name], auto[name]) for name in off), settings
        assert all(value.isfinite().all() for value in auto.values()), settings


def _mixed() -> nn.Module:
    torch.manual_seed(0)
    return Chain(Block(), Chain(Block(), Block(), own=False), Block()).float()
