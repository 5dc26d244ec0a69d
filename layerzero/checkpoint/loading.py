"""Loading a checkpoint from any source of tensors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from layerzero.checkpoint.atomic_files import CheckpointError, Manifest
from layerzero.checkpoint.contents_checks import num_saving_ranks
from layerzero.checkpoint.dcp_storage import CheckpointContents
from layerzero.checkpoint.json_codec import has_own_values
from layerzero.checkpoint.rank_agreement import PathLike, RankLostError, agree_or_raise, check_usable
from layerzero.checkpoint.restore import RestorePlan
from layerzero.checkpoint.safe_json import printable
from layerzero.checkpoint.safetensors_reader import CheckpointFiles
from layerzero.checkpoint.staging import finish_pending
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.engine.hooks import get_state
from layerzero.engine.param_view import ParamView
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["PreparedLoad", "Source", "load", "prepare_from", "prepare_load"]

_LOG = logging.getLogger("layerzero")
_WAY_OUT = "If it is of another model, use another folder for this one; strict=False loads the tensors that fit"


def load(path: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None = None, *, strict: bool = True) -> Any:
    """Load a checkpoint into a sharded model and optimizer.

    Before anything is changed, each rank reads its own rows and verifies their checksums. All data-parallel ranks must
    call this. The number of ranks, `zero3_size` and units may differ from those of the save.

    Args:
        path: from :func:`save`, :func:`save_async`, or :func:`latest`.
        optimizer: None skips the optimizer state in the checkpoint. Each parameter group takes the hyperparameters
            that its parameters were saved with, even if the parameters were grouped differently.
        strict: False loads the tensors that fit and warns about the others.

    Returns:
        The saved ``extra``. Its tensors are on the CPU; sharded ones are sharded like the current model.

    Raises:
        FileNotFoundError: nothing exists at `path`.
        CheckpointError: the checkpoint is incomplete or damaged; the message names the file. Nothing has been changed,
            unless a file was read and verified once but could not be read again. In that case the message says so, and
            model and optimizer cannot be used until a load succeeds.
        ValueError: names, shapes or dtypes do not match; the message lists or counts the mismatches. Nothing has been
            changed.

    Example::

        path = layerzero.checkpoint.latest("runs/1")
        extra = layerzero.checkpoint.load(path, model, optimizer) if path else {"step": 0}
    """
    return prepare_load(path, model, optimizer, strict=strict).commit()


def prepare_load(
    path: PathLike,
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    strict: bool = True,
    apart: RankLocalNames | None = None,
) -> PreparedLoad:
    """Read and check a checkpoint for :func:`load`, without changing model or optimizer.

    The function returns only if the checks pass on all ranks.

    Args:
        apart: the same names as for the save; None: all ranks have the same parameters.
    """
    path = Path(path)

    def opened(runtime: LayerZeroState) -> Source:
        return CheckpointFiles(Manifest.read(path))

    return prepare_from(opened, os.fspath(path), model, optimizer, strict=strict, apart=apart)


class Source(Protocol):
    """A checkpoint that a rank has opened.

    Attributes:
        fingerprint: equal on all ranks if all have opened the same checkpoint.
        twice: whether :meth:`reread` is supported.
    """

    contents: CheckpointContents
    fingerprint: object
    twice: bool

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        """Fill `tensors` except those in `in_place`, which :meth:`reread` fills. All ranks must call this."""

    def reread(self) -> None:
        """Fill the tensors whose keys were in `in_place`."""


def prepare_from(
    opened: Callable[[LayerZeroState], Source],
    path: str,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    *,
    strict: bool,
    apart: RankLocalNames | None = None,
) -> PreparedLoad:
    """Prepare a load from any source, as :func:`prepare_load` does from a checkpoint.

    See [Note: Nothing changes before all is known] in restore.py.
    """
    runtime = get_state(model)
    model_ranks = runtime.ranks
    fields: dict[str, Any] = {"with an optimizer": optimizer is not None, "strict": strict}
    failure: Exception | None = None
    source: Source | None = None
    restore: RestorePlan | None = None
    try:
        finish_pending(runtime)
        check_usable(runtime, optimizer)
        if ParamView.EMA in runtime.status.active_views:
            raise RuntimeError("a load inside EMA.swapped() would be undone; leave the context first")
        source = opened(runtime)
        fields["files"] = source.fingerprint
        ranks = num_saving_ranks(source.contents.topology)
        rank = model_ranks.rank if ranks == model_ranks.size else None
        if rank is None and model_ranks.rank == 0 and has_own_values(source.contents.document["extra"]):
            _LOG.warning(
                "%s was saved by %s ranks and is loaded by %s: what per_rank marks in extra comes back as None",
                *(path, ranks, model_ranks.size),
            )
        restore = RestorePlan(runtime, optimizer, source.contents, rank=rank, twice=source.twice, apart=apart)
        if restore.problems and strict:
            raise ValueError(printable(f"{path} does not fit: {restore.summary()}. {_WAY_OUT}"))
    except Exception as error:
        failure = error
    agree_or_raise("checkpoint.load", runtime, fields, failure)
    assert source is not None and restore is not None
    try:
        source.read(restore.tensors, restore.in_place)
        if twins := restore.optimizer_problems():
            raise ValueError(printable("; ".join(twins)))
    except RankLostError:
        raise
    except Exception as error:
        failure = error
    agree_or_raise("checkpoint.load", runtime, {}, failure)
    return PreparedLoad(runtime, optimizer, source, restore, path)


@dataclass(frozen=True)
class PreparedLoad:
    """A load that has passed all checks and has not changed the model or the optimizer yet."""

    runtime: LayerZeroState
    optimizer: ShardedOptimizer | None
    source: Source
    restore: RestorePlan
    path: str

    def commit(self) -> Any:
        """Write the values into model and optimizer; return ``extra``. All data-parallel ranks must call this."""
        extra = _commit(self.runtime, self.optimizer, self.source, self.restore, self.path)
        if self.restore.problems and self.runtime.ranks.is_first:
            said = printable(self.restore.summary())
            warnings.warn(f"checkpoint.load left out what does not fit: {said}", stacklevel=3)
        return extra


def _commit(
    runtime: LayerZeroState, optimizer: ShardedOptimizer | None, source: Source, restore: RestorePlan, path: str
) -> Any:
    """Write the values into model and optimizer; return ``extra``. A failure may leave both partly loaded."""
    extra: Any = None
    failure: Exception | None = None
    try:
        extra = restore.prepare()
    except Exception as error:  # a module's set_extra_state may fail on this rank only
        failure = error
    agree_or_raise("checkpoint.load", runtime, {}, failure)
    torn = runtime.status.load_error, optimizer.load_error if optimizer is not None else None
    said = printable(
        f"a load of {path} has failed halfway, and the model and the optimizer hold a part of it; load this or another "
        "checkpoint before you go on"
    )
    _mark(runtime, optimizer, said, said)
    try:
        source.reread()
    except Exception as error:
        failure = CheckpointError(f"{error}. A moment ago it was right; now {said}")
        failure.__cause__ = error
    agree_or_raise("checkpoint.load", runtime, {}, failure)
    restore.commit()
    _mark(runtime, optimizer, *(torn if restore.problems else (None, None)))  # what was skipped may still be torn
    return extra


def _mark(
    runtime: LayerZeroState, optimizer: ShardedOptimizer | None, of_model: str | None, of_optimizer: str | None
) -> None:
    runtime.status.load_error = of_model
    if optimizer is not None:
        optimizer.load_error = of_optimizer
