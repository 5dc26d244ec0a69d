"""Find the positions of one rank's parameters in the full model, from ``sharded_state_dict`` of Megatron's modules."""

from __future__ import annotations

import re
from typing import Any

from layerzero.checkpoint.json_codec import MergeableValue
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.engine.hooks import get_state
from layerzero.megatron.chunk import ShardedChunk

__all__ = ["global_layout_of", "layer_of", "module_name"]

_LAYER = re.compile(r".*?\blayers\.\d+\.")


def module_name(name: str) -> str:
    """Return a parameter's name in Megatron's model, without the ``module.`` prefixes that wrappers add."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def global_layout_of(chunk: ShardedChunk, rank_local_names: RankLocalNames) -> dict[str, Any] | MergeableValue:
    """Return each parameter's name, shape and row ranges in the full model.

    Args:
        chunk: model chunk that holds the parameters.
        rank_local_names: checkpoint names of rank-local experts.

    Returns:
        ``{name: {"name": ..., "shape": [...], "pieces": [[first, stop, [offset, ...]], ...]}}``. Rows ``first:stop`` of
        the parameter start at ``offset`` in the full tensor. Except for rank-local experts, the result is the same on
        all data-parallel ranks. If the modules do not provide the positions, the result is ``{"because": reason}``.
    """
    if not hasattr(chunk.module, "sharded_state_dict"):
        return {"because": f"{type(chunk.module).__name__} has no sharded_state_dict, which returns the positions"}
    members = get_state(chunk).members.values()
    # Store each layer under a separate key, which contains the layer's index in the full model.
    metadata = {"non_homogeneous_layers": True}
    try:
        from layerzero.megatron.sharded_model_state import global_params  # noqa: PLC0415

        _, params = global_params(chunk.module, members, metadata, of_all_ranks=True)
    except Exception as error:  # the save continues, because only an export needs the positions
        return {"because": f"{type(error).__name__}: {error}"}
    common: dict[str, Any] = {}
    rank_local: dict[str, Any] = {}
    for member in members:
        if member.name not in params:
            return {"because": f"its modules do not return the position of {member.name!r}"}
        global_param, dims = params[member.name], len(member.spec.shape)
        stored = rank_local_names.stored(member.name)
        name = module_name(stored)
        # A copy of the word embeddings on the last stage has the key of the original. The keys of other parameters may
        # contain the names of other modules. Therefore only the layer number in these keys is used.
        copied = getattr(member.gathered, "shared", False)
        (rank_local if rank_local_names.is_rank_local(stored) else common)[name] = {
            "name": global_param.key if copied else layer_of(global_param.key) + name.removeprefix(layer_of(name)),
            "shape": list(global_param.pieces[0][1].global_shape[-dims:]),
            "pieces": [
                [row_range.start, row_range.stop, list(piece.global_offset[-dims:])]
                for row_range, piece in global_param.pieces
            ],
        }
    return MergeableValue(common, rank_local)


def layer_of(name: str) -> str:
    """Return the prefix of a name up to the layer number, such as ``decoder.layers.3.``; "" if there is no number."""
    match = _LAYER.match(name)
    return match[0] if match else ""
