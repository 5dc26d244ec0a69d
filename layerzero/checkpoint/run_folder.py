"""Manage the folder that contains the checkpoints of one run, and resume the run from the newest of them.

[Note: Renaming of damaged checkpoints]
If a damaged checkpoint kept a name that a later save needs, every resumed run would fail at that save. Therefore the
damaged checkpoint receives a new name, under which it is never read or removed. It is renamed only after an earlier
checkpoint has been loaded. If no checkpoint can be loaded, another cause is more likely, such as the file system, and
no checkpoint is renamed. A checkpoint that was skipped because of non-finite values is also renamed if it is newer than
the loaded one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.errors import CheckpointError, RankLostError, UnsupportedFormatError
from layerzero.checkpoint.loading import prepare_load
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
from layerzero.checkpoint.rank_agreement import PathLike, agreed
from layerzero.extend import LayerZeroState, get_state

__all__ = ["Resumed", "clean_up_after_save", "clear_leftovers", "latest", "load_latest", "next_sequence"]

_LOG = logging.getLogger("layerzero")
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


class Resumed(NamedTuple):
    """Result of :func:`load_latest`.

    Attributes:
        path: path of the checkpoint that was loaded.
        extra: the ``extra`` that was saved with the checkpoint.
        set_aside: one sentence for each damaged checkpoint and for each newer checkpoint with non-finite values. The
            sentence contains the path, the problem and the new name.
    """

    path: Path
    extra: Any
    set_aside: tuple[str, ...]


def load_latest(
    folder: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None = None, *, strict: bool = True
) -> Resumed | None:
    """Load the newest valid checkpoint in a folder with :func:`load`.

    All ranks try the same checkpoint. If that checkpoint is damaged on any rank, all ranks try the previous checkpoint.
    After a checkpoint has been loaded, damaged checkpoints are renamed, so that later saves can use their names. The
    function logs a warning for each renamed checkpoint and removes no checkpoint. Checkpoints with non-finite values
    are tried last. Such checkpoints are also renamed if an older checkpoint is loaded.

    Args:
        folder: folder that contains the checkpoints of one run, as for :func:`latest`.
        model, optimizer, strict: as for :func:`load`.

    Returns:
        A description of the loaded checkpoint, or None if `folder` does not exist or contains no checkpoint, not even a
        damaged one.

    Raises:
        CheckpointError: `folder` contains checkpoints, but none of them can be loaded. The message has the reason for
            each checkpoint. No checkpoint has been renamed. Or `folder` is itself a checkpoint.
        NotADirectoryError: `folder` or one of its parents is a file.
        ValueError: names, shapes or dtypes of an intact checkpoint do not match. No other checkpoint is tried.

    Example::

        found = layerzero.checkpoint.load_latest("runs/1", model, optimizer)
        first_step = found.extra["step"] if found else 0
    """
    lz_state = get_state(model)
    folder = Path(folder).absolute()
    seen: RunFolderScan | None = None
    with agreed("checkpoint.load_latest", lz_state, {"folder": os.fspath(folder)}):
        if lz_state.ranks.rank == 0:
            if (folder / MANIFEST).exists():
                raise CheckpointError(
                    f"{folder} is a checkpoint. Pass its parent folder, or call layerzero.checkpoint.load"
                )
            seen = scan(folder)
    names = _broadcast_texts(lz_state, None if seen is None else [manifest.folder.name for manifest in seen.complete])
    damaged: dict[Path, str] = {}
    for name in names:
        path = folder / name
        extra, reason = _try_load(lz_state, path, model, optimizer, strict=strict)
        if reason is None:
            break
        if reason:
            damaged[path] = reason
    else:
        broken = _broadcast_texts(
            lz_state, None if seen is None else [f"{p}: {reason}" for p, reason in seen.broken.items()]
        )
        if not broken and not damaged:
            return None
        reasons = "; ".join([*damaged.values(), *broken])
        raise CheckpointError(f"no checkpoint in {folder} can be loaded, and no checkpoint has been renamed: {reasons}")
    moved = _broadcast_texts(lz_state, None if seen is None else _rename_passed_over(seen, damaged, loaded=path))
    if seen is not None:
        for message in moved:
            _LOG.warning("%s. %s has been loaded instead", message, path)
    return Resumed(path, extra, tuple(moved))


def _broadcast_texts(lz_state: LayerZeroState, texts: list[str] | None) -> list[str]:
    """Return the first rank's `texts` on every rank."""
    first_rank_texts: list[str] = json.loads(lz_state.ranks.all_gather_text(json.dumps(texts))[0])
    return first_rank_texts


def _try_load(
    lz_state: LayerZeroState, path: Path, model: nn.Module, optimizer: ShardedOptimizer | None, *, strict: bool
) -> tuple[Any, str | None]:
    """Try to load a checkpoint. Return (``extra``, None), or (None, reason) if the checkpoint is damaged.

    The reason is the same on all ranks. It is empty if the checkpoint no longer exists. Other errors are raised.
    """
    try:
        return prepare_load(path, model, optimizer, strict=strict).commit(), None
    except RankLostError:
        raise
    except Exception as error:
        own_error = error
    kinds = (
        (UnsupportedFormatError, "unknown"),
        (CheckpointError, "damaged"),
        (FileNotFoundError, "gone"),
        (Exception, "failed"),
    )
    own_kind = next(kind for error_type, kind in kinds if isinstance(own_error, error_type))
    # Ranks may have raised different errors in the same attempt, but every rank has raised an error.
    outcomes = [json.loads(text) for text in lz_state.ranks.all_gather_text(json.dumps([own_kind, str(own_error)]))]
    if any(kind == "failed" for kind, _ in outcomes) or own_kind == "unknown":
        raise own_error
    if unknown := next((reason for kind, reason in outcomes if kind == "unknown"), ""):
        raise UnsupportedFormatError(unknown)
    return None, next((reason for kind, reason in outcomes if kind == "damaged"), "")


def _rename_passed_over(seen: RunFolderScan, damaged: dict[Path, str], *, loaded: Path) -> list[str]:
    """Rename damaged checkpoints, and non-finite checkpoints that are newer than the loaded one.

    Returns:
        One sentence for each of these checkpoints.
    """
    manifests: dict[Path, Manifest | None] = {manifest.folder: manifest for manifest in seen.complete}
    loaded_sequence = next(manifest.sequence for manifest in seen.complete if manifest.folder == loaded)
    passed_over = {
        manifest.folder: "has non-finite values"
        for manifest in seen.complete
        if manifest.finite is False and manifest.sequence > loaded_sequence
    }
    manifests |= dict.fromkeys(seen.broken)
    unusable = passed_over | {path: f"is damaged ({reason})" for path, reason in (damaged | seen.broken).items()}
    return [_rename_and_report(path, manifests[path], reason) for path, reason in unusable.items()]


def _rename_and_report(path: Path, manifest: Manifest | None, reason: str) -> str:
    try:
        new_path = rename_if_unchanged(path, manifest)
    except OSError as error:
        return f"{path} {reason} and cannot be renamed: {error}"
    outcome = "another job has replaced it" if new_path is None else f"it has been renamed to {new_path.name}"
    return f"{path} {reason}: {outcome}"
