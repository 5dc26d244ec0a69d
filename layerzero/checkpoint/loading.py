"""Load a checkpoint from any source of tensors.

A checkpoint is complete when its folder, with an intact manifest, has been renamed to its final name; see [Note: Atomic
publication] in publish.py. A load compares names, shapes and dtypes and verifies the checksums of all bytes that
it needs before it changes anything; see [Note: Checks before changes] in restore.py.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from layerzero import ShardedOptimizer
from layerzero.checkpoint.background import finish_pending, rank_tree
from layerzero.checkpoint.contents import CheckpointContents, num_saving_ranks
from layerzero.checkpoint.errors import CheckpointError, escape_unprintable
from layerzero.checkpoint.json_codec import has_own_values
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.rank_agreement import PathLike, agreed, check_checkpoint_arguments
from layerzero.checkpoint.rank_tree import RankTree
from layerzero.checkpoint.restore import NO_OPTIMIZER_STATE, RestorePlan
from layerzero.checkpoint.safetensors_files import CheckpointFiles
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.extend import LayerZeroState, ParamView, get_state, has_peers

_LOG = logging.getLogger("layerzero")
_OTHER_MODEL = "Use a separate folder for each model"
_LOAD_MODEL_ONLY = "Load the model without an optimizer"
_OTHER_OPTIMIZER = (
    "Create the optimizer with the same class, parameter groups and options as in the run that saved the checkpoint, "
    "or load the model without an optimizer"
)


def load(path: PathLike, model: nn.Module, optimizer: ShardedOptimizer | None = None, *, strict: bool = True) -> Any:
    """Load a checkpoint into a sharded model and optimizer.

    Each rank reads its own rows and verifies their checksums before it changes the model or the optimizer. All
    data-parallel ranks must call this function. The number of ranks, `zero3_size` and the units may differ from those
    in the run that saved the checkpoint.

    Args:
        path: path of a checkpoint that :func:`save` or :func:`save_async` wrote, for instance the result of
            :func:`latest`.
        optimizer: optimizer to load. If None, the optimizer state in the checkpoint is skipped. Each parameter group
            receives the hyperparameters that its parameters were saved with, even if the parameters were grouped
            differently.
        strict: if False, load the tensors that match and warn about the others.

    Returns:
        The saved ``extra``. Its tensors are on the CPU. Its sharded tensors have the sharding of the current model.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: the checkpoint is incomplete or damaged; the message names the file. The model and the
            optimizer are unchanged, unless a file was verified once but could not be read a second time. The message
            then reports this failure, and the model and the optimizer cannot be used until a load succeeds.
        ValueError: names, shapes or dtypes do not match; the message lists or counts the mismatches. The model and the
            optimizer are unchanged.

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
    rank_local_names: RankLocalNames | None = None,
) -> PreparedLoad:
    """Read and check a checkpoint for :func:`load`, without changing the model or the optimizer.

    The function raises an error unless the checks pass on all ranks.

    Args:
        rank_local_names: names of the parameters that differ between ranks, as passed to
            :func:`save_with_rank_local_names`. None if there are none.
    """

    def open_source() -> Source:
        return CheckpointFiles(Manifest.read(path))

    return prepare_load_from(
        open_source, os.fspath(path), model, optimizer, strict=strict, rank_local_names=rank_local_names
    )


class Source(Protocol):
    """Protocol of an opened checkpoint from which a load reads tensors.

    Attributes:
        contents: names, shapes and dtypes of all tensors, and all other values.
        fingerprint: value that is the same on all ranks if they have opened the same checkpoint.
        twice: whether :meth:`reread` is supported.
    """

    contents: CheckpointContents
    fingerprint: object
    twice: bool

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        """Fill the `tensors` whose keys are not in `in_place`; :meth:`reread` fills the others.

        A source with checksums verifies all `tensors`. All ranks must call this method.
        """

    def reread(self) -> None:
        """Fill the tensors that :meth:`read` only verified, because their keys were in its argument `in_place`."""


