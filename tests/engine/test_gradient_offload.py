"""`Offload.grads`: same bits, accumulators of at most two units on the device, no use of an unfinished copy.

There is no device here whose copies run late. `LateTransfers` replaces one: it performs a copy only when the
computation waits for it, and detects accesses to either side before.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import layerzero
from layerzero import Offload
from layerzero.engine.gradient_offload import AccumulatorAllocator
from layerzero.engine.hooks import get_state
from tests.support.graphs import (
    IN_FLIGHT,
    WORLD,
    Block,
    Case,
    Chain,
    blocks,
    compare,
    freeze,
    one_pass,
    run_script,
    shard,
)
from tests.support.late_device import Device, DeviceCopies, Stream
from tests.support.late_transfers import LateTransfers, late
from tests.support.ranks import on_ranks

MODES = ("sharded", "full", "local")
CPU = torch.device("cpu")


# Slabs


def _accumulators() -> list[Any]:
    allocator = AccumulatorAllocator(CPU, LateTransfers(CPU))
    return [allocator.make(4, torch.float32) for _ in range(4)]


def test_an_accumulator_is_kept_while_others_use_the_slabs() -> None:
    first, *others = _accumulators()
    first.open(keep=False).fill_(7)
    first.close(keep=True)
    for other in others:
        other.open(keep=False).fill_(1)
        other.close(keep=True)
    first.prefetch(keep=True)
    assert first.open(keep=True).eq(7).all()


def test_an_open_accumulator_keeps_its_slab() -> None:
    first, *others = _accumulators()
    opened = first.open(keep=False).fill_(1)
    for other in others:
        other.prefetch(keep=False)
        other.open(keep=False).fill_(2)
        other.close(keep=True)
    assert first.open(keep=True).data_ptr() == opened.data_ptr() and opened.eq(1).all()
    first.close(keep=True)
    others[0].open(keep=True)
    others[1].open(keep=True)
    assert opened.eq(2).all(), "another accumulator uses the slab"
    for other in others[:2]:
        other.close(keep=False)
    assert first.open(keep=True).eq(1).all()


@on_ranks(world_size=1)
def test_a_slab_is_reused_after_its_last_use_on_another_stream(rank: int) -> None:
    """Reuse a slab, and replace it by a larger one, while another stream still reads it."""
    with Device().installed() as device:
        side, allocator = Stream(), AccumulatorAllocator(CPU, DeviceCopies(CPU))
        small, read = allocator.make(4, torch.float32), torch.empty(4)
        for is_replaced in (False, True):
            opened = small.open(keep=False).fill_(1)
            side.wait_event(device.current_stream().record_event())
            side.give(lambda: time.sleep(0.05))
            with device.stream(side):
                read.copy_(small.open(keep=True))
            small.close(keep=False)
            if is_replaced:
                for _ in range(2):
                    allocator.make(64, torch.float32).prefetch(keep=False)
                opened.fill_(2)  # the next owner of the freed memory
            else:
                small.open(keep=False).fill_(2)
                small.close(keep=False)
            device.current_stream().wait_stream(side)
            assert read.eq(1).all()


@on_ranks(world_size=1)
def test_an_accumulator_returns_to_the_device_after_it_was_stored(rank: int) -> None:
    """The copies in the two directions run on different streams."""
    with Device().installed():
        allocator = AccumulatorAllocator(CPU, DeviceCopies(CPU))
        storage, _ = (allocator.make(4, torch.float32) for _ in range(2))
        for value in range(1, 11):
            storage.open(keep=False).fill_(value)
            storage.close(keep=True)
            storage.prefetch(keep=True)
            assert storage.open(keep=True).eq(value).all()
            storage.close(keep=False)


# The engine


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["grads", pytest.param("optimizer", marks=pytest.mark.exhaustive)])
@on_ranks(world_size=WORLD)
def test_any_graph_can_be_offloaded(rank: int, setting: str) -> None:
    offload = Offload(**{setting: True})
    cases = {
        "in flight": Case(blocks, IN_FLIGHT),
        "called twice": Case(lambda: blocks(order=(0, 1, 0, 2))),
        "nested": Case(lambda: Chain(blocks(2), blocks(2))),
        "reentrant": Case(lambda: Chain(Block(reentrant=True), Block(reentrant=True), Block())),
        "checkpoint": Case(lambda: Chain(Block(reentrant=False), Block(reentrant=False))),
        "unused": Case(lambda: blocks(4, order=(0, 3))),
        "half frozen": Case(lambda: freeze(blocks(), "units.1", "units.2.linear.bias")),
        "retained": Case(blocks, partial(run_script, script="F0 R0 B0")),
    }
    with late():
        for name, case in cases.items():
            compare(rank, name, case, *({"accumulation": mode} for mode in MODES), offload=offload)
        by_unit = {"accumulation": lambda name, module: MODES[len(name) % 3 if "1" in name else 0]}
        compare(rank, "a mode of its own for each unit", Case(lambda: blocks(5)), offload=offload, **by_unit)


@on_ranks(world_size=WORLD)
def test_every_accumulator_lies_in_the_host_and_two_units_on_the_device(rank: int) -> None:
    for mode in ("sharded", "full"):  # "local" has no accumulators
        with late():
            model = shard(blocks(6), accumulation=mode, offload=Offload(grads=True))
        (transfers,) = LateTransfers.made
        handles = get_state(model).handles
        sizes = [handle.gradients.accumulator.storage.numel * 8 for handle in handles]
        pointers: list[set[int]] = []
        for step in range(4):
            for micro_batch in range(3):
                transfers.stores = transfers.fetches = 0
                with layerzero.no_sync(model) if micro_batch < 2 else nullcontext():
                    one_pass(model, rank, step)
                if micro_batch < 2:
                    assert transfers.stores == len(handles), f"{mode}: every unit takes part"
                    first = micro_batch == 0
                    assert transfers.fetches == len(handles) * (not first), mode
                else:
                    assert transfers.stores <= 1, f"{mode}: what has been reduced is not kept; the root comes in parts"
            report = layerzero.memory(model)
            assert report.measured["host_accumulator"] == report.predicted["host_accumulator"] == sum(sizes)
            assert report.measured["accumulator"] == report.predicted["accumulator"] == 2 * max(sizes)
            assert report.total == sum(report.measured.values()) - sum(sizes)
            pointers.append({handle.gradients.accumulator.storage._host.data_ptr() for handle in handles})
            model.zero_grad()
        assert len(pointers[0]) == len(handles) and all(each == pointers[0] for each in pointers), "reused"
    with late():
        model = shard(blocks(6), accumulation="local", offload=Offload(grads=True))
    one_pass(model, rank, 0)
    measured = layerzero.memory(model).measured
    assert measured["host_accumulator"] == measured["accumulator"] == 0 < measured["gradient_shard"]


def _raise(_: torch.Tensor) -> None:
    raise LookupError


@on_ranks(world_size=WORLD)
def test_a_failed_backward_returns_its_slabs(rank: int) -> None:
    with late():
        model = shard(blocks(4), accumulation="full", offload=Offload(grads=True))
    for number in range(3):
        hook = model.units[number].linear.weight.register_hook(_raise)
        with pytest.raises(LookupError):
            one_pass(model, rank, 0)
        hook.remove()
        model.zero_grad()
    one_pass(model, rank, 0)
    report = layerzero.memory(model)
    assert report.measured["accumulator"] == report.predicted["accumulator"] > 0


@on_ranks(world_size=2)
def test_without_a_device_there_is_one_warning(rank: int) -> None:
    with pytest.warns(
        UserWarning,
        match=r"^Offload\(grads=True\) on cpu: .* to free\. Results do not change\. Leave offload out$",
    ):
        shard(blocks(1), offload=Offload(grads=True))
    with warnings.catch_warnings(), late():
        warnings.simplefilter("error")
        shard(blocks(1), offload=Offload(grads=True))
