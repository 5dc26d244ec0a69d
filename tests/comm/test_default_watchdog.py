"""Watchdog that `shard_model` starts on a device, where the wait for a collective never raises."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero.comm import waits
from layerzero.comm import watchdog as module
from layerzero.comm.collectives import PendingCollective, timeout_of
from layerzero.comm.process_groups import current_groups
from layerzero.comm.traffic_counters import Collective
from layerzero.comm.watchdog import Watchdog, default_limit
from layerzero.engine.hooks import get_state
from tests.support.late_device import NAME, Device, Event, register
from tests.support.models import IntegerNet, exact_sgd, integer_net, train
from tests.support.ranks import on_ranks, run_ranks
from tests.support.waiting import within
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow

TIMEOUT = 12.0  # seconds, of the groups


def _on_device() -> nn.Module:
    register()
    mesh = mesh_on(NAME, 2, timedelta(seconds=TIMEOUT))
    return layerzero.shard_model(integer_net(), mesh=mesh, units=IntegerNet.UNITS)


def _default_of(model: nn.Module) -> Watchdog:
    watchdog = get_state(model).mesh_info.counters.watchdog
    assert isinstance(watchdog, Watchdog) and watchdog.is_default
    return watchdog


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "layerzero wait monitor"]


# The limit


def test_the_line_comes_before_the_process_is_killed() -> None:
    for timeout in (12.0, 60.0, 600.0, 1800.0, 86400.0):
        limit = default_limit(timeout)
        longest = limit + waits._TICK + waits._TO_ANSWER + 1  # detected, answered by all
        assert longest <= limit + 5 < timeout
        assert limit <= 300


# An absent rank


def _comes_late(rank: int) -> list[str]:
    with Device().installed():
        model = _on_device()
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        watchdog = _default_of(model)
        assert watchdog.limit == TIMEOUT / 2
        train(model, optimizer, rank, [0])
        dist.barrier()
        began = time.monotonic()
        if rank == 1:
            assert within(TIMEOUT, lambda: bool(watchdog.reports))
        train(model, optimizer, rank, [0])
        assert within(5, lambda: bool(watchdog.reports)), "the wait has not raised, and nothing is said"
        assert time.monotonic() - began < TIMEOUT + 5
        dist.barrier()
        return watchdog.reports


def test_an_absent_rank_is_named_before_the_timeout_of_the_group() -> None:
    for reports in run_ranks(_comes_late, timeout=40):
        late = float(reports[0].partition("late by ")[2].partition(" s")[0])
        assert TIMEOUT / 2 <= late < TIMEOUT, reports
        assert "rank 1 has not joined, and waits in no collective: at step 1, " in reports[0], reports
        assert "rank 0 has not joined" not in reports[0] or "it waits in" in reports[0], reports
        assert "gather of" in reports[0], reports


# Its lifetime


@on_ranks(world_size=2)
def test_the_default_one_is_replaced_and_ends_with_the_model(rank: int) -> None:
    with Device().installed():
        model = _on_device()
        first = _default_of(model)
        group = get_state(model).mesh_info.zero3_gather_comm.group
        assert 0 < first.limit < timeout_of(group) == TIMEOUT
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        train(model, optimizer, rank, [0])
        layerzero.traffic(model, reset=True)
        train(model, optimizer, rank, [0])
        assert first._steps == 2, "of an optimizer that is newer than the watchdog"

        second = layerzero.watchdog(model, 30.0)
        assert get_state(model).mesh_info.counters.watchdog is second and not second.is_default
        train(model, optimizer, rank, [0])
        assert (first._steps, second._steps) == (2, 1)
        with pytest.raises(RuntimeError, match="already has a watchdog"):
            layerzero.watchdog(model)
        second.close()
        assert get_state(model).mesh_info.counters.watchdog is None
        train(model, optimizer, rank, [0])

        model = _on_device()
        counters = get_state(model).mesh_info.counters
        layerzero.close(model)
        assert counters.watchdog is None, "closed with the model"

        model = _on_device()
        watchdog = weakref.ref(_default_of(model))
        del model, optimizer, first, second, group, counters
        gc.collect()
        assert watchdog() is None and within(10, lambda: not _threads()), "it has kept the model"


@on_ranks(world_size=2)
def test_it_ends_with_the_process_group(rank: int) -> None:
    with Device().installed():
        model = _on_device()
        threads = _threads()
        dist.destroy_process_group()
        ended = within(10, lambda: not any(thread.is_alive() for thread in threads))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of the test
        assert threads and ended and model is not None


@on_ranks(world_size=2)
def test_there_is_none_on_the_cpu(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), zero3_size=2, units=IntegerNet.UNITS)
    assert get_state(model).mesh_info.counters.watchdog is None


# Its cost


@on_ranks(world_size=4)
def test_what_is_done_is_not_kept_and_the_device_is_not_asked(rank: int) -> None:
    """Check that the watchdog keeps no tensor of a collective alive and does not query the device."""
    works: list[PendingCollective] = []
    with Device().installed():
        model = _on_device()
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        watchdog = _default_of(model)
        wait = PendingCollective.wait

        def seen(self: PendingCollective, **how: bool) -> None:
            works.append(self)
            wait(self, **how)

        with mock.patch.object(Event, "query", side_effect=AssertionError) as query:
            with mock.patch.object(PendingCollective, "wait", seen):
                train(model, optimizer, rank, [0])
            time.sleep(2.5 * waits._TICK)
            assert not query.called, "a graph may be captured meanwhile"
        assert _threads() and not watchdog.reports

        launches = [launch for each in works for launch in each.records.values()]
        assert any(each.launched.collective is Collective.GATHER for each in launches)
        works.clear()
        gc.collect()
        assert not [each.launched.status for each in launches if each._works() is not None], "works hold their outputs"

        with mock.patch.object(module, "_MOST", 8):
            before, most = sum(held.log.launches for held in current_groups()), 0
            for _ in range(8):
                train(model, optimizer, rank, [0])
                most = max(most, len(watchdog._in_flight))
            a_step = (sum(held.log.launches for held in current_groups()) - before) // 8
            assert a_step > 8 and most < 8 + 3 * a_step, (most, a_step)
