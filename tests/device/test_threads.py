"""Threads that replace streams on gloo: delays change no bit and no order; the program raises their errors."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import Offload
from layerzero.comm.collectives import PendingReduction
from layerzero.device.streams import DeferredCollectiveError, StreamThread, ThreadStreams
from layerzero.engine.hooks import get_state
from tests.support.graphs import boom
from tests.support.late_threads import late_reductions, late_threads
from tests.support.launches import by_communicator, launches_of
from tests.support.models import (
    SideBySide,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
)
from tests.support.ranks import BOTH, mesh_of, on_ranks, run_ranks
from tests.support.waiting import within

pytestmark = pytest.mark.slow

UNITS = [f"units.{index}" for index in range(4)]

Log = dict[str, list[tuple[str, str]]]


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


def _launches(rank: int, zero3_size: int) -> list[Log]:
    warnings.filterwarnings("ignore", "Offload.grads=True. on cpu")
    alone = SideBySide(len(UNITS))
    _train(alone, exact_sgd(alone.parameters()), range(4))
    logs = []
    for mode, offload in (("sharded", False), ("full", False), ("sharded", True), ("full", True)):
        accumulation = "full" if mode == "full" else lambda name, _: "full" if name == UNITS[1] else "sharded"
        model = _shard(None, zero3_size, accumulation=accumulation, offload=Offload(grads=offload))
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        launches = launches_of(model)
        with late_reductions(rank):
            _train(model, optimizer, [rank])
        logs.append(by_communicator(launches))
        assert not different(full_parameters(model), dict(alone.named_parameters())), (mode, offload)
    return logs


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_late_threads_change_no_bit_and_each_communicator_has_one_order_on_all_ranks(
    zero3_size: int,
) -> None:
    by_rank = run_ranks(_launches, zero3_size, world_size=4, shared_memory="off", pg_timeout=60)
    for first, *others in zip(*by_rank, strict=True):
        assert {comm for comm in first if "re" in comm and "control" not in comm} == {
            1: {"replica"}, 2: {"zero3 reduce", "replica"}, 4: {"zero3 reduce"},
        }[zero3_size]  # fmt: skip
        for comm, launched in first.items():
            assert all(other[comm] == launched for other in others), comm


def _shard(model: nn.Module | None = None, zero3_size: int = 2, **settings: Any) -> nn.Module:
    model = SideBySide(len(UNITS)) if model is None else model
    return layerzero.shard_model(model, mesh=mesh_of(zero3_size), units=UNITS, **settings)


@BOTH
@on_ranks(world_size=2)
def test_what_fails_in_a_thread_is_raised_in_the_backward_and_the_next_step_is_right(
    rank: int, shared_memory: str | None
) -> None:
    model = _shard()
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
@on_ranks()
def test_no_reduction_of_a_failed_backward_is_in_flight_after_the_recovery(
    rank: int, shared_memory: str | None
) -> None:
    """Raise in a backward pass after it has started the reductions of some units. The next forward pass recovers."""
    model = _shard()
    queue = get_state(model).gradients.queue
    hook = model.units[0].register_forward_hook(lambda module, args, output: output.register_hook(boom) and None)
    loss = integer_loss(model, integer_batch(rank=rank))
    hook.remove()
    with late_threads(0.1):
        with pytest.raises(LookupError):
            loss.backward()
        assert any(gradients.reduction is not None for gradients in queue.order)
        model.zero_grad()
        integer_loss(model, integer_batch(rank=rank))
    assert not any(gradients.reduction for gradients in queue.order) and not any(queue._events)


def _fails_alone(rank: int) -> str:
    """Fail on rank 0 in the addition after hop 1 of a unit; no other hop 2 may be matched to that unit."""
    model = _shard()
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


class _Reentrant(SideBySide):
    """Calls each unit twice inside reentrant checkpoints.

    The gradients of each nested backward pass are reduced separately.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # otherwise a reentrant checkpoint computes no gradients
        calls = (checkpoint(unit, x.roll(index, 1), use_reentrant=True) for unit in self.units for index in range(2))
        return sum(calls) + self.last


@on_ranks(world_size=4, shared_memory="off")
def test_a_gradient_that_arrives_in_parts_waits_for_the_late_reduction_of_the_first_part(rank: int) -> None:
    warnings.filterwarnings("ignore", "Offload.grads=True. on cpu")
    alone = _Reentrant(len(UNITS))
    for each in range(4):
        (integer_loss(alone, integer_batch(rank=each)) / 4).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for mode, offload in itertools.product(("full", "sharded"), (False, True)):
        settings = {"accumulation": mode, "offload": Offload(grads=offload)}
        model = _shard(_Reentrant(len(UNITS)), **settings)
        with late_reductions(rank), late_threads(0.02):
            integer_loss(model, integer_batch(rank=rank)).backward()
        assert not different(full_gradients(model), expected), settings


@on_ranks(world_size=4, shared_memory="off")
def test_late_threads_need_no_more_memory_than_predicted(rank: int) -> None:
    """The host waits for the oldest reduction, so that late threads do not need more memory than predicted."""
    model = _shard()
    scratch = get_state(model).pools.scratch
    for step in range(2):
        with late_threads(0.02):
            integer_loss(model, integer_batch(step=step, rank=rank)).backward()
        assert 0 < scratch.most_bytes <= scratch.predicted_bytes, (scratch.most_bytes, scratch.predicted_bytes)


def test_a_synchronization_waits_for_all_threads_and_marks_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, log = ThreadStreams(), []

    def marked(*words: str) -> AbstractContextManager[None]:
        log.append(" ".join(words))
        return nullcontext()

    def end_late() -> None:
        time.sleep(0.2)
        log.append("ended")

    streams.replica.run(end_late)
    monkeypatch.setattr("layerzero.device.streams.profiler_range", marked)
    events = deque([streams.replica.record_event("hop2", "units.0")])
    streams.synchronize([events])
    assert log == ["wait hop2 units.0", "ended"] and not events
    streams.close()


def test_an_error_is_raised_after_the_operations_of_all_threads_have_ended() -> None:
    streams, ended = ThreadStreams(), []

    def fail() -> None:
        raise DeferredCollectiveError(OSError("lost"), lambda error: ConnectionError(f"explained: {error}"))

    def end_late() -> None:
        time.sleep(0.2)
        ended.append(True)

    streams.zero3.run(fail)
    events = deque([streams.zero3.record_event()])
    streams.replica.run(end_late)
    try:
        with pytest.raises(ConnectionError, match="explained: lost"):
            streams.synchronize([events])
        assert ended and not events, "the caller may reuse the buffers of all operations"
    finally:
        streams.close()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, StreamThread)]


@BOTH
@on_ranks(world_size=4)
def test_threads_are_there_from_the_first_backward_to_the_end_of_the_model(
    rank: int, shared_memory: str | None
) -> None:
    before = len(_threads())
    model = _shard()
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
    assert within(30, lambda: len(_threads()) == before), "they end with it"
