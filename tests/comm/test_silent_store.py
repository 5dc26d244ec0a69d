"""The store stops answering: waiting ranks report this, and do not wait for the store themselves."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import layerzero
from layerzero.comm import failure_report
from layerzero.comm.failure_report import CollectiveError
from layerzero.comm.mesh_info import mesh_of_ranks
from tests.support.crashing import survivors
from tests.support.logs import logged
from tests.support.models import exact_model, train

pytestmark = pytest.mark.slow

LIMIT, TIMEOUT = 1.0, 8  # seconds


def _stop(process: int) -> None:
    """Stop a process. Its threads stop one after the other when scheduled, and run until then."""
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{process}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, "the store has not stopped"
        time.sleep(0.01)


def _trains_without_a_peer(rank: int, size: int, has_answered: bool) -> str:
    """Return the log and the error of rank 1, which trains without rank 2. Rank 0, which serves the store, stops.

    If `has_answered` is True, it stops when rank 1 reads the statuses of other ranks, and not before.
    """
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("server", str(os.getpid()))
        return ""
    mesh = mesh_of_ranks((1, 2), size, "cpu")
    model, optimizer = exact_model(mesh=mesh, shared_memory="off")
    train(model, optimizer, rank, range(2))
    layerzero.watchdog(model, LIMIT)
    if rank == 2:
        store.set("ready", "")
        return ""
    store.wait(["ready"])
    server, receive = int(store.get("server")), failure_report._receive_statuses

    def stop_and_receive(*args: Any, **settings: Any) -> None:
        _stop(server)
        receive(*args, **settings)

    if has_answered:
        failure_report._receive_statuses = stop_and_receive
    else:
        _stop(server)
    with logged() as lines:
        try:
            train(model, optimizer, rank, range(2, 4))
        except CollectiveError as error:
            lines.append(f"raised: {error}")
    return "\n".join(lines)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "has_answered"), [(1, False), (2, False), (2, True)], ids=["sum", "gather", "gather, after an answer"]
)
def test_a_store_that_does_not_answer_is_told_and_not_waited_for(tmp_path: Path, size: int, has_answered: bool) -> None:
    act, timeout = partial(_trains_without_a_peer, size=size, has_answered=has_answered), timedelta(seconds=TIMEOUT)
    told = survivors(tmp_path, act, world_size=3, victim=0, timeout=timeout)[1].splitlines()
    if not has_answered:
        (late,) = [line for line in told if line.startswith("layerzero: late by")]
        assert "is pending on rank 1: the store has not answered for " in late, late
        assert "has stopped, or this machine cannot reach it" in late
    doing = "gather of " if size == 2 else "hop 2 of "
    assert told[-1].startswith(f"raised: layerzero: {doing}"), told
    assert f"rank 2 did not take part within {TIMEOUT} s; the rendezvous store does not answer" in told[-1]
