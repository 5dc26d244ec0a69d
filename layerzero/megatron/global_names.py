"""Find the names and positions of one rank's parameters in the full model.

The positions come from ``sharded_state_dict`` of Megatron's modules. The names of expert-parallel parameters contain
each expert's index in the full model.
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from layerzero.checkpoint.extend import MergeableValue, RankLocalNames
from layerzero.extend import get_state, strip_wrapper_names
from layerzero.megatron.chunk import ShardedChunk

_LAYER = re.compile(r".*?\blayers\.\d+\.")
# Names inside a layer's experts: local_experts.3.linear_fc1.weight, or linear_fc1.weight3. A weight1 without a
# preceding module name belongs to all experts.
_NUMBER = re.compile(r"^(local_experts\.|(?:\w+\.)+(?:weight|bias))(\d+)(?=\.|$)")


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


def expert_names_of(chunk: ShardedChunk) -> RankLocalNames:
    """Return the checkpoint names of a chunk's rank-local experts, which differ between data-parallel ranks.

    Each name contains the index that the expert has within its layer in the full model. Therefore a checkpoint can be
    loaded with a different number of expert-parallel ranks.

    Raises:
        ValueError: a parameter belongs to several experts, or its name does not contain the index of its expert.
    """
    groups = chunk.groups
    if groups.expert_zero1 is None:
        return RankLocalNames.nothing()
    numbers = _expert_indices(chunk)
    num_experts = getattr(chunk.config, "num_moe_experts", None) or 0

    def split_name(name: str) -> tuple[str, re.Match[str], range] | None:
        """Split the name of an expert's parameter, which may start with ``module.``.

        Returns:
            The prefix before the experts' own names, a match of the rest of the name, and the indices of this rank's
            experts. None if the name does not belong to a parameter of a single expert.
        """
        for layer, local_experts in numbers.items():
            before, matched, suffix = name.partition(layer)
            if matched and not before.replace("module.", "") and (match := _NUMBER.match(suffix)):
                return before + layer, match, local_experts
        return None

    def stored(name: str) -> str:
        name = strip_wrapper_names(name)
        if (parts := split_name(name)) is None:
            return name
        prefix, match, local_experts = parts
        return f"{prefix}{match[1]}{local_experts[int(match[2])]}{match.string[match.end() :]}"

    def is_elsewhere(name: str) -> bool:
        parts = split_name(name)
        return parts is not None and int(parts[1][2]) in range(num_experts) and int(parts[1][2]) not in parts[2]

    for member in get_state(chunk).members.values():
        if member.spec.num_holders < groups.zero1.size() and split_name(strip_wrapper_names(member.name)) is None:
            raise ValueError(
                f"layerzero.megatron.save and load do not support {member.name!r}, because its name does not contain "
                "the index of its expert. Use Megatron's format torch_dist, with sharded_state_dict of chunks and "
                "optimizer"
            )
    return RankLocalNames(
        stored, lambda name: split_name(name) is not None, is_elsewhere, dist.get_rank(groups.expert_zero1) == 0
    )


def _expert_indices(chunk: ShardedChunk) -> dict[str, range]:
    """Return the indices of this rank's experts in each layer, keyed by the name prefix of the layer's experts.

    The prefixes do not contain the names of wrappers.
    """
    experts_by_prefix: dict[str, range] = {}
    for name, module in chunk.named_modules():
        local_experts: Any = getattr(module, "local_expert_indices", None)
        if local_experts and hasattr(module, "experts"):
            experts_by_prefix[f"{module_name(strip_wrapper_names(name))}.experts."] = range(
                local_experts[0], local_experts[-1] + 1
            )
    return experts_by_prefix
