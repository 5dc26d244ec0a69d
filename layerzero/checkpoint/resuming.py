"""Resume a run from the newest checkpoint that can be loaded.

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
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from layerzero.checkpoint.errors import CheckpointError, RankLostError, UnsupportedFormatError
from layerzero.checkpoint.loading import prepare_load
from layerzero.checkpoint.manifest import MANIFEST, Manifest
from layerzero.checkpoint.rank_agreement import PathLike, agreed
from layerzero.checkpoint.run_folder import RunFolderScan, rename_if_unchanged, scan
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["Resumed", "load_latest"]

_LOG = logging.getLogger("layerzero")


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
