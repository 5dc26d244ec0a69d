"""Ranks that wait for each other raise the same error soon, and a slow rank is never mistaken for one of them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import saving
from layerzero.checkpoint.background import rank_tree
from layerzero.comm import process_groups, waits
from layerzero.comm.agreement import require_equal
from layerzero.comm.collectives import Collective, all_gather, receive, send
from layerzero.engine.hooks import get_state
from tests.support.graphs import batch, message_of, one_pass, train_step, trained
from tests.support.late_device import on_device
from tests.support.logs import logged
from tests.support.models import (
    exact_model,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    train,
    update,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks, run_sharing

_PLAN = saving.CheckpointWriter.plan
ASK, TIMEOUT = 0.5, 20.0  # seconds until ranks ask each other, and until the groups give up


@contextmanager
def _soon(ask: float = ASK, warn: float = 60.0) -> Iterator[None]:
    values = {"_ASK_AFTER": ask, "_WARN_AFTER": warn, "_TICK": 0.1, "_PERIOD": 0.3}
    with mock.patch.multiple(waits, **values):
        yield


def _evaluates(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Evaluate on rank 0 alone, and continue to train on all ranks, as nanoGPT does."""
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            model(batch(0, 2))
        model.train()
    for step in range(2, 5):
        train_step(model, optimizer, step)


def _one_batch_fewer(then: Callable[[nn.Module, Any, Path], object]) -> Callable[..., None]:
    def scenario(model: nn.Module, optimizer: Any, folder: Path) -> None:
        for step in range(2, 4):
            if step == 2 or dist.get_rank() != dist.get_world_size() - 1:
                one_pass(model, dist.get_rank(), step)
        then(model, optimizer, folder)

    return scenario


def _save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    checkpoint.save(folder / "step-2", model, optimizer)


def _save_async(model: nn.Module, optimizer: Any, folder: Path) -> None:
    checkpoint.save_async(folder / "step-2", model, optimizer).wait()


def _clip(model: nn.Module, optimizer: Any, folder: Path) -> None:
    layerzero.clip_grad_norm_(model, 1.0)


