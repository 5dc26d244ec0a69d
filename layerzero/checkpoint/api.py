"""save, save_async and load."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.files import CheckpointError, Manifest, NameTaken
from layerzero.checkpoint.folder import next_sequence, tidy
from layerzero.checkpoint.staging import Staging
from layerzero.checkpoint.state import Restore, encode_all
from layerzero.checkpoint.storage import Contents, Reader, Writer
from layerzero.checkpoint.untrusted import printable
from layerzero.checkpoint.values import PerRank
from layerzero.comm.agreement import agree
from layerzero.comm.topology import groups_so_far, new_control_group
from layerzero.engine.hooks import runtime_of
from layerzero.engine.runtime import Runtime
from layerzero.engine.view import View
from layerzero.optimizers.sharded import ShardedOptimizer

__all__ = ["PendingSave", "load", "per_rank", "save", "save_async"]

PathLike = str | os.PathLike[str]


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
        keep_last: after a success, only so many checkpoints stay in the folder that `path` is in; the oldest go.

    Raises:
        FileExistsError: there is something at `path`.
        TypeError: a value in `extra` cannot be saved; names it.
        ValueError: `extra` differs between ranks, or the ranks disagree on what to save.
        CheckpointError: a rank could not write, with what it met; nothing is left at `path`.

    Example::

        extra = {"step": step, "scheduler": scheduler.state_dict()}
        layerzero.checkpoint.save(f"runs/1/step-{step:06d}", model, optimizer, extra, keep_last=3)
    """
    runtime = runtime_of(model)
    _write(_prepare(Path(path), runtime, optimizer, extra, keep_last), runtime.topology.control.group)


def save_async(
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    extra: object = None,
    *,
    keep_last: int | None = None,
) -> PendingSave:
    """:func:`save` that copies to (pinned) host memory, returns, and writes while training goes on.

    What is written is the state at the time of the call. The host memory, as large as what this rank writes (pinned: up
    to twice that, as torch rounds it to a power of two), is kept for the next call. A save that is still being written
    is waited for by the next one, and by :func:`load`, which also raise its error. Call ``wait()`` on the last one
    before ``destroy_process_group()``.

    Returns:
        A :class:`PendingSave`. Arguments and errors are those of :func:`save`.

    Example::

        pending = layerzero.checkpoint.save_async("runs/1/step-000100", model, optimizer)
        train_on()
        pending.wait()
    """
    runtime = runtime_of(model)
    job = _prepare(Path(path), runtime, optimizer, extra, keep_last)
    staging = _staging_of(runtime)
    failure: Exception | None = None
    tensors: dict[str, Tensor] = {}
    try:
        tensors = staging.copy(job.tensors)
    except Exception as error:  # such as no memory to pin
        failure = error
    fields = groups_so_far() if staging.group is None else {}
    agree("checkpoint.save_async", fields, ranks=runtime.topology.ranks, failure=failure)
    if staging.group is None:
        staging.group = new_control_group(runtime.topology)
    staging.pending = pending = PendingSave(partial(_write_staged, replace(job, tensors=tensors), staging))
    return pending


class PendingSave:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
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


def _staging_of(runtime: Runtime) -> Staging:
    if runtime.staging is None:
        runtime.staging = Staging(runtime.topology.device)
    return cast("Staging", runtime.staging)


def _finish_pending(runtime: Runtime) -> None:
    """Wait for a save in the background, and raise its error."""
    staging = _staging_of(runtime)
    if staging.pending is not None:
        pending, staging.pending = staging.pending, None
        pending.wait()


