"""Errors that say which rank did not arrive, died, or ran something else; and a store that does not grow."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.comm.agreement import require_equal
from layerzero.comm.failure_report import RankStatus, _describe_statuses
from tests.support.crashing import survivors
from tests.support.graphs import batch, message_of, one_pass, train_step, trained
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

STORES = ("server", "file")
SECONDS = 3.0  # of the process group

_message = partial(message_of, with_cause=True)
_trained = partial(trained, shared_memory="off")  # of collectives; comm/transport/test_shared_memory.py has the others


# --- ranks that die ---


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_pass(rank: int, *, compares: bool) -> str:
    model, _ = _trained()
    if compares:
        model.order = (1, 0, 2)  # on all ranks, which therefore compare their orders
    if rank == 1:
        model.units[1].register_forward_pre_hook(_die, prepend=True)
    return _message(lambda: one_pass(model, rank, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("compares", [True, False])
def test_a_peer_that_died_is_reported_as_dead(compares: bool, tmp_path: Path) -> None:
    act = partial(_die_in_a_pass, compares=compares)
    (message,) = survivors(tmp_path, act, world_size=2, victim=1).values()
    collective = "comparison of orders" if compares else "gather of 'units"
    assert "rank 1 has died or has exited" in message and collective in message, message
    assert "different orders" not in message and "onnection" in message.partition("[")[2], message


def test_after_a_lost_connection_a_rank_that_reports_nothing_from_the_same_collective_is_dead() -> None:
    own, other = RankStatus("gather of 'a'", failed="lost a connection"), RankStatus("gather of 'b'")
    alike = RankStatus("gather of 'a'")
    sentences, elsewhere = _describe_statuses(own, [1, 2, 3], {1: alike, 2: other, 3: own}, 3.0)
    assert sentences[0].startswith("rank 1 has died or has exited: its connection was closed"), sentences
    assert sentences[1:] == ["rank 2 also waited without success in gather of 'b'"] and not elsewhere
    sentences, elsewhere = _describe_statuses(own, [2, 3], {2: other, 3: own}, 3.0)
    assert sentences == ["rank 2 was in another operation: gather of 'b'"] and elsewhere == {2: other}


def _die_with_the_store(rank: int) -> str:
    require_equal("first", {}, ranks=range(3))
    dist.barrier()
    if rank == 0:
        time.sleep(1)  # the others wait for its result by then
        _die()
    failure = LookupError("of rank 1 itself") if rank == 1 else None
    return _message(lambda: require_equal("second", {}, ranks=range(3), failure=failure))


def test_a_rank_that_failed_keeps_its_own_error_where_the_store_has_died(tmp_path: Path) -> None:
    said = survivors(tmp_path, _die_with_the_store, world_size=3, victim=0)
    assert said[1].startswith("LookupError: of rank 1 itself"), said
    assert "second" in said[2] and "store" in said[2] and "rank 0" in said[2], said


# --- ranks that are alive and do something else ---


def _sleep(rank: int) -> str:
    model, _ = _trained()
    if rank == 1:
        time.sleep(SECONDS + 3)
    return _message(lambda: one_pass(model, rank, 2))


def test_a_rank_that_comes_too_late_is_named_and_is_told_who_gave_up() -> None:
    waited, late = run_ranks(_sleep, world_size=2, pg_timeout=SECONDS)
    assert "gather of" in waited and "rank 1 did not take part within 3 s" in waited, waited
    assert "last published status: comparison of orders before the gather of 'units.0'; " in waited, waited
    assert re.search("Timed out|timeout caused", waited), waited  # the message depends on the wait that ends first
    assert "rank 0 waited until its timeout" in late, late
    assert "different orders" not in waited + late


def _differ(rank: int, case: str, folder: Path) -> str:
    """Evaluate on rank 0 alone, or run one batch fewer on rank 1 before a checkpoint or a clipping."""
    model, optimizer = _trained(size=1 if case == "clip" else 2)

    def go_on() -> None:
        if case == "evaluate":
            if rank == 0:
                with torch.no_grad():
                    model(batch(rank, 2))
            for step in range(2, 5):
                train_step(model, optimizer, step)
            return
        for _ in range(2 - rank):
            one_pass(model, rank, 2)
        if case == "clip":
            layerzero.clip_grad_norm_(model, 1.0)
        else:
            layerzero.checkpoint.save(folder / "step-2", model, optimizer)

    return _message(go_on)


ORDERS = "different orders.*rank 0: .*rank 1: .*rank == 0"
# Patterns in the messages of rank 0 and of rank 1.
DIFFERENCES = {
    "evaluate": (ORDERS, ORDERS),
    "save": (  # the failure of another rank is not quoted
        r"rank 1 was in another operation: checkpoint\.save(?!.*did not take part)",
        r"ranks? \[?0\]? did not take part.*gather of 'the root'.*imed out",
    ),
    "clip": (
        "hop 2.*rank 1 was in another operation: norm of gradients",
        "norm of gradients.*rank 0 was in another operation: hop 2",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_run_different_operations_are_named_with_them(case: str, tmp_path: Path) -> None:
    messages = run_ranks(_differ, case, tmp_path, world_size=2, pg_timeout=SECONDS)
    for message, pattern in zip(messages, DIFFERENCES[case], strict=True):
        assert re.search(pattern, message, re.DOTALL), messages


def _save_on_rank_0(rank: int, folder: Path) -> str:
    model, optimizer = _trained()
    if rank != 0:
        return ""
    return _message(lambda: layerzero.checkpoint.save(folder / "one", model, optimizer))


def test_a_save_on_rank_0_only_is_told_that_all_ranks_must_call_it(tmp_path: Path) -> None:
    message = run_ranks(_save_on_rank_0, tmp_path, world_size=2, pg_timeout=SECONDS)[0]
    assert "checkpoint.save: ranks [1] did not take part within 3 s" in message, message
    assert "All ranks must make this call. Look for `if rank == 0:` around the call" in message, message


def _leave_out_one_of_four(rank: int) -> str:
    model, _ = _trained(size=4)
    if rank == 2:
        time.sleep(9)
        return ""
    return _message(lambda: one_pass(model, rank, 2))


@pytest.mark.exhaustive
def test_of_four_ranks_the_one_that_is_missing_is_named_by_all_others() -> None:
    for rank, message in enumerate(run_ranks(_leave_out_one_of_four, world_size=4, pg_timeout=5)):
        assert rank == 2 or "rank 2 did not take part within 5 s" in message, message
        assert "was in another operation" not in message and "rank 1 did" not in message, message


# --- the store ---


def _count_keys(rank: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    model, optimizer = _trained(steps=4)
    counts = []
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)
        train_step(model, optimizer, step)
        require_equal("part", {}, ranks=[0, 1] if rank < 2 else [2, 3])
        if step % 3 == 0:
            with pytest.raises(ValueError, match="ranks disagree"):
                require_equal("bad", {"rank": rank}, ranks=range(4))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


@pytest.mark.parametrize("kind", STORES)
def test_agreements_leave_nothing_in_the_store(kind: str, tmp_path: Path) -> None:
    store_file = tmp_path / "store" if kind == "file" else None
    for counts in run_ranks(_count_keys, world_size=4, store_file=store_file):
        failed = 4
        assert counts[-1] - counts[1] <= failed - 1, counts  # the messages of the ranks that failed


def _steady_calls(rank: int) -> int:
    model, optimizer = _trained(steps=4)
    store = dist.distributed_c10d._get_default_store()
    before = store.get(f"layerzero/word/{rank}")
    store.delete_key(f"layerzero/word/{rank}")
    for step in range(4, 7):
        train_step(model, optimizer, step)
    assert b"comparison" in before or b"shard_model" in before, before
    return int(store.check([f"layerzero/word/{rank}"]))


def test_a_loop_that_repeats_itself_leaves_no_word() -> None:
    assert run_ranks(_steady_calls, world_size=2) == [0, 0]
