"""Values reach all ranks along a tree of small groups, with few sockets and few bytes in the store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import buddy_snapshots
from layerzero.checkpoint.background import rank_tree
from layerzero.checkpoint.checkpoint_writer import CheckpointWriter
from layerzero.checkpoint.rank_tree import FailedRanksError, RankTree, _group_starts
from layerzero.comm import process_groups
from layerzero.engine.hooks import get_state
from tests.support.checkpointing import everything, sharded_net
from tests.support.counting_store import counted_store
from tests.support.crashing import SOON, fails_at, failure_of, interrupt, kill, survivors
from tests.support.models import different, integer_net, train
from tests.support.ranks import mesh_of, on_ranks

FAN_OUT = 4


@pytest.mark.parametrize("size", [1, 2, 4, 5, 16, 17, 64, 1000, 16384])
def test_each_rank_reaches_the_first_over_at_most_three_connections_a_level(size: int) -> None:
    levels = 0
    while FAN_OUT**levels < size:
        levels += 1
    for rank in range(size):
        groups = _group_starts(rank, size)
        assert len(groups) <= levels
        assert [start for start, _ in groups[:-1]] == [rank] * (len(groups) - 1), "the first rank of its group goes on"
        assert all(start + index * width == rank for start, width in groups for index in [(rank - start) // width])
        assert not groups or groups[-1][0] < rank or rank == 0, "the last group leads to a rank before this one"


@on_ranks(world_size=7)
def test_values_arrive_in_the_order_of_ranks_also_from_two_threads(rank: int) -> None:
    model, _ = sharded_net(7)
    tree = rank_tree(get_state(model))
    assert rank_tree(get_state(model)) is tree
    found: dict[int, list[list[int]]] = {1: [], 2: []}

    def exchange(tag: int) -> None:
        for turn in range(20):
            if (rank + tag + turn) % 3 == 0:
                time.sleep(0.002)  # so that the threads of each rank overlap in another way
            found[tag].append(tree.all_gather(tag, 100 * tag + rank))

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in found]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    for tag, lists in found.items():
        assert lists == [[100 * tag + each for each in range(7)]] * 20
    gathered = tree.gather(3, {"rank": rank, "text": '"\\é' * rank})
    assert rank or gathered == [{"rank": each, "text": '"\\é' * each} for each in range(7)]
    assert tree.scatter(3, [[each, "x" * each] for each in range(7)] if rank == 0 else []) == [rank, "x" * rank]


@on_ranks(world_size=6)
def test_an_error_on_any_rank_is_raised_on_all_and_the_next_call_works(rank: int) -> None:
    model, _ = sharded_net(6)
    tree = rank_tree(get_state(model))

    def map_rank(bad: set[int]) -> int:
        if rank in bad:
            raise KeyboardInterrupt(f"of {rank}") if rank == 5 else OSError(f"of {rank}")
        return rank

    def merge(values: list[int], is_bad: bool) -> list[int]:
        if is_bad:
            raise ValueError("merged")
        return [10 * value for value in values]

    for bad, said in (({5}, "rank 5: KeyboardInterrupt: of 5"), ({2, 3}, "rank 2: OSError: of 2; rank 3: OSError")):
        with pytest.raises(FailedRanksError, match=said):
            tree.map_and_merge(1, lambda bad=bad: map_rank(bad), lambda values: merge(values, False))
    with pytest.raises(FailedRanksError, match="rank 0: ValueError: merged"):
        tree.map_and_merge(1, lambda: map_rank(set()), lambda values: merge(values, True))
    assert tree.map_and_merge(1, lambda: map_rank(set()), lambda values: merge(values, False)) == 10 * rank
    endless = 10**5000 if rank == 3 else 0
    with pytest.raises(FailedRanksError, match="rank 3: ValueError"):
        tree.map_and_merge(1, lambda: endless, lambda values: values)
    assert not tree.failure


@on_ranks(world_size=2)
def test_the_next_save_connects_again_after_an_exchange_that_any_error_has_interrupted(rank: int) -> None:
    model, _ = sharded_net(2)
    tree = rank_tree(get_state(model))
    if rank == 1:
        with pytest.raises(checkpoint.CheckpointError, match="rank 1 failed with TypeError"):
            tree.gather(1, object())  # stands for an error between two messages, such as KeyboardInterrupt
        assert tree.failure
    else:
        assert not tree.failure
    again = rank_tree(get_state(model))
    assert again is not tree
    assert again.all_gather(2, rank) == [0, 1]


@on_ranks(world_size=8)
def test_a_save_a_snapshot_and_a_save_in_the_background_share_few_sockets(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(4, adam=True)
    train(model, optimizer, rank, range(1))
    place = tmp_path / f"node{rank // 4}"
    place.mkdir(exist_ok=True)
    dist.barrier()
    before = _sockets()
    with counted_store() as store:
        checkpoint.save(tmp_path / "one", model, optimizer)
    # Groups (0, 1, 2, 3) and (4, 5, 6, 7), then (0, 4): a socket for each other rank, and one that listens.
    assert _sockets() - before == (6 if rank % 4 == 0 else 4)
    assert store.nbytes < 64 << 10
    buddies = checkpoint.Buddies(model, optimizer, name="run", memory=place)
    assert _sockets() - before == (8 if rank % 4 == 0 else 6), "and a pair with the other node"
    state = everything(model, optimizer)
    buddies.snapshot({"at": 1})
    pending = checkpoint.save_async(tmp_path / "two", model, optimizer, {"at": 1})
    train(model, optimizer, rank, range(1, 2))
    pending.wait()
    buddies.wait()
    assert _sockets() - before == (8 if rank % 4 == 0 else 6)
    assert checkpoint.load(tmp_path / "two", model, optimizer) == {"at": 1}
    assert not different(everything(model, optimizer), state)
    train(model, optimizer, rank, range(1, 2))
    found = buddies.load()
    assert found is not None and found.extra == {"at": 1}
    assert not different(everything(model, optimizer), state)
    layerzero.close(model)
    buddies.close()
    del buddies, pending
    layerzero.shard_model(integer_net(), mesh=mesh_of(4))  # drops the groups that nothing refers to
    deadline = time.monotonic() + 10
    while _sockets() > before:
        assert time.monotonic() < deadline, (_sockets(), before)
        time.sleep(0.1)


def _sockets() -> int:
    """Return the number of sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):  # the descriptor of the listing itself is closed by now
            links.append(os.readlink(path))
    return sum(link.startswith("socket:") for link in links)


