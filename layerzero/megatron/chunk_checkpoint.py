"""Save and load a model with tensor and pipeline parallelism as one folder, which has a part for each model chunk.

[Note: Publication of a Megatron checkpoint]
All parts are first written to one hidden folder, ``.NAME.TOKEN.partial``. Once all parts exist, a marker file that
contains the token is added, and the folder is renamed to ``NAME``. Each save draws a new token, which is the same on
all ranks. Therefore no job writes into or removes another job's folder; see [Note: Concurrent saves to one path] in
``checkpoint/publish.py``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerzero import EMA
from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.extend import (
    PathTakenError,
    RankLocalNames,
    clear_leftovers,
    make_folder,
    new_token,
    partial_path,
    prepare_load,
    publish_folder,
    remove,
    save_with_rank_local_names,
    write_file,
)
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.global_names import expert_names_of, global_layout_of
from layerzero.megatron.megatron_optimizer import ShardedMegatronOptimizer
from layerzero.megatron.parallel_groups import ProcessGroups, all_gather_object, raising_on_all_ranks

_MARKER = "complete"
_SAVE, _LOAD = "layerzero.megatron.save", "layerzero.megatron.load"


def save(
    path: str | os.PathLike[str],
    model_chunks: Sequence[ShardedChunk],
    optimizer: ShardedMegatronOptimizer | None = None,
    extra: object = None,
) -> None:
    """Write a checkpoint of the full model.

    All ranks must call this function, between a step and the next forward pass.

    Args:
        path: path of the new checkpoint folder, on a file system that all ranks share. The folder must not exist yet.
            It is published atomically after all data is written to disk.
        extra: additional state, as for ``layerzero.checkpoint.save``: iteration, ``scheduler.state_dict()``, ...

    Raises:
        FileExistsError: `path` already exists, or another job has created `path` during the save.
        CheckpointError: a rank could not write its part; the message gives the cause. `path` is not created.
        TypeError, ValueError: as raised by ``layerzero.checkpoint.save``. Ranks of other stages raise RuntimeError.
    """
    folder, groups = Path(path).absolute(), model_chunks[0].groups
    with raising_on_all_ranks(_SAVE, groups):
        experts = [expert_names_of(chunk) for chunk in model_chunks]
    own_token = new_token()
    token = all_gather_object(groups, own_token)[0]
    first, partial = token == own_token, partial_path(folder, token)
    with raising_on_all_ranks(_SAVE, groups):
        if first:
            _create_partial_folder(folder, partial)
    parts = [partial / _part_name(groups, index) for index in range(len(model_chunks))]
    scale = None if optimizer is None or optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict()
    try:
        with raising_on_all_ranks(_SAVE, groups):
            for index, (chunk, part, rank_local_names) in enumerate(zip(model_chunks, parts, experts, strict=True)):
                inner, ema = (None, None) if optimizer is None else (optimizer.sharded[index], optimizer.emas[index])
                average = None if ema is None else _ema_state_to_save(ema.state_dict(), rank_local_names)
                chunk_fields = {"places": global_layout_of(chunk, rank_local_names), "chunks": len(model_chunks)}
                extra_state = {"extra": extra, "grad_scaler": scale, "ema": average, **chunk_fields}
                save_with_rank_local_names(rank_local_names, part, chunk, inner, extra_state)
        written = {part.name for of_rank in all_gather_object(groups, parts) for part in of_rank}
        with raising_on_all_ranks(_SAVE, groups):
            if first:
                _publish_parts(partial, folder, written, token)
    except Exception:
        if first:
            remove(partial)  # safe: only this save has this token
        raise


def load(
    path: str | os.PathLike[str],
    model_chunks: Sequence[ShardedChunk],
    optimizer: ShardedMegatronOptimizer | None = None,
) -> Any:
    """Load a checkpoint that :func:`save` wrote, and return its `extra`. All ranks must call this function.

    The tensor-parallel and pipeline-parallel layout must be the same as when the checkpoint was saved. `zero3_size` and
    the numbers of data-parallel and expert-parallel ranks may differ.

    Raises:
        FileNotFoundError, CheckpointError, ValueError: `path` contains no complete checkpoint with this layout, or a
            stage's part of the checkpoint is damaged or does not match the model. All models are unchanged.
    """
    folder, groups = Path(path), model_chunks[0].groups
    parts = [folder / _part_name(groups, index) for index in range(len(model_chunks))]
    with raising_on_all_ranks(_LOAD, groups):
        experts = [expert_names_of(chunk) for chunk in model_chunks]
    with raising_on_all_ranks(_LOAD, groups):
        if not (folder / _MARKER).exists():
            raise FileNotFoundError(f"{folder} contains no complete checkpoint written by layerzero.megatron.save")
        if missing := [part.name for part in parts if not part.exists()]:
            raise FileNotFoundError(
                f"{folder} has no {missing}, because it was saved with another tensor or pipeline layout. Use the "
                "layout of the save"
            )
    sharded = [None] * len(parts) if optimizer is None else optimizer.sharded
    emas = [None] * len(parts) if optimizer is None else optimizer.emas
    with raising_on_all_ranks(_LOAD, groups):
        prepared = [
            prepare_load(part, chunk, inner, rank_local_names=rank_local_names)
            for part, chunk, inner, rank_local_names in zip(parts, model_chunks, sharded, experts, strict=True)
        ]
    result: Any = None
    with raising_on_all_ranks(_LOAD, groups):
        for prepared_load, ema, rank_local_names in zip(prepared, emas, experts, strict=True):
            result = prepared_load.commit()
            _load_average(ema, result.get("ema"), rank_local_names)
    if optimizer is not None:
        optimizer.load_scale(result["grad_scaler"])
    return result["extra"]


def _ema_state_to_save(state: Mapping[str, Any], rank_local_names: RankLocalNames) -> dict[str, Any]:
    """Return the EMA state, with the averages keyed by their names in the checkpoint."""
    return {
        **state,
        "averages": rank_local_names.split_values(
            {rank_local_names.stored(name): rows for name, rows in state["averages"].items()}
        ),
    }


def _load_average(ema: EMA | None, saved: Any, rank_local_names: RankLocalNames) -> None:
    """Load the EMA from a checkpoint.

    If the checkpoint has no EMA, reset `ema`. The next update of `ema` then copies the weights.
    """
    if ema is not None and saved is None:
        ema.n_averaged.zero_()
    elif ema is not None:
        current_names = {rank_local_names.stored(name): name for name in ema.state_dict()["averages"]}
        local_rows = {name: rows for name, rows in saved["averages"].items() if not rank_local_names.is_elsewhere(name)}
        ema.load_state_dict(
            {**saved, "averages": {current_names.get(name, name): rows for name, rows in local_rows.items()}}
        )


def _create_partial_folder(folder: Path, partial: Path) -> None:
    if folder.name.startswith("."):
        raise ValueError(
            f"the checkpoint name {folder.name!r} starts with a dot, which marks incomplete checkpoints. Use another "
            "name"
        )
    if os.path.lexists(folder):
        is_complete = (folder / _MARKER).exists()
        raise FileExistsError(
            f"{PathTakenError.at(folder)}" + ("" if is_complete else ". (It contains no complete checkpoint.)")
        )
    make_folder(folder.parent)
    partial.mkdir()


def _publish_parts(partial: Path, folder: Path, written: set[str], token: str) -> None:
    """Publish the parts in `partial` as the checkpoint `folder`."""

    def is_published() -> bool:
        try:
            return (folder / _MARKER).read_text() == token
        except OSError:
            return False

    if missing := sorted(part for part in written if not (partial / part).is_dir()):
        raise CheckpointError(
            f"{partial} lacks {missing}, seen from the first rank. Save to a file system that all ranks share"
        )
    write_file(partial / _MARKER, [token.encode()])
    publish_folder(partial, folder, is_published)
    try:
        clear_leftovers(folder / _MARKER)
    except OSError as error:  # only warn, because the new checkpoint has been published
        warnings.warn(
            f"leftovers of a dead save in {folder.parent} could not be removed: {error}. Remove them manually",
            stacklevel=3,
        )


def _part_name(groups: ProcessGroups, chunk: int) -> str:
    tensor, stage = dist.get_rank(groups.tensor), dist.get_rank(groups.pipeline)
    sizes = f"{groups.tensor.size()}-{groups.pipeline.size()}"
    return f"layout-{sizes}-tensor-{tensor:03d}-stage-{stage:03d}-chunk-{chunk:03d}"
