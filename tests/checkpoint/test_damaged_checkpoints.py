"""A damaged checkpoint raises on all ranks and names the file; it never gives wrong weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.checksums import ChecksumScheme
from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.manifest import FORMAT, MANIFEST, VERSION, Manifest, manifest_text
from tests.support.checkpointing import everything, on_first_rank, sharded_net, train
from tests.support.damaging import DATA, nested, sign
from tests.support.models import different
from tests.support.ranks import mesh_of, on_ranks, run_ranks

FILES = ("contents.json", "manifest.json", DATA, "rank-00001.safetensors")


@pytest.fixture
def damaged(intact: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint for a test to damage."""
    return Path(shutil.copytree(intact, tmp_path / "damaged"))


def _verify(path: Path) -> None:
    manifest = Manifest.read(path)
    CheckpointContents.read(manifest)
    manifest.verify()


def _write_byte(file: Path, offset: int, byte: int) -> None:
    """Overwrite a byte in place: truncating a new file makes some file systems wait for the disk."""
    with file.open("r+b", buffering=0) as opened:
        opened.seek(offset)
        opened.write(bytes([byte]))


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file(damaged: Path, name: str) -> None:
    file = damaged / name
    content = file.read_bytes()
    sample = range(len(content)) if name.endswith("json") else [*range(64), *range(64, len(content), 11)]
    for offset in sample:
        for bit in range(8) if name == MANIFEST else (offset % 8,):
            _write_byte(file, offset, content[offset] ^ 1 << bit)
            with pytest.raises(CheckpointError, match=name):
                _verify(damaged)
        _write_byte(file, offset, content[offset])
    _verify(damaged)


def test_a_reader_shows_no_values_that_the_checkpoint_does_not_have(intact: Path) -> None:
    entries = checkpoint.reader(intact).read_metadata().state_dict_metadata
    assert entries["extra.numpy"].size == (3,) and entries["extra.tensor"].size == (2, 3)


