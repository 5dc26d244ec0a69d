"""Snapshots in the memory of other nodes: losing a node costs only the steps since the last snapshot."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from layerzero import checkpoint
from layerzero.checkpoint import buddy_snapshots
from layerzero.checkpoint.buddy_snapshots import _partners
from tests.chaos.faults import killed_node
from tests.chaos.tries import Try, undisturbed
from tests.support.checkpointing import everything, on_first_rank, sharded_net, train
from tests.support.damaging import flip_bit
from tests.support.models import different
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

NAME = "run"


def _node(folder: Path, rank: int, ranks_of_node: int = 2) -> Path:
    """Return the folder that plays the shared memory of this rank's node; four ranks on two emulated nodes."""
    place = folder / f"node{rank // ranks_of_node}"
    place.mkdir(exist_ok=True)
    return place


def _home(place: Path) -> Path:
    return place / f"layerzero-{os.getuid()}-{NAME}"


def _buddies(folder: Path, model, optimizer, node: int | None = None) -> checkpoint.Buddies:
    place = _node(folder, dist.get_rank() if node is None else 2 * node)
    return checkpoint.Buddies(model, optimizer, name=NAME, memory=place)


def _started(folder: Path) -> tuple[nn.Module, Optimizer, checkpoint.Buddies]:
    model, optimizer = sharded_net(2, adam=True)
    return model, optimizer, _buddies(folder, model, optimizer)


def _take(keeper: checkpoint.Buddies, extra: object) -> None:
    keeper.snapshot(extra)
    keeper.wait()


def _extra(keeper: checkpoint.Buddies) -> Any:
    """Load the last snapshot, which must exist, and return its `extra`."""
    found = keeper.load()
    assert found is not None
    return found.extra


# --- contents, location and loading of snapshots ---


@on_ranks()
def test_a_snapshot_is_loaded_without_the_memory_of_a_node(rank: int, tmp_path: Path) -> None:
    model, optimizer, keeper = _started(tmp_path)
    assert keeper.load() is None
    train(model, optimizer, range(3))
    states = {}
    for step in (3, 4, 5):
        states[step] = everything(model, optimizer)
        keeper.snapshot({"step": step, "mine": checkpoint.per_rank(rank)})
        train(model, optimizer, range(step, step + 1))  # while it is being sent
    keeper.wait()
    dist.barrier()
    home = _home(_node(tmp_path, rank))
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert len(list(home.iterdir())) == 2, "two snapshots, and no more"
    for snapshot in home.iterdir():
        files = {file.name for file in snapshot.glob("*.safetensors")}
        assert files == {f"rank-{each:05d}.safetensors" for each in range(4)}, "each node has all that another has"
    on_first_rank(shutil.rmtree, _node(tmp_path, 3))
    again, its_optimizer = sharded_net(2, adam=True, seed=1)
    assert _extra(_buddies(tmp_path, again, its_optimizer)) == {"step": 5, "mine": rank}
    assert not (wrong := different(everything(again, its_optimizer), states[5])), wrong
    train(again, its_optimizer, range(5, 7))
    train(model, optimizer, range(6, 7))
    assert not (wrong := different(everything(again, its_optimizer), everything(model, optimizer))), wrong
    again, its_optimizer = sharded_net(4, adam=True, seed=2)  # another sharding, and all the memory of the other node
    place = _node(tmp_path, 0)
    keeper = checkpoint.Buddies(again, its_optimizer, name=NAME, memory=place)
    found = keeper.load()
    assert found is not None and not different(everything(again, its_optimizer), states[5])
    dist.barrier()
    keeper.close()
    dist.barrier()
    assert not home.exists() or rank > 1
    assert not list(place.iterdir()), "nothing is left"


def _on_fewer(rank: int, folder: Path, states) -> None:
    again, its_optimizer = sharded_net(1, adam=True, seed=1)
    assert _extra(checkpoint.Buddies(again, its_optimizer, name=NAME, memory=folder / "node0")) == 7
    assert not (wrong := different(everything(again, its_optimizer), states)), wrong


def _take_one(rank: int, folder: Path):
    model, optimizer, keeper = _started(folder)
    train(model, optimizer, range(2))
    _take(keeper, 7)
    return everything(model, optimizer)


