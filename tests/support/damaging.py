"""Intact checkpoints, and helpers that forge parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerzero import checkpoint
from layerzero.checkpoint import safetensors_files
from layerzero.checkpoint.checksums import ChecksumScheme, ChunkHasher, FileRecord
from layerzero.checkpoint.manifest import FORMAT, MANIFEST, VERSION, manifest_text
from tests.support.checkpointing import sharded_net, train

DATA = "rank-00000.safetensors"


def save_intact(rank: int, path: str) -> None:
    model, optimizer = sharded_net(2, adam=True)
    train(model, optimizer, range(1))
    extra = {
        "step": 1,
        "tensor": torch.arange(6.0).view(2, 3),
        "numpy": np.arange(3),
        "own": checkpoint.per_rank({"rng": torch.get_rng_state(), "rank": (rank,)}),
        "weight": dict(model.named_parameters())["head.weight"],
        "others": [{1: b"x", 2.5: float("inf")}, torch.float32, None, ("a", {"b": [True]})],
    }
    checkpoint.save(path, model, optimizer, extra)


def flip_bit(path: Path, offset: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@contextmanager
def bad_disk(name: str = "rank-00001.safetensors", *, lies: bool = False) -> Iterator[None]:
    """Let a write of the data file `name` fail on this rank, or silently write another bit."""
    write = safetensors_files.write_file

    def badly(path: Path, content: Any) -> FileRecord:
        if path.name == name and not lies:
            raise OSError(28, "No space left on device")
        record = write(path, content)
        if path.name == name:
            flip_bit(path)
        return record

    safetensors_files.write_file = badly
    try:
        yield
    finally:
        safetensors_files.write_file = write


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def sign(
    path: Path,
    listed: dict[str, str] | None = None,
    sequence: Any = 0,
    scheme: ChecksumScheme | None = None,
    **more: Any,
) -> None:
    """Replace the manifest by a forged valid one; `listed` maps the names to list to the files with the contents."""
    listed = listed or {file.name: file.name for file in path.iterdir() if file.name != MANIFEST}
    scheme = scheme or ChecksumScheme.best()
    table = {}
    for name, file in listed.items():
        content = (path / file).read_bytes()
        hasher = ChunkHasher(scheme)
        hasher.update(content)
        table[name] = [len(content), hasher.hexdigest()]
    known = {"format": FORMAT, "version": VERSION, "sequence": sequence, "files": table, "token": "0" * 16, **more}
    known = {"checksums": asdict(scheme), **known}
    (path / MANIFEST).unlink(missing_ok=True)
    (path / MANIFEST).write_bytes(manifest_text(known))
