"""Collect the state that a save writes, and check that all ranks agree on the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero import ShardedOptimizer
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import Encoder, to_subclass_entry
from layerzero.checkpoint.state_names import RankLocalNames, StateNames, rename_params
from layerzero.extend import LayerZeroState, format_first_names, local_rows, nonfinite_names, torch_compat


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
    document, encoder = _encode_all(lz_state, optimizer, extra, rank=rank, rank_local_names=rank_local_names)
    tensors = {key: tensor for key, tensor in encoder.tensors.items() if key in encoder.written}
    nonfinite = nonfinite_names(_trained_rows(lz_state, encoder.tensors))
    if nonfinite and require_finite:
        raise CheckpointError(
            f"non-finite values in {format_first_names(nonfinite)} on rank {dist.get_rank()}. Nothing is saved, and "
            "existing checkpoints are kept. Load the last checkpoint, or pass require_finite=False to save anyway"
        )
    return CollectedState(document, tensors, encoder.own, encoder.digests, nonfinite)


def topology_entry(lz_state: LayerZeroState) -> dict[str, int]:
    """Return the ``topology`` entry of a checkpoint; ``ranks`` is omitted if it equals ``data_parallel``."""
    mesh_info, model_ranks = lz_state.mesh_info, lz_state.ranks
    further = {} if model_ranks.size == mesh_info.data_parallel else {"ranks": model_ranks.size}
    return {"data_parallel": mesh_info.data_parallel, "zero3_size": mesh_info.zero3_size, **further}


def _encode_all(
    lz_state: LayerZeroState,
    optimizer: ShardedOptimizer | None,
    extra: object,
    *,
    rank: int,
    rank_local_names: RankLocalNames | None = None,
) -> tuple[dict[str, Any], Encoder]:
    """Return the document of a checkpoint, and the encoder that has collected the tensors of the document.

    Raises:
        TypeError: a value cannot be saved; the message names the value.
    """
    names = StateNames(lz_state, rank_local_names)
    if names.odd:
        raise TypeError(
            f"the model's state_dict() has {', '.join(names.odd)}, which is no parameter, no persistent buffer and no "
            "extra state of a module. A load could not restore an entry that a hook adds. Remove the hook"
        )
    encoder = Encoder(rank, names.of_rows, names.rank_local_names.is_rank_local, names.rank_local_names.tells)
    stepped: dict[str, Any] | None = None
    if optimizer is not None:
        by_name, shared = optimizer.state_dict_by_name(), optimizer.shared_state()
        by_name["state"] = {key: values for key, values in by_name["state"].items() if key not in shared}
        state, groups = rename_params(by_name, names.to_stored)
        _check_state(names, state)
        groups = [{**group, "params": names.rank_local_names.split_names(group["params"])} for group in groups]
        stepped = {
            "class": type(optimizer.inner).__name__,
            "state": names.rank_local_names.split_values(state),
            "param_groups": groups,
            **({"shared_state": shared} if shared else {}),
        }
    values = {
        n: to_subclass_entry(n, v) if isinstance(names.targets[n], Tensor) else v for n, v in names.entries.items()
    }
    document = {
        "model": encoder.encode(names.rank_local_names.split_values(values), "model"),
        "optimizer": None if stepped is None else encoder.encode(stepped, "optimizer"),
        "extra": encoder.encode(extra, "extra"),
    }
    return document, encoder


def _trained_rows(lz_state: LayerZeroState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's rows of the `tensors` that are trained parameters or optimizer state, by key."""
    frozen = {id(member.sharded) for member in lz_state.members.values() if not member.sharded.requires_grad}
    return {
        key: local_rows(tensor.detach())
        for key, tensor in tensors.items()
        if isinstance(tensor, DTensor) and id(tensor) not in frozen and key.startswith(("model.", "optimizer."))
    }


def _check_state(names: StateNames, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise TypeError for unsharded state other than scalars.

    Only the first rank's copy would be saved, although ranks may have different values.
    """
    for name, values in state.items():
        for key, value in values.items() if name in names.members else ():
            for leaf in torch_compat.tree_leaves(value):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.ndim:
                    raise TypeError(
                        f"optimizer.state.{name}.{key} cannot be saved, because its shape {list(leaf.shape)} is "
                        "neither that of its parameter nor that of a scalar"
                    )
