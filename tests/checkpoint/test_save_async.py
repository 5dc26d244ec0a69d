"""save_async writes the state at the time of the call while training goes on."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layerzero import checkpoint
from layerzero.checkpoint import safetensors_files
from layerzero.checkpoint.background import Staging, staging_of
from layerzero.checkpoint.manifest import Manifest
from layerzero.engine.hooks import get_state
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.damaging import bad_disk
from tests.support.models import different
from tests.support.ranks import on_ranks, run_ranks


@contextmanager
def _gate_before(module: Any, name: str) -> Iterator[threading.Event]:
    """Let calls of a function wait until the event is set."""
    gate, function = threading.Event(), getattr(module, name)

    def late(*args: Any, **options: Any) -> Any:
        gate.wait()
        return function(*args, **options)

    with mock.patch.object(module, name, late):
        try:
            yield gate
        finally:
            gate.set()


@on_ranks()
def test_training_during_the_write_changes_nothing_in_it(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, steps=1)
    with _gate_before(safetensors_files, "write_file") as gate:
        at_call = everything(model, optimizer)
        tensor = torch.ones(3)
        extra = {"list": [1], "tensor": tensor, "own": checkpoint.per_rank(tensor)}
        pending = checkpoint.save_async(f"{tmp_path}/one", model, optimizer, extra)
        extra["list"].append(2)
        tensor.zero_()
        train(model, optimizer, range(1, 4))
        assert not pending.done() and not Path(tmp_path, "one").exists()
        assert different(everything(model, optimizer), at_call)
        gate.set()
        pending.wait()
    dist.barrier()
    undisturbed, its_optimizer = sharded_net(2, steps=4)
    assert not different(everything(model, optimizer), everything(undisturbed, its_optimizer))
    again, its_optimizer = sharded_net(4, seed=1)
    loaded = checkpoint.load(f"{tmp_path}/one", again, its_optimizer)
    assert loaded["list"] == [1] and loaded["tensor"].tolist() == loaded["own"].tolist() == [1, 1, 1]
    assert not (wrong := different(everything(again, its_optimizer), at_call)), wrong


def _save_and_destroy(rank: int, folder: str, is_full: bool) -> str:
    model, optimizer = sharded_net(2, steps=1)
    with (
        _gate_before(checkpoint.saving, "_write_on_all_ranks") as gate,
        bad_disk() if is_full else contextlib.nullcontext(),
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
        pending = checkpoint.save_async(f"{folder}/one", model, optimizer)
        dist.barrier()
        dist.destroy_process_group()
        gate.set()
        if is_full:
            with pytest.raises(checkpoint.CheckpointError, match=r"Call wait\(\) .* before destroy_process_group"):
                pending.wait()
        else:
            pending.wait()
        return printed.getvalue()


def test_a_group_that_is_destroyed_during_a_save_does_not_end_the_save(tmp_path: Path) -> None:
    assert run_ranks(_save_and_destroy, str(tmp_path), False) == [""] * 4
    Manifest.read(tmp_path / "one").verify()


def test_an_error_after_the_group_was_destroyed_is_printed_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    for printed in run_ranks(_save_and_destroy, str(tmp_path), True):
        assert "save_async failed: " in printed and "was not saved completely" in printed
    assert not list(tmp_path.iterdir())


@on_ranks()
def test_a_second_save_waits_for_the_first(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2)
    states, buffers = [], []
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        states.append(everything(model, optimizer))
        pending = checkpoint.save_async(f"{tmp_path}/step-{step}", model, optimizer, {"step": step})
        buffers.append(staging_of(get_state(model))._memory.data_ptr())
    pending.wait()
    assert buffers[1] == buffers[2], "host memory is taken again"
    for step, expected in enumerate(states):
        again, its_optimizer = sharded_net(4, seed=1)
        assert checkpoint.load(f"{tmp_path}/step-{step}", again, its_optimizer) == {"step": step}
        assert not (wrong := different(everything(again, its_optimizer), expected)), f"{step}: {wrong}"


@on_ranks(world_size=2)
def test_an_error_surfaces_in_wait_and_is_told_by_the_next_call_which_goes_on(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded_net(2, steps=1)
    said = "could not be written: rank 1: OSError: .*No space"
    with bad_disk(), pytest.raises(checkpoint.CheckpointError, match=f"one {said}"):
        checkpoint.save_async(tmp_path / "one", model, optimizer).wait()
    for name, next_call in (
        ("two", lambda: checkpoint.save(tmp_path / "three", model, optimizer)),
        ("four", lambda: checkpoint.load(tmp_path / "three", model, optimizer)),
        ("five", lambda: train(model, optimizer, range(1, 2))),
    ):
        with bad_disk():
            pending = checkpoint.save_async(tmp_path / name, model, optimizer)
            while not pending.done():
                time.sleep(0.01)
        with pytest.warns(RuntimeWarning, match=f"{name} {said}"):
            next_call()
        with pytest.raises(checkpoint.CheckpointError, match=f"{name} {said}"):
            pending.wait()
        pending.wait()  # has been reported
    train(model, optimizer, range(2, 3))
    checkpoint.save_async(tmp_path / "six", model, optimizer).wait()
    train(model, optimizer, range(3, 4))
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["six", "three"]


@on_ranks(world_size=2, pg_timeout=15)
def test_a_rank_that_alone_has_failed_or_lost_the_others_does_not_end_all_later_saves(
    rank: int, tmp_path: Path
) -> None:
    model, optimizer = sharded_net(2)
    failure = MemoryError("no memory to pin") if rank == 1 else None
    full = mock.patch.object(Staging, "copy", side_effect=failure, autospec=True)
    with full, pytest.raises((MemoryError, RuntimeError), match="no memory to pin"):
        checkpoint.save_async(tmp_path / "none", model, optimizer)
    checkpoint.save_async(f"{tmp_path}/one", model, optimizer).wait()
    tree = staging_of(get_state(model)).tree
    for name, loser in (("two", 1), ("three", 0)):
        if rank == loser:
            staging_of(get_state(model)).tree = None  # as after an agreement that failed on this rank only
            dist.new_group([rank], use_local_synchronization=True)
        checkpoint.save_async(f"{tmp_path}/{name}", model, optimizer).wait()
        assert staging_of(get_state(model)).tree is not tree, "all have made another one"
        tree = staging_of(get_state(model)).tree
    checkpoint.save_async(f"{tmp_path}/four", model, optimizer).wait()
    assert staging_of(get_state(model)).tree is tree, "which is kept"
    dist.barrier()
    assert len(list(Path(tmp_path).iterdir())) == 4
