"""Contract of transports: each test runs on process groups and on shared memory, with ranks of one ZeRO-3 group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.comm.collectives import PendingReduction
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.base import BufferDemand, FullBuffer, GatherOptions, Transport
from layerzero.comm.transport.selection import may_share_memory, select_transports
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.layout.flat_layout import FlatLayout, plan_layouts
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.parametrize("name", ["process_group", "shared_memory"])

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
NUMEL = 1024  # of a full gradient
LATE = 0.3  # seconds
MANY = 2  # handles


def layout_of(world: int) -> FlatLayout:
    (layout,) = plan_layouts([("a", (40, 3)), ("b", (9,))], num_shards=world, align=8)
    return layout


@contextmanager
def transport_of(name: str) -> Iterator[tuple[Transport, MeshInfo]]:
    """Context manager of the transport of all ranks, which is selected as for a model."""
    world = dist.get_world_size()
    mesh_info = MeshInfo.from_mesh(mesh_of(world))
    demand = BufferDemand(
        full_buffers=((layout_of(world).numel, BF16),) * MANY,
        send_scratch={(NUMEL, FP32): 3},
        accumulators=((NUMEL, FP32),),
        gradients=((NUMEL, FP32),) * MANY,
    )
    setting = "auto" if name == "shared_memory" else "off"
    assert may_share_memory(mesh_info, setting) is (setting == "auto")
    pools = BufferPool(CPU), FullBufferPool(CPU)
    transport = select_transports([mesh_info], lambda traits: demand, *pools, setting=setting)[mesh_info]
    assert transport.traits.name == name
    try:
        yield transport, mesh_info
    finally:
        dist.barrier()  # peers may still read
        transport.close()
        mesh_info.groups.release()


def shard_of(rank: int, version: int, numel: int) -> Tensor:
    """Return the shard of a rank, bf16 [numel]; elements differ between ranks and versions."""
    generator = torch.Generator().manual_seed(100 * version + rank)
    return torch.randn(numel, generator=generator).to(BF16)


def full_of(version: int, layout: FlatLayout, world: int) -> Tensor:
    return torch.cat([shard_of(rank, version, layout.numel // world) for rank in range(world)])


def write(transport: Transport, buffer: FullBuffer, rank: int, version: int, *, wait: bool = True) -> None:
    """Write this rank's shard as a refresh does. Before the first read, no write has to wait."""
    if wait:
        transport.begin_write()
    buffer.shard.copy_(shard_of(rank, version, buffer.shard.numel()))
    buffer.publish(None)
    transport.end_write()


def gather(buffer: FullBuffer, name: str = "unit") -> Tensor:
    pending = buffer.gather(name=name)
    if pending is not None:
        pending.wait()
    return buffer.full


# --- full buffers ---


def _gather(rank: int, name: str) -> None:
    world = dist.get_world_size()
    layout = layout_of(world)
    with transport_of(name) as (transport, mesh_info):
        buffers = [transport.full_buffer(layout, BF16, GatherOptions()) for _ in range(MANY)]
        counters = mesh_info.counters
        resident = transport.traits.shares_memory
        for version, buffer in enumerate(buffers):
            buffer.free()
            assert buffer.read_by_peers is resident
            assert buffer.full.numel() == layout.numel and buffer.shard.numel() == layout.numel // world
            write(transport, buffer, rank, version, wait=False)
        for round_ in range(3):
            counters.totals(reset=True)
            for version, buffer in enumerate(buffers):
                assert torch.equal(gather(buffer), full_of(version + 10 * round_, layout, world))
            assert counters.calls == {"gather": MANY}
            sent = 0 if resident else MANY * (world - 1) * buffers[0].shard.nbytes
            assert counters.bytes == {("gather", "zero3"): sent}
            for buffer in buffers:
                assert buffer.nbytes == buffer.full_bytes == (0 if resident else buffer.full.nbytes)
                buffer.free()
                assert buffer.nbytes == 0
                assert (buffer.full.untyped_storage().nbytes() > 0) is resident
            transport.begin_write()
            for version, buffer in enumerate(buffers):
                buffer.shard.copy_(shard_of(rank, version + 10 * (round_ + 1), buffer.shard.numel()))
                buffer.publish(None)
            transport.end_write()


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_delivers_the_shards_of_all_ranks_bit_for_bit(name: str, world: int) -> None:
    run_ranks(_gather, name, world_size=world)