def test_a_snapshot_is_loaded_by_fewer_ranks_than_have_taken_it(tmp_path: Path) -> None:
    states = run_ranks(_take_one, tmp_path)[0]
    shutil.rmtree(tmp_path / "node1")
    run_ranks(_on_fewer, tmp_path, states, world_size=2)


@on_ranks()
def test_an_old_snapshot_does_not_outdo_a_younger_one(rank: int, tmp_path: Path) -> None:
    """Bring back a node after a long time, with more snapshots than were taken since."""
    model, optimizer, keeper = _started(tmp_path)
    remove = shutil.rmtree

    def removed_by_another(folder: Path, ignore_errors: bool = False) -> None:
        remove(folder, ignore_errors=True)
        remove(folder, ignore_errors)

    with (
        mock.patch.object(buddy_snapshots.time, "time", return_value=time.time() - 1e6),
        mock.patch.object(shutil, "rmtree", removed_by_another),
    ):
        for step in range(4):
            keeper.snapshot(step)
        keeper.wait()
    on_first_rank((tmp_path / "node1").rename, tmp_path / "away")
    on_first_rank(shutil.rmtree, tmp_path / "node0")
    keeper = _buddies(tmp_path, model, optimizer)
    assert keeper.load() is None
    _take(keeper, "young")
    on_first_rank(shutil.rmtree, tmp_path / "node1")
    on_first_rank((tmp_path / "away").rename, tmp_path / "node1")
    keeper = _buddies(tmp_path, model, optimizer)
    assert _extra(keeper) == "young"


@on_ranks(timeout=100)
def test_what_is_newer_in_memory_or_on_a_disk_is_loaded(rank: int, tmp_path: Path) -> None:
    model, optimizer, keeper = _started(tmp_path)
    runs = tmp_path / "runs"
    _take(keeper, "before")
    assert keeper.load(newer_than=runs).extra == "before", "there is nothing on the disk"
    time.sleep(1.1)
    checkpoint.save(runs / "step-1", model, optimizer)
    assert keeper.load(newer_than=runs) is None
    assert keeper.load().extra == "before"
    time.sleep(1.1)
    keeper._period = 1e4  # a snapshot is spread over a quarter of the interval, too long for wait()
    keeper._began = time.monotonic() - 1e4
    _take(keeper, "after")
    assert keeper.load(newer_than=runs if rank == 0 else None).extra == "after"
    keeper.close()


# --- snapshots replaced completely or not at all ---


@on_ranks()
def test_a_snapshot_that_is_not_whole_or_is_damaged_leaves_the_one_before(rank: int, tmp_path: Path) -> None:
    model, optimizer, keeper = _started(tmp_path)
    train(model, optimizer, range(2))
    _take(keeper, 2)
    state = everything(model, optimizer)
    train(model, optimizer, range(2, 3))
    real = buddy_snapshots.read_pieces

    def damaged(path: Path, *args: object) -> None:
        flip_bit(path)
        real(path, *args)

    # The data from rank 3 arrived damaged at rank 1.
    with mock.patch.object(buddy_snapshots, "read_pieces", damaged if rank == 1 else real):
        keeper.snapshot(3)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank 1: .*rank-00003.safetensors is damaged"):
            keeper.wait()
    dist.barrier()
    again, its_optimizer = sharded_net(2, adam=True, seed=1)
    assert _extra(_buddies(tmp_path, again, its_optimizer)) == 2
    assert not different(everything(again, its_optimizer), state)
    keeper.snapshot(3)  # and the next snapshot is taken
    keeper.wait()
    assert _extra(_buddies(tmp_path, again, its_optimizer)) == 3
    # After a bit flip in memory the previous snapshot is loaded, and the log says so.
    train(model, optimizer, range(3, 4))
    _take(keeper, 4)
    dist.barrier()
    if rank == 2:
        flip_bit(max(_home(_node(tmp_path, 2)).iterdir()) / "rank-00002.safetensors")
    dist.barrier()
    assert _extra(_buddies(tmp_path, again, its_optimizer)) == 3
    # No rank goes on to another snapshot if one rank finds an error that is no damage.
    found = ValueError("another model") if rank == 1 else checkpoint.CheckpointError("damaged")
    with mock.patch.object(keeper, "_load", side_effect=found), pytest.raises((ValueError, checkpoint.CheckpointError)):
        keeper.load()


