"""A signal on one rank ends the run after the same step on all ranks, with a checkpoint, within a deadline."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layerzero import checkpoint
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.crashing import exit_codes, join_ranks, start_all
from tests.support.models import different
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

ASKING = (signal.SIGTERM, signal.SIGUSR1)


def _asked(rank: int, folder: str, victim: int, when: int) -> int:
    model, optimizer = sharded_net(2)
    with checkpoint.on_signal(signal.SIGTERM, model, exit_code=75) as request, pytest.raises(SystemExit) as left:
        for step in range(100):
            if rank == victim and step == when:
                os.kill(os.getpid(), signal.SIGTERM)
            train(model, optimizer, range(step, step + 1))
            if request.asked():
                state = everything(model, optimizer)
                checkpoint.save_async(f"{folder}/last", model, optimizer, {"step": step + 1})
                request.leave()
    assert left.value.code == 75
    again, its_optimizer = sharded_net(4, seed=1)
    assert checkpoint.load(f"{folder}/last", again, its_optimizer) == {"step": step + 1}
    assert not different(everything(again, its_optimizer), state)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the handler is put back"
    return step


@pytest.mark.parametrize(("victim", "when"), [(0, 0), (3, 4)])
def test_all_ranks_leave_after_the_same_step_when_one_gets_the_signal(tmp_path: Path, victim: int, when: int) -> None:
    steps = run_ranks(_asked, str(tmp_path), victim, when)
    assert len(set(steps)) == 1
    assert when < steps[0] <= when + 2, "at the third question at the latest"


@on_ranks(world_size=2)
def test_a_request_without_a_signal_or_left_by_an_exception_puts_everything_back(rank: int) -> None:
    model, optimizer = sharded_net(2)
    before = signal.getsignal(signal.SIGTERM)
    request = checkpoint.on_signal(signal.SIGTERM, model)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        assert not request.asked()
    request.close()
    request.close()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match="deadline must be positive"):
        checkpoint.on_signal(signal.SIGTERM, model, deadline=0)
    with pytest.raises(KeyError), checkpoint.on_signal(signal.SIGTERM, model) as request:
        if rank == 0:  # and the others never query
            assert not request.asked()
        raise KeyError
    dist.barrier()
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1
    request = checkpoint.on_signal(signal.SIGTERM, model)
    lost = mock.patch.object(request, "_wait_for_pending", side_effect=RuntimeError("a rank is gone"))
    with lost, pytest.raises(RuntimeError, match="a rank is gone"):
        request.close()
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1, "that came first"
    request = checkpoint.on_signal(signal.SIGUSR2, model)
    request._before = None  # as with a handler outside Python
    request.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@on_ranks(world_size=1)
def test_several_requests_share_what_wakes_them_until_the_last_is_closed(rank: int) -> None:
    model, _ = sharded_net(1)
    one, two = (checkpoint.on_signal(each, model, deadline=100) for each in (signal.SIGTERM, signal.SIGUSR1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert two.asked() and not one.asked()
    one.close()
    ours = signal.set_wakeup_fd(-1)
    assert ours != -1, "the other one still needs it"
    signal.set_wakeup_fd(ours)
    two.close()
    assert signal.set_wakeup_fd(-1) == -1
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.setblocking(False)
        with checkpoint.on_signal(signal.SIGTERM, model):
            signal.set_wakeup_fd(theirs.fileno())
        assert signal.set_wakeup_fd(-1) == theirs.fileno(), "somebody else's stays"
    with pytest.raises(OSError, match="Invalid argument"):
        checkpoint.on_signal(signal.SIGKILL, model)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_thread_that_python_gives_no_signals_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(checkpoint.on_signal, signal.SIGTERM, torch.nn.Linear(1, 1)).exception()
    assert isinstance(refused, RuntimeError) and "must be called from the main thread" in str(refused)


@on_ranks(world_size=2)
def test_a_signal_for_a_child_is_none_for_the_run(rank: int) -> None:
    """Run an evaluation with a worker pool, which is terminated at its end."""
    model, _ = sharded_net(1)
    with checkpoint.on_signal(signal.SIGTERM, model, deadline=0.5) as request:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, "it ends as it did before"
        time.sleep(1.0)
        assert not any(request.asked() for _ in range(3)), "nobody has asked this process"
        assert signal.getsignal(signal.SIGTERM) == request._on_signal
    first = checkpoint.on_signal(signal.SIGTERM, model)
    second = checkpoint.on_signal(signal.SIGTERM, model)
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "not that of a request that is closed"
    assert signal.set_wakeup_fd(-1) == -1


def _stuck(rank: int, folder: Path) -> None:
    """Let rank 0 wait in gloo for rank 1, which never arrives."""
    join_ranks(str(folder / "store"), rank, 2, timedelta(seconds=60))
    model, optimizer = sharded_net(2, shared_memory="off", steps=1)
    requests = [checkpoint.on_signal(each, model, deadline=1.0, exit_code=75) for each in ASKING]
    assert len(requests) == 2
    (folder / f"ready.{rank}").touch()
    if rank == 1:
        time.sleep(60)
    train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("signum", ASKING)
def test_the_deadline_is_kept_by_a_rank_that_waits_for_a_dead_one(tmp_path: Path, signum: signal.Signals) -> None:
    ranks = start_all(_stuck, [(rank, tmp_path) for rank in range(2)])
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready.{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # rank 0 waits by now
    began = time.monotonic()
    for process in ranks:
        os.kill(process.pid, signum)
    assert exit_codes(ranks) == [75, 75]
    assert time.monotonic() - began < 10
