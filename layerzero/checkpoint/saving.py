"""Synchronous and background saves: :func:`save` and :func:`save_async`."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from layerzero.checkpoint.atomic_files import PathTakenError, refuse_to_replace
from layerzero.checkpoint.checksums import ChecksumScheme
from layerzero.checkpoint.collect_state import CollectedState, collect, require_equal_state, saving_mesh
from layerzero.checkpoint.dcp_storage import SafetensorsWriter
from layerzero.checkpoint.json_codec import PerRank
from layerzero.checkpoint.rank_agreement import PathLike, RankLostError, check_usable, failure_of
from layerzero.checkpoint.run_folder import next_sequence, tidy
from layerzero.checkpoint.staging import Staging, finish_pending, staging_of
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.comm.agreement import require_equal
from layerzero.comm.process_groups import groups_so_far, known_to_torch
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["PendingSave", "per_rank", "save", "save_async", "save_with"]


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
    """Write a checkpoint that loads with any number of ranks, any `zero3_size` and any units.

    Each rank writes its own rows of masters and optimizer state, without gathering rows and without writing duplicates.
    The first rank writes buffers and other unsharded values. All data-parallel ranks must call this function with a
    path on a shared file system. Gradients are not saved, so call this function between ``optimizer.step()`` and the
    next backward.

    Args:
        path: a folder that does not exist yet. It is created only after all its files are on disk.
        model: from :func:`layerzero.shard_model`.
        optimizer: from :func:`layerzero.shard_optimizer`.
        extra: further state of the run, such as ``scheduler.state_dict()`` and the position in the data. It may contain
            numbers, strings, bytes, None, tensors, NumPy arrays, sharded tensors of this model (``ema.state_dict()``),
            and lists, tuples and dicts of these. It must be the same on all ranks, except for values marked by
            :func:`per_rank`.
        keep_last: after a successful save, remove older checkpoints from the parent folder of `path`, except this many
            newest ones and the last finite one. The new checkpoint is read back and verified first.
        overwrite: replace an existing checkpoint at `path` after the new one is on disk. The new checkpoint is read
            back and verified first.
        require_finite: if True, save nothing if a trained parameter or its optimizer state has a NaN or Inf. If False,
            save the state anyway for debugging, and record the non-finite values in the manifest.

    Raises:
        FileExistsError: `path` already exists.
        TypeError: a value in `extra` cannot be saved; the message names it.
        ValueError: `extra` differs between ranks, or the ranks disagree on what to save.
        CheckpointError: a rank could not write (the message has its error) or has non-finite values. `path` is
            unchanged.

    Example::

        extra = {"step": step, "scheduler": scheduler.state_dict()}
        layerzero.checkpoint.save(f"runs/1/step-{step:06d}", model, optimizer, extra, keep_last=3)
    """
    runtime = get_state(model)
    how = _How(keep_last, overwrite, require_finite)
    _write(_prepare(Path(path), runtime, optimizer, extra, how), runtime.ranks.control_group())


def save_with(
    apart: RankLocalNames | None, path: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None, extra: object
) -> None:
    """Save a model whose ranks have different parameters under the same names.

    Takes the positional arguments of :func:`save` after `apart`, and raises the same errors.

    Args:
        apart: names under which ranks have different parameters. If it is None, all ranks have the same parameters.
    """
    runtime = get_state(model)
    how = _How(keep_last=None, overwrite=False, require_finite=True)
    _write(_prepare(Path(path), runtime, optimizer, extra, how, apart), runtime.ranks.control_group())


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
    """Copy the state to (pinned) host memory, return, and write the checkpoint while training continues.

    The checkpoint contains the state at the time of the call. The next call reuses the host memory. The host memory has
    the size of the data that this rank writes. Pinned memory may have twice that size, because torch rounds up to a
    power of two. The next save and :func:`load` wait for a save that is still being written. If a save fails, the next
    step, save or load logs a warning and then continues. Call ``wait()`` on the last save before
    ``destroy_process_group()``.

    Takes the same arguments and raises the same errors as :func:`save`.

    Returns:
        A :class:`PendingSave`.

    Example::

        pending = layerzero.checkpoint.save_async("runs/1/step-000100", model, optimizer)
        train_on()
        pending.wait()
    """
    runtime = get_state(model)
    job = _prepare(Path(path), runtime, optimizer, extra, _How(keep_last, overwrite, require_finite))
    staging = staging_of(runtime)
    failure: Exception | None = None
    tensors: dict[str, Tensor] = {}
    try:
        tensors = staging.copy(job.tensors)
    except Exception as error:  # such as a failure to pin memory
        failure = error
    require_equal("checkpoint.save_async", {}, ranks=runtime.ranks.ranks, failure=failure)
    _renew_group(runtime, staging)
    staging.pending = pending = PendingSave(partial(_write_staged, replace(job, tensors=tensors), staging))
    staging.listeners += [each.register_step_pre_hook(pending.warn_if_failed) for each in runtime.optimizers]
    return pending


class PendingSave:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[], None], what: str = "layerzero.checkpoint.save_async") -> None:
        self._what = what  # name of the function in warnings
        self._error: BaseException | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="layerzero checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether the save has ended; :meth:`wait` raises if it failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint exists. If the save failed, the first call raises the error of :func:`save`."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait until the save ends.

        Warn if the save failed and neither a warning nor :meth:`wait` has reported the error.
        """
        self._thread.join()
        self.warn_if_failed()

    def warn_if_failed(self, *_: object) -> None:
        """Warn once if the save has failed and :meth:`wait` has not raised its error."""
        if self._is_reported or not self.done():
            return
        self._is_reported = True
        if self._error is not None:
            said = f"{self._what} failed: {self._error}. Training continues, and the next save is not affected."
            warnings.warn(said, RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class _How:
    """Options of a save."""

    keep_last: int | None
    overwrite: bool
    require_finite: bool


@dataclass(frozen=True)
class _SaveJob:
    """One checkpoint to be written.

    Attributes:
        tensors: by key, the tensors that this rank writes; see :class:`CollectedState`.
    """

    path: Path
    writer: SafetensorsWriter
    tensors: dict[str, Tensor]
    keep_last: int | None


def _prepare(
    path: Path,
    runtime: LayerZeroState,
    optimizer: ShardedOptimizer | None,
    extra: object,
    how: _How,
    apart: RankLocalNames | None = None,
) -> _SaveJob:
    rank = runtime.ranks.rank
    path = path.absolute()
    fields: dict[str, Any] = {"path": str(path), "checksums by": ChecksumScheme.best().algorithm, **asdict(how)}
    failure: Exception | None = None
    state = CollectedState({}, {}, [], {}, [])
    try:
        finish_pending(runtime)
        check_usable(runtime, optimizer)
        if how.keep_last is not None and (not isinstance(how.keep_last, int) or how.keep_last < 1):
            raise ValueError(f"keep_last must be a positive int or None, got {how.keep_last!r}")
        if path.name.startswith("."):
            raise ValueError(
                f"the checkpoint name {path.name!r} starts with a dot, which marks incomplete checkpoints. Use another "
                "name"
            )
        if os.path.lexists(path):
            if not how.overwrite:
                raise PathTakenError.at(path)
            refuse_to_replace(path)
        state = collect(runtime, optimizer, extra, require_finite=how.require_finite, apart=apart)
    except Exception as error:
        failure = error
    require_equal_state("checkpoint.save", runtime, fields | state.digests, failure)
    writer = SafetensorsWriter(
        path,
        rank=rank,
        topology=saving_mesh(runtime),
        document=state.document,
        own=state.own,
        sequence=partial(next_sequence, path.parent),
        finite=not state.bad,
        overwrite=how.overwrite,
        reads_back=how.keep_last is not None or how.overwrite,
    )
    return _SaveJob(path, writer, state.tensors, how.keep_last)


def _renew_group(runtime: LayerZeroState, staging: Staging) -> None:
    """Create a process group for background saves on all ranks if any rank has no such group.

    A rank has no such group if its own collectives failed during the last save. The ranks first tell each other whether
    they have one.
    """
    model_ranks = runtime.ranks
    said = model_ranks.all_gather_text("lacks one" if staging.group is None else "has one")
    if staging.group is None or "lacks one" in said:
        require_equal("checkpoint.save_async", {}, ranks=model_ranks.ranks, groups=groups_so_far(model_ranks.ranks))
        staging.group = model_ranks.new_control_group()


def _write_staged(job: _SaveJob, staging: Staging) -> None:
    assert staging.group is not None
    try:
        _write(job, staging.group.group)
    except RankLostError:
        staging.group = None  # the next save creates another group
        raise


def _write(job: _SaveJob, group: dist.ProcessGroup) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = dist.get_rank(group) == 0
    try:
        with known_to_torch(group):
            write_tensors(job.tensors, storage_writer=job.writer, planner=planner, process_group=group)
    except CheckpointException as error:
        if first:
            job.writer.discard()
        raise failure_of("written", job.path, error) from None
    except RuntimeError as error:  # a collective failed; another rank may still be writing into the partial folder
        raise RankLostError(
            f"{job.path} could not be written, because a rank has exited or is late: {error}"
        ) from error
    if first:
        try:
            tidy(job.path, job.keep_last)
        except OSError as error:  # a warning only: the new checkpoint exists, and the other ranks continue
            warnings.warn(
                f"keep_last={job.keep_last}: an old checkpoint could not be removed: {error}. Remove it manually",
                stacklevel=2,
            )
