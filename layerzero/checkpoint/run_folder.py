"""Manage the folder that contains the checkpoints of one run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from layerzero.checkpoint.errors import CheckpointError, UnsupportedFormatError
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from layerzero.checkpoint.publish import (
    discard,
    hide_folder,
    is_displaced,
    is_temporary,
    remove,
    rename_as_damaged,
    require_only_checkpoint_files,
)

__all__ = [
    "RunFolderScan",
    "clean_up_after_save",
    "clear_leftovers",
    "latest",
    "next_sequence",
    "rename_if_unchanged",
    "rotate",
    "scan",
]


_DEAD_AFTER = 24 * 3600.0  # time in seconds without a write after which a save counts as dead


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the most recently saved complete checkpoint in `folder`; None if there is none.

    A checkpoint is ignored if it is still being written, if the saving process died, or if files are missing or
    truncated. Only :func:`load` verifies the contents of the files.

    Raises:
        NotADirectoryError: `folder` or one of its parents is a file.
    """
    _refuse_file(Path(folder))
    manifests = _complete_manifests(Path(folder))
    return manifests[-1].folder if manifests else None


def next_sequence(folder: Path) -> int:
    """Return the sequence number of a new checkpoint in `folder`."""
    manifests = _complete_manifests(folder)
    return manifests[-1].sequence + 1 if manifests else 0


def clean_up_after_save(path: Path, keep_last: int | None) -> None:
    """After a save to `path`, remove files of interrupted saves, and all but the newest `keep_last` checkpoints.

    A checkpoint that another job has saved at the same time or later is never removed.

    Raises:
        OSError: a checkpoint or a leftover could not be removed.
    """
    clear_leftovers(path / MANIFEST)
    if keep_last is not None:
        rotate(path, keep_last)


def rotate(path: Path, keep_last: int) -> None:
    """Remove checkpoints in the folder of `path` that are older than `path`, except the last `keep_last` checkpoints.

    The function also keeps the last checkpoint that is known to be finite.
    """
    manifests = _complete_manifests(path.parent)
    own_sequence = next((manifest.sequence for manifest in manifests if manifest.folder == path), None)
    newest_finite = next((manifest for manifest in reversed(manifests) if manifest.finite), None)
    for manifest in manifests[:-keep_last]:
        if own_sequence is not None and manifest.sequence < own_sequence and manifest is not newest_finite:
            with suppress(FileNotFoundError):  # another job has removed the checkpoint
                _remove_checkpoint(manifest)


def clear_leftovers(written_last: Path) -> None:
    """Remove leftovers of saves that died over a day ago.

    Args:
        written_last: file that a save has just written last into its checkpoint. The leftovers next to that checkpoint
            are removed. The time stamp of the file serves as the current time.
    """
    file_system_time = (
        written_last.stat().st_mtime
    )  # from the clock of the file system, like the time stamps of the leftovers
    for leftover in written_last.parent.parent.iterdir():
        if is_temporary(leftover):
            with suppress(FileNotFoundError):  # the leftover has become a checkpoint, or another job has removed it
                if (
                    file_system_time - _last_write_time(leftover) > _DEAD_AFTER
                ):  # another job or an import may still be writing
                    discard(leftover)


def _remove_checkpoint(manifest: Manifest) -> None:
    """Remove the checkpoint that `manifest` describes, but not a newer one that another job has saved to its path."""
    new_path = hide_folder(manifest.folder)
    if _read_manifest(new_path) == replace(manifest, folder=new_path):
        remove(new_path)
    else:
        os.rename(new_path, manifest.folder)


@dataclass(frozen=True)
class RunFolderScan:
    """Checkpoints found in the folder of one run.

    Attributes:
        complete: manifests of complete checkpoints in the order in which a load tries them. The newest is first, and
            checkpoints that have non-finite values are last.
        broken: reason why a checkpoint is incomplete, by path of the checkpoint.
    """

    complete: tuple[Manifest, ...]
    broken: dict[Path, str]


def scan(folder: Path) -> RunFolderScan:
    """Return the complete and the broken checkpoints in the folder of a run.

    Raises:
        NotADirectoryError: `folder` or one of its parents is a file.
        UnsupportedFormatError: a newer version of layerzero wrote a checkpoint.
    """
    _refuse_file(folder)
    found = _read_manifests(folder)
    if unsupported := [each for each in found.values() if isinstance(each, UnsupportedFormatError)]:
        raise unsupported[0]
    broken = {
        path: str(error) for path, error in found.items() if isinstance(error, Exception) and _was_checkpoint(path)
    }
    newest = _in_order_of_saves(found)[::-1]
    usable = [manifest for manifest in newest if manifest.finite is not False]
    return RunFolderScan((*usable, *(manifest for manifest in newest if manifest.finite is False)), broken)


def rename_if_unchanged(path: Path, damaged: Manifest | None) -> Path | None:
    """Rename a damaged checkpoint and return the new path; None if another checkpoint has replaced it.

    Args:
        damaged: manifest of the damaged checkpoint, or None if the checkpoint has no intact manifest. In that case, the
            folder must contain only checkpoint files.

    Raises:
        OSError: the checkpoint could not be renamed.
    """
    if damaged is None:
        require_only_checkpoint_files(path)
    elif _read_manifest(path) != damaged:
        return None
    return rename_as_damaged(path)


def _was_checkpoint(path: Path) -> bool:
    """Return whether `path` contains a manifest, or contains only checkpoint files."""
    try:
        if os.path.lexists(path / MANIFEST):
            return True
        require_only_checkpoint_files(path)
        return any(path.iterdir())
    except OSError:  # includes PathTakenError
        return False


def _last_write_time(partial: Path) -> float:
    contents = list(partial.rglob("*")) if partial.is_dir() else []
    return max(path.lstat().st_mtime for path in [partial, *contents])


def _complete_manifests(folder: Path) -> list[Manifest]:
    """Return the manifests of all complete checkpoints, in the order in which they were saved."""
    return _in_order_of_saves(_read_manifests(folder))


def _in_order_of_saves(found: Mapping[Path, Manifest | Exception]) -> list[Manifest]:
    manifests = [manifest for manifest in found.values() if isinstance(manifest, Manifest)]
    return sorted(manifests, key=lambda manifest: (manifest.sequence, manifest.folder.name))


def _read_manifests(folder: Path) -> dict[Path, Manifest | Exception]:
    """Return the manifest of each checkpoint in the folder of a run, or the error of reading it."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found: dict[Path, Manifest | Exception] = {}
    for path in entries:
        if (not path.name.startswith(".") or is_displaced(path)) and not path.is_symlink() and path.is_dir():
            try:
                found[path] = Manifest.read(path)
            except FileNotFoundError:  # another job has removed the checkpoint
                continue
            except (CheckpointError, OSError) as error:
                found[path] = error
    return found


def _refuse_file(folder: Path) -> None:
    """Raise NotADirectoryError if `folder` or one of its parents is a file. The folder need not exist yet."""
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise NotADirectoryError(f"{file} is a file. Pass the folder that contains the checkpoints of the run")


def _read_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except (CheckpointError, OSError):
        return None
