"""A run resumes from the last loadable checkpoint, and bad checkpoints never replace good ones."""

from __future__ import annotations

import math
import os
import random
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import loading, publish
from layerzero.checkpoint.manifest import Manifest, UnsupportedFormatError
from layerzero.checkpoint.run_folder import _candidates
from layerzero.checkpoint.safetensors_files import CheckpointFiles
from tests.support.checkpointing import everything, on_first_rank, sharded_net, train
from tests.support.damaging import bad_disk, flip_bit
from tests.support.logs import logged
from tests.support.models import different
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

DATA = "rank-00001.safetensors"


def _shown(folder: str) -> list[str]:
    """Return the visible folders on all ranks, after the first rank has cleaned up."""
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def _states_saved(folder: str, steps: int):
    model, optimizer = sharded_net(2)
    states = []
    for step in range(steps):
        train(model, optimizer, range(step, step + 1))
        states.append(everything(model, optimizer))
        checkpoint.save(f"{folder}/step-{step}", model, optimizer, {"step": step})
    dist.barrier()
    return model, optimizer, states


# --- load_latest ---


@on_ranks()
def test_the_newest_that_can_be_loaded_is_loaded_and_the_damaged_are_set_aside(rank: int, tmp_path: Path) -> None:
    _, _, states = _states_saved(tmp_path, 6)
    if rank == 0:
        flip_bit(tmp_path / "step-5" / DATA, -1)  # detected by the ranks that read it only
        flip_bit(tmp_path / "step-4" / "contents.json", 40)
        (tmp_path / "step-3" / "manifest.json").unlink()
        (tmp_path / "step-2" / DATA).write_bytes(b"short")
        (tmp_path / "logs").mkdir()  # from another program: stays
        (tmp_path / "logs" / "events").write_text("...")
    dist.barrier()
    again, its_optimizer = sharded_net(4, seed=1)
    with logged() as lines:
        found = checkpoint.load_latest(tmp_path, again, its_optimizer)
    assert found is not None and found.path == Path(tmp_path, "step-1") and found.extra == {"step": 1}
    assert not (wrong := different(everything(again, its_optimizer), states[1])), wrong
    assert len(found.set_aside) == 4
    for step in (2, 3, 4, 5):
        assert sum(f"{tmp_path}/step-{step} is damaged" in text for text in found.set_aside) == 1
    assert "rank-00001.safetensors is damaged: bytes" in found.set_aside[0]
    assert len(lines) == (4 if rank == 0 else 0)
    assert all("step-1 has been loaded instead" in line and "renamed to .step-" in line for line in lines)
    assert _shown(tmp_path) == ["logs", "step-0", "step-1"]
    assert len(list(Path(tmp_path).glob(".step-*.damaged"))) == 4, "nothing is removed"
    train(again, its_optimizer, range(2, 6))
    for name in ("step-5", "step-3"):  # the same names work again
        checkpoint.save(f"{tmp_path}/{name}", again, its_optimizer, {"step": 9}, keep_last=2)
    assert _shown(tmp_path) == ["logs", "step-3", "step-5"]
    assert len(list(Path(tmp_path).glob(".step-*.damaged"))) == 4, "nor by keep_last"
    assert checkpoint.load_latest(tmp_path, again, its_optimizer) == (Path(tmp_path, "step-3"), {"step": 9}, ())