def _goes_on(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Step and train again; the last pass has no peer."""
    for step in range(4, 6):
        update(optimizer)
        one_pass(model, dist.get_rank(), step)
    optimizer.step()


def _no_backward(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Skip one backward on the last rank, as for a loss that is not finite."""
    for step in range(2, 5):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            model(batch(dist.get_rank(), step))
        else:
            one_pass(model, dist.get_rank(), step)
        update(optimizer)


SCENARIOS: dict[str, Callable[..., None]] = {
    "evaluation": _evaluates,
    "save": _one_batch_fewer(_save),
    "save_async": _one_batch_fewer(_save_async),
    "clip": _one_batch_fewer(_clip),
    "goes on": _one_batch_fewer(_goes_on),
    "no backward": _no_backward,
}


def _runs(rank: int, scenario: str, size: int, folder: Path) -> str:
    with _soon():
        model, optimizer = trained(size)
        message = message_of(partial(SCENARIOS[scenario], model, optimizer, folder))
        _meet()
        return message


def _meet() -> None:
    """Wait for all ranks through the store."""
    store = dist.distributed_c10d._get_default_store()
    store.add("done", 1)
    while store.add("done", 0) < dist.get_world_size():
        time.sleep(0.05)


ORDERS, SAVE = "gather units in different orders: rank 0: ", "waits in checkpoint.save for rank 0"
NORM, REFRESH = "waits in norm of gradients for rank", "waits in refresh of 'the root' for rank"
CASES = [
    (2, 2, "off", "evaluation", ORDERS),
    (2, 2, "off", "save", SAVE),
    (2, 2, "off", "save_async", SAVE),
    (2, 2, "off", "clip", NORM),
    (2, 2, "off", "no backward", "for rank 1; rank 1 waits in hop 1 of 'units.2' for rank 0"),
    (2, 1, "off", "goes on", REFRESH),
    (4, 2, "off", "evaluation", ORDERS),
    (4, 2, "off", "save", SAVE),
    (4, 2, None, "clip", NORM),
    (4, 2, None, "goes on", "waits in refresh for rank"),
]


@pytest.mark.parametrize(("world", "size", "shared_memory", "scenario", "expected"), CASES)
def test_ranks_that_wait_for_each_other_raise_the_same_error(
    world: int, size: int, shared_memory: str | None, scenario: str, expected: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"world_size": world, "pg_timeout": TIMEOUT, "shared_memory": shared_memory}
    messages = run_ranks(_runs, scenario, size, tmp_path, **settings)
    assert len(set(messages)) == 1 and messages[0].startswith("WaitCycleError: layerzero: "), messages
    assert expected in messages[0] and "if rank == 0: evaluate(model)" in messages[0], messages


def _joins(rank: int, size: int, how: str) -> list[torch.Tensor]:
    """Return the weights after four steps. Before two of them, the last rank runs no backward."""
    model, optimizer = exact_model(mesh=mesh_of(size))
    for step in range(4):
        inputs = integer_batch(step=step, rank=rank)
        if step % 2 == 0 or rank != dist.get_world_size() - 1:
            integer_loss(model, inputs).backward()
        elif how == "forward":
            integer_loss(model, inputs)
        if how == "clip":
            layerzero.clip_grad_norm_(model, float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "zeros")
        if step == 1:  # no rank has gradients
            optimizer.step()
    return list(full_parameters(model).values())


@pytest.mark.parametrize("how", ["forward", "nothing", "clip", "zeros"])
@pytest.mark.parametrize(("world", "size", "shared_memory"), [(2, 1, "off"), (4, 1, "off"), (4, 2, None)])
def test_a_rank_without_a_backward_before_a_step_contributes_zeros(
    world: int, size: int, shared_memory: str | None, how: str
) -> None:
    plain = integer_net()
    optimizer = exact_sgd(plain.parameters())
    for step in range(4):
        for rank in range(world - step % 2):
            (integer_loss(plain, integer_batch(step=step, rank=rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "zeros")
        if step == 1 and how == "zeros":  # a step with gradients of zeros, which momentum and weight decay change
            optimizer.step()
    settings: dict[str, Any] = {"world_size": world, "shared_memory": shared_memory}
    for weights in run_ranks(_joins, size, how, **settings):
        for weight, expected in zip(weights, plain.parameters(), strict=True):
            assert torch.equal(weight, expected.detach())


def _evaluates_in_shared_memory(rank: int) -> list[str]:
    with logged() as lines:
        model, optimizer = trained()
        _evaluates(model, optimizer, Path())
        _evaluates(model, optimizer, Path())
        return lines


def test_an_evaluation_that_only_shared_memory_allows_is_warned_of_once() -> None:
    first, *others = run_sharing(_evaluates_in_shared_memory, world_size=4)
    (line,) = first
    assert "rank 0 has run a forward pass that ranks [1] have not run" in line and "shared_memory='off'" in line, first
    assert others == [[], [], []], others


def _barrier() -> None:
    dist.barrier()


def _waits_in_torch(rank: int) -> tuple[str, list[str]]:
    """Have one batch fewer on rank 1, which waits in a barrier of its own."""
    with _soon(), logged() as lines:
        model, _ = trained()
        message = message_of(partial(one_pass, model, 0, 2) if rank == 0 else _barrier)
        if rank == 0:
            dist.barrier()  # so that rank 1 can end
        return message, lines


def test_a_wait_in_a_barrier_of_the_program_is_found() -> None:
    (raised, _), (message, lines) = run_ranks(_waits_in_torch, world_size=2, pg_timeout=TIMEOUT)
    assert "rank 1 waits in dist.barrier at test_waits.py:" in raised and raised.startswith("WaitCycleError"), raised
    assert " dist.barrier() for rank 0. Look for calls" in raised, raised
    assert message == "nothing was raised" and [f"WaitCycleError: {each}" for each in lines] == [raised], lines


def _evaluates_on_a_device(rank: int) -> str:
    """Evaluate on rank 0 alone where the host does not wait for gathers."""
    message = ""
    with _soon(), suppress(AssertionError), on_device(2, timedelta(seconds=8)) as (_, mesh):
        # The emulation fails where a collective does.
        model, optimizer = exact_model(mesh=mesh)

        def evaluate_and_train() -> None:
            with torch.no_grad():
                for _ in range(2 if rank == 0 else 0):
                    model(integer_batch(rank=0)[0])
            train(model, optimizer, rank, [0, 0, 0])

        train(model, optimizer, rank, [0, 0, 0])
        message = message_of(evaluate_and_train)
        _meet()
    return message


def test_ranks_that_wait_for_each_other_on_a_device_raise_the_same_error() -> None:
    messages = run_ranks(_evaluates_on_a_device, world_size=2, pg_timeout=TIMEOUT)
    first, second = (message.partition("Error: ")[2] for message in messages)  # a later launch raises RuntimeError
    assert first == second and first.startswith("layerzero: ") and ORDERS in first, messages


def _is_slow(rank: int, how: str) -> list[str]:
    """Let one rank come late: it computes alone, or waits for a thread that does."""
    with _soon(warn=1.0), logged() as lines:
        model, optimizer = trained()
        for step in range(2, 4):
            if rank == 1 and how == "sleeps":
                time.sleep(2)
            elif rank == 1:
                thread = threading.Thread(target=time.sleep, args=[2])
                thread.start()
                thread.join()
            train_step(model, optimizer, step)
        return lines


@pytest.mark.parametrize("how", ["sleeps", "joins"])
@pytest.mark.parametrize("shared_memory", ["off", None])
def test_a_slow_rank_is_waited_for_and_one_warning_says_where_it_is(how: str, shared_memory: str | None) -> None:
    first, second, *_ = run_ranks(_is_slow, how, world_size=2, pg_timeout=60, shared_memory=shared_memory)
    source = "time.sleep(2)" if how == "sleeps" else "thread.join()"
    assert len(first) == 2 and not second, (first, second)
    assert all("Rank 1 has not joined: it is at test_waits.py:" in line and source in line for line in first), first


def _is_slow_in_a_save(rank: int, folder: Path) -> list[str]:
    """Let one rank write its file for a long time, in the main thread."""
    model, optimizer = trained()
    with _soon(warn=1.0), logged() as lines:
        _slow_save(model, optimizer, folder, seconds=1.5 * rank).wait()
        slow = mock.patch.object(saving.CheckpointWriter, "plan", partialmethod(_slow_plan, 1.5 * rank))
        with slow:
            checkpoint.save(folder / "step-3", model, optimizer)
        return lines


def _slow_plan(writer: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return _PLAN(writer)


def test_a_slow_rank_of_a_save_is_waited_for_and_named(tmp_path: Path) -> None:
    first, second = run_ranks(_is_slow_in_a_save, tmp_path, world_size=2, pg_timeout=TIMEOUT)
    assert len(first) == 2 and not second, (first, second)
    assert all("s in transfer of 'values of a checkpoint'. Rank 1 has not joined" in line for line in first), first


@on_ranks(world_size=2)
def test_a_rank_that_has_sent_a_message_is_not_absent_from_its_transfer(rank: int) -> None:
    model, _ = trained()
    (comm,) = [level.comm for level in rank_tree(get_state(model))._levels]
    number = torch.zeros(1)
    work = receive(comm, number, 1, name="", tag=9) if rank == 0 else send(comm, number, 0, name="", tag=9)
    work.wait()
    dist.barrier()
    if rank == 0:
        (monitor,) = [each for each in waits._RUNNING if not each.ended.is_set()]
        state, answer = work.launched.state(), monitor.ask([1])[1]
        assert waits.has_joined(state, answer)
        assert not waits.has_joined(replace(state, number=2), answer), "of the next message"
    dist.barrier()


def _waits_in_a_thread(rank: int) -> tuple[str, str]:
    """Have one batch fewer on rank 1, while a thread of rank 0 waits for a message of rank 1."""
    with _soon():
        model, _ = trained()
        tree, said = rank_tree(get_state(model)), list[str]()

        def exchange() -> None:
            waits.may_wait()
            said.append(message_of(partial(tree.all_gather, 7, None)))

        thread = threading.Thread(target=exchange)
        if rank == 0:
            thread.start()
        message = message_of(partial(_one_batch_fewer(_clip), model, None, Path()))
        if rank == 0:
            thread.join()
        _meet()
        return message, "".join(said)


def test_a_wait_for_a_message_in_a_thread_ends_with_the_waits_of_its_rank() -> None:
    (_, said), (message, _) = run_ranks(_waits_in_a_thread, world_size=2, pg_timeout=TIMEOUT, timeout=40)
    assert message.startswith("WaitCycleError") and "rank 1 waits in norm of gradients for rank 0" in message, message
    assert said.startswith("RankLostError: layerzero: ranks wait for each other"), said


def _late_through_a_thread(rank: int, how: str, folder: Path) -> int:
    """Let rank 0 and a thread of the other rank wait, while nothing but a thread of this program is late."""
    with _soon():
        model, optimizer = trained()
        if how == "save":
            pending = _slow_save(model, optimizer, folder, seconds=2.0 * rank)
            if rank == 0:
                pending.wait()
            train_step(model, optimizer, 2)
            pending.wait()
            return 0
        agree = partial(require_equal, "agreement of a thread", {}, ranks=range(2))
        if rank == 0:
            train_step(model, optimizer, 2)
            agree()
            return 0
        agreeing = threading.Thread(target=agree)
        agreeing.start()
        loaded: queue.Queue[torch.Tensor] = queue.Queue()
        loading = threading.Timer(2.0, loaded.put, [batch(1, 2)])
        loading.start()
        if how == "queue":
            loaded.get()
        elif how == "join":
            loading.join()
        else:
            loading.finished.wait()
        train_step(model, optimizer, 2)
        agreeing.join()
        return 0


def _slow_save(model: nn.Module, optimizer: Any, folder: Path, *, seconds: float) -> checkpoint.PendingSave:
    write = saving._write

    def write_late(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    with mock.patch.object(saving, "_write", write_late):
        return checkpoint.save_async(folder / "step-2", model, optimizer)


@pytest.mark.parametrize("how", ["queue", "event", "join", "save"])
def test_a_rank_that_waits_for_its_own_threads_is_not_stuck(how: str, tmp_path: Path) -> None:
    assert run_ranks(_late_through_a_thread, how, tmp_path, world_size=2, pg_timeout=60, shared_memory="off") == [0, 0]


def test_a_rank_is_not_stuck_while_its_background_save_runs() -> None:
    recorded = list[bool]()
    saving.PendingSave(lambda: recorded.append(threading.current_thread() in waits._waits)).wait()
    assert recorded == [True]


def _trains(rank: int) -> int:
    """Count the requests to the store of steps in which nothing waits for long."""
    model, optimizer = trained()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    requests = mock.Mock(wraps=waits.WaitMonitor.ask)
    with mock.patch.object(waits.WaitMonitor, "ask", requests):
        for step in range(2, 10):
            train_step(model, optimizer, step)
    keys = [f"layerzero/waits/{kind}/{rank}" for kind in ("wake", "asked", "answer", "verdict")]
    assert not any(store.check([key]) for key in keys)
    assert {type(wait) for wait in waits._waits.values()} == {type(None)}
    return requests.call_count


def test_nothing_is_asked_while_nothing_waits() -> None:
    assert run_ranks(_trains, world_size=2) == [0, 0]


@pytest.mark.slow
def test_it_takes_ten_seconds_by_default() -> None:
    began = time.monotonic()
    for message in run_ranks(_evaluates_by_default, world_size=2, pg_timeout=120, timeout=100):
        assert message.startswith("WaitCycleError: ") and ORDERS in message, message
    assert time.monotonic() - began < 100


def _evaluates_by_default(rank: int) -> str:
    model, optimizer = trained()
    message = message_of(partial(_evaluates, model, optimizer, Path()))
    _meet()
    return message


_ENDING = """
import sys, time
import torch, torch.distributed as dist
import layerzero
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
model = layerzero.shard_model(torch.nn.Linear(2, 2), zero3_size=1)
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
sys.slow = Slow()  # deleted while the interpreter finalizes
"""


@pytest.mark.parametrize("group", ["destroyed", "kept"])
def test_no_thread_is_in_the_store_when_the_process_ends(group: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [subprocess.Popen([sys.executable, "-c", _ENDING, str(server.port), str(rank), group]) for rank in range(2)]
    while any(process.poll() is None for process in ranks):
        for rank in range(2):  # a request ends inside the finalizing interpreter, which aborts the process
            server.set(f"0//layerzero/waits/wake/{rank}", "")
        time.sleep(0.01)
    assert [process.returncode for process in ranks] == [0, 0]


@on_ranks(world_size=2)
def test_the_end_of_a_process_waits_for_collectives_that_a_thread_has_left(rank: int) -> None:
    model = layerzero.shard_model(nn.Linear(2, 2), mesh=mesh_of(1), shared_memory="off")
    comm = get_state(model).mesh_info.replica_comm
    if rank == 1:
        time.sleep(0.5)
    pending = all_gather(comm, Collective.REFRESH, torch.empty(2), torch.full((1,), float(rank)))
    with suppress(RuntimeError):
        pending.wait(off_main_thread=True, may_wait=lambda: False)  # as a thread does when the process ends
    process_groups._await_in_flight()  # gloo's threads must not release tensors of an interpreter that has ended
    assert pending.done()


def _waits_in_a_call_of_torch(rank: int) -> None:
    model = layerzero.shard_model(nn.Linear(2, 2), mesh=mesh_of(1))
    (monitor,) = (each for each in waits._RUNNING if not each.ended.is_set())
    answers: list[waits.RankWaits] = []
    if rank == 1:
        time.sleep(1.0)
    else:
        threading.Timer(0.5, lambda: answers.append(monitor._answer(0, monitor._answering))).start()
    dist.barrier(group=get_state(model).mesh_info.control_comms[0].group)
    for answer in answers:
        (wait,) = answer.waits
        assert wait.doing.startswith("dist.barrier") and waits.has_joined(wait, answer), answer
    assert len(answers) == (rank == 0)


def test_a_rank_has_joined_its_own_call_of_torch_on_a_group_that_torch_does_not_list() -> None:
    run_ranks(_waits_in_a_call_of_torch, world_size=2)
