"""A failed attempt to overwrite a checkpoint leaves the old one in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from layerzero import checkpoint
from layerzero.checkpoint import publish
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from layerzero.checkpoint.run_folder import clear_leftovers, scan
from tests.support.checkpointing import everything, sharded_net, train
from tests.support.models import different
from tests.support.ranks import on_ranks

BOTH_WAYS = pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])


@contextmanager
def _disk(exchanges: bool, rename: Callable[[Any, Any], None] = os.rename) -> Iterator[None]:
    """Simulate a disk that cannot swap two names, or that has its own rename."""
    exchange = publish._renameat2 if exchanges else None
    with mock.patch.object(publish, "_renameat2", exchange), mock.patch.object(os, "rename", rename):
        yield


def _refuses(name: str, times: int) -> Callable[[Any, Any], None]:
    """Return a rename that fails `times` times for the target `name`."""
    real, left = os.rename, list(range(times))

    def rename(source: Any, target: Any) -> None:
        if Path(target).name == name and left:
            left.pop()
            raise OSError(5, "Input/output error")
        real(source, target)

    return rename


def _left(folder: str) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


@on_ranks(world_size=2)
def test_the_old_one_gets_its_name_back_or_is_found_without_it(rank: int, tmp_path: Path) -> None:
    path = f"{tmp_path}/last"
    model, optimizer = sharded_net(2)
    checkpoint.save(path, model, optimizer, {"step": 1})
    first = everything(model, optimizer)
    train(model, optimizer, range(1))
    dist.barrier()
    with _disk(False, _refuses("last", 1)), pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
        checkpoint.save(path, model, optimizer, {"step": 2}, overwrite=True)
    assert _left(tmp_path) == ["last"], "the old one has its name back"
    assert checkpoint.load(path, model, optimizer) == {"step": 1}
    assert not different(everything(model, optimizer), first)
    train(model, optimizer, range(1))
    dist.barrier()
    with _disk(False, _refuses("last", 2)), pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
        checkpoint.save(path, model, optimizer, {"step": 2}, overwrite=True)
    (name,) = _left(tmp_path)
    assert name.startswith(".last.") and name.endswith(".replaced"), "as if the process had died between the two"
    found = checkpoint.load_latest(tmp_path, model, optimizer)
    assert found == (Path(tmp_path, name), {"step": 1}, ()) and checkpoint.latest(tmp_path) == Path(tmp_path, name)
    assert not different(everything(model, optimizer), first)
    dist.barrier()
    if rank == 0:
        for place in (Path(tmp_path, name), *Path(tmp_path, name).iterdir()):
            os.utime(place, (0, 0))  # long ago
    dist.barrier()
    checkpoint.save(f"{tmp_path}/other", model, optimizer)
    assert _left(tmp_path) == [name, "other"], "nobody removes the only one there is of that name"
    checkpoint.save(path, model, optimizer, {"step": 3}, overwrite=True)
    assert _left(tmp_path) == ["last", "other"]
    assert checkpoint.load(path, model, optimizer) == {"step": 3}
    said = "does not contain the new checkpoint after the rename"
    with mock.patch.object(Manifest, "is_at", lambda *_: False), pytest.raises(checkpoint.CheckpointError, match=said):
        checkpoint.save(path, model, optimizer, {"step": 4}, overwrite=True)  # the new one cannot be read
    assert _left(tmp_path) == ["last", "other"]
    assert checkpoint.load(path, model, optimizer) == {"step": 3}, "what is discarded is the new one"


@BOTH_WAYS
def test_what_another_job_has_put_there_meanwhile_stays(intact: Path, tmp_path: Path, exchanges: bool) -> None:
    shutil.copytree(intact, tmp_path / "last")
    path, partial = tmp_path / "last", publish.partial_path(tmp_path / "last", publish.new_token())
    shutil.copytree(path, partial)
    (path / "rank-00001.safetensors").write_bytes(b"of the old one")

    def intrudes() -> bool:
        shutil.rmtree(path)
        path.mkdir()
        (path / "rank-00002.safetensors").write_bytes(b"of another job")
        return False

    with _disk(exchanges), pytest.raises(checkpoint.CheckpointError, match="does not contain the new checkpoint"):
        publish.publish_folder(partial, path, intrudes, overwrite=True)
    assert (path / "rank-00002.safetensors").exists()
    publish.remove(partial)  # as a failed save does
    (old,) = tmp_path.glob(".last.*.replaced")
    assert (old / "rank-00001.safetensors").exists(), "the old one is not what a failed save discards"
    with mock.patch.object(os, "rmdir", side_effect=OSError):  # on a network file system, a reader may still have it
        publish.remove(old)


def test_one_that_has_lost_its_name_is_a_checkpoint_until_there_is_another_of_that_name(
    intact: Path, tmp_path: Path
) -> None:
    for name in ("last", "new"):
        shutil.copytree(intact, tmp_path / name)
    hidden = publish.hide_folder(tmp_path / "last", "replaced")
    for place in (hidden, *hidden.iterdir()):
        os.utime(place, (0, 0))
    clear_leftovers(tmp_path / "new" / MANIFEST)
    assert {manifest.folder for manifest in scan(tmp_path)[0]} == {hidden, tmp_path / "new"}
    shutil.copytree(tmp_path / "new", tmp_path / "last")
    assert {manifest.folder.name for manifest in scan(tmp_path)[0]} == {"last", "new"}
    clear_leftovers(tmp_path / "new" / MANIFEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "new"]
    Manifest.read(tmp_path / "last").verify()