@on_ranks(world_size=2)
def test_where_nothing_can_be_loaded_nothing_is_renamed(rank: int, tmp_path: Path) -> None:
    empty = f"{tmp_path}/none"
    model, optimizer, states = _states_saved(tmp_path, 2)
    assert checkpoint.load_latest(empty, model, optimizer) is None
    file = Path(tmp_path, "step-1", DATA)
    for path in (file, file / "further"):
        with pytest.raises(NotADirectoryError, match=f"{DATA} is a file. Pass the folder that contains"):
            checkpoint.load_latest(path, model, optimizer)
        with pytest.raises(NotADirectoryError, match=f"{DATA} is a file. Pass the folder that contains"):
            checkpoint.latest(path)
        with pytest.raises(
            checkpoint.CheckpointError, match=f"rank 0: FileExistsError: .*{DATA} exists, but it is not a folder"
        ):
            checkpoint.save(path / "step-2", model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=r"step-1 is a checkpoint\. Pass its parent folder"):
        checkpoint.load_latest(Path(tmp_path, "step-1"), model, optimizer)
    other = layerzero.shard_model(torch.nn.Linear(2, 2), mesh=mesh_of(2))
    with pytest.raises((ValueError, RuntimeError), match="does not match the model"):
        checkpoint.load_latest(tmp_path, other)
    assert _shown(tmp_path) == ["step-0", "step-1"], "a checkpoint that does not fit is not a damaged one"
    if rank == 0:
        for step in range(2):
            flip_bit(Path(tmp_path, f"step-{step}", DATA), -1)
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint has been renamed: .*step-1.*; .*step-0"):
        checkpoint.load_latest(tmp_path, model, optimizer)
    assert _shown(tmp_path) == ["step-0", "step-1"]
    assert not different(everything(model, optimizer), states[-1]), "the model is as it was"
    dist.barrier()
    if rank == 0:
        text = Path(tmp_path, "step-1", "manifest.json").read_text()
        Path(tmp_path, "step-1", "manifest.json").write_text(text.replace('"version": 2', '"version": 1'))
    dist.barrier()
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"has format version 1, .* reads only version 2\. Read it with commit f359e383 of layerzero",
    ):
        checkpoint.load_latest(tmp_path, model, optimizer)


@on_ranks(world_size=2)
def test_a_load_that_failed_halfway_is_followed_by_one_that_does_not(rank: int, tmp_path: Path) -> None:
    """Simulate a disk of one rank that returns the right bytes the first time and not the second."""
    model, optimizer, states = _states_saved(tmp_path, 2)
    reread, fails = CheckpointFiles.reread, iter([rank == 1])

    def fail_once(self: CheckpointFiles) -> None:
        if next(fails, False):
            raise checkpoint.CheckpointError("the disk has changed its mind")
        reread(self)

    with mock.patch.object(CheckpointFiles, "reread", fail_once):
        found = checkpoint.load_latest(tmp_path, model, optimizer)
    assert found is not None and found.path.name == "step-0"
    assert "changed its mind" in found.set_aside[0]
    assert not different(everything(model, optimizer), states[0])
    train(model, optimizer, range(1, 2))
    assert not different(everything(model, optimizer), states[1]), "the model can be used"


# --- overwrite ---


@pytest.mark.parametrize("exchanges", [True, False])
@on_ranks(world_size=2)
def test_overwrite_replaces_a_checkpoint_and_nothing_else(rank: int, tmp_path: Path, exchanges: bool) -> None:
    model, optimizer, _ = _states_saved(tmp_path, 1)
    path, rename = f"{tmp_path}/step-0", publish._renameat2
    with mock.patch.object(publish, "_renameat2", rename if exchanges else None):
        train(model, optimizer, range(1, 2))
        state = everything(model, optimizer)
        checkpoint.save(path, model, optimizer, {"step": 1}, overwrite=True)
        dist.barrier()
        assert [each.name for each in Path(tmp_path).iterdir()] == ["step-0"], "the old one is gone"
        dist.barrier()
        again, its_optimizer = sharded_net(1, seed=1)
        assert checkpoint.load(path, again, its_optimizer) == {"step": 1}
        assert not different(everything(again, its_optimizer), state)
        on_first_rank(Path(path, DATA).unlink)  # a damaged one may be overwritten, too
        checkpoint.save_async(path, model, optimizer, {"step": 2}, overwrite=True).wait()
        assert checkpoint.load(path, again, its_optimizer) == {"step": 2}
        on_first_rank(Path(path, "thesis.txt").write_text, "mine")
        with pytest.raises(FileExistsError, match="does not consist of checkpoint files only"):
            checkpoint.save(path, model, optimizer, overwrite=True)
        with pytest.raises(FileExistsError, match="or pass overwrite=True"):
            checkpoint.save(path, model, optimizer)


