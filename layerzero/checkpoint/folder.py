"""A folder that holds the checkpoints of one run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from layerzero.checkpoint.files import CheckpointError, Manifest, discard

__all__ = ["latest", "next_sequence", "rotate"]


_DEAD_AFTER = 24 * 3600.0  # seconds without a write


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in `folder` that was saved last; None if there is none.

    A checkpoint that is still being written, one whose save died, and one with missing, shortened or unlisted files do
    not count. The files' contents are compared by :func:`load`.
    """
    found = _complete(Path(folder))
    return found[-1].folder if found else None


def next_sequence(folder: Path) -> int:
    """The place of a new checkpoint in the order of those in `folder`."""
    found = _complete(folder)
    return found[-1].sequence + 1 if found else 0


def rotate(folder: Path, keep_last: int) -> None:
    """Remove all complete checkpoints but the last ones, and what saves have left that died a day ago."""
    for manifest in _complete(folder)[:-keep_last]:
        discard(manifest.folder)
    for leftover in folder.glob(".*.partial"):
        if time.time() - _last_written(leftover) > _DEAD_AFTER:  # others may be writing: another model, an import
            discard(leftover)


def _last_written(partial: Path) -> float:
    return max(path.lstat().st_mtime for path in (partial, *partial.iterdir()))


def _complete(folder: Path) -> list[Manifest]:
    """In the order in which they were saved."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
            continue
        try:
            found.append(Manifest.read(path))
        except (CheckpointError, OSError):
            continue
    return sorted(found, key=lambda manifest: (manifest.sequence, manifest.folder.name))