@on_ranks(world_size=2)
def test_a_gather_waits_for_shards_that_are_published_late(rank: int, name: str) -> None:
    """Let rank 1 publish its new shard late: the others wait for it in the gather."""
    world = dist.get_world_size()
    layout = layout_of(world)
    with transport_of(name) as (transport, _):
        buffer = transport.full_buffer(layout, BF16, GatherOptions())
        write(transport, buffer, rank, 0, wait=False)
        gather(buffer)
        transport.begin_write()
        if rank == 1:
            time.sleep(LATE)
        buffer.shard.copy_(shard_of(rank, 1, buffer.shard.numel()))
        buffer.publish(None)
        transport.end_write()
        assert torch.equal(gather(buffer), full_of(1, layout, world))


def wait_for_peer(event: str, *, blocked: bool) -> None:
    """Wait until the peer has begun `event`. If not `blocked`, also wait for its end; otherwise check that it waits."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"{event} begins"])
    if blocked:
        time.sleep(LATE)  # if the peer did not wait, it would end meanwhile
        assert not store.check([f"{event} ends"]), f"{event} did not wait for the reader"
    else:
        store.wait([f"{event} ends"])


@contextmanager
def announced(event: str) -> Iterator[None]:
    """Set keys of the store when the body begins and ends."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{event} begins", "")
    yield
    store.set(f"{event} ends", "")


@on_ranks(world_size=2)
def test_a_write_waits_for_peers_only_if_they_read_the_shard_itself(rank: int, name: str) -> None:
    """Let rank 1 read until rank 0 has begun to write, or until it waits to write."""
    world = dist.get_world_size()
    layout = layout_of(world)
    with transport_of(name) as (transport, _):
        buffer = transport.full_buffer(layout, BF16, GatherOptions())
        write(transport, buffer, rank, 0, wait=False)
        before = gather(buffer).clone()
        if rank == 1:
            wait_for_peer("the write", blocked=name == "shared_memory")
            assert torch.equal(buffer.full, before), "written while it is read"
        with announced("the write") if rank == 0 else nullcontext():
            transport.begin_write()
        transport.begin_write()  # inside a round this does nothing
        write(transport, buffer, rank, 1)
        assert torch.equal(gather(buffer), full_of(1, layout, world))


@on_ranks(world_size=4)
def test_a_post_forward_shard_is_regathered_until_it_is_dropped(rank: int, name: str) -> None:
    world = dist.get_world_size()
    layout = layout_of(world)
    with transport_of(name) as (transport, mesh_info):
        options = GatherOptions(post_forward_comm=mesh_info.subgroup_comm(2))
        buffer = transport.full_buffer(layout, BF16, options)
        buffer.free()
        kept = not transport.traits.shares_memory
        assert buffer.post_forward_bytes == (layout.numel if kept else 0), "a half, two bytes per element"
        write(transport, buffer, rank, 0, wait=False)
        for again in range(2):
            gather(buffer)
            mesh_info.counters.totals(reset=True)
            buffer.keep_post_forward()
            buffer.free()
            assert buffer.has_post_forward_shard is kept and buffer.nbytes == buffer.post_forward_bytes
            if again:
                buffer.drop_post_forward()
                assert not buffer.has_post_forward_shard and buffer.nbytes == 0
            assert torch.equal(gather(buffer), full_of(0, layout, world))
            assert mesh_info.counters.calls == {"regather" if kept and not again else "gather": 1}
            buffer.drop_post_forward()
            buffer.free()


# --- hop 1 ---


def part_of(rank: int, number: int) -> Tensor:
    """Return a rank's full gradient, fp32 [NUMEL], of values whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(NUMEL, generator=generator) * 10.0 ** torch.randint(-3, 4, (NUMEL,), generator=generator)


def sum_of(ranks: range, number: int, wire: torch.dtype) -> Tensor:
    """Return the fp32 sum of all ranks' gradients, each rounded to `wire`, in the order of `ranks`."""
    total = torch.zeros(NUMEL)
    for rank in ranks:
        total += part_of(rank, number).to(wire)
    return total


def hop1(transport: Transport, flat: Tensor, wire: torch.dtype) -> PendingReduction:
    """Start hop 1; round first if the transport does not."""
    sent = flat if transport.traits.shares_memory else flat.to(wire)
    return transport.reduce_scatter(sent, wire, name="unit")


