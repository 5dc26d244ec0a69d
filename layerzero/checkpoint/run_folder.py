"""Manage the folder that contains the checkpoints of one run, and resume the run from the newest of them.

[Note: Renaming of damaged checkpoints]
If a damaged checkpoint kept a name that a later save needs, every resumed run would fail at that save. Therefore the
damaged checkpoint receives a new name, under which it is never read or removed. It is renamed only after an earlier
checkpoint has been loaded. If no checkpoint can be loaded, another cause is more likely, such as the file system, and
no checkpoint is renamed. A checkpoint that was skipped because of non-finite values is also renamed if it is newer than
the loaded one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.background import finish_pending, rank_tree
from layerzero.checkpoint.errors import CheckpointError, RankLostError, UnsupportedFormatError
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from layerzero.checkpoint.publish import (
    hide_folder,
    is_displaced,
    is_temporary,
    remove,
    require_only_checkpoint_files,
)
from layerzero.checkpoint.rank_agreement import PathLike, agreed
from layerzero.checkpoint.rank_tree import FILES
from layerzero.extend import LayerZeroState, get_state

_LOG = logging.getLogger("layerzero")
_KINDS = {"unknown": UnsupportedFormatError, "damaged": CheckpointError, "gone": FileNotFoundError, "failed": Exception}
_DEAD_AFTER = 24 * 3600.0  # time in seconds without a write after which a save counts as dead


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the most recently saved complete checkpoint in `folder`; None if there is none.

    A checkpoint is ignored if it is still being written, if the saving process died, or if files are missing or
    truncated. Only :func:`load` verifies the contents of the files.

    Raises:
        NotADirectoryError: `folder` or one of its parents is a file.
    """
    _refuse_file(Path(folder))
    manifests, _ = scan(Path(folder))
    return manifests[-1].folder if manifests else None


def next_sequence(folder: Path) -> int:
    """Return the sequence number of a new checkpoint in `folder`."""
    manifests, _ = scan(folder)
    return manifests[-1].sequence + 1 if manifests else 0


def rotate(path: Path, keep_last: int) -> None:
    """Remove checkpoints in the folder of `path` that are older than `path`, except the last `keep_last` checkpoints.

    The function also keeps the last checkpoint that is known to be finite. A checkpoint that another job has saved at
    the same time or later is never removed.
    """
    manifests, _ = scan(path.parent)
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
                    remove(hide_folder(leftover))


def _remove_checkpoint(manifest: Manifest) -> None:
    """Remove the checkpoint that `manifest` describes, but not a newer one that another job has saved to its path."""
    new_path = hide_folder(manifest.folder)
    if manifest.is_at(new_path):
        remove(new_path)
    else:
        os.rename(new_path, manifest.folder)


def scan(folder: Path) -> tuple[list[Manifest], dict[Path, Exception]]:
    """Read the manifests of all checkpoints in the folder of a run.

    Returns:
        Manifests of the complete checkpoints, in the order in which they were saved, and the error of each other
        folder, by path.
    """
    complete: list[Manifest] = []
    errors: dict[Path, Exception] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (not path.name.startswith(".") or is_displaced(path)) and not path.is_symlink() and path.is_dir():
            try:
                complete.append(Manifest.read(path))
            except FileNotFoundError:  # another job has removed the checkpoint
                continue
            except (CheckpointError, OSError) as error:
                errors[path] = error
    return sorted(complete, key=lambda manifest: (manifest.sequence, manifest.folder.name)), errors


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