@on_ranks(world_size=4, pg_timeout=15)
def test_connections_that_have_failed_are_replaced_for_saves_and_snapshots(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, adam=True)
    train(model, optimizer, rank, range(1))
    place = tmp_path / f"node{rank // 2}"
    place.mkdir(exist_ok=True)
    dist.barrier()
    buddies = checkpoint.Buddies(model, optimizer, name="run", memory=place)
    for turn, loser in enumerate((3, 0)):
        tree = rank_tree(get_state(model))
        if rank == loser:
            tree.fail(OSError())  # as after a message that failed on this rank only
        buddies.snapshot(turn)
        checkpoint.save(tmp_path / f"step-{turn}", model, optimizer, turn)
        buddies.wait()
        assert rank_tree(get_state(model)) is not tree
        found = buddies.load()
        assert found is not None and found.extra == turn == checkpoint.load(tmp_path / f"step-{turn}", model, optimizer)
    buddies.close()


# Groups of 9 ranks: (0, 1, 2, 3), (4, 5, 6, 7) and (0, 4, 8). Rank 4 sends two parts in two messages to rank 0.
@pytest.mark.parametrize(
    ("bad", "turn"),
    [(5, 0), (4, 1), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(8, 1, marks=pytest.mark.slow)],
)
@on_ranks(world_size=9)
def test_an_error_between_two_messages_is_raised_by_all_ranks_at_once(
    rank: int, bad: int, turn: int, tmp_path: Path
) -> None:
    model, optimizer = sharded_net(3)
    save: Callable[..., None] = partial(checkpoint.save, model=model, optimizer=optimizer)
    save(tmp_path / "one")
    with fails_at(RankTree, "_send", turn if rank == bad else 1000, interrupt):
        said = failure_of(lambda: save(tmp_path / "two"))
    if rank == bad:
        assert said == "KeyboardInterrupt: by hand"
    else:
        assert said.startswith(f"RankLostError: {tmp_path / 'two'} could not be written: rank {bad} failed with "), said
    save(tmp_path / "three")
    checkpoint.load(tmp_path / "three", model, optimizer)


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 4, pytest.param(5, marks=pytest.mark.slow)])
@on_ranks(world_size=9)
def test_a_rank_that_cannot_connect_is_named_by_all_ranks_and_the_next_save_connects(
    rank: int, bad: int, tmp_path: Path
) -> None:
    model, optimizer = sharded_net(3)
    pending: list[Any] = []

    def save(name: str) -> None:
        pending[:] = [checkpoint.save_async(tmp_path / name, model, optimizer)]
        pending[0].wait()

    def fail() -> None:
        raise OSError("Too many open files")

    for turn in (0, 1) if bad != 5 else (0,):  # rank 5 belongs to one group
        with fails_at(process_groups, "create_group", turn if rank == bad else 1000, fail):
            said = failure_of(lambda: save("one"))
        assert "OSError: Too many open files" in said, said
        assert rank == bad or f"rank {bad} failed with OSError" in said, said
        assert rank == bad or said.startswith("RankLostError: "), said
    save("two")
    checkpoint.load(tmp_path / "two", model, optimizer)


