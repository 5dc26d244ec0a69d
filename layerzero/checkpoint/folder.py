"""A folder that holds the checkpoints of one run."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from layerzero.checkpoint.files import MANIFEST, CheckpointError, Manifest, discard, hide, is_partial, remove

__all__ = ["clear_leftovers", "latest", "next_sequence", "rotate", "tidy"]


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


def tidy(path: Path, keep_last: int | None) -> None:
    """After a save to `path`: remove what dead saves have left in its folder, and all but the last checkpoints.

    A checkpoint that another job has saved at the same time or later is never removed.

    Raises:
        OSError: something could not be removed.
    """
    clear_leftovers(path / MANIFEST)
    if keep_last is not None:
        rotate(path, keep_last)


def rotate(path: Path, keep_last: int) -> None:
    """Of the checkpoints beside `path`, remove all but the last ones, and none that is not older than `path`."""
    found = _complete(path.parent)
    own = next((manifest.sequence for manifest in found if manifest.folder == path), None)
    for manifest in found[:-keep_last]:
        if own is not None and manifest.sequence < own:
            with suppress(FileNotFoundError):  # another job was faster
                _remove_checkpoint(manifest)


def clear_leftovers(written_last: Path) -> None:
    """Remove what saves that died a day ago have left beside a new checkpoint, whose last file is given."""
    now = written_last.stat().st_mtime  # by the clock of the file system, as all the others
    for leftover in written_last.parent.parent.iterdir():
        if is_partial(leftover):
            with suppress(FileNotFoundError):  # it has become a checkpoint, or another job was faster
                if now - _last_written(leftover) > _DEAD_AFTER:  # others may be writing: another job, an import
                    discard(leftover)


def _remove_checkpoint(manifest: Manifest) -> None:
    """Remove this one, and not a newer one that another job may have put there since."""
    hidden = hide(manifest.folder)
    if _read(hidden) == replace(manifest, folder=hidden):
        remove(hidden)
    else:
        os.rename(hidden, manifest.folder)


def _last_written(partial: Path) -> float:
    inside = list(partial.rglob("*")) if partial.is_dir() else []
    return max(path.lstat().st_mtime for path in [partial, *inside])


def _complete(folder: Path) -> list[Manifest]:
    """In the order in which they were saved."""
    paths = folder.iterdir() if folder.is_dir() else ()
    shown = (path for path in paths if not path.name.startswith(".") and not path.is_symlink() and path.is_dir())
    found = [manifest for path in shown if (manifest := _read(path)) is not None]
    return sorted(found, key=lambda manifest: (manifest.sequence, manifest.folder.name))


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except (CheckpointError, OSError):
        return None
