"""save_async writes the state at the time of the call while training goes on."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerzero import checkpoint
from layerzero.checkpoint import publish, safetensors_files
from layerzero.checkpoint.background import staging_of
from layerzero.checkpoint.checksums import FileRecord
from layerzero.engine.hooks import get_state
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.models import different
from tests.support.ranks import run_ranks


def _trained_meanwhile(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    train(model, optimizer, range(1))
    gate, write = threading.Event(), publish.write_file

    def write_late(*args, **kwargs):
        gate.wait()
        return write(*args, **kwargs)

    safetensors_files.write_file = write_late
    try:
        at_call = everything(model, optimizer)
        pending = checkpoint.save_async(f"{folder}/one", model, optimizer, {"step": 1})
        train(model, optimizer, range(1, 4))
        assert not pending.done() and not Path(folder, "one").exists()
        assert different(everything(model, optimizer), at_call)
        gate.set()
        pending.wait()
    finally:
        gate.set()
        safetensors_files.write_file = write
    dist.barrier()
    undisturbed, its_optimizer = sharded_net(2)
    train(undisturbed, its_optimizer, range(4))
    assert not different(everything(model, optimizer), everything(undisturbed, its_optimizer))
    again, its_optimizer = sharded_net(4, seed=1)
    assert checkpoint.load(f"{folder}/one", again, its_optimizer) == {"step": 1}
    assert not (wrong := different(everything(again, its_optimizer), at_call)), wrong


def test_training_during_the_write_changes_nothing_in_it(tmp_path: Path) -> None:
    run_ranks(_trained_meanwhile, str(tmp_path))


def _save_and_destroy(rank: int, folder: str) -> str:
    model, optimizer = sharded_net(2)
    train(model, optimizer, range(1))
    gate, write = threading.Event(), checkpoint.saving.write_tensors

    def write_late(*args, **kwargs):
        gate.wait()
        return write(*args, **kwargs)

    checkpoint.saving.write_tensors = write_late
    try:
        pending = checkpoint.save_async(f"{folder}/one", model, optimizer)
        dist.barrier()
        dist.destroy_process_group()
        with contextlib.redirect_stderr(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it saves in a single process
            gate.set()
            with pytest.raises(checkpoint.CheckpointError, match=r"Call wait\(\) .* before destroy_process_group"):
                pending.wait()
        return printed.getvalue()
    finally:
        gate.set()
        checkpoint.saving.write_tensors = write


def test_a_group_that_is_destroyed_during_a_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    for printed in run_ranks(_save_and_destroy, str(tmp_path)):
        assert "save_async failed: " in printed and "was not saved completely" in printed
    assert not (tmp_path / "one").exists()


def _staged(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    states, buffers = [], []
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        states.append(everything(model, optimizer))
        pending = checkpoint.save_async(f"{folder}/step-{step}", model, optimizer, {"step": step})
        buffers.append(staging_of(get_state(model))._memory.data_ptr())
    pending.wait()
    assert buffers[1] == buffers[2], "host memory is taken again"
    for step, expected in enumerate(states):
        again, its_optimizer = sharded_net(4, seed=1)
        assert checkpoint.load(f"{folder}/step-{step}", again, its_optimizer) == {"step": step}
        assert not (wrong := different(everything(again, its_optimizer), expected)), f"{step}: {wrong}"


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    run_ranks(_staged, str(tmp_path))


def _failing(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    train(model, optimizer, range(1))

    def blocked(name: str) -> checkpoint.PendingSave:
        return checkpoint.save_async(f"{folder}/{name}", model, optimizer)

    write = safetensors_files.write_file

    def refuse(path: Path, content: object) -> FileRecord:
        if path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, content)

    safetensors_files.write_file = refuse
    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"one could not be written: rank 1: OSError: .*No space"):
            blocked("one").wait()
        pending = blocked("two")
        while not pending.done():
            time.sleep(0.01)
        safetensors_files.write_file = write
        with pytest.warns(RuntimeWarning, match="two could not be written: rank 1"):
            checkpoint.save(f"{folder}/three", model, optimizer)
        safetensors_files.write_file = refuse
        pending = blocked("four")
        with pytest.warns(RuntimeWarning, match="four could not be written"):
            checkpoint.load(f"{folder}/three", model, optimizer)
        with pytest.raises(checkpoint.CheckpointError, match="four could not be written"):
            pending.wait()
        pending.wait()  # has been reported
    finally:
        safetensors_files.write_file = write
    checkpoint.save_async(f"{folder}/five", model, optimizer).wait()
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["five", "three"]


def test_an_error_surfaces_in_wait_and_is_told_by_the_next_call_which_goes_on(tmp_path: Path) -> None:
    run_ranks(_failing, str(tmp_path), world_size=2)


def _lost_by_one(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    checkpoint.save_async(f"{folder}/one", model, optimizer).wait()
    group = staging_of(get_state(model)).group
    for name, loser in (("two", 1), ("three", 0)):
        if rank == loser:
            staging_of(get_state(model)).group = None  # as after an agreement that failed on this rank only
        checkpoint.save_async(f"{folder}/{name}", model, optimizer).wait()
        assert staging_of(get_state(model)).group is not group, "all have made another one"
        group = staging_of(get_state(model)).group
    checkpoint.save_async(f"{folder}/four", model, optimizer).wait()
    assert staging_of(get_state(model)).group is group, "which is kept"
    dist.barrier()
    assert len(list(Path(folder).iterdir())) == 4


def test_a_rank_that_alone_has_lost_the_others_does_not_end_all_later_saves(tmp_path: Path) -> None:
    run_ranks(_lost_by_one, str(tmp_path), world_size=2)


def _told_at_a_step(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    train(model, optimizer, range(1))
    write = safetensors_files.write_file

    def refuse(path: Path, content: object) -> FileRecord:
        raise OSError(28, "No space left on device")

    safetensors_files.write_file = refuse
    try:
        pending = checkpoint.save_async(f"{folder}/one", model, optimizer)
        while not pending.done():
            time.sleep(0.01)
    finally:
        safetensors_files.write_file = write
    with pytest.warns(RuntimeWarning, match="one could not be written: rank 0: OSError: .*No space"):
        train(model, optimizer, range(1, 2))
    train(model, optimizer, range(2, 3))  # it is reported once
    checkpoint.save_async(f"{folder}/two", model, optimizer).wait()
    train(model, optimizer, range(3, 4))
    assert checkpoint.latest(folder) == Path(folder, "two")


def test_a_save_that_failed_is_told_at_the_next_step(tmp_path: Path) -> None:
    run_ranks(_told_at_a_step, str(tmp_path), world_size=2)


def _left_alone(rank: int, folder: str) -> None:
    model, optimizer = sharded_net(2)
    tensor = torch.ones(3)
    extra = {"list": [1], "tensor": tensor, "own": checkpoint.per_rank(tensor)}
    pending = checkpoint.save_async(f"{folder}/one", model, optimizer, extra)
    extra["list"].append(2)
    tensor.zero_()
    pending.wait()
    loaded = checkpoint.load(f"{folder}/one", model, optimizer)
    assert loaded["list"] == [1]
    assert loaded["tensor"].tolist() == loaded["own"].tolist() == [1, 1, 1]


def test_extra_is_copied_too(tmp_path: Path) -> None:
    run_ranks(_left_alone, str(tmp_path), world_size=2)
