"""Two jobs save to one path or into one folder at the same time: a checkpoint reported as saved can be loaded."""

from __future__ import annotations

import os
import shutil
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
from tests.support.checkpointing import everything
from tests.support.damaging import sign
from tests.support.models import exact_model, integer_net, train
from tests.support.rivals import Job, kill_one_of_two, race

pytestmark = pytest.mark.slow


def _job(jobs: list[list[int]], seed: int) -> Job:
    groups = [dist.new_group(ranks) for ranks in jobs]
    group = next(group for group, ranks in zip(groups, jobs, strict=True) if dist.get_rank() in ranks)
    mesh = layerzero.mesh_from_groups(group, group)

    def built(seed: int) -> tuple[Any, Any]:
        return exact_model(integer_net(seed), mesh=mesh)

    (model, optimizer), (again, its_optimizer) = built(seed), built(2)

    def save(path: Path, extra: Any, later: bool) -> None:
        if later:
            checkpoint.save_async(path, model, optimizer, extra).wait()
        else:
            checkpoint.save(path, model, optimizer, extra)

    def load(path: Path) -> tuple[Any, dict[str, Tensor]]:
        return checkpoint.load(path, again, its_optimizer), everything(again, its_optimizer)

    return Job(
        lambda turn: train(model, optimizer, dist.get_rank(), [turn]), lambda: everything(model, optimizer), save, load
    )


def test_of_two_jobs_that_save_to_one_path_one_gets_it_and_can_load_it(tmp_path: Path) -> None:
    race(_job, tmp_path)


def test_a_job_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    kill_one_of_two(_job, tmp_path, (4, 8, 2))


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
