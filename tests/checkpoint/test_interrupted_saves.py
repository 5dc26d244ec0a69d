"""If a save ends early for any reason, the previous checkpoint loads, and no incomplete one looks complete.

The ranks that die here are separate processes, forked from one that has imported torch.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from layerzero import checkpoint
from layerzero.checkpoint import checkpoint_writer
from layerzero.checkpoint.manifest import Manifest
from tests.support.checkpointing import everything, on_first_rank, sharded_net, train
from tests.support.crashing import RAISED, SURVIVED, WRONG, die_at, exit_codes, join_ranks, start_all
from tests.support.models import different
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

PARTIAL = re.compile(r"\.step-\d\.[0-9a-f]{16}\.partial")


def _second_save(folder: str, rank: int, world_size: int, victim: int, turn: int, half: bool) -> None:
    join_ranks(f"{folder}.store", rank, world_size)
    model, optimizer = sharded_net(world_size, steps=2)
    dist.barrier()
    if rank == victim:
        die_at(turn, half=half)
    try:
        if turn % 2:
            checkpoint.save_async(f"{folder}/step-2", model, optimizer, {"step": 2}, keep_last=1).wait()
        else:
            checkpoint.save(f"{folder}/step-2", model, optimizer, {"step": 2}, keep_last=1)
    except checkpoint.CheckpointError as error:
        os._exit(RAISED if "step-2 could not be written" in str(error) else WRONG)
    os._exit(SURVIVED)


def _start(folder: Path, world_size: int, victim: int, turn: int, *, half: bool = False) -> list[Any]:
    """Start ranks that save step-2, one of which may die during the save."""
    return start_all(_second_save, [(str(folder), rank, world_size, victim, turn, half) for rank in range(world_size)])


def _first_save(rank: int, folder: str) -> list[dict[str, Tensor]]:
    """Save step-1; return the states of both steps."""
    model, optimizer = sharded_net(1, steps=1)
    checkpoint.save(f"{folder}/step-1", model, optimizer, {"step": 1}, keep_last=1)
    first = everything(model, optimizer)
    train(model, optimizer, range(1, 2))
    return [first, everything(model, optimizer)]


def _survey(rank: int, folders: list[Path], states: list[dict[str, Tensor]]) -> list[str]:
    """Return the latest checkpoint of each folder; assert that it is complete and that the next save can start."""
    found = []
    model, optimizer = sharded_net(1, seed=1)
    for folder in folders:
        path = checkpoint.latest(folder)
        assert path is not None, folder
        extra = checkpoint.load(path, model, optimizer)
        assert path.name == f"step-{extra['step']}"
        assert not (wrong := different(everything(model, optimizer), states[extra["step"] - 1])), f"{folder}: {wrong}"
        for shown in folder.iterdir():
            if not shown.name.startswith("."):
                Manifest.read(shown).verify()
        following = f"step-{extra['step'] + 1}"
        checkpoint.save(folder / following, model, optimizer, keep_last=1)
        left = {left.name for left in folder.iterdir()}
        assert {name for name in left if not PARTIAL.fullmatch(name)} == {following}, f"after {folder}: {left}"
        for leftover in folder.glob(".*"):
            for place in (*leftover.iterdir(), leftover):
                os.utime(place, (0, 0))  # it died long ago
        checkpoint.save(folder / "one-more", model, optimizer, keep_last=1)
        assert [left.name for left in folder.iterdir()] == ["one-more"], f"after {folder}"
        found.append(path.name)
    return found


def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    states = run_ranks(_first_save, str(tmp_path / "False"), world_size=1)[0]
    shutil.copytree(tmp_path / "False", tmp_path / "True")
    shutil.copytree(
        tmp_path / "True" / "step-1", tmp_path / "True" / f".step-2.{16 * '0'}.partial"
    )  # from an earlier crash
    folders = []
    for turn in range(100):
        saves = []
        for half in (False, True):
            folders.append(tmp_path / f"{turn}-{half}")
            shutil.copytree(tmp_path / str(half), folders[-1])
            saves += _start(folders[-1], 1, 0, turn, half=half)
        exits = exit_codes(saves)
        if exits == [SURVIVED, SURVIVED]:
            break
        assert set(exits) <= {-signal.SIGKILL, SURVIVED}, exits
    assert turn > 25, "this many calls change the disk"
    found = run_ranks(_survey, folders, states, world_size=1)[0]
    assert found.count("step-1") > 40 and found.count("step-2") > 10


def test_when_one_of_two_ranks_dies_the_other_says_so(tmp_path: Path) -> None:
    states = run_ranks(_first_save, str(tmp_path / "base"), world_size=1)[0]
    folders, others = [], []
    for victim in (0, 1):
        for turn in range(1, 100, 3 + victim):
            folders.append(tmp_path / f"{victim}-{turn}")
            shutil.copytree(tmp_path / "base", folders[-1])
            exits = exit_codes(_start(folders[-1], 2, victim, turn))
            if exits[victim] == SURVIVED:
                break
            assert exits[victim] == -signal.SIGKILL
            others.append(exits[1 - victim])
    assert others.count(RAISED) > 6
    found = run_ranks(_survey, folders, states, world_size=1)[0]
    for other, name in zip(others, found, strict=False):
        assert other == RAISED or name == "step-2", "who heard of no error has a checkpoint"


@contextmanager
def _small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def _fill(folder: Path, *, free: int, pages: bool) -> None:
    """Fill a small disk up to `free` pages, or `free` files."""
    filler = folder / "filler"
    shutil.rmtree(filler, ignore_errors=True)
    filler.mkdir()
    found = os.statvfs(folder)
    if pages:
        (filler / "0").write_bytes(bytes((found.f_bavail - free) * found.f_bsize))
    for name in range(0 if pages else found.f_favail - free):
        (filler / str(name)).touch()


def _crowded(rank: int, folder: Path, pages: bool) -> int:
    """Save with increasing free space until it succeeds; return the number of failures."""
    model, optimizer = sharded_net(2, steps=1)
    checkpoint.save(folder / "step-1", model, optimizer, {"step": 1})
    first = everything(model, optimizer)
    said = r"step-2 could not be written: .*rank \d: OSError: .*No space left on device"
    for free in range(20):
        on_first_rank(_fill, folder, free=free, pages=pages)
        try:
            if free % 2:
                pending = checkpoint.save_async(folder / "step-2", model, optimizer, {"step": 2}, keep_last=2)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # the save may have failed by now
                    train(model, optimizer, range(1, 2))
                pending.wait()
            else:
                checkpoint.save(folder / "step-2", model, optimizer, {"step": 2}, keep_last=2)
            break
        except checkpoint.CheckpointError as error:
            assert re.search(said, str(error)), error
        dist.barrier()
        assert {path.name for path in folder.iterdir()} == {"filler", "step-1"}
        assert checkpoint.latest(folder) == folder / "step-1"
        train(model, optimizer, range(1, 2))
        assert checkpoint.load(folder / "step-1", model, optimizer) == {"step": 1}
        assert not (wrong := different(everything(model, optimizer), first)), wrong
    dist.barrier()
    assert checkpoint.load(folder / "step-2", model, optimizer) == {"step": 2}
    return free


@pytest.mark.parametrize("options", ["size=128k", "size=1m,nr_inodes=24"])
def test_a_full_disk_is_an_error_after_which_training_goes_on(tmp_path: Path, options: str) -> None:
    with _small_disk(tmp_path / "disk", options) as disk:
        failures = run_ranks(_crowded, disk, "nr_inodes" not in options, world_size=2)
    assert min(failures) >= 4, "each file of a checkpoint was once the one too many"


@on_ranks(world_size=2)
def test_a_file_that_the_first_rank_cannot_see_makes_no_checkpoint(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2)
    checkpoint.save(tmp_path / "step-1", model, optimizer)
    publish = checkpoint_writer.publish
    harms: list[Callable[[Path], Any]] = []

    def elsewhere(partial: Path, *args: Any, **kwargs: Any) -> None:
        harms[-1](partial / "rank-00001.safetensors")
        publish(partial, *args, **kwargs)

    with mock.patch.object(checkpoint_writer, "publish", elsewhere):
        for harm, said in (
            (os.unlink, "is missing"),
            (lambda path: os.truncate(path, 10), "has 10 bytes"),
            (lambda path: path.rename(path.parent / "x") and path.symlink_to("x"), "not a regular file"),
        ):
            harms.append(harm)
            with pytest.raises(
                checkpoint.CheckpointError, match=rf"rank-00001.* {said}.*file system that all ranks share"
            ):
                checkpoint.save(tmp_path / "step-2", model, optimizer)
            dist.barrier()
            left = [path.name for path in tmp_path.iterdir()]
            assert left == ["step-1"], (said, left)
            dist.barrier()
    (tmp_path / str(rank)).mkdir()
    os.chdir(tmp_path / str(rank))
    with pytest.raises(ValueError, match=r'path is ".*0/here" on rank 0'):
        checkpoint.save("here", model, optimizer)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"rank 1: FileNotFoundError.*cwd/\.here\.\w+\.partial/rank-00001"
    ):
        checkpoint.save("/proc/self/cwd/here", model, optimizer)  # two machines: the same path is a different place
    dist.barrier()
    assert list(Path().iterdir()) == []
    os.chdir("/")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
