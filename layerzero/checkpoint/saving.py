"""save and save_async."""

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
from layerzero.checkpoint.collect_state import CollectedState, agree_on_state, collect, who_saves
from layerzero.checkpoint.dcp_storage import SafetensorsWriter
from layerzero.checkpoint.json_codec import PerRank
from layerzero.checkpoint.rank_agreement import PathLike, RankLostError, check_usable, told
from layerzero.checkpoint.run_folder import next_sequence, tidy
from layerzero.checkpoint.staging import Staging, finish_pending, staging_of
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.comm.agreement import require_equal
from layerzero.comm.process_groups import groups_so_far, known_to_torch
from layerzero.engine.hooks import get_state
from layerzero.engine.runtime import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["PendingSave", "per_rank", "save", "save_async", "save_with"]


def per_rank(value: object) -> PerRank:
    """Marks a value in ``extra`` that differs between ranks, such as a state of random numbers.

    Each rank gets its own back from :func:`load`, if as many ranks load as have saved; otherwise None.

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
    """Write a checkpoint that any number of ranks, with any `zero3_size` and any units, can load.

    Each rank writes the rows of masters and optimizer state that it owns; nothing is gathered and nothing is written
    twice. Buffers and whatever else is not sharded are the first rank's. All data-parallel ranks must call this, with a
    path on a file system that they share. Gradients are not saved: call it between ``optimizer.step()`` and the next
    backward.

    Args:
        path: a folder that does not exist yet. It appears when all of it is on the disk, and not before.
        model: from :func:`layerzero.shard_model`.
        optimizer: from :func:`layerzero.shard_optimizer`.
        extra: what else the run needs, such as ``scheduler.state_dict()`` and the position in the data: numbers,
            strings, bytes, None, tensors, NumPy arrays, sharded tensors of this model (``ema.state_dict()``), and
            lists, tuples and dicts of them. The same on all ranks, but for what :func:`per_rank` marks.
        keep_last: after a success, only so many checkpoints stay in the folder that `path` is in, and the last one that
            was finite; the oldest go. What was written is read back before.
        overwrite: a checkpoint that is at `path` is replaced, when the new one is on the disk. What was written is read
            back before.
        require_finite: save nothing where a trained parameter or its optimizer state holds a NaN or an infinity. False:
            save it, and note it, for people who look for the cause.

    Raises:
        FileExistsError: there is something at `path`.
        TypeError: a value in `extra` cannot be saved; names it.
        ValueError: `extra` differs between ranks, or the ranks disagree on what to save.
        CheckpointError: a rank could not write, with what it met, or has numbers that are not finite; nothing new is at
            `path`.

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
    """:func:`save` of a model of which other ranks have something else under the same names."""
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
    """:func:`save` that copies to (pinned) host memory, returns, and writes while training goes on.

    What is written is the state at the time of the call. The host memory, as large as what this rank writes (pinned: up
    to twice that, as torch rounds it to a power of two), is kept for the next call. A save that is still being written
    is waited for by the next one, and by :func:`load`. One that has failed is a warning at the next step, or where the
    next save or load begins, which goes on. Call ``wait()`` on the last one before ``destroy_process_group()``.

    Returns:
        A :class:`PendingSave`. Arguments and errors are those of :func:`save`.

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
    except Exception as error:  # such as no memory to pin
        failure = error
    require_equal("checkpoint.save_async", {}, ranks=runtime.ranks.ranks, failure=failure)
    _renew_group(runtime, staging)
    staging.pending = pending = PendingSave(partial(_write_staged, replace(job, tensors=tensors), staging))
    staging.listeners += [each.register_step_pre_hook(pending.tell_if_done) for each in runtime.optimizers]
    return pending


class PendingSave:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[], None], what: str = "layerzero.checkpoint.save_async") -> None:
        self._what = what  # names it in warnings
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="layerzero checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Nothing is being written any more; :meth:`wait` says whether that is good news."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint exists. Raises, once, what :func:`save` would have raised."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """:meth:`wait` that warns, unless somebody has been told."""
        self._thread.join()
        self.tell_if_done()

    def tell_if_done(self, *_: object) -> None:
        """Warn, once, if it has failed and nobody has waited for it."""
        if self._told or not self.done():
            return
        self._told = True
        if self._error is not None:
            said = f"{self._what}: {self._error}. Training goes on, and so will the next save"
            warnings.warn(said, RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class _How:
    """What the user asks of a save."""

    keep_last: int | None
    overwrite: bool
    require_finite: bool


@dataclass(frozen=True)
class _SaveJob:
    """One checkpoint that is going to be written.

    Attributes:
        tensors: by key, what this rank offers: what is sharded, and from the first rank everything else.
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
            raise ValueError(f"the name of a checkpoint must not start with a dot, got {path.name!r}")
        if os.path.lexists(path):
            if not how.overwrite:
                raise PathTakenError.at(path)
            refuse_to_replace(path)
        state = collect(runtime, optimizer, extra, require_finite=how.require_finite, apart=apart)
    except Exception as error:
        failure = error
    agree_on_state("checkpoint.save", runtime, fields | state.digests, failure)
    writer = SafetensorsWriter(
        path,
        rank=rank,
        topology=who_saves(runtime),
        document=state.document,
        own=state.own,
        sequence=partial(next_sequence, path.parent),
        finite=not state.bad,
        overwrite=how.overwrite,
        reads_back=how.keep_last is not None or how.overwrite,
    )
    return _SaveJob(path, writer, state.tensors, how.keep_last)


def _renew_group(runtime: LayerZeroState, staging: Staging) -> None:
    """Make a group for the ranks' talk, if any of them has none: whether a talk has failed, each knows for itself."""
    everyone = runtime.ranks
    said = everyone.all_gather_text("lacks one" if staging.group is None else "has one")
    if staging.group is None or "lacks one" in said:
        require_equal("checkpoint.save_async", {}, ranks=everyone.ranks, groups=groups_so_far(everyone.ranks))
        staging.group = everyone.new_control_group()


def _write_staged(job: _SaveJob, staging: Staging) -> None:
    assert staging.group is not None
    try:
        _write(job, staging.group.group)
    except RankLostError:
        staging.group = None  # the next save makes another one
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
        raise told("written", job.path, error) from None
    except RuntimeError as error:  # the ranks' talk; what is in the partial folder may still be written to
        raise RankLostError(f"{job.path} could not be written: ranks have lost each other: {error}") from error
    if first:
        try:
            tidy(job.path, job.keep_last)
        except OSError as error:  # the new checkpoint is there, and the other ranks go on
            warnings.warn(f"keep_last={job.keep_last}: an old checkpoint could not be removed: {error}", stacklevel=2)