def _harms(name: str) -> dict[str, Callable[[Path], Any]]:
    def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
        return lambda file: file.write_bytes(change(file.read_bytes()))

    return {
        "short": rewrite(lambda content: content[:-1]),
        "empty": rewrite(lambda content: b""),
        "long": rewrite(lambda content: content + b"\0"),
        "zeroed": rewrite(lambda content: bytes(len(content))),
        "deep": rewrite(lambda content: b"[" * len(content)),
        "missing": os.unlink,
        "other": lambda file: shutil.copy(file.parent / FILES[FILES.index(name) - 1], file),
        "folder": lambda file: (file.unlink(), file.mkdir()),
        "link": lambda file: (file.rename(file.parent.parent / "x"), file.symlink_to("../x")),
        "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    }


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_as_it_was_written_is_named(intact: Path, tmp_path: Path, name: str) -> None:
    for what, harm in _harms(name).items():
        path = Path(shutil.copytree(intact, tmp_path / what / "one"))
        harm(path / name)
        with pytest.raises(CheckpointError, match=name):
            _verify(path)
        if what not in ("zeroed", "deep", "other") or name == MANIFEST:
            assert checkpoint.latest(path.parent) is None


@on_ranks(world_size=2)
def test_a_load_of_a_damaged_checkpoint_changes_nothing_on_any_rank(rank: int, damaged: Path) -> None:
    """Damage each file in turn: no rank loads anything, and all ranks raise the same error."""
    model, optimizer = sharded_net(1, adam=True, seed=1, steps=1)
    before = everything(model, optimizer)
    for name in FILES:
        content = (damaged / name).read_bytes()
        for harmed in (content[:-1], content[:200] + bytes([content[200] ^ 4]) + content[201:]):
            on_first_rank((damaged / name).write_bytes, harmed)
            with pytest.raises(CheckpointError, match=f"{name}.*is damaged"):
                checkpoint.load(damaged, model, optimizer)
            assert not different(everything(model, optimizer), before)
        on_first_rank((damaged / name).write_bytes, content)
    assert checkpoint.load(damaged, model, optimizer)["step"] == 1
    train(model, optimizer, range(1))


def test_a_manifest_cannot_name_what_is_not_in_the_checkpoint(damaged: Path) -> None:
    shutil.copy(damaged / DATA, damaged.parent / DATA)
    odd = (
        "",
        ".",
        "..",
        f"../{DATA}",
        "/etc/passwd",
        "a/b",
        f"./{DATA}",
        str(damaged / DATA),
        "a\0b",
        "\ud800",
        "x" * 300,
    )
    for name in odd:
        sign(damaged, {"contents.json": "contents.json", name: DATA})
        with pytest.raises(CheckpointError, match=r"manifest\.json names a file"):
            Manifest.read(damaged)
        assert checkpoint.latest(damaged.parent) is None
    known = {"format": FORMAT, "version": VERSION, "sequence": 0, "files": {}, "token": "0"}
    for checksums, said in (
        (asdict(ChecksumScheme("md5", 8 << 20)), "the unknown algorithm 'md5'"),
        (None, "is damaged"),
        ({"algorithm": "sha256"}, "is damaged"),
    ):
        (damaged / MANIFEST).write_bytes(manifest_text({**known, "checksums": checksums}))
        with pytest.raises(CheckpointError, match=rf"manifest\.json .*{said}"):
            Manifest.read(damaged)
    sign(damaged, {DATA: DATA})
    with pytest.raises(CheckpointError, match=r"manifest\.json does not list the file 'contents\.json'"):
        CheckpointContents.read(Manifest.read(damaged))


def test_latest_goes_by_the_order_of_saves_and_passes_over_what_is_no_checkpoint(intact: Path, tmp_path: Path) -> None:
    for sequence, name in enumerate(
        ("step-9", "step-10", "a", "z-without-manifest", "y-damaged", "x-unlisted", "locked")
    ):
        sign(Path(shutil.copytree(intact, tmp_path / name)), sequence=sequence)
        os.utime(tmp_path / name, (9 - sequence, 9 - sequence))
    (tmp_path / "z-without-manifest" / MANIFEST).unlink()
    manifest = tmp_path / "y-damaged" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"sequence": 4', b'"sequence": 9'))
    (tmp_path / "x-unlisted" / DATA).unlink()
    (tmp_path / "z-link").symlink_to("step-9")
    (tmp_path / "z-nowhere").symlink_to("gone")
    (tmp_path / "z-file").write_text("{}")
    (tmp_path / "z-empty").mkdir()
    shutil.copytree(tmp_path / "step-10", tmp_path / ".z.partial")
    assert checkpoint.latest(str(tmp_path)) == tmp_path / "locked"
    read = Manifest.read

    def read_as_another_user(path: Path) -> Manifest:
        if path.name == "locked":
            raise PermissionError(path)
        return read(path)

    with mock.patch.object(Manifest, "read", read_as_another_user):
        assert checkpoint.latest(tmp_path) == tmp_path / "a"
    shutil.rmtree(tmp_path / "locked")
    for expected in ("a", "step-10", "step-9"):
        assert checkpoint.latest(tmp_path) == tmp_path / expected
        shutil.rmtree(tmp_path / expected)
    assert checkpoint.latest(tmp_path) is None


class Untied(nn.Module):
    """Two linear maps, which may share their weights."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("seen", torch.rand(3))
        self.more = nn.Parameter(torch.rand(8, 4))  # so that the root is cut differently from a unit
        if tied:
            self.two.weight = self.one.weight


@on_ranks(world_size=2)
def test_a_tensor_that_is_stored_once_fills_all_that_want_it(rank: int, tmp_path: Path) -> None:
    """Load tensors that are stored once and needed twice."""
    torch.manual_seed(0)
    net = Untied(tied=True)
    weight, seen = net.one.weight.detach().clone(), net.seen.clone()
    model = layerzero.shard_model(net, mesh=mesh_of(1), units=("one",))
    rows, extra = dict(model.named_parameters())["one.weight"], torch.arange(3)
    checkpoint.save(tmp_path / "tied", model, None, {"rows": rows, "seen": model.seen, "a": extra, "b": [extra]})
    for tied in (True, False):
        torch.manual_seed(1)
        again = layerzero.shard_model(Untied(tied=tied), mesh=mesh_of(2), units=("one",))
        loaded = checkpoint.load(tmp_path / "tied", again)
        for name in ("one.weight", "two.weight")[: 1 if tied else 2]:
            assert torch.equal(dict(again.named_parameters())[name].full_tensor(), weight), f"{name} tied={tied}"
        found = loaded["rows"].full_tensor() if hasattr(loaded["rows"], "full_tensor") else loaded["rows"]
        assert torch.equal(found, weight) and torch.equal(loaded["seen"], seen) and torch.equal(again.seen, seen)
        assert loaded["a"].tolist() == loaded["b"][0].tolist() == [0, 1, 2]


def _endless(rank: int, folder: Path) -> None:
    model, optimizer = sharded_net(1)
    endless: list[Any] = []
    endless.append(endless)
    for extra in (endless, nested(300), {"a": checkpoint.per_rank(nested(5000))}):
        with pytest.raises(TypeError, match="nested"):
            checkpoint.save(folder / "one", model, optimizer, extra)
    checkpoint.save(folder / "one", model, optimizer, {"a": checkpoint.per_rank(nested(90)), "\ud800": torch.ones(1)})
    assert checkpoint.load(folder / "one", model, optimizer)["\ud800"].tolist() == [1]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run_ranks(_endless, tmp_path, world_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
