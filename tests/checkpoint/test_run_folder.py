"""A run resumes from the last loadable checkpoint, and bad checkpoints never replace good ones."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import loading, publish, safetensors_files
from layerzero.checkpoint.checksums import FileRecord
from layerzero.checkpoint.manifest import Manifest, UnsupportedFormatError
from layerzero.checkpoint.run_folder import _candidates
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.logs import logged
from tests.support.models import different
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow

DATA = "rank-00001.safetensors"


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


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


def _damaged_in_every_way(rank: int, folder: str) -> None:
    _, _, states = _states_saved(folder, 6)
    if rank == 0:
        _flip(Path(folder, "step-5", DATA), -1)  # detected by the ranks that read it only
        _flip(Path(folder, "step-4", "contents.json"), 40)
        Path(folder, "step-3", "manifest.json").unlink()
        (Path(folder, "step-2") / DATA).write_bytes(b"short")
        Path(folder, "logs").mkdir()  # from another program: stays
        Path(folder, "logs", "events").write_text("...")
    dist.barrier()
    again, its_optimizer = sharded_net(4, seed=1)
    with logged() as lines:
        found = checkpoint.load_latest(folder, again, its_optimizer)
    assert found is not None and found.path == Path(folder, "step-1") and found.extra == {"step": 1}
    assert not (wrong := different(everything(again, its_optimizer), states[1])), wrong
    assert len(found.set_aside) == 4
    for step in (2, 3, 4, 5):
        assert sum(f"{folder}/step-{step} is damaged" in text for text in found.set_aside) == 1
    assert "rank-00001.safetensors is damaged: bytes" in found.set_aside[0]
    assert len(lines) == (4 if rank == 0 else 0)
    assert all("step-1 has been loaded instead" in line and "renamed to .step-" in line for line in lines)
    assert _shown(folder) == ["logs", "step-0", "step-1"]
    assert len(list(Path(folder).glob(".step-*.damaged"))) == 4, "nothing is removed"
    train(again, its_optimizer, range(2, 6))
    for name in ("step-5", "step-3"):  # the same names work again
        checkpoint.save(f"{folder}/{name}", again, its_optimizer, {"step": 9}, keep_last=2)
    assert _shown(folder) == ["logs", "step-3", "step-5"]
    assert len(list(Path(folder).glob(".step-*.damaged"))) == 4, "nor by keep_last"
    assert checkpoint.load_latest(folder, again, its_optimizer) == (Path(folder, "step-3"), {"step": 9}, ())


def test_the_newest_that_can_be_loaded_is_loaded_and_the_damaged_are_set_aside(tmp_path: Path) -> None:
    run_ranks(_damaged_in_every_way, str(tmp_path))


def _nothing_fits(rank: int, folder: str) -> None:
    empty = f"{folder}/none"
    model, optimizer, states = _states_saved(folder, 2)
    assert checkpoint.load_latest(empty, model, optimizer) is None
    file = Path(folder, "step-1", DATA)
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
        checkpoint.load_latest(Path(folder, "step-1"), model, optimizer)
    other = layerzero.shard_model(torch.nn.Linear(2, 2), mesh=mesh_of(2))
    with pytest.raises((ValueError, RuntimeError), match="does not match the model"):
        checkpoint.load_latest(folder, other)
    assert _shown(folder) == ["step-0", "step-1"], "a checkpoint that does not fit is not a damaged one"
    if rank == 0:
        for step in range(2):
            _flip(Path(folder, f"step-{step}", DATA), -1)
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint has been renamed: .*step-1.*; .*step-0"):
        checkpoint.load_latest(folder, model, optimizer)
    assert _shown(folder) == ["step-0", "step-1"]
    assert not different(everything(model, optimizer), states[-1]), "the model is as it was"
    dist.barrier()
    if rank == 0:
        text = Path(folder, "step-1", "manifest.json").read_text()
        Path(folder, "step-1", "manifest.json").write_text(text.replace('"version": 2', '"version": 1'))
    dist.barrier()
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"has format version 1, .* reads only version 2\. Read it with commit f359e383 of layerzero",
    ):
        checkpoint.load_latest(folder, model, optimizer)


def test_where_nothing_can_be_loaded_nothing_is_renamed(tmp_path: Path) -> None:
    run_ranks(_nothing_fits, str(tmp_path), world_size=2)


def _halfway(rank: int, folder: str) -> None:
    """Simulate a disk of one rank that returns the right bytes the first time and not the second."""
    model, optimizer, states = _states_saved(folder, 2)
    again = layerzero.checkpoint.safetensors_files.CheckpointFiles.reread

    def fails_once(self) -> None:
        layerzero.checkpoint.safetensors_files.CheckpointFiles.reread = again
        if rank == 1:
            raise checkpoint.CheckpointError("the disk has changed its mind")
        again(self)

    layerzero.checkpoint.safetensors_files.CheckpointFiles.reread = fails_once
    found = checkpoint.load_latest(folder, model, optimizer)
    assert found is not None and found.path.name == "step-0"
    assert "changed its mind" in found.set_aside[0]
    assert not different(everything(model, optimizer), states[0])
    train(model, optimizer, range(1, 2))
    assert not different(everything(model, optimizer), states[1]), "the model can be used"


def test_a_load_that_failed_halfway_is_followed_by_one_that_does_not(tmp_path: Path) -> None:
    run_ranks(_halfway, str(tmp_path), world_size=2)


# --- overwrite ---


def _overwritten(rank: int, folder: str, exchanges: bool) -> None:
    model, optimizer, _ = _states_saved(folder, 1)
    path, rename = f"{folder}/step-0", publish._renameat2
    publish._renameat2 = rename if exchanges else None
    try:
        train(model, optimizer, range(1, 2))
        state = everything(model, optimizer)
        checkpoint.save(path, model, optimizer, {"step": 1}, overwrite=True)
        dist.barrier()
        assert [each.name for each in Path(folder).iterdir()] == ["step-0"], "the old one is gone"
        dist.barrier()
        again, its_optimizer = sharded_net(1, seed=1)
        assert checkpoint.load(path, again, its_optimizer) == {"step": 1}
        assert not different(everything(again, its_optimizer), state)
        if rank == 0:
            Path(path, DATA).unlink()  # a damaged one may be overwritten, too
        dist.barrier()
        checkpoint.save_async(path, model, optimizer, {"step": 2}, overwrite=True).wait()
        assert checkpoint.load(path, again, its_optimizer) == {"step": 2}
        dist.barrier()
        if rank == 0:
            Path(path, "thesis.txt").write_text("mine")
        dist.barrier()
        with pytest.raises(FileExistsError, match="does not consist of checkpoint files only"):
            checkpoint.save(path, model, optimizer, overwrite=True)
        with pytest.raises(FileExistsError, match="or pass overwrite=True"):
            checkpoint.save(path, model, optimizer)
    finally:
        publish._renameat2 = rename


@pytest.mark.parametrize("exchanges", [True, False])
def test_overwrite_replaces_a_checkpoint_and_nothing_else(tmp_path: Path, exchanges: bool) -> None:
    run_ranks(_overwritten, str(tmp_path), exchanges, world_size=2)


def _full_disk(rank: int, folder: str) -> None:
    model, optimizer, states = _states_saved(folder, 1)
    write = safetensors_files.write_file

    def refuse(path: Path, content: object) -> FileRecord:
        if path.name == DATA:
            raise OSError(28, "No space left on device")
        return write(path, content)

    safetensors_files.write_file = refuse
    train(model, optimizer, range(1, 2))
    try:
        with pytest.raises(checkpoint.CheckpointError, match="No space"):
            checkpoint.save(f"{folder}/step-0", model, optimizer, {"step": 1}, overwrite=True)
    finally:
        safetensors_files.write_file = write
    assert checkpoint.load(f"{folder}/step-0", model, optimizer) == {"step": 0}
    assert not different(everything(model, optimizer), states[0])


def test_an_overwrite_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    run_ranks(_full_disk, str(tmp_path), world_size=2)


# --- before anything is deleted ---


def _lying_disk(rank: int, folder: str) -> None:
    model, optimizer, _ = _states_saved(folder, 2)
    write = safetensors_files.write_file

    def lie(path: Path, content: object) -> FileRecord:
        record = write(path, content)
        if path.name == DATA:
            _flip(path, -1)
        return record

    safetensors_files.write_file = lie
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match=r"rank 1: .*differs from the data that was written: .*rank-00001"
        ):
            checkpoint.save(f"{folder}/step-2", model, optimizer, keep_last=1)
    finally:
        safetensors_files.write_file = write
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-0", "step-1"]
    dist.barrier()
    checkpoint.save(f"{folder}/step-2", model, optimizer, keep_last=1)
    assert _shown(folder) == ["step-2"]


def test_what_was_written_is_read_back_before_keep_last_deletes_anything(tmp_path: Path) -> None:
    run_ranks(_lying_disk, str(tmp_path), world_size=2)


def _spoil(model: torch.nn.Module, rank: int, value: float) -> None:
    """Set one number in the rows of one rank."""
    rows = dict(model.named_parameters())["first.weight"].detach().to_local()
    if rank == 1:
        rows.view(-1)[0] = value


def _not_finite(rank: int, folder: str) -> None:
    model, optimizer, states = _states_saved(folder, 2)
    for value in (math.nan, -math.inf):
        _spoil(model, rank, value)
        for save in (checkpoint.save, lambda *args, **how: checkpoint.save_async(*args, **how).wait()):
            with pytest.raises(
                checkpoint.CheckpointError, match=r"non-finite values in 'model.first.weight' on rank 1"
            ):
                save(f"{folder}/bad", model, optimizer, keep_last=1)
    assert _shown(folder) == ["step-0", "step-1"]
    for number in range(3):
        checkpoint.save(f"{folder}/bad-{number}", model, optimizer, number, keep_last=2, require_finite=False)
    assert _shown(folder) == ["bad-1", "bad-2", "step-1"], "the last finite one stays, however many follow"
    assert [Manifest.read(f"{folder}/{name}").finite for name in ("bad-1", "bad-2", "step-1")] == [False, False, True]
    found = checkpoint.load_latest(folder, model, optimizer)
    assert found is not None and found.path.name == "step-1"
    assert not different(everything(model, optimizer), states[1])
    assert [text.split(": it has been renamed to .bad-")[0] for text in found.set_aside] == [
        f"{folder}/{name} has non-finite values" for name in ("bad-2", "bad-1")
    ]
    assert _shown(folder) == ["step-1"] and checkpoint.latest(folder) == Path(folder, "step-1")
    checkpoint.save(f"{folder}/bad-1", model, optimizer, keep_last=2)
    checkpoint.save(f"{folder}/good", model, optimizer, keep_last=2)
    assert _shown(folder) == ["bad-1", "good"], "then it may go"
    state = optimizer.state_dict_by_name()["state"]["first.weight"]["momentum_buffer"].to_local()
    if rank == 1:
        state.view(-1)[0] = math.inf
    with pytest.raises(checkpoint.CheckpointError, match="momentum_buffer' on rank 1"):
        checkpoint.save(f"{folder}/bad", model, optimizer)


def test_what_is_not_finite_is_not_saved_and_does_not_push_out_what_is(tmp_path: Path) -> None:
    run_ranks(_not_finite, str(tmp_path), world_size=2)


def _frozen_mask(rank: int, folder: str) -> None:
    model = torch.nn.Linear(4, 4)
    model.register_parameter("mask", torch.nn.Parameter(torch.full((4, 4), -math.inf), requires_grad=False))
    model.register_buffer("tail", torch.full((2,), math.inf))
    model = layerzero.shard_model(model, mesh=mesh_of(2))
    checkpoint.save(f"{folder}/one", model)
    checkpoint.load(f"{folder}/one", model)


def test_a_mask_of_infinities_is_no_fault(tmp_path: Path) -> None:
    run_ranks(_frozen_mask, str(tmp_path), world_size=2)


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


def _with_a_stranger(rank: int, folder: str) -> None:
    model, optimizer, states = _states_saved(folder, 2)
    if rank == 0:
        Path(folder, "step-1", "notes.txt").write_text("mine")
        _flip(Path(folder, "step-1", "manifest.json"), 30)
    dist.barrier()
    found = checkpoint.load_latest(folder, model, optimizer)
    assert found is not None and found.path.name == "step-0"
    assert len(found.set_aside) == 1 and re.search(r"step-1 is damaged .* and cannot be renamed", found.set_aside[0])
    assert _shown(folder) == ["step-0", "step-1"], "somebody's notes stay where they are"
    if rank == 0:
        _flip(Path(folder, "step-0", "manifest.json"), 30)
        Path(folder, "step-0", "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint in .* can be loaded"):
        checkpoint.load_latest(folder, model, optimizer)
    assert not different(everything(model, optimizer), states[0])


def test_a_broken_checkpoint_with_a_strange_file_in_it_is_not_taken_for_none(tmp_path: Path) -> None:
    run_ranks(_with_a_stranger, str(tmp_path), world_size=2)


def _of_two_minds(rank: int, folder: str) -> None:
    """Let one rank be unable to read what another one finds damaged."""
    model, optimizer, states = _states_saved(folder, 2)
    opened = loading.CheckpointFiles

    def meets(manifest: Manifest, **who: int) -> loading.Source:
        if rank == 1:
            raise UnsupportedFormatError("this needs xxhash")
        if rank == 2:
            raise checkpoint.CheckpointError("a disk has lost it")
        return opened(manifest, **who)

    loading.CheckpointFiles = meets
    try:
        with pytest.raises(checkpoint.CheckpointError, match="this needs xxhash"):
            checkpoint.load_latest(folder, model, optimizer)
    finally:
        loading.CheckpointFiles = opened
    assert _shown(folder) == ["step-0", "step-1"]
    assert not different(everything(model, optimizer), states[1])


def test_what_a_rank_cannot_read_is_told_to_all_whatever_others_have_met(tmp_path: Path) -> None:
    run_ranks(_of_two_minds, str(tmp_path), pg_timeout=20)
