"""Collect the state that a save writes, and check that all ranks agree on the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.rank_agreement import agree_or_raise
from layerzero.checkpoint.state_names import RankLocalNames, encode_all, trained_rows
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer
from layerzero.utils.nonfinite import format_first_names, nonfinite_names

__all__ = ["CollectedState", "collect", "require_equal_state", "topology_entry"]


class CollectedState(NamedTuple):
    """The state that one rank saves.

    Attributes:
        document: nested values. They are the same on all ranks, except for entries that only the first rank writes.
        tensors: by key, the tensors that this rank writes. These are the rank's shards and the unsharded tensors that
            no other rank writes.
        own: this rank's :class:`PerRank` values, and its own entries of :class:`MergeableValue`.
        digests: by path, digests of all values that must be the same on all ranks.
        bad: names of tensors with non-finite values.
    """

    document: dict[str, Any]
    tensors: dict[str, Tensor]
    own: list[Any]
    digests: dict[str, str]
    bad: list[str]


def collect(
    lz_state: LayerZeroState,
    optimizer: ShardedOptimizer | None,
    extra: object,
    *,
    require_finite: bool = True,
    rank_local_names: RankLocalNames | None = None,
) -> CollectedState:
    """Collect the parts of the model, the optimizer and `extra` that this rank saves.

    Args:
        rank_local_names: names under which ranks have different parameters. If None, all ranks have the same
            parameters.

    Raises:
        RuntimeError: an earlier load failed after it had changed the model or the optimizer.
        TypeError: a value cannot be saved.
        CheckpointError: `require_finite` is True, and a tensor has non-finite values.
    """
    if load_error := lz_state.status.load_error or (optimizer.load_error if optimizer is not None else None):
        raise RuntimeError(load_error)
    rank = lz_state.ranks.rank
    document, encoder = encode_all(lz_state, optimizer, extra, rank=rank, rank_local_names=rank_local_names)
    tensors = {
        key: tensor
        for key, tensor in encoder.tensors.items()
        if (encoder.tells if key in encoder.apart else rank == 0)
        or isinstance(tensor, DTensor)
        or key.startswith(f"rank{rank}.")
    }
    nonfinite = nonfinite_names(trained_rows(lz_state, encoder.tensors))
    if nonfinite and require_finite:
        raise CheckpointError(
            f"non-finite values in {format_first_names(nonfinite)} on rank {dist.get_rank()}. Nothing is saved, and "
            "existing checkpoints are kept. Load the last checkpoint, or pass require_finite=False to save anyway"
        )
    return CollectedState(document, tensors, encoder.own, encoder.digests, nonfinite)


def require_equal_state(
    subject: str, lz_state: LayerZeroState, fields: Mapping[str, object], failure: Exception | None
) -> None:
    """Raise an error on all ranks unless all ranks save the same state.

    Raises:
        ValueError: the ranks save different states.
        Exception: `failure`, if it is not None.
        RuntimeError: another rank failed or did not take part. If callers handle the class of that rank's error, such
            as CheckpointError, an error of that class is raised instead.
    """
    try:
        agree_or_raise(subject, lz_state, fields, failure)
    except ValueError as error:
        if failure is not None or " extra" not in str(error):
            raise
        raise ValueError(f"{error}. Mark values that differ between ranks with layerzero.checkpoint.per_rank") from None


def topology_entry(lz_state: LayerZeroState) -> dict[str, int]:
    """Return the ``topology`` entry of a checkpoint; ``ranks`` is omitted if it equals ``data_parallel``."""
    mesh_info, model_ranks = lz_state.mesh_info, lz_state.ranks
    further = {} if model_ranks.size == mesh_info.data_parallel else {"ranks": model_ranks.size}
    return {"data_parallel": mesh_info.data_parallel, "zero3_size": mesh_info.zero3_size, **further}