@on_ranks(world_size=2)
def test_a_write_that_fails_or_is_wrong_replaces_and_deletes_nothing(rank: int, tmp_path: Path) -> None:
    model, optimizer, states = _states_saved(str(tmp_path), 2)
    train(model, optimizer, range(2, 3))
    for lies, said in ((False, "No space"), (True, r"rank 1: .*differs from the data that was written: .*rank-00001")):
        for name, how in (("step-1", {"overwrite": True}), ("step-2", {"keep_last": 1})):
            with bad_disk(lies=lies), pytest.raises(checkpoint.CheckpointError, match=said):
                checkpoint.save(tmp_path / name, model, optimizer, **how)
            dist.barrier()
            assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1"]
            dist.barrier()
    again, its_optimizer = sharded_net(2, seed=1)
    assert checkpoint.load(tmp_path / "step-1", again, its_optimizer) == {"step": 1}
    assert not different(everything(again, its_optimizer), states[1])
    with mock.patch.object(os, "posix_fadvise") as advised:
        checkpoint.save(tmp_path / "step-2", model, optimizer, keep_last=1)
    assert {call.args[1:] for call in advised.mock_calls} == {(0, 0, os.POSIX_FADV_DONTNEED)}, "of whole files"
    assert _shown(str(tmp_path)) == ["step-2"]


def _spoil(model: torch.nn.Module, rank: int, value: float) -> None:
    """Set one number in the rows of one rank."""
    rows = dict(model.named_parameters())["first.weight"].detach().to_local()
    if rank == 1:
        rows.view(-1)[0] = value


@on_ranks(world_size=2)
def test_what_is_not_finite_is_not_saved_and_does_not_push_out_what_is(rank: int, tmp_path: Path) -> None:
    model, optimizer, states = _states_saved(tmp_path, 2)
    for value in (math.nan, -math.inf):
        _spoil(model, rank, value)
        for save in (checkpoint.save, lambda *args, **how: checkpoint.save_async(*args, **how).wait()):
            with pytest.raises(
                checkpoint.CheckpointError, match=r"non-finite values in 'model.first.weight' on rank 1"
            ):
                save(f"{tmp_path}/bad", model, optimizer, keep_last=1)
    assert _shown(tmp_path) == ["step-0", "step-1"]
    for number in range(3):
        checkpoint.save(f"{tmp_path}/bad-{number}", model, optimizer, number, keep_last=2, require_finite=False)
    assert _shown(tmp_path) == ["bad-1", "bad-2", "step-1"], "the last finite one stays, however many follow"
    assert [Manifest.read(f"{tmp_path}/{name}").finite for name in ("bad-1", "bad-2", "step-1")] == [False, False, True]
    found = checkpoint.load_latest(tmp_path, model, optimizer)
    assert found is not None and found.path.name == "step-1"
    assert not different(everything(model, optimizer), states[1])
    assert [text.split(": it has been renamed to .bad-")[0] for text in found.set_aside] == [
        f"{tmp_path}/{name} has non-finite values" for name in ("bad-2", "bad-1")
    ]
    assert _shown(tmp_path) == ["step-1"] and checkpoint.latest(tmp_path) == Path(tmp_path, "step-1")
    checkpoint.save(f"{tmp_path}/bad-1", model, optimizer, keep_last=2)
    checkpoint.save(f"{tmp_path}/good", model, optimizer, keep_last=2)
    assert _shown(tmp_path) == ["bad-1", "good"], "then it may go"
    state = optimizer.state_dict_by_name()["state"]["first.weight"]["momentum_buffer"].to_local()
    if rank == 1:
        state.view(-1)[0] = math.inf
    with pytest.raises(checkpoint.CheckpointError, match="momentum_buffer' on rank 1"):
        checkpoint.save(f"{tmp_path}/bad", model, optimizer)
    masked = torch.nn.Linear(4, 4)
    masked.register_parameter("mask", torch.nn.Parameter(torch.full((4, 4), -math.inf), requires_grad=False))
    masked.register_buffer("tail", torch.full((2,), math.inf))
    checkpoint.save(f"{tmp_path}/masked", layerzero.shard_model(masked, mesh=mesh_of(2)))


# --- random numbers ---


def _draws() -> list[float]:
    import numpy  # noqa: PLC0415

    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]  # noqa: NPY002


