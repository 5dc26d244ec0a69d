"""Threads that replace streams on gloo: delays change no bit and no order; the program raises their errors."""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerzero
from layerzero.comm.collectives import PendingReduction
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.streams import StreamThread
from tests.support.models import SideBySide, different, exact_sgd, full_parameters, integer_batch, integer_loss
from tests.support.ranks import BOTH, mesh_of, run_ranks

pytestmark = pytest.mark.slow

UNITS = [f"units.{index}" for index in range(4)]
MOST_LATE = 3e-3  # seconds

Log = dict[str, list[tuple[str, str]]]


@contextmanager
def _late(rank: int) -> Iterator[None]:
    """Delay waits and additions at random and fill receive buffers with NaN; raise if a buffer in use is written."""
    draw = random.Random(rank)
    init, wait, add = PendingReduction.__init__, PendingReduction.wait, PendingReduction.add_to
    take = BufferPool.acquire
    sent: dict[int, Tensor] = {}  # by collective in flight

    def launch(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        init(pending, *args, **settings)
        sent[id(pending)] = pending.sent.clone()

    def late_wait(pending: PendingReduction, **how: bool) -> None:
        wait(pending, **how)
        time.sleep(draw.random() * MOST_LATE)
        before = sent.pop(id(pending))
        if not torch.equal(pending.sent.view(torch.uint8), before.view(torch.uint8)):
            raise AssertionError("written while it was sent")

    def late_add(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        time.sleep(draw.random() * MOST_LATE)
        add(pending, *args, **settings)

    def poisoned(pool: BufferPool, *args: Any) -> Tensor:
        return take(pool, *args).fill_(math.nan)

    with (
        mock.patch.object(PendingReduction, "__init__", launch),
        mock.patch.object(PendingReduction, "wait", late_wait),
        mock.patch.object(PendingReduction, "add_to", late_add),
        mock.patch.object(BufferPool, "acquire", poisoned),
    ):
        yield


def _train(model: nn.Module, optimizer: Any, ranks: Sequence[int]) -> None:
    """Train three steps of two micro-batches; sharded, the second runs one inside no_sync and the third both."""
    for step in range(3):
        for micro_batch in range(2):
            if len(ranks) == 1:
                model.set_requires_gradient_sync(step == 0 or (step == 1 and micro_batch == 1))
            for rank in ranks:
                loss = integer_loss(model, integer_batch(step=step, micro_batch=micro_batch, rank=rank))
                (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _launches(rank: int, zero3_size: int, folder: str) -> list[Log]:
    warnings.filterwarnings("ignore", "offload_grads=True on cpu")
    alone = SideBySide(len(UNITS))
    _train(alone, exact_sgd(alone.parameters()), range(4))
    logs = []
    for number, (mode, offload) in enumerate([("sharded", False), ("full", False), ("sharded", True), ("full", True)]):
        model = layerzero.shard_model(
            SideBySide(len(UNITS)),
            mesh=mesh_of(zero3_size),
            units=UNITS,
            accumulation="full" if mode == "full" else lambda name, module: "full" if name == UNITS[1] else "sharded",
            offload_grads=offload,
        )
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        with _late(rank), layerzero.trace(model, f"{folder}/{number}-{rank}.json") as trace:
            _train(model, optimizer, [rank])
        assert not different(full_parameters(model), dict(alone.named_parameters())), (mode, offload)
        log = defaultdict(list)
        for event in trace.events:
            if event.kind == "launch":
                log[event.communicator].append((event.collective, event.name))
        logs.append(dict(log))
    return logs


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_late_threads_change_no_bit_and_each_communicator_has_one_order_on_all_ranks(
    zero3_size: int, tmp_path: Path
) -> None:
    by_rank = run_ranks(_launches, zero3_size, str(tmp_path), world_size=4, shared_memory="off", pg_timeout=60)
    for first, *others in zip(*by_rank, strict=True):
        assert {comm for comm in first if "re" in comm and "control" not in comm} == {
            1: {"replica"}, 2: {"zero3 reduce", "replica"}, 4: {"zero3 reduce"},
        }[zero3_size]  # fmt: skip
        for comm, launched in first.items():
            assert all(other[comm] == launched for other in others), comm


def _fails(rank: int) -> None:
    model = layerzero.shard_model(SideBySide(len(UNITS)), mesh=mesh_of(2), units=UNITS)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    add = PendingReduction.add_to

    def broken(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        add(pending, *args, **settings)
        if pending.work.launched.name == UNITS[2]:
            raise LookupError(f"in thread {threading.current_thread().name!r}")

    integer_loss(model, integer_batch(step=0, rank=rank)).backward()
    loss = integer_loss(model, integer_batch(step=1, rank=rank))
    with mock.patch.object(PendingReduction, "add_to", broken), pytest.raises(LookupError, match="'layerzero zero3'"):
        loss.backward()
    with pytest.raises(RuntimeError, match="the last backward raised an exception"):
        optimizer.step()
    optimizer.zero_grad()
    alone = SideBySide(len(UNITS))
    _train(model, optimizer, [rank])
    _train(alone, exact_sgd(alone.parameters()), range(2))
    assert not different(full_parameters(model), dict(alone.named_parameters()))


@BOTH
def test_what_fails_in_a_thread_is_raised_in_the_backward_and_the_next_step_is_right(shared_memory: str | None) -> None:
    run_ranks(_fails, world_size=2, shared_memory=shared_memory)


def _fails_alone(rank: int) -> str:
    """Fail on rank 0 in the addition after hop 1 of a unit; no other hop 2 may be matched to that unit."""
    model = layerzero.shard_model(SideBySide(len(UNITS)), mesh=mesh_of(2), units=UNITS)
    integer_loss(model, integer_batch(step=0, rank=rank)).backward()
    add = PendingReduction.add_to

    def broken(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        add(pending, *args, **settings)
        if rank == 0 and pending.work.launched.name == UNITS[2]:
            raise MemoryError("of rank 0")

    with mock.patch.object(PendingReduction, "add_to", broken):
        try:
            integer_loss(model, integer_batch(step=1, rank=rank)).backward()
        except (MemoryError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_fails_alone_lets_nobody_take_one_unit_for_another() -> None:
    first, neighbor, opposite, _ = run_ranks(_fails_alone, world_size=4, shared_memory="off", pg_timeout=15)
    assert first == "MemoryError: of rank 0"
    assert "hop 2 of 'units.2' failed" in opposite and "rank 0" in opposite, (opposite, neighbor)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, StreamThread)]


def _ends(rank: int, shared_memory: str | None) -> None:
    before = len(_threads())
    model = layerzero.shard_model(SideBySide(len(UNITS)), mesh=mesh_of(2), units=UNITS)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    with torch.no_grad():
        model(integer_batch(step=0, rank=rank)[0])
    assert len(_threads()) == before, "a model that only computes has none"
    _train(model, optimizer, [rank])
    of_weights = {"layerzero refresh"} if shared_memory is None else set()  # shared between ranks
    assert {thread.name for thread in _threads()[before:]} == {
        "layerzero zero3",
        "layerzero replica",
        "layerzero control",
    } | of_weights
    del model, optimizer
    deadline = time.monotonic() + 30
    while len(_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(_threads()) == before, "they end with it"


@BOTH
def test_threads_are_there_from_the_first_backward_to_the_end_of_the_model(shared_memory: str | None) -> None:
    run_ranks(_ends, shared_memory, world_size=4, shared_memory=shared_memory)