def load(path: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None = None, *, strict: bool = True) -> Any:
    """Put a checkpoint into a sharded model and optimizer.

    Every byte is compared with the SHA-256 that was written, each file by one rank, while each rank reads its own rows.
    All data-parallel ranks must call this. Ranks, `zero3_size` and units need not be those that saved.

    Args:
        path: from :func:`save`, :func:`save_async`, or :func:`latest`.
        optimizer: None leaves out the optimizer state that the checkpoint may have. Its parameter groups take the
            hyperparameters that their parameters were saved with, whatever the groups were.
        strict: False loads what fits and warns about the rest.

    Returns:
        The ``extra`` that was saved; tensors on the CPU, sharded ones cut as the model now is.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: the checkpoint is incomplete or damaged; names the file. Nothing has been changed.
        ValueError: names, shapes or dtypes do not fit; lists all. Nothing has been changed.

    Example::

        path = layerzero.checkpoint.latest("runs/1")
        extra = layerzero.checkpoint.load(path, model, optimizer) if path else {"step": 0}
    """
    return load_from(_verified(Path(path)), os.fspath(path), model, optimizer, strict=strict)


@dataclass(frozen=True)
class Source:
    """A checkpoint that a rank has opened.

    Attributes:
        fingerprint: the same on all ranks if all have opened the same one.
        verify: raises CheckpointError if this rank's share of the files is damaged.
    """

    contents: Contents
    reader: StorageReader
    fingerprint: object
    verify: Callable[[], None]


def _verified(path: Path) -> Callable[[Runtime], Source]:
    def opened(runtime: Runtime) -> Source:
        manifest = Manifest.read(path)
        contents = Contents.read(manifest)
        digests = {name: record.sha256 for name, record in manifest.files.items()}
        control = runtime.topology.control
        share = sorted(manifest.files)[control.rank :: control.size]
        return Source(contents, Reader(manifest, contents), digests, partial(manifest.verify, share))

    return opened


def load_from(
    opened: Callable[[Runtime], Source],
    path: str,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    *,
    strict: bool,
) -> Any:
    """:func:`load` of any source of tensors. See [Note: Nothing changes before all is known] in state.py."""
    runtime = runtime_of(model)
    control = runtime.topology.control
    fields: dict[str, Any] = {"with an optimizer": optimizer is not None, "strict": strict}
    failure: Exception | None = None
    source: Source | None = None
    restore: Restore | None = None
    try:
        _finish_pending(runtime)
        _check(runtime, optimizer)
        if View.AVERAGES in runtime.views:
            raise RuntimeError("a load inside EMA.swapped() would be undone; leave the context first")
        source = opened(runtime)
        fields["files"] = source.fingerprint
        same = source.contents.topology.get("data_parallel") == control.size
        restore = Restore(runtime, optimizer, source.contents, rank=control.rank if same else None)
        if restore.problems and strict:
            raise ValueError(printable(f"{path} does not fit: " + "; ".join(restore.problems)))
    except Exception as error:
        failure = error
    _agree("checkpoint.load", runtime, fields, failure)
    assert source is not None and restore is not None
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with ThreadPoolExecutor(1) as pool:  # neither hashing nor reading holds the interpreter
        verified = pool.submit(source.verify)
        try:
            read_tensors(
                dict(restore.tensors), storage_reader=source.reader, planner=planner, process_group=control.group
            )
        except CheckpointException as error:
            failure = _readable("read", path, error)
        except RuntimeError as error:
            raise CheckpointError(f"{path} could not be read: ranks have lost each other: {error}") from error
        damage = cast("Exception | None", verified.exception())
    twins = restore.twin_problems() if failure is None else []
    _agree("checkpoint.load", runtime, {}, damage or (ValueError(printable("; ".join(twins))) if twins else None))
    if failure is not None:
        raise failure  # all ranks have it
    extra = restore.commit()
    if restore.problems and control.rank == 0:
        said = printable("; ".join(restore.problems))
        warnings.warn(f"checkpoint.load left out what does not fit: {said}", stacklevel=3)
    return extra


def _agree(subject: str, runtime: Runtime, fields: Mapping[str, object], failure: Exception | None) -> None:
    try:
        agree(subject, fields, ranks=runtime.topology.ranks, failure=failure)
    except RuntimeError as error:
        for kind in (
            CheckpointError,
            FileExistsError,
        ):  # all ranks can then turn to another checkpoint, or another name
            if failure is None and f"failed with {kind.__name__}" in str(error):
                raise kind(str(error)) from None
        raise