def _refuse_file(folder: Path) -> None:
    """Raise NotADirectoryError if `folder` or one of its parents is a file. The folder need not exist yet."""
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise NotADirectoryError(f"{file} is a file. Pass the folder that contains the checkpoints of the run")


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
    manifests: dict[Path, Manifest] = {}  # on the first rank, in the order of tries
    broken: dict[Path, str] = {}  # on the first rank: reasons
    with agreed("checkpoint.load_latest", lz_state, {"folder": os.fspath(folder)}):
        finish_pending(lz_state)
    tree = rank_tree(lz_state)
    with agreed("checkpoint.load_latest", lz_state, tree=tree):
        if lz_state.ranks.rank == 0:
            if (folder / MANIFEST).exists():
                raise CheckpointError(
                    f"{folder} is a checkpoint. Pass its parent folder, or call layerzero.checkpoint.load"
                )
            manifests, broken = _candidates(folder)
    names = tree.all_gather(FILES, [path.name for path in manifests])[0]
    damaged: dict[Path, str] = {}
    for name in names:
        path = folder / name
        extra, reason = try_load(lz_state, load, path, model, optimizer, strict=strict)
        if reason is None:
            break
        if reason:
            damaged[path] = reason
    else:
        reasons = [
            *damaged.values(),
            *rank_tree(lz_state).all_gather(FILES, [f"{each}: {why}" for each, why in broken.items()])[0],
        ]
        if not reasons:
            return None
        raise CheckpointError(
            f"no checkpoint in {folder} can be loaded, and no checkpoint has been renamed: {'; '.join(reasons)}"
        )
    unusable = _newer_nonfinite(manifests, loaded=path)
    unusable |= {each: f"is damaged ({why})" for each, why in (damaged | broken).items()}
    first_rank = lz_state.ranks.rank == 0
    tree = rank_tree(lz_state)
    with tree.failing_together():
        moved = [_set_aside(each, manifests.get(each), why) for each, why in unusable.items()] if first_rank else []
    moved = tree.all_gather(FILES, moved)[0]
    for message in moved if first_rank else ():
        _LOG.warning("%s. %s has been loaded instead", message, path)
    return Resumed(path, extra, tuple(moved))


def _candidates(folder: Path) -> tuple[dict[Path, Manifest], dict[Path, str]]:
    """Return the checkpoints in the order in which a load tries them, and the reasons why others are broken.

    The newest checkpoint is first, and those with non-finite values are last.

    Raises:
        NotADirectoryError: `folder` or one of its parents is a file.
        UnsupportedFormatError: another version of layerzero wrote a checkpoint.
    """
    _refuse_file(folder)
    complete, errors = scan(folder)
    for error in errors.values():
        if isinstance(error, UnsupportedFormatError):
            raise error
    broken = {path: str(error) for path, error in errors.items() if _was_checkpoint(path)}
    newest_first = complete[::-1]
    tried = sorted(newest_first, key=lambda manifest: manifest.finite is False)
    return {manifest.folder: manifest for manifest in tried}, broken


def try_load(lz_state: LayerZeroState, load: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
    """Try to load a checkpoint. Return (``extra``, None), or (None, reason) if the checkpoint is damaged.

    The reason is the same on all ranks. It is empty if the checkpoint no longer exists. Other errors are raised.

    Args:
        load: function that loads the checkpoint, for the other arguments, and returns ``extra``. If it raises an error
            on a rank, it raises an error on all ranks.
    """
    try:
        return load(*args, **kwargs), None
    except RankLostError:
        raise
    except Exception as error:
        own_kind = next(kind for kind, error_type in _KINDS.items() if isinstance(error, error_type))
        # Ranks may have raised different errors in the same attempt, but every rank has raised an error.
        outcomes = rank_tree(lz_state).all_gather(FILES, [own_kind, str(error)])
        if any(kind == "failed" for kind, _ in outcomes) or own_kind == "unknown":
            raise
    if unknown := next((reason for kind, reason in outcomes if kind == "unknown"), ""):
        raise UnsupportedFormatError(unknown)
    return None, next((reason for kind, reason in outcomes if kind == "damaged"), "")


def _newer_nonfinite(manifests: dict[Path, Manifest], *, loaded: Path) -> dict[Path, str]:
    """Return the checkpoints with non-finite values that are newer than the loaded one, and the reason as text."""
    loaded_manifest = manifests.get(loaded)
    return {
        path: "has non-finite values"
        for path, manifest in manifests.items()
        if loaded_manifest and manifest.finite is False and manifest.sequence > loaded_manifest.sequence
    }


def _set_aside(path: Path, manifest: Manifest | None, reason: str) -> str:
    """Rename a checkpoint unless another checkpoint has replaced it; return a sentence with the result."""
    try:
        if manifest is None:
            require_only_checkpoint_files(path)
        elif not manifest.is_at(path):
            return f"{path} {reason}: another job has replaced it"
        return f"{path} {reason}: it has been renamed to {hide_folder(path, 'damaged').name}"
    except OSError as error:
        return f"{path} {reason} and cannot be renamed: {error}"
