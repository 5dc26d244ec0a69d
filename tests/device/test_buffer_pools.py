"""Reuse of memory: full buffers alternate, scratch is kept, and a steady state allocates nothing."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest import mock

import torch

import layerzero
from layerzero.device.buffer_pools import BufferPool, DeviceBufferPool, FullBufferPool
from layerzero.engine.hooks import get_state
from tests.support.graphs import WORLD, blocks, one_pass, sgd, shard
from tests.support.late_device import Device, Stream, register
from tests.support.models import update
from tests.support.ranks import needs_caching, on_ranks

CPU = torch.device("cpu")


def _empty(numel: int) -> torch.Tensor:
    tensor = torch.empty(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_caching
def test_no_more_is_cached_than_the_limit_and_sizes_are_separate() -> None:
    pool = FullBufferPool(CPU)
    pool.limit = 100
    tensors = [_empty(16), _empty(16), _empty(8)]
    for _ in range(2):
        for tensor in tensors:
            pool.allocate(tensor.untyped_storage(), tensor.numel() * 4)
            tensor.fill_(1)
        for tensor in tensors:
            pool.free(tensor.untyped_storage())
            assert tensor.untyped_storage().nbytes() == 0
        assert pool.cached_bytes == 64 + 32, "the other 64 bytes do not fit"
    assert pool.allocations == 3 + 2, "cached memory of another size has made room"
    pool.free(tensors[0].untyped_storage())  # has none
    assert pool.cached_bytes == 96


@on_ranks(world_size=1)
def test_a_device_pool_has_room_for_two_units_and_gives_all_of_it_back(rank: int) -> None:
    register()
    with Device().installed() as device:
        pool, side = BufferPool.of(CPU), Stream()
        assert isinstance(pool, DeviceBufferPool)
        pool.set_predicted({(4, torch.float32): 2, (16, torch.float32): 1}, 64 + 16)
        addresses, large = [], torch.empty(16)
        for numel in (16, 4, 4, 4, 4):
            buffer = pool.acquire(numel, torch.float32)
            buffer.fill_(len(addresses))
            addresses.append(buffer.data_ptr())
            written = device.current_stream().record_event()
            side.wait_event(written)
            with device.stream(side):
                buffer.mul_(2)
                if numel == 16:
                    buffer.add_(5)
                    large.copy_(buffer)
                pool.release(buffer)
            assert pool.held_bytes <= 64 + 16
        assert pool.most_bytes == 64 + 16
        assert addresses[3:] == addresses[1:3], "two take turns, once the large one has made room"
        assert large.eq(5).all(), "the pool returns the memory of the large buffer after its last use"
        fifth = pool.acquire(4, torch.float32)
        assert fifth.data_ptr() == addresses[1] and fifth.eq(6).all(), "it has waited for the last use"
        pool.release(fifth)
        read = torch.ones(3)
        with device.stream(side):  # belongs to the stream of the computation, and waits for its work so far
            third = pool.acquire(7, torch.float32)
            third.zero_()
            pool.release(third)
            side.use([read], "new memory, which earlier work of the computation may use")
        pool.trim()
        other = BufferPool.of(CPU)
        other.set_predicted({(4, torch.float32): 3}, 32)
        for value in range(3):  # the third one reuses the first one, since there is no room
            buffer = other.acquire(4, torch.float32)
            buffer.fill_(value)
            side.wait_event(device.current_stream().record_event())
            with device.stream(side):
                buffer.add_(1)
                other.release(buffer)
            addresses.append(buffer.data_ptr())
        assert addresses[-1] == addresses[-3] and other.held_bytes == 32
        assert other.acquire(4, torch.float32).eq(2).all(), "it has waited"
        assert pool.held_bytes == 0 and not +pool._made, "activations can use it"
        exceeded = BufferPool.of(CPU)
        exceeded.set_predicted({}, 16)
        for buffer in [exceeded.acquire(4, torch.float32) for _ in range(3)]:
            exceeded.release(buffer)
        exceeded.acquire(8, torch.float32)
        assert exceeded.held_bytes == 3 * 16 + 32, "up to twice the bytes that were in use together are kept"


@on_ranks(world_size=WORLD, shared_memory="off")
def test_a_steady_state_allocates_no_full_buffer(rank: int) -> None:
    for settings in ({}, {"accumulation": "full"}, {"prefetch": 2}, {"reshard_after_forward": False}):
        model = shard(blocks(6), **settings)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        pools = get_state(model).pools
        counts = []
        for step in range(6):
            for micro_batch in range(2):
                with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                    one_pass(model, rank, step)
            update(optimizer)
            accumulated = pools.accumulators.device_bytes + pools.accumulators.host_bytes
            counts.append((pools.full.allocations, pools.full.cached_bytes, accumulated))
        assert pools.full.cached_bytes <= pools.full.limit
        if not FullBufferPool.can_cache:
            grown = {after[0] - before[0] for before, after in itertools.pairwise(counts[2:])}
            assert len(grown) == 1, f"{settings}: every step allocates as much"
            continue
        assert counts[2:] == [counts[2]] * 4, (settings, counts)
        root, unit = (sum(get_state(model).handles[index].gathered_sizes) for index in (0, 1))
        together = 6 if "reshard_after_forward" in settings else 1 + settings.get("prefetch", 1)
        assert pools.full.cached_bytes == root + together * unit, (settings, pools.full.cached_bytes)
        assert layerzero.memory(model).measured["cached_buffer"] == pools.full.cached_bytes
        assert pools.full.allocations == 1 + together, settings


@needs_caching
@on_ranks(world_size=WORLD, shared_memory="off")
def test_units_lie_where_they_lay_in_a_loop_that_repeats_itself(rank: int) -> None:
    model = shard(blocks(4))
    optimizer = layerzero.shard_optimizer(sgd(model), model)
    allocate, steps = FullBufferPool.allocate, []

    def seen(pool: FullBufferPool, storage: torch.UntypedStorage, nbytes: int) -> None:
        allocate(pool, storage, nbytes)
        steps[-1].append((storage._cdata, storage.data_ptr()))

    with mock.patch.object(FullBufferPool, "allocate", seen):
        for step in range(5):
            steps.append([])
            for micro_batch in range(2):
                with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                    one_pass(model, rank, step)
            update(optimizer)
    assert len(steps[2]) >= 12 and steps[2] == steps[3] == steps[4], "who replays a graph finds the weights"
