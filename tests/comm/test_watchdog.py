"""A late collective is reported on every rank, with the missing ranks and what they run instead."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.checkpointing import sharded_net, train
from tests.support.logs import logged
from tests.support.ranks import run_ranks
from tests.support.waiting import within

pytestmark = pytest.mark.slow

LIMIT = 2.0


def _watched(size: int = 2, **settings):
    model, optimizer = sharded_net(size, **settings)
    train(model, optimizer, range(2))
    return model, optimizer, layerzero.watchdog(model, LIMIT)


def _reported(dog: layerzero.Watchdog) -> str:
    """Return the reports within 20 s beyond the limit: a busy machine delays the watchdog, too."""
    within(LIMIT + 20, lambda: bool(dog.reports))
    return "; ".join(dog.reports)


def _sleeps(rank: int, victim: int) -> str:
    """Keep one rank busy, as if it evaluated alone."""
    model, optimizer, dog = _watched()
    if rank == victim:
        _reported(dog)
    train(model, optimizer, range(2, 3))
    said = _reported(dog)  # a rank may continue before its own watchdog reports
    dist.barrier()
    dog.close()
    assert get_state(model).mesh_info.counters.watchdog is None
    return said


def _seconds_late(said: str) -> float:
    """Return the wait in the first report."""
    found = re.match(r"layerzero: late by ([\d.]+) s: ", said)
    assert found is not None, said
    return float(found[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_does_something_else_is_named_on_all_ranks(victim: int) -> None:
    for said in run_ranks(_sleeps, victim):
        assert f"rank {victim} has not joined, and waits in no collective: at step 0, " in said, said
        assert "is pending on rank" in said and LIMIT <= _seconds_late(said) < LIMIT + 5, said
        others = [rank for rank in range(4) if rank != victim]
        assert not any(f"rank {rank} has not joined, and waits in no collective" in said for rank in others), said
        assert "does not answer" not in said and "step 0" in said
        assert any(name in said for name in ("gather of", "hop 2", "hop 1")), said


def _skips(rank: int) -> str:
    """Skip one collective on rank 2, which then waits in another."""
    model, optimizer, dog = _watched(2)
    dog.close()
    dog = layerzero.watchdog(model, 2 * LIMIT)  # a busy machine delays ranks, too
    model_ranks = get_state(model).ranks

    def go_on() -> None:
        if rank != 2:
            model_ranks.all_gather_text("one")
        train(model, optimizer, range(2, 3))

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    said = _reported(dog)
    store = dist.distributed_c10d._get_default_store()
    store.add("reported", 1)
    within(20, lambda: store.add("reported", 0) == 4)  # the ranks notice at different times
    if rank == 2:
        model_ranks.all_gather_text("one")  # so that all can end
    thread.join(20)
    return said


def test_a_skipped_collective_is_named(tmp_path: Path) -> None:
    for said in run_ranks(_skips, pg_timeout=30):
        assert "agreement on used parameters, step 0, is pending on ranks" in said, said
        assert "rank 2 has not joined" in said, said


def _is_stopped(rank: int, folder: Path) -> str:
    model, optimizer, dog = _watched()
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        train(model, optimizer, range(2, 3))
        return "woken"
    store = dist.distributed_c10d._get_default_store().clone()  # a connection of the thread
    said = []

    def wake_after_all_reports() -> None:
        said.append(_reported(dog))
        if store.add("reported", 1) == 3:
            os.kill(int((folder / "pid.1").read_text()), signal.SIGCONT)

    thread = threading.Thread(target=wake_after_all_reports, daemon=True)
    thread.start()
    train(model, optimizer, range(2, 3))
    thread.join()
    return said[0]


def test_a_rank_that_is_stopped_does_not_answer(tmp_path: Path) -> None:
    said = run_ranks(_is_stopped, tmp_path, pg_timeout=60)
    for text in (said[0], said[2], said[3]):
        assert (
            "rank 1 has not joined and does not answer: it has stopped, has died, or cannot reach the store" in text
        ), text
        assert text.count("does not answer") == text.count("rank 1 has not joined and"), text


def _in_time(rank: int) -> None:
    model, optimizer, dog = _watched()
    for step in range(2, 30):
        train(model, optimizer, range(step, step + 1))
        time.sleep(0.1)
    time.sleep(LIMIT + 1)
    assert not dog.reports
    with pytest.raises(RuntimeError, match="already has a watchdog"):
        layerzero.watchdog(model)
    dog.close()
    with pytest.raises(ValueError, match="limit must be positive"):
        layerzero.watchdog(model, 0)
    assert not torch.is_grad_enabled() or get_state(model).mesh_info.counters.watchdog is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("memory", ["off", None])
def test_who_is_in_time_is_not_told_of(memory: str | None) -> None:
    run_ranks(_in_time, world_size=2, shared_memory=memory)


def _two_models(rank: int) -> tuple[list[str], list[str]]:
    """Run two models on the same ranks, one of which is waited for."""
    models = [sharded_net(2, seed=seed) for seed in (0, 1)]
    for each in models:
        train(*each, range(2))
    dogs = [layerzero.watchdog(model, LIMIT) for model, _ in models]
    for each, steps in zip(models, (range(2, 4), range(2, 3)), strict=True):
        train(*each, steps)
    if rank == 3:
        _reported(dogs[0])
    train(*models[0], range(4, 5))
    _reported(dogs[0])
    dist.barrier()
    reports = [list(dog.reports) for dog in dogs]
    for dog in dogs:
        dog.close()
    return reports[0], reports[1]


def test_two_watched_models_do_not_answer_for_each_other() -> None:
    for rank, (late, in_time) in enumerate(run_ranks(_two_models)):
        assert not in_time, (rank, in_time)
        assert "rank 3 has not joined, and waits in no collective: at step 2, " in "; ".join(late), late
        assert "launched nothing" not in "; ".join(late), late


def _fails(rank: int) -> list[str]:
    with logged() as lines:
        model, optimizer, dog = _watched()
        dog.unreported = lambda: 1 / 0
        within(10, lambda: any("has failed" in line for line in lines))
        train(model, optimizer, range(2, 3))
        dog.close()
    return lines


def test_a_watchdog_that_fails_says_so() -> None:
    for rank, lines in enumerate(run_ranks(_fails, world_size=2)):
        assert f"layerzero: the monitor of the waits of rank {rank} has failed and has stopped" in lines