def prepare_load_from(
    open_source: Callable[[], Source],
    path: str,
    model: nn.Module,
    optimizer: ShardedOptimizer | None,
    *,
    strict: bool,
    rank_local_names: RankLocalNames | None = None,
) -> PreparedLoad:
    """Prepare a load from any source, as :func:`prepare_load` does for a checkpoint.

    See [Note: Checks before changes] in restore.py.

    Args:
        open_source: function that opens the checkpoint on this rank.
        path: name of the checkpoint in messages.
    """
    lz_state = get_state(model)
    model_ranks = lz_state.ranks
    source: Source | None = None
    restore: RestorePlan | None = None
    with agreed("checkpoint.load", lz_state, {"with an optimizer": optimizer is not None, "strict": strict}):
        finish_pending(lz_state)
        check_checkpoint_arguments(lz_state, optimizer)
        if ParamView.EMA in lz_state.status.active_views:
            raise RuntimeError(
                "a checkpoint cannot be loaded inside EMA.swapped(), because the end of the context would overwrite "
                "the loaded weights. Leave the context first"
            )
    tree = rank_tree(lz_state) if has_peers(model_ranks.ranks) else None
    with agreed("checkpoint.load", lz_state, fields := dict[str, Any](), tree):
        source = open_source()
        fields["files"] = source.fingerprint
        ranks = num_saving_ranks(source.contents.topology)
        rank = model_ranks.rank if ranks == model_ranks.size else None
        if rank is None and model_ranks.rank == 0 and has_own_values(source.contents.document["extra"]):
            _LOG.warning(
                "%s was saved by %s ranks and is loaded by %s ranks. Values in `extra` that were wrapped in per_rank "
                "are loaded as None",
                *(path, ranks, model_ranks.size),
            )
        restore = RestorePlan(
            lz_state, optimizer, source.contents, rank=rank, twice=source.twice, rank_local_names=rank_local_names
        )
        if restore.problems and strict:
            raise ValueError(escape_unprintable(_mismatch_message(path, optimizer, restore)))
    assert source is not None and restore is not None
    with agreed("checkpoint.load", lz_state, tree=tree):
        source.read(restore.tensors, restore.in_place)
        if tied_problems := restore.tied_weight_problems():
            raise ValueError(escape_unprintable("; ".join(tied_problems)))
    return PreparedLoad(lz_state, optimizer, source, restore, path, tree)


def _mismatch_message(path: str, optimizer: ShardedOptimizer | None, restore: RestorePlan) -> str:
    if restore.only_optimizer_differs:
        subject = "the optimizer"
        advice = _LOAD_MODEL_ONLY if NO_OPTIMIZER_STATE in restore.problems else _OTHER_OPTIMIZER
    else:
        subject, advice = "the model" if optimizer is None else "the model or the optimizer", _OTHER_MODEL
    return (
        f"{path} does not match {subject}: {restore.summary()}. {advice}. Pass strict=False to load only the tensors "
        "that match"
    )


@dataclass(frozen=True)
class PreparedLoad:
    """A load that has passed all checks but has not changed the model or the optimizer yet."""

    lz_state: LayerZeroState
    optimizer: ShardedOptimizer | None
    source: Source
    restore: RestorePlan
    path: str
    tree: RankTree | None

    def commit(self) -> Any:
        """Write the values into the model and the optimizer; return ``extra``.

        All data-parallel ranks must call this method. After a failure, the model and the optimizer may be partly
        loaded.
        """
        lz_state, optimizer, restore = self.lz_state, self.optimizer, self.restore
        extra: Any = None
        with agreed("checkpoint.load", lz_state, tree=self.tree):
            extra = restore.restore_extra_states()  # a module's set_extra_state may fail on this rank only
        previous_errors = lz_state.status.load_error, None if optimizer is None else optimizer.load_error
        message = escape_unprintable(
            f"a load of {self.path} has failed halfway, and the model and the optimizer are partly loaded. Load this "
            "or another checkpoint before you continue"
        )
        self._set_load_errors(message, message)
        with agreed("checkpoint.load", lz_state, tree=self.tree):
            try:
                self.source.reread()
            except Exception as error:
                raise CheckpointError(
                    f"{error}. The first read of this file succeeded, but the second failed: {message}"
                ) from error
        restore.commit()
        self._set_load_errors(
            *(previous_errors if restore.problems else (None, None))
        )  # skipped tensors may be invalid
        if restore.problems and lz_state.ranks.is_first:
            summary = escape_unprintable(restore.summary())
            warnings.warn(f"checkpoint.load skipped the entries that do not match: {summary}", stacklevel=3)
        return extra

    def _set_load_errors(self, of_model: str | None, of_optimizer: str | None) -> None:
        self.lz_state.status.load_error = of_model
        if self.optimizer is not None:
            self.optimizer.load_error = of_optimizer