def _save_random(rank: int, folder: str) -> list[float]:
    model, optimizer = sharded_net(2)
    torch.manual_seed(rank)
    random.seed(rank)
    _draws()
    extra = {"random": checkpoint.random_states(7, 3), "own": checkpoint.per_rank(rank)}
    checkpoint.save(f"{folder}/one", model, optimizer, extra)
    return _draws()


def _load_random(rank: int, folder: str) -> tuple[bool, list[float], list[str]]:
    model, optimizer = sharded_net(2, seed=1)
    with logged() as lines:
        extra = checkpoint.load(f"{folder}/one", model, optimizer)
        exact = checkpoint.set_random_states(extra["random"])
    return exact, _draws(), lines


def test_random_states_come_back_or_are_derived_and_that_is_said(tmp_path: Path) -> None:
    drawn = run_ranks(_save_random, str(tmp_path))
    again = run_ranks(_load_random, str(tmp_path))
    assert [(exact, draws) for exact, draws, _ in again] == [(True, draws) for draws in drawn]
    assert not any(lines for *_, lines in again)
    fewer = [run_ranks(_load_random, str(tmp_path), world_size=2) for _ in range(2)]
    assert [draws for _, draws, _ in fewer[0]] == [draws for _, draws, _ in fewer[1]], (
        "the same whenever it is resumed so"
    )
    draws = [tuple(draws) for _, draws, _ in fewer[0]]
    assert len({*draws, *map(tuple, drawn)}) == 6, "and another for each rank"
    assert not any(exact for exact, *_ in fewer[0])
    assert "was saved by 4 ranks and is loaded by 2" in fewer[0][0][2][0]
    assert "derives new states from seed 7, step 3" in fewer[0][0][2][1]


def test_a_folder_that_is_no_checkpoint_is_never_set_aside(tmp_path: Path) -> None:
    for name, file in (("tensorboard", "events"), ("weights", "model.safetensors"), ("mixed", "tokenizer.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"")
    (tmp_path / "mixed" / "contents.json").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert _candidates(tmp_path) == ({}, {})
    (tmp_path / "mixed" / "tokenizer.json").unlink()
    assert list(_candidates(tmp_path)[1]) == [tmp_path / "mixed"]


@on_ranks(world_size=2)
def test_a_broken_checkpoint_with_a_strange_file_in_it_is_not_taken_for_none(rank: int, tmp_path: Path) -> None:
    model, optimizer, states = _states_saved(tmp_path, 2)
    if rank == 0:
        Path(tmp_path, "step-1", "notes.txt").write_text("mine")
        flip_bit(Path(tmp_path, "step-1", "manifest.json"), 30)
    dist.barrier()
    found = checkpoint.load_latest(tmp_path, model, optimizer)
    assert found is not None and found.path.name == "step-0"
    assert len(found.set_aside) == 1 and re.search(r"step-1 is damaged .* and cannot be renamed", found.set_aside[0])
    assert _shown(tmp_path) == ["step-0", "step-1"], "somebody's notes stay where they are"
    if rank == 0:
        flip_bit(Path(tmp_path, "step-0", "manifest.json"), 30)
        Path(tmp_path, "step-0", "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint in .* can be loaded"):
        checkpoint.load_latest(tmp_path, model, optimizer)
    assert not different(everything(model, optimizer), states[0])


@on_ranks(pg_timeout=20)
def test_what_a_rank_cannot_read_is_told_to_all_whatever_others_have_met(rank: int, tmp_path: Path) -> None:
    """Let one rank be unable to read what another one finds damaged."""
    model, optimizer, states = _states_saved(tmp_path, 2)
    opened = loading.CheckpointFiles

    def meets(manifest: Manifest, **who: int) -> loading.Source:
        if rank == 1:
            raise UnsupportedFormatError("this needs xxhash")
        if rank == 2:
            raise checkpoint.CheckpointError("a disk has lost it")
        return opened(manifest, **who)

    with (
        mock.patch.object(loading, "CheckpointFiles", meets),
        pytest.raises(checkpoint.CheckpointError, match="this needs xxhash"),
    ):
        checkpoint.load_latest(tmp_path, model, optimizer)
    assert _shown(tmp_path) == ["step-0", "step-1"]
    assert not different(everything(model, optimizer), states[1])