def land(pending: PendingReduction, world: int, scale: float = 1.0) -> Tensor:
    pending.wait()
    target = torch.full((NUMEL // world,), torch.nan)
    pending.add_to(target, overwrite=True, scale=scale)
    return target


@on_ranks(world_size=4)
def test_hop_1_adds_in_rank_order_what_is_rounded_to_the_wire_dtype(rank: int, name: str) -> None:
    world = dist.get_world_size()
    own = slice(rank * NUMEL // world, (rank + 1) * NUMEL // world)
    with transport_of(name) as (transport, mesh_info):
        assert transport.traits.sums_locally
        for number, wire in enumerate((FP32, BF16, FP32, BF16)):
            mesh_info.counters.totals(reset=True)
            flat = transport.send_scratch.acquire(NUMEL, FP32).copy_(part_of(rank, number))
            pending = hop1(transport, flat, wire)
            expected = sum_of(range(world), number, wire)
            assert torch.equal(land(pending, world), expected[own])
            transport.send_scratch.release(flat)
            assert not torch.equal(expected, sum_of(range(world)[::-1], number, wire)), "the order matters"
            itemsize = FP32.itemsize if transport.traits.shares_memory else wire.itemsize
            assert mesh_info.counters.calls == {"hop1": 1}
            assert mesh_info.counters.bytes == {("hop1", "zero3"): (world - 1) * NUMEL // world * itemsize}


@pytest.mark.parametrize("persistent", [False, True], ids=["pooled", "persistent"])
@on_ranks(world_size=2)
def test_memory_that_was_sent_is_writable_when_all_peers_have_read_it(rank: int, name: str, persistent: bool) -> None:
    """Write new values to the memory that was sent, while rank 1 has not read the old ones yet."""
    world = dist.get_world_size()
    own = slice(rank * NUMEL // world, (rank + 1) * NUMEL // world)
    with transport_of(name) as (transport, _):
        accumulator = transport.send_buffer(NUMEL, FP32)
        assert accumulator.nbytes == 0 and accumulator.read_in_place is transport.traits.shares_memory
        if persistent:
            assert not accumulator.open().any() and accumulator.nbytes == 4 * NUMEL

        def memory() -> Tensor:
            return accumulator.open() if persistent else transport.send_scratch.acquire(NUMEL, FP32)

        for number in range(8):
            flat = memory().copy_(part_of(rank, number))
            pending = transport.reduce_scatter(flat, FP32, name="unit")
            pending.wait()
            if rank == 1:
                time.sleep(LATE / 4)
            assert torch.equal(land(pending, world), sum_of(range(world), number, FP32)[own]), number
            if not persistent:
                transport.send_scratch.release(flat)


@on_ranks(world_size=2)
def test_an_accumulator_waits_for_readers_only_if_they_read_it_in_place(rank: int, name: str) -> None:
    """Let rank 1 read after the accumulator of rank 0 is writable, or while rank 0 waits until it is."""
    world = dist.get_world_size()
    with transport_of(name) as (transport, _):
        accumulator = transport.send_buffer(NUMEL, FP32)
        pending = transport.reduce_scatter(accumulator.open(), FP32, name="unit")
        pending.wait()
        if rank == 1:
            wait_for_peer("the wait", blocked=name == "shared_memory")
        land(pending, world)
        with announced("the wait") if rank == 0 else nullcontext():
            accumulator.wait_until_writable()


# --- one rank is missing ---


def _lost(rank: int, name: str, act: Callable[[Transport, FullBuffer], Any]) -> str:
    with transport_of(name) as (transport, _):
        buffer = transport.full_buffer(layout_of(2), BF16, GatherOptions())
        buffer.publish(None)
        gather(buffer)
        message = ""
        if rank == 0:
            try:
                act(transport, buffer)
            except RuntimeError as error:
                message = str(error)
        else:
            time.sleep(4)
        return message


def _gather_alone(transport: Transport, buffer: FullBuffer) -> None:
    buffer.shard.zero_()
    buffer.publish(None)
    gather(buffer, "blocks.0")


def _reduce_alone(transport: Transport, buffer: FullBuffer) -> None:
    transport.reduce_scatter(torch.ones(NUMEL), FP32, name="blocks.0").wait()


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("act", [_gather_alone, _reduce_alone])
def test_the_error_names_the_rank_that_did_not_take_part(name: str, act: Callable[..., Any]) -> None:
    message, _ = run_ranks(_lost, name, act, world_size=2, pg_timeout=2)
    assert "'blocks.0' failed on rank 0: rank 1 did not take part within 2 s" in message, message
