"""Going on from the last checkpoint that can be loaded.

[Note: What is set aside, and when]
A damaged checkpoint in the way of the next save of its name would end every attempt to go on in the same place. So it
gets another name, which nothing here looks at or removes. That is done only when an earlier one has been loaded: where
none can be, it is more likely that something else is wrong, such as a file system, and everything stays as it is. A
newer one whose numbers are not finite, which was passed over, is as much in the way.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from layerzero.checkpoint.atomic_files import CheckpointError
from layerzero.checkpoint.loading import prepare_load
from layerzero.checkpoint.manifest import Manifest, UnsupportedFormat
from layerzero.checkpoint.rank_agreement import PathLike, RankLostError, agree_or_raise
from layerzero.checkpoint.run_folder import RunFolderScan, put_aside, scan
from layerzero.engine.hooks import get_state
from layerzero.engine.runtime import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["Resumed", "load_latest"]

_LOG = logging.getLogger("layerzero")


class Resumed(NamedTuple):
    """What :func:`load_latest` has found.

    Attributes:
        path: of the checkpoint that was loaded.
        extra: what was saved with it.
        set_aside: of each damaged one, and each newer one that is not finite, a sentence that names it, what is wrong
            with it, and where it is now.
    """

    path: Path
    extra: Any
    set_aside: tuple[str, ...]


def load_latest(
    folder: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None = None, *, strict: bool = True
) -> Resumed | None:
    """:func:`load` of the newest checkpoint in a folder that can be loaded.

    All ranks try the same one. Where a rank finds it damaged, all turn to the one before. When that has been loaded,
    the damaged ones are renamed, so that later saves of their names work, and the log says so; nothing is removed.
    Checkpoints whose numbers are not finite are tried after all others; where an older one has been loaded instead,
    they are renamed, too.

    Args:
        folder: of one run, as for :func:`latest`.
        model, optimizer, strict: as for :func:`load`.

    Returns:
        What was loaded; None if there is no checkpoint in `folder`, not even a damaged one.

    Raises:
        CheckpointError: there are checkpoints, and none can be loaded; says why for each. Nothing has been renamed.
        ValueError: names, shapes or dtypes of one that is not damaged do not fit; no other is tried.

    Example::

        found = layerzero.checkpoint.load_latest("runs/1", model, optimizer)
        first_step = found.extra["step"] if found else 0
    """
    runtime = get_state(model)
    folder = Path(folder).absolute()
    seen: RunFolderScan | None = None
    failure: Exception | None = None
    if runtime.ranks.rank == 0:
        try:
            seen = scan(folder)
        except (CheckpointError, OSError) as error:
            failure = error
    agree_or_raise("checkpoint.load_latest", runtime, {"folder": os.fspath(folder)}, failure)
    names = _heard(runtime, None if seen is None else [manifest.folder.name for manifest in seen.complete])
    damaged: dict[Path, str] = {}
    for name in names:
        path = folder / name
        extra, why = _tried(runtime, path, model, optimizer, strict=strict)
        if why is None:
            break
        if why:
            damaged[path] = why
    else:
        broken = _heard(runtime, None if seen is None else [f"{p}: {why}" for p, why in seen.broken.items()])
        if not broken and not damaged:
            return None
        told = "; ".join([*damaged.values(), *broken])
        raise CheckpointError(f"no checkpoint in {folder} can be loaded, and nothing has been renamed: {told}")
    moved = _heard(runtime, None if seen is None else _put_aside(seen, damaged, loaded=path))
    if seen is not None:
        for text in moved:
            _LOG.warning("%s. %s has been loaded instead", text, path)
    return Resumed(path, extra, tuple(moved))


def _heard(runtime: LayerZeroState, texts: list[str] | None) -> list[str]:
    """What the first rank says."""
    heard: list[str] = json.loads(runtime.ranks.all_gather_text(json.dumps(texts))[0])
    return heard


def _tried(
    runtime: LayerZeroState, path: Path, model: nn.Module, optimizer: ShardedOptimizer | None, *, strict: bool
) -> tuple[Any, str | None]:
    """Load it; or say why it is damaged, the same on all ranks; empty if it is gone. Others' errors are raised."""
    try:
        return prepare_load(path, model, optimizer, strict=strict).commit(), None
    except RankLostError:
        raise
    except Exception as error:
        caught = error
    kinds = (
        (UnsupportedFormat, "unknown"),
        (CheckpointError, "damaged"),
        (FileNotFoundError, "gone"),
        (Exception, "failed"),
    )
    mine = next(kind for each, kind in kinds if isinstance(caught, each))
    # Ranks may have met different errors in the same attempt, but each has met one.
    said = [json.loads(text) for text in runtime.ranks.all_gather_text(json.dumps([mine, str(caught)]))]
    if any(kind == "failed" for kind, _ in said) or mine == "unknown":
        raise caught
    if unknown := next((why for kind, why in said if kind == "unknown"), ""):
        raise UnsupportedFormat(unknown)
    return None, next((why for kind, why in said if kind == "damaged"), "")


def _put_aside(seen: RunFolderScan, damaged: dict[Path, str], *, loaded: Path) -> list[str]:
    """Rename what is damaged, and what is newer than what was loaded and not finite; what became of each."""
    known: dict[Path, Manifest | None] = {manifest.folder: manifest for manifest in seen.complete}
    since = next(manifest.sequence for manifest in seen.complete if manifest.folder == loaded)
    passed_over = {
        manifest.folder: "holds numbers that are not finite"
        for manifest in seen.complete
        if manifest.finite is False and manifest.sequence > since
    }
    known |= dict.fromkeys(seen.broken)
    wrong = passed_over | {path: f"is damaged ({why})" for path, why in (damaged | seen.broken).items()}
    return [_one_aside(path, known[path], why) for path, why in wrong.items()]


def _one_aside(path: Path, manifest: Manifest | None, why: str) -> str:
    try:
        aside = put_aside(path, manifest)
    except OSError as error:
        return f"{path} {why}, and cannot be set aside: {error}"
    where = "another job has replaced it" if aside is None else f"it has been set aside as {aside.name}"
    return f"{path} {why}: {where}"