def _saves_until_killed(folder: Path, where: str, rank: int) -> str:
    """Return how soon and how a save of 9 ranks ends in which rank 5 is killed."""
    owner, name, turn = {
        "exchange": (RankTree, "_send", 1),
        "address": (process_groups._AddressStore, "set", 0),
        "connect": (process_groups._AddressStore, "wait", 0),
    }[where]
    model, optimizer = sharded_net(3)
    dist.barrier()
    began = time.monotonic()
    try:
        soon = mock.patch.object(process_groups, "_TO_CONNECT", timedelta(seconds=1))
        with soon, fails_at(owner, name, turn if rank == 5 else 1000, kill):
            checkpoint.save(folder / "one", model, optimizer)
    except checkpoint.CheckpointError as error:
        return f"{time.monotonic() - began} {error}"
    return "nothing was raised"


@pytest.mark.slow
@pytest.mark.parametrize(("where", "seconds"), [("exchange", 5.0), ("address", 15.0), ("connect", 15.0)])
def test_all_others_raise_an_error_soon_if_a_rank_is_killed(where: str, seconds: float, tmp_path: Path) -> None:
    act = partial(_saves_until_killed, tmp_path, where)
    for rank, said in survivors(tmp_path, act, world_size=9, victim=5, timeout=timedelta(seconds=60)).items():
        took, _, message = said.partition(" ")
        assert re.fullmatch(r"[\d.]+", took) and float(took) < seconds, (rank, said)
        assert where != "exchange" or "rank 5 has died or has exited" in message, (rank, said)


@on_ranks(world_size=2)
def test_an_interrupt_ends_the_wait_for_another_rank(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(1)
    save = partial(checkpoint.save, model=model, optimizer=optimizer)
    save(tmp_path / "one")
    plan = CheckpointWriter.plan
    ended = tmp_path / "ended"

    def waits(writer: CheckpointWriter) -> object:
        deadline = time.monotonic() + SOON + 2
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ended.exists(), "rank 0 still waits"
        return plan(writer)

    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        said = failure_of(lambda: save(tmp_path / "two"))
        assert said.startswith("KeyboardInterrupt"), said
        ended.touch()
        signal.signal(signal.SIGINT, before)
    else:
        with mock.patch.object(CheckpointWriter, "plan", waits):
            said = failure_of(lambda: save(tmp_path / "two"))
        assert "rank 0 failed with KeyboardInterrupt" in said, said
    save(tmp_path / "three")


@on_ranks(world_size=4)
def test_snapshots_end_on_all_ranks_if_one_is_interrupted_or_cannot_connect(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, adam=True)
    train(model, optimizer, rank, range(1))
    place = tmp_path / f"node{rank // 2}"
    place.mkdir(exist_ok=True)
    dist.barrier()
    create = partial(checkpoint.Buddies, model, optimizer, name="run", memory=place)
    checkpoint.save(tmp_path / "one", model, optimizer)  # connects the tree
    with fails_at(process_groups, "create_group", 0 if rank == 1 else 1000, interrupt):
        said = failure_of(create)
    assert said.startswith("KeyboardInterrupt: by hand" if rank == 1 else "RankLostError: rank 1 failed with Keyb"), (
        said
    )
    buddies = create()
    buddies.snapshot(1)
    buddies.wait()
    with fails_at(buddy_snapshots, "transfer", 0 if rank == 2 else 1000, interrupt):
        buddies.snapshot(2)
        said = failure_of(buddies.wait)
    assert said.startswith("KeyboardInterrupt: by hand" if rank == 2 else "RankLostError: rank 2 failed with Keyb"), (
        said
    )
    found = buddies.load()
    assert found is not None and found.extra == 1
    with fails_at(checkpoint.Buddies, "_write", 0 if rank == 3 else 1000, interrupt):
        said = failure_of(partial(buddies.snapshot, 3))
    assert said.startswith("KeyboardInterrupt: by hand" if rank == 3 else "RankLostError: rank 3 failed with Keyb"), (
        said
    )
    buddies.snapshot(3)
    buddies.wait()
    buddies.close()
