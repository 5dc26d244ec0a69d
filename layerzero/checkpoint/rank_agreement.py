"""Check the arguments of saves and loads, and check that all ranks agree and raise the same kind of error."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

from layerzero import ShardedOptimizer
from layerzero.checkpoint.errors import CheckpointError, PathTakenError, RankLostError, UnsupportedFormatError
from layerzero.checkpoint.rank_tree import FILES, RankTree
from layerzero.extend import LayerZeroState, ParamView, require_equal, require_numpy

PathLike = str | os.PathLike[str]


# Classes of errors that callers handle.
_HANDLED = (
    CheckpointError,
    UnsupportedFormatError,
    FileExistsError,
    PathTakenError,
    FileNotFoundError,
    NotADirectoryError,
)


@contextmanager
def agreed(
    subject: str,
    lz_state: LayerZeroState,
    fields: Mapping[str, object] | None = None,
    tree: RankTree | None = None,
) -> Iterator[None]:
    """Run the body on all ranks, and raise an error on all ranks if the body failed on any rank or `fields` differ.

    The body may add entries to `fields`. In contrast to :func:`layerzero.extend.agreed`, all ranks raise an error of a
    class that callers handle.

    Args:
        tree: connections through which the ranks agree. If None, the ranks agree through the store.

    Raises:
        ValueError: `fields` differ between ranks.
        Exception: the error of the body.
        RankLostError: an exchange along the `tree` has failed at once, because a rank was interrupted or has ended.
        RuntimeError: another rank failed or did not take part. If callers handle the class of that rank's error, such
            as CheckpointError, an error of that class is raised instead.
    """
    failure: Exception | None = None
    try:
        with nullcontext() if tree is None else tree.failing_together():
            try:
                yield
            except RankLostError:
                raise
            except Exception as error:
                failure = error
        gather = None if tree is None else partial(tree.all_gather, FILES)
        require_equal(subject, dict(fields or {}), ranks=lz_state.ranks.ranks, failure=failure, gather=gather)
    except Exception as error:
        if tree is not None and tree.failure:  # this rank's own error may be another, but other ranks raise this one
            raise tree.error(f"{subject} has failed: ") from error
        if failure is not None or isinstance(error, RankLostError):
            raise
        if (handled := _error_for_callers(error)) is not None:
            raise handled from None
        raise


def _error_for_callers(error: Exception) -> Exception | None:
    """Return an error of a class that callers handle, or None if `error` is to be raised as it is."""
    if isinstance(error, ValueError) and " extra" in str(error):
        return ValueError(f"{error}. Mark values that differ between ranks with layerzero.checkpoint.per_rank")
    for kind in _HANDLED:  # so that all ranks can try another checkpoint or another path
        if isinstance(error, RuntimeError) and f"failed with {kind.__name__}:" in str(error):
            return kind(str(error))
    return None


def check_checkpoint_arguments(lz_state: LayerZeroState, optimizer: object) -> None:
    require_numpy("a checkpoint")
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        way_out = "Pass the optimizer that layerzero.shard_optimizer returned"
        if isinstance(optimizer, (list, tuple)):
            way_out = "Pass one optimizer (Muon, if there is one). The state_dict() of the others can be saved in extra"
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. {way_out}")
    if optimizer is not None and optimizer not in lz_state.optimizers:
        raise ValueError(
            "the optimizer belongs to another model. Pass the optimizer that layerzero.shard_optimizer returned for "
            "this model"
        )
    if ParamView.UNSHARDED in lz_state.status.active_views:
        raise RuntimeError("a checkpoint cannot be saved or loaded inside layerzero.unsharded. Leave the context first")
