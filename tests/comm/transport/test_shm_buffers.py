"""Gradients added directly from the memory of other ranks: when buffers are rewritten, and how many there are."""

from __future__ import annotations

import mmap
import random
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.comm.collectives import PendingReduction
from layerzero.engine.hooks import get_state
from layerzero.shared_memory.buffers import RING_BYTES, aligned_bytes
from layerzero.shared_memory.counters import LINE, SharedCounters
from tests.support.graphs import batch, blocks, loss_of, sgd, shard
from tests.support.models import IntegerNet, assert_same_bits, exact_sgd, in_lockstep, integer_net, update
from tests.support.ranks import on_ranks
from tests.support.ranks import run_sharing as run_ranks
from tests.support.transports import numbered, shared_transport

pytestmark = pytest.mark.slow

NUMEL = 64
ROUNDS = 60


# --- sums of a ZeRO-3 group, without an engine ---


def _sums(rank: int, seed: int, buffers: int) -> list[int]:
    """Reduce many sums, one in flight while the next is filled, with random delays; return the indices of wrong ones.

    A reader pauses between parts, so that it would notice a buffer that is overwritten too early.
    """
    transport, pool, _model = shared_transport()
    pool.predicted = {(NUMEL, torch.float32): buffers}  # with fewer than the usual four, ranks must wait for readers
    world = dist.get_world_size()
    naps = random.Random(10 * seed + rank)
    wrong, flying = [], []

    def land(number: int, pending: PendingReduction, flat: torch.Tensor) -> None:
        pending.wait()
        target = torch.zeros(NUMEL // world)
        parts = pending.parts()

        def slowly() -> Any:
            for part in parts:
                if naps.random() < 0.3:
                    time.sleep(naps.uniform(0, 0.02))
                yield part

        pending.parts = lambda: list(slowly())
        pending.add_to(target, overwrite=True, scale=1.0)
        pool.release(flat)
        piece = slice(rank * NUMEL // world, (rank + 1) * NUMEL // world)
        expected = sum((numbered(each, number)[piece] for each in range(world)), torch.zeros(()))
        if not torch.equal(target, expected):
            wrong.append(number)

    for number in range(1, ROUNDS + 1):
        flat = pool.acquire(NUMEL, torch.float32)
        flat.fill_(-1)
        if naps.random() < 0.3:
            time.sleep(naps.uniform(0, 0.02))
        flat.copy_(numbered(rank, number))
        flying.append((number, transport.reduce_scatter(flat, flat.dtype, name="x"), flat))
        if len(flying) > 1:
            land(*flying.pop(0))
    land(*flying.pop(0))
    dist.barrier()
    assert (pool._used - RING_BYTES) // aligned_bytes(NUMEL * 4) == buffers
    permanent = pool.allocate_permanent(NUMEL, torch.float32)
    pool.acquire(2 * NUMEL, torch.float32)
    assert pool.most_bytes == pool._memory.committed - aligned_bytes(permanent.nbytes), "without gradients"
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize(("seed", "buffers"), [(0, 2), (1, 2), (2, 4)])
def test_no_buffer_is_written_before_all_have_read_it(seed: int, buffers: int) -> None:
    assert run_ranks(_sums, seed, buffers, world_size=4) == [[]] * 4


def _different_sums(rank: int) -> str:
    transport, pool, _model = shared_transport()
    flat = pool.acquire(NUMEL * (1 + rank), torch.float32)
    pending = transport.reduce_scatter(flat, flat.dtype, name="x")
    pending.wait()
    try:
        pending.parts()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_ranks_that_reduce_different_things_are_told() -> None:
    for message in run_ranks(_different_sums, world_size=2):
        assert "of the ZeRO-3 group reduces different gradients" in message


def _no_room(rank: int) -> str:
    _, pool, _model = shared_transport(part=1 << 40)
    try:
        pool.acquire(1 << 36, torch.float32)
    except RuntimeError as error:
        return str(error)
    return ""


def test_where_there_is_no_room_for_gradients_that_is_an_error_with_a_way_out() -> None:
    for message in run_ranks(_no_room, world_size=2):
        assert "cannot grow by 274877906944 bytes" in message and "are available" in message, message
        assert 'shared_memory="off"' in message, message


# --- counters ---


def test_numbers_are_compared_across_their_wrap() -> None:
    with open("/dev/zero", "r+b") as file:
        mapping = mmap.mmap(-1, SharedCounters.nbytes(2, 2) + LINE)
        counters = SharedCounters(mapping, file=file.fileno(), ranks=(0, 1), rank=0, num_counters=2, timeout=1.0)
        other = SharedCounters(mapping, file=file.fileno(), ranks=(0, 1), rank=1, num_counters=2, timeout=1.0)
        start = (1 << 32) - 2
        other._numbers[(1 * other._num_counters + 1) * other._per_line] = start
        assert counters.ranks_below(1, start) == [] and counters.ranks_below(1, start + 1) == [1]
        for _ in range(4):
            other.increment(1)
        assert counters.ranks_below(1, start + 4) == [] and counters.ranks_below(1, start + 5) == [1]
        assert other._numbers[(1 * other._num_counters + 1) * other._per_line] == 2
        assert counters.ranks_below(0, 0) == [], "no other word was touched"


def _waits(rank: int) -> float:
    """Return the CPU seconds that a wait of two seconds takes."""
    transport, pool, _model = shared_transport()
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)
    used = time.thread_time()
    transport.reduce_scatter(pool.acquire(NUMEL, torch.float32), torch.float32, name="x").wait()
    used = time.thread_time() - used
    dist.barrier()
    return used


def test_who_waits_sleeps() -> None:
    waited, _ = run_ranks(_waits, world_size=2)
    assert waited < 0.5, "seconds of CPU in two seconds: a rank that spins takes them all"


# --- with the engine, and delays ---


@pytest.mark.parametrize("seed", range(2))
@on_ranks(world_size=4, shared_memory="auto")
def test_training_is_exact_however_late_a_rank_is(rank: int, seed: int) -> None:
    """Train with random delays on each rank, during backwards and additions."""
    naps = random.Random(10 * seed + rank)
    whole = PendingReduction.add_to

    def slow(self: PendingReduction, *args: Any, **kwargs: Any) -> None:
        if naps.random() < 0.3:
            time.sleep(naps.uniform(0, 0.01))
        whole(self, *args, **kwargs)

    def nap(*_: Any) -> None:
        if naps.random() < 0.3:
            time.sleep(naps.uniform(0, 0.01))

    with mock.patch.object(PendingReduction, "add_to", slow):
        for size, settings in ((2, {}), (4, {}), (4, {"accumulation": "full"})):
            net = integer_net()
            model = layerzero.shard_model(integer_net(), zero3_size=size, units=IntegerNet.UNITS, **settings)
            for name in IntegerNet.UNITS:
                model.get_submodule(name).register_forward_hook(nap)
            for parameter in model.parameters():
                parameter.register_hook(nap)
            optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
            in_lockstep(rank, (model, optimizer), (net, exact_sgd(net.parameters())), range(6))
            assert_same_bits(model, net, f"{size} {settings}")


@on_ranks(world_size=4, shared_memory="auto")
def test_scratch_is_a_few_units_whatever_the_depth(rank: int) -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for settings in ({}, {"mp_policy": low}, {"mp_policy": low, "accumulation": "full"}, {"accumulation": "full"}):
        model = shard(blocks(12).float(), size=4, **settings)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        pool = get_state(model).transports[0].send_scratch
        held = []
        for step in range(8):
            for micro_batch in range(2):
                with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                    loss_of(model(batch(rank, step, micro_batch).float())).backward()
            update(optimizer)
            held.append(pool._used - RING_BYTES)
        if "accumulation" in settings:  # the sums themselves, in any dtype of the collective, and nothing else
            sums = sum(aligned_bytes(handle.layout.numel * 4) for handle in get_state(model).handles)
            assert held[-1] == sums == pool.kept_bytes, (settings, held, sums)
            continue
        itemsize = 2 if "mp_policy" in settings else 4
        root, *units = (aligned_bytes(handle.layout.numel * itemsize) for handle in get_state(model).handles)
        assert held == [root * 2 + max(units) * 4] * 8, (settings, held)
        assert get_state(model).pools.scratch.most_bytes == 0, "nothing is received"