@on_ranks()
def test_where_there_is_no_room_what_was_taken_stays(rank: int, tmp_path: Path) -> None:
    model, optimizer, keeper = _started(tmp_path)
    train(model, optimizer, range(1))
    keeper.snapshot(1)

    def full(name: str, victim: int) -> Any:
        failure = OSError(28, "No space left on device") if rank == victim else None
        return mock.patch.object(buddy_snapshots, name, side_effect=failure, wraps=getattr(buddy_snapshots, name))

    for name in ("write_items", "allocate_file"):  # for its own file, and for its partner's
        with (
            full(name, 2),
            pytest.raises(checkpoint.CheckpointError, match=r"rank 2: .*No space left .* bytes of free space"),
        ):
            keeper.snapshot(2)
        assert _extra(keeper) == 1
    broken = OSError(5, "Input/output error") if rank == 2 else None
    with (
        mock.patch.object(buddy_snapshots, "allocate_file", side_effect=broken),
        pytest.raises(checkpoint.CheckpointError, match=r"rank 2: \[Errno 5\] Input/output error$"),
    ):
        keeper.snapshot(2)
    lost = _node(tmp_path, rank) / "away"
    on_first_rank(keeper.folder.rename, lost)  # all files of the first node must come from the second
    on_first_rank(keeper.folder.mkdir, mode=0o700)
    with full("allocate_file", 1):
        assert keeper.load() is None, "on all ranks"
    dist.barrier()
    for folder in keeper.folder.iterdir() if rank == 0 else ():  # as if a load had been killed while it fetched
        (folder / ".rank-00000.safetensors").write_bytes(b"part")
    dist.barrier()
    assert _extra(keeper) == 1
    dist.barrier()  # each rank removes the files that it has fetched
    assert rank > 1 or not any(file.is_file() for file in keeper.folder.rglob("*")), "what was fetched is gone again"
    on_first_rank(shutil.rmtree, keeper.folder)
    on_first_rank(lost.rename, keeper.folder)
    for step in (3, 4):
        keeper.snapshot(step)
        assert _extra(keeper) == step


@on_ranks()
def test_what_cannot_be_taken_is_one_error_on_all_ranks(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, adam=True)
    place = _node(tmp_path, rank)
    train(model, optimizer, range(1))
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="name must be a single path component"):
            checkpoint.Buddies(model, optimizer, name=name, memory=place)
    if rank % 2 == 0:
        _home(place).mkdir(mode=0o755)
    dist.barrier()
    with pytest.raises((PermissionError, RuntimeError), match="is not a folder that only this user can access"):
        checkpoint.Buddies(model, optimizer, name=NAME, memory=place)
    dist.barrier()
    if rank % 2 == 0:
        _home(place).chmod(0o700)
    dist.barrier()
    keeper = checkpoint.Buddies(model, optimizer, name=NAME, memory=place)
    with pytest.raises((TypeError, RuntimeError), match=r"extra.*cannot be saved, because checkpoints contain no code"):
        keeper.snapshot(object() if rank == 1 else 1)
    with pytest.raises(ValueError, match=r"extra.*per_rank"):
        keeper.snapshot(rank)
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises((checkpoint.CheckpointError, RuntimeError), match="non-finite values in"):
        keeper.snapshot(1)
    assert keeper.load() is None
    keeper.close()
    assert not any(thread.name == "layerzero checkpoint" for thread in threading.enumerate())


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4, 4], [1, 1], [2, 1, 1], [3, 2, 2], [2, 2, 2, 1]])
def test_partners_are_on_another_node_and_each_rank_has_one(sizes: list[int]) -> None:
    nodes = [str(node) for node, size in enumerate(sizes) for _ in range(size)]
    random.Random(0).shuffle(nodes)
    pairs = [_partners(nodes, rank) for rank in range(len(nodes))]
    assert all(nodes[to] != nodes[rank] != nodes[source] for rank, (to, source) in enumerate(pairs))
    assert all(pairs[to][1] == rank for rank, (to, _) in enumerate(pairs))
    assert _partners(["a", "a"], 1) == (None, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_node_that_is_killed_is_replaced_by_a_spare_and_the_bits_are_the_same(tmp_path: Path, seed: int) -> None:
    assert killed_node(Try(tmp_path, undisturbed({})), random.Random(seed)) == "survived"
