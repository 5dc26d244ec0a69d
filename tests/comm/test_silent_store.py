"""The store stops answering: waiting ranks report this, and do not wait for the store themselves."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.comm.failure_report import CollectiveError
from tests.support.checkpointing import sharded_net, train
from tests.support.crashing import forks
from tests.support.logs import logged
from tests.support.ranks import serve

pytestmark = pytest.mark.slow

LIMIT, TIMEOUT, SECONDS = 1.0, 8, 100


def _serve(place: str) -> None:
    store = serve()
    _write(Path(place, "port"), str(store.port))
    time.sleep(SECONDS)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _read(path: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody has written {path.name}"
        time.sleep(0.02)
    return path.read_text()


def _stop(process: int) -> None:
    """Stop the store. Its threads stop one after the other when scheduled, and run until then."""
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + SECONDS
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{process}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, "the store has not stopped"
        time.sleep(0.01)


def _rank(rank: int, place: str, port: int, server: int, size: int) -> None:
    """Run without rank 1. The store never answers rank 0."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model, optimizer = sharded_net(size, shared_memory="off")
    train(model, optimizer, range(2))
    layerzero.watchdog(model, LIMIT)
    _write(Path(place, f"ready{rank}"), "")
    _read(Path(place, "go"))
    if rank == 1:
        time.sleep(SECONDS)
    _stop(server)
    with logged() as lines:
        try:
            train(model, optimizer, range(2, 4))
        except CollectiveError as error:
            lines.append(f"raised: {error}")
    _write(Path(place, "told"), "\n".join(lines))
    os._exit(0)


def _told(folder: Path, size: int) -> list[str]:
    """Return the log of rank 0 and its final error."""
    server = forks.Process(target=_serve, args=(str(folder),))
    server.start()
    port = int(_read(folder / "port"))
    arguments = (str(folder), port, server.pid, size)
    ranks = [forks.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        for rank in range(2):
            _read(folder / f"ready{rank}")
        _write(folder / "go", "")
        return _read(folder / "told").splitlines()
    finally:
        for process in (*ranks, server):
            process.kill()
            process.join()


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2], ids=["sum", "gather"])
def test_a_store_that_does_not_answer_is_told_and_not_waited_for(tmp_path: Path, size: int) -> None:
    told = _told(tmp_path, size)
    (late,) = [line for line in told if line.startswith("layerzero: late by")]
    assert "is pending on rank 0: the store has not answered for " in late, late
    assert "has stopped, or this machine cannot reach it" in late
    doing = "gather of " if size == 2 else "hop 2 of "
    assert told[-1].startswith(f"raised: layerzero: {doing}"), told
    assert f"rank 1 did not take part within {TIMEOUT} s; the rendezvous store does not answer" in told[-1]
