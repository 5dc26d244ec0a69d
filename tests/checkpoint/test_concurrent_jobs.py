"""Two jobs save to one path or into one folder at the same time: a checkpoint reported as saved can be loaded."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import publish, run_folder
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from tests.support.checkpointing import everything, sharded_net
from tests.support.crashing import slow_disk
from tests.support.damaging import sign
from tests.support.models import IntegerNet, different, exact_sgd, integer_net, train
from tests.support.ranks import run_ranks
from tests.support.rivals import meet, save_beside, start, winner

pytestmark = pytest.mark.slow


def _job_of(rank: int) -> tuple[int, dist.ProcessGroup]:
    """Return the job of this rank and its group: two jobs of two ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return rank // 2, groups[rank // 2]


def _built(group: dist.ProcessGroup, seed: int) -> tuple[Any, Any]:
    mesh = layerzero.mesh_from_groups(group, group)
    model = layerzero.shard_model(integer_net(seed), mesh=mesh, units=IntegerNet.UNITS)
    return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)


def _saved(path: Path, model: Any, optimizer: Any, extra: Any, *, later: bool) -> bool:
    try:
        if later:
            checkpoint.save_async(path, model, optimizer, extra).wait()
        else:
            checkpoint.save(path, model, optimizer, extra)
    except FileExistsError as error:
        assert "already exists" in str(error)
        return False
    return True


def race(rank: int, folder: Path, rounds: int, seed: int) -> list[bool]:
    """Return for each round whether this rank's job won the name. The winner has loaded its checkpoint."""
    job, group = _job_of(rank)
    (model, optimizer), (again, its_optimizer) = _built(group, job), _built(group, 2)
    generator = random.Random(100 * seed + rank)
    alike = random.Random(100 * seed + 50 + job)  # on both ranks of a job
    won = []
    for turn in range(rounds):
        train(model, optimizer, rank, [turn])
        state, later = everything(model, optimizer), alike.random() < 0.5
        dist.barrier()
        time.sleep(alike.uniform(0, 0.05))
        with slow_disk(generator):
            won.append(_saved(folder / str(turn), model, optimizer, {"job": job, "turn": turn}, later=later))
        if won[-1]:
            assert checkpoint.load(folder / str(turn), again, its_optimizer) == {"job": job, "turn": turn}
            wrong = different(everything(again, its_optimizer), state)
            assert not wrong, f"job {job} saved in round {turn}, and loads other {wrong}"
        dist.barrier()
        if won[-1]:  # also after the other job has ended
            assert checkpoint.load(folder / str(turn), again, its_optimizer) == {"job": job, "turn": turn}
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted(map(str, range(rounds))), f"nothing is left of who came too late: {left}"
    return won


def test_of_two_jobs_that_save_to_one_path_one_gets_it_and_can_load_it(tmp_path: Path) -> None:
    first, first_peer, second, second_peer = run_ranks(race, tmp_path, 10, 1)
    assert first == first_peer and second == second_peer
    for turn, winners in enumerate(zip(first, second, strict=True)):
        assert sum(winners) == 1, f"round {turn}: {winners}"
    assert any(first) and any(second), "the race is one"


def _rival(folder: Path, job: int, rank: int, victim: tuple[int, int], turn: int) -> None:
    meet(folder, job, rank)
    model, optimizer = sharded_net(2, seed=job)
    extra, later = {"job": job}, bool(turn % 3)
    save_beside(folder, job, rank, victim, turn, lambda: _saved(folder / "one", model, optimizer, extra, later=later))


def _states(rank: int) -> list[dict[str, Tensor]]:
    return [everything(*sharded_net(1, seed=job)) for job in (0, 1)]


def _loads(rank: int, winners: dict[Path, int], states: list[dict[str, Tensor]]) -> None:
    model, optimizer = sharded_net(1, seed=2)
    for folder, job in winners.items():
        assert checkpoint.load(folder / "one", model, optimizer) == {"job": job}, folder
        assert not different(everything(model, optimizer), states[job]), folder


def test_a_job_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    states = run_ranks(_states, world_size=1)[0]
    turns = range(4, 16, 4)
    processes = {
        (place := tmp_path / str(turn)): start(_rival, place, (turn % 2, turn // 2 % 2), turn) for turn in turns
    }
    winners = {place: won for place, each in processes.items() if (won := winner(place, each)) is not None}
    run_ranks(_loads, winners, states, world_size=1)
    assert len(winners) >= 2


def _copy(intact: Path, path: Path, sequence: int, token: str) -> None:
    shutil.copytree(intact, path)
    sign(path, sequence=sequence, token=token)


def test_what_is_as_new_or_newer_is_not_rotated_away(intact: Path, tmp_path: Path) -> None:
    for name, sequence in {"old": 1, "a": 2, "mine": 2, "z": 2, "newer": 5}.items():
        _copy(intact, tmp_path / name, sequence, name)
    run_folder.rotate(tmp_path / "mine", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "mine", "z", "newer"}
    run_folder.rotate(tmp_path / "gone", 1)
    run_folder.rotate(tmp_path / "newer", 2)
    assert {path.name for path in tmp_path.iterdir()} == {"z", "newer"}


def test_a_checkpoint_that_came_in_place_of_an_old_one_is_put_back(intact: Path, tmp_path: Path) -> None:
    _copy(intact, tmp_path / "one", 0, "old")
    listed = Manifest.read(tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    _copy(intact, tmp_path / "one", 9, "new")
    run_folder._remove_checkpoint(listed)
    assert Manifest.read(tmp_path / "one").token == "new"
    run_folder._remove_checkpoint(Manifest.read(tmp_path / "one"))
    assert list(tmp_path.iterdir()) == []


def test_publishing_goes_by_what_is_there_and_not_by_the_reply_to_the_rename(intact: Path, tmp_path: Path) -> None:
    rename = os.rename
    harms: dict[str, Callable[[Path, Path], Any]] = {
        "merged": lambda source, target: sign(target, token="another"),  # a file system that merges folders
        "removed": lambda source, target: shutil.rmtree(target),  # another job removes it as outdated
        "torn": lambda source, target: (target / "contents.json").unlink(),
        "repeated": rename,  # NFS, where the reply to the first request may be lost: this rename fails
    }
    for name, harm in harms.items():
        partial = publish.partial_path(tmp_path / name, publish.new_token())
        shutil.copytree(intact, partial)
        records = Manifest.read(partial).files.values()
        (partial / MANIFEST).unlink()

        def renamed(source: Path, target: Path, harm: Callable[[Path, Path], Any] = harm) -> None:
            rename(source, target)
            harm(source, target)

        said = rf"{name} does not contain the new checkpoint after"
        refused = nullcontext() if name == "repeated" else pytest.raises(checkpoint.CheckpointError, match=said)
        with mock.patch.object(os, "rename", renamed), refused:
            publish.publish(partial, tmp_path / name, records, sequence=0, token=partial.name.split(".")[2])
    assert Manifest.read(tmp_path / "repeated").token == partial.name.split(".")[2]
