"""Checkpoints of all pipeline stages and tensor ranks: a folder with a layerzero checkpoint for each model chunk.

[Note: When a Megatron checkpoint exists]
Each part exists when it is whole, on its own. The folder counts only once it holds the marker, which is written when
all parts exist.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerzero import checkpoint
from layerzero.checkpoint.files import discard, flush_folder, make_folder, write_file
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.groups import ProcessGroups, together
from layerzero.megatron.optimizer import ShardedMegatronOptimizer

__all__ = ["load", "save"]

_MARKER = "complete"
_LAYOUT = "layout-"  # with which names of parts begin


def save(
    path: str | os.PathLike[str],
    model_chunks: Sequence[ShardedChunk],
    optimizer: ShardedMegatronOptimizer | None = None,
    extra: object = None,
) -> None:
    """Write a checkpoint of the whole model. All ranks must call this, between a step and the next forward.

    Args:
        path: a folder that all ranks share and that does not hold a checkpoint. What a save has left in it that died is
            removed.
        extra: as for ``layerzero.checkpoint.save``: iteration, ``scheduler.state_dict()``, ...

    Raises:
        FileExistsError, CheckpointError, ...: what ``layerzero.checkpoint.save`` raises, on all ranks of the stage;
            RuntimeError on the others.
    """
    folder, groups = Path(path), model_chunks[0].groups
    together("layerzero.megatron.save", groups, _make_room(folder) if dist.get_rank() == 0 else None)
    scale = None if optimizer is None or optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict()
    failure: Exception | None = None
    try:
        for index, chunk in enumerate(model_chunks):
            inner = None if optimizer is None else optimizer.sharded[index]
            checkpoint.save(folder / _part(groups, index), chunk, inner, {"extra": extra, "grad_scaler": scale})
    except Exception as error:
        failure = error
    together("layerzero.megatron.save", groups, failure)
    if dist.get_rank() == 0:
        write_file(folder / _MARKER, [])
        flush_folder(folder)
    together("layerzero.megatron.save", groups, None)  # nobody goes on before it is there


def load(
    path: str | os.PathLike[str],
    model_chunks: Sequence[ShardedChunk],
    optimizer: ShardedMegatronOptimizer | None = None,
) -> Any:
    """Put a checkpoint of :func:`save` into chunks of the same tensor and pipeline layout; returns its `extra`.

    Data-parallel ranks and `zero3_size` may be others than those that saved. All ranks must call this.

    Raises:
        FileNotFoundError: there is no complete checkpoint of this layout at `path`; nothing has been changed.
    """
    folder, groups = Path(path), model_chunks[0].groups
    failure: Exception | None = None
    parts = [folder / _part(groups, index) for index in range(len(model_chunks))]
    if not (folder / _MARKER).exists():
        failure = FileNotFoundError(f"{folder} holds no complete checkpoint of layerzero.megatron.save")
    elif missing := [part.name for part in parts if not part.exists()]:
        failure = FileNotFoundError(f"{folder} was saved with other tensor or pipeline ranks: it has no {missing}")
    together("layerzero.megatron.load", groups, failure)
    result: Any = None
    try:
        for index, (chunk, part) in enumerate(zip(model_chunks, parts, strict=True)):
            result = checkpoint.load(part, chunk, None if optimizer is None else optimizer.sharded[index])
    except Exception as error:
        failure = error
    together("layerzero.megatron.load", groups, failure)
    if optimizer is not None:
        optimizer.load_scale(result["grad_scaler"])
    return result["extra"]


def _make_room(folder: Path) -> Exception | None:
    """Make the folder, or empty it of the parts that a save has left which died; returns what is in the way."""
    try:
        if (folder / _MARKER).exists():
            raise FileExistsError(f"{folder} holds a checkpoint already, which is never overwritten")
        make_folder(folder)
        for part in folder.glob(f"{_LAYOUT}*"):
            discard(part)
    except OSError as error:
        return error
    return None


def _part(groups: ProcessGroups, chunk: int) -> str:
    tensor, stage = dist.get_rank(groups.tensor), dist.get_rank(groups.pipeline)
    sizes = f"{groups.tensor.size()}-{groups.pipeline.size()}"
    return f"{_LAYOUT}{sizes}-tensor-{tensor:03d}-stage-{stage:03d}-chunk-{chunk:03d}"
