"""Save checkpoints synchronously (:func:`save`) or in the background (:func:`save_async`)."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.background import PendingSave, finish_pending, rank_tree, staging_of
from layerzero.checkpoint.checkpoint_writer import CheckpointWriter
from layerzero.checkpoint.checksums import ChecksumScheme
from layerzero.checkpoint.collect_state import CollectedState, collect, topology_entry
from layerzero.checkpoint.errors import CheckpointError, PathTakenError, RankLostError
from layerzero.checkpoint.json_codec import PerRank
from layerzero.checkpoint.manifest import MANIFEST
from layerzero.checkpoint.publish import require_only_checkpoint_files
from layerzero.checkpoint.rank_agreement import PathLike, agreed, check_checkpoint_arguments
from layerzero.checkpoint.rank_tree import FILES, FailedRanksError, RankTree
from layerzero.checkpoint.run_folder import clear_leftovers, rotate
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.extend import get_state

__all__ = ["PendingSave", "per_rank", "save", "save_async", "save_with_rank_local_names"]


def per_rank(value: object) -> PerRank:
    """Mark a value in ``extra`` that differs between ranks, such as a random state.

    :func:`load` returns each rank's own value if the number of ranks is unchanged, and None otherwise.

    Example::

        extra = {"step": step, "rng": layerzero.checkpoint.per_rank(torch.get_rng_state())}
    """
    return PerRank(value)


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    extra: object = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    require_finite: bool = True,
) -> None:
    """Write a checkpoint that can be loaded with any number of ranks, any `zero3_size` and any units.

    Each rank writes its own rows of masters and optimizer state. No rows are gathered, and no duplicates are written.
    The first rank writes buffers and other unsharded values. All data-parallel ranks must call this function with a
    path on a shared file system. Gradients are not saved. Therefore, call this function between ``optimizer.step()``
    and the next backward pass.

    Args:
        path: path of the new checkpoint folder, which must not exist yet. The folder appears under this path only after
            all its files are on disk.
        model: model that :func:`layerzero.shard_model` returned.
        optimizer: optimizer that :func:`layerzero.shard_optimizer` returned. If the model has several optimizers, put
            the ``state_dict()`` of the others into `extra`, and pass the one that needs full parameters (Muon) here.
        extra: additional state of the run, such as ``scheduler.state_dict()`` and the position in the data. It may
            contain numbers, strings, bytes, None, tensors, NumPy arrays, sharded tensors of this model
            (``ema.state_dict()``), and lists, tuples and dicts of these. It must be the same on all ranks, except for
            values marked by :func:`per_rank`.
        keep_last: number of checkpoints to keep in the parent folder of `path`. The new checkpoint is
            read back and verified first. After a successful save, older checkpoints are removed, except the last one
            that is known to be finite. If None, no checkpoints are removed.
        overwrite: whether to replace an existing checkpoint at `path` after the new checkpoint is on disk. If True, the
            new checkpoint is read back and verified first.
        require_finite: if True, save nothing if a trained parameter or its optimizer state contains NaN or Inf. If
            False, save the state anyway, for debugging, and record in the manifest that it has non-finite values.

    Raises:
        FileExistsError: `path` already exists, and either `overwrite` is False or `path` is not a checkpoint.
        TypeError: a value in `extra` cannot be saved; the message names the value.
        ValueError: `extra` differs between ranks, or the ranks disagree on what to save.
        CheckpointError: a rank could not write its file, or has non-finite values. The message contains the error of
            that rank. `path` is unchanged.

    Example::

        extra = {"step": step, "scheduler": scheduler.state_dict()}
        layerzero.checkpoint.save(f"runs/1/step-{step:06d}", model, optimizer, extra, keep_last=3)
    """
    writer = _prepare(
        path, model, optimizer, extra, keep_last=keep_last, overwrite=overwrite, require_finite=require_finite
    )
    _write(writer, rank_tree(get_state(model)))


def save_with_rank_local_names(
    rank_local_names: RankLocalNames | None,
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    extra: object,
) -> None:
    """Save a model whose ranks have different parameters under the same names.

    After `rank_local_names`, the function takes the positional arguments of :func:`save`. It raises the same errors.

    Args:
        rank_local_names: names under which ranks have different parameters. If None, all ranks have the same
            parameters.
    """
    writer = _prepare(path, model, optimizer, extra, rank_local_names=rank_local_names)
    _write(writer, rank_tree(get_state(model)))


def save_async(
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    extra: object = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    require_finite: bool = True,
) -> PendingSave:
    """Copy the state to (pinned) host memory and write the checkpoint in the background while training continues.

    The function returns after the state is copied. The checkpoint contains the state at the time of the call. The next
    call reuses the host memory. The host memory has the size of the data that this rank writes. Pinned memory may have
    twice that size, because torch rounds sizes up to a power of two. The next save or :func:`load` waits until the
    current checkpoint is written. If a background save fails, the next optimizer step, save or load emits a warning and
    then continues. Call ``wait()`` on the last save before ``destroy_process_group()``. Otherwise, the ranks
    only print an error of that save.

    The function takes the same arguments and raises the same errors as :func:`save`.

    Returns:
        A :class:`PendingSave`, on which you can wait.

    Example::

        pending = layerzero.checkpoint.save_async("runs/1/step-000100", model, optimizer)
        train_on()
        pending.wait()
    """
    lz_state = get_state(model)
    writer = _prepare(
        path, model, optimizer, extra, keep_last=keep_last, overwrite=overwrite, require_finite=require_finite
    )
    staging = staging_of(lz_state)
    with agreed("checkpoint.save_async", lz_state):  # for instance, pinning the memory may fail
        writer.state = writer.state._replace(tensors=staging.copy(writer.state.tensors))
    write = partial(_write, writer, rank_tree(lz_state))
    staging.pending = PendingSave(write, optimizers=lz_state.optimizers)
    return staging.pending


def _prepare(
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    extra: object,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    require_finite: bool = True,
    rank_local_names: RankLocalNames | None = None,
) -> CheckpointWriter:
    lz_state, path = get_state(model), Path(path).absolute()
    fields: dict[str, Any] = {"path": str(path), "checksums by": ChecksumScheme.best().algorithm}
    fields |= {"keep_last": keep_last, "overwrite": overwrite, "require_finite": require_finite}
    state = CollectedState({}, {}, [], {}, [])
    with agreed("checkpoint.save", lz_state, fields):
        finish_pending(lz_state)
        check_checkpoint_arguments(lz_state, optimizer)
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last must be a positive int or None, got {keep_last!r}")
        if path.name.startswith("."):
            raise ValueError(
                f"the checkpoint name {path.name!r} starts with a dot, which marks incomplete checkpoints. Use another "
                "name"
            )
        if os.path.lexists(path):
            if not overwrite:
                raise PathTakenError.at(path)
            require_only_checkpoint_files(path)
        state = collect(lz_state, optimizer, extra, require_finite=require_finite, rank_local_names=rank_local_names)
        fields |= state.digests
    return CheckpointWriter(path, state, topology_entry(lz_state), lz_state.ranks.rank, keep_last, overwrite)


def _write(writer: CheckpointWriter, tree: RankTree) -> None:
    try:
        _write_on_all_ranks(writer, tree)
    except Exception as error:
        if dist.is_initialized():
            raise
        raise CheckpointError(
            f"{writer.path} was not saved completely, and the process group has been destroyed: {error}. Call wait() "
            "on the result of the last save_async before destroy_process_group()"
        ) from error


def _write_on_all_ranks(writer: CheckpointWriter, tree: RankTree) -> None:
    first = writer.rank == 0
    try:
        with tree.failing_together():
            token, kept = tree.map_and_merge(FILES, writer.plan, writer.merge_plans)
            tree.map_and_merge(FILES, lambda: writer.write(token, kept), writer.finish)
    except FailedRanksError as error:
        if first:
            writer.discard()
        if path_taken := [message for _, kind, message in error.failures if kind == PathTakenError.__name__]:
            raise FileExistsError(path_taken[0]) from None
        raise CheckpointError(f"{writer.path} could not be written: {error}") from None
    except RankLostError as error:  # another rank may still be writing into the partial folder
        raise RankLostError(f"{writer.path} could not be written: {error}") from error
    if first:
        try:
            clear_leftovers(writer.path / MANIFEST)
            if writer.keep_last is not None:
                rotate(writer.path, writer.keep_last)
        except OSError as error:  # only warn, because the new checkpoint exists and the other ranks continue
            warnings.warn(
                f"keep_last={writer.keep_last}: an old checkpoint could not be removed: {error}. Remove it manually",
                stacklevel=2,
            )