@dataclass(frozen=True)
class _Job:
    """One checkpoint that is going to be written.

    Attributes:
        tensors: by key, what this rank offers: what is sharded, and from the first rank everything else.
    """

    path: Path
    writer: Writer
    tensors: dict[str, Tensor]
    keep_last: int | None


def _prepare(
    path: Path, runtime: Runtime, optimizer: ShardedOptimizer | None, extra: object, keep_last: int | None
) -> _Job:
    topology = runtime.topology
    rank = topology.control.rank
    path = path.absolute()
    fields: dict[str, Any] = {"path": str(path), "keep_last": keep_last}
    failure: Exception | None = None
    document: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    own: list[Any] = []
    try:
        _finish_pending(runtime)
        _check(runtime, optimizer)
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last must be a positive int or None, got {keep_last!r}")
        if path.name.startswith("."):
            raise ValueError(f"the name of a checkpoint must not start with a dot, got {path.name!r}")
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists already; a checkpoint is never overwritten")
        document, encoder = encode_all(runtime, optimizer, extra, rank=rank)
        fields |= encoder.digests
        own = encoder.own
        tensors = {
            key: tensor
            for key, tensor in encoder.tensors.items()
            if rank == 0 or isinstance(tensor, DTensor) or key.startswith(f"rank{rank}.")
        }
    except Exception as error:
        failure = error
    try:
        _agree("checkpoint.save", runtime, fields, failure)
    except ValueError as error:
        if failure is not None or " extra" not in str(error):
            raise
        raise ValueError(f"{error}. Mark what belongs to one rank with layerzero.checkpoint.per_rank") from None
    writer = Writer(
        path,
        rank=rank,
        topology={"data_parallel": topology.data_parallel, "zero3_size": topology.zero3_size},
        document=document,
        own=own,
        sequence=partial(next_sequence, path.parent),
    )
    return _Job(path, writer, tensors, keep_last)


def _write_staged(job: _Job, staging: Staging) -> None:
    assert staging.group is not None
    try:
        _write(job, staging.group)
    except _LostEachOther:
        staging.group = None  # the next save makes another one
        raise


class _LostEachOther(CheckpointError):
    """The ranks' talk has failed: one of them is gone or late."""


def _write(job: _Job, group: dist.ProcessGroup) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = dist.get_rank(group) == 0
    try:
        write_tensors(job.tensors, storage_writer=job.writer, planner=planner, process_group=group)
    except CheckpointException as error:
        if first:
            job.writer.discard()
        raise _readable("written", job.path, error) from None
    except RuntimeError as error:  # the ranks' talk; what is in the partial folder may still be written to
        raise _LostEachOther(f"{job.path} could not be written: ranks have lost each other: {error}") from error
    if first:
        try:
            tidy(job.path, job.keep_last)
        except OSError as error:  # the new checkpoint is there, and the other ranks go on
            warnings.warn(f"keep_last={job.keep_last}: an old checkpoint could not be removed: {error}", stacklevel=2)


def _check(runtime: Runtime, optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(f"optimizer must come from layerzero.shard_optimizer, got {type(optimizer).__name__}")
    if optimizer is not None and optimizer not in runtime.optimizers:
        raise ValueError("the optimizer belongs to another model")
    if View.FULL in runtime.views:
        raise RuntimeError("a checkpoint inside layerzero.unsharded; leave the context first")


def _readable(done: str, path: PathLike, error: CheckpointException) -> Exception:
    if taken := [failure for failure, _ in error.failures.values() if isinstance(failure, NameTaken)]:
        return FileExistsError(*taken[0].args)
    said = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
    return CheckpointError(f"{os.fspath(path)} could not be {done}: {said}")
