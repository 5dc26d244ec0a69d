"""Experts that are others on other data-parallel ranks, by their numbers in the whole model."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist

from layerzero.checkpoint.state_names import RankLocalNames, plain_name
from layerzero.engine.hooks import get_state
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.global_layout import module_name

__all__ = ["experts_of"]

# In a layer's experts: local_experts.3.linear_fc1.weight, or linear_fc1.weight3; but a bare weight1 is of all of them.
_NUMBER = re.compile(r"^(local_experts\.|(?:\w+\.)+(?:weight|bias))(\d+)(?=\.|$)")


def experts_of(chunk: ShardedChunk) -> RankLocalNames:
    """What checkpoints call the experts of a chunk, where data-parallel ranks have different ones.

    A name has the number that the expert has in its layer of the whole model, so that its ranks may change.

    Raises:
        ValueError: a parameter is of several experts, or its name does not say of which.
    """
    groups = chunk.groups
    if groups.expert_zero1 is None:
        return RankLocalNames.nothing()
    numbers = _numbers(chunk)
    whole = getattr(chunk.config, "num_moe_experts", None) or 0

    def split(name: str) -> tuple[str, re.Match[str], range] | None:
        """Of a name without wrappers: what comes before the experts' own, that, and this rank's numbers."""
        for layer, own in numbers.items():
            before, inside, after = name.partition(layer)
            if inside and not before.replace("module.", "") and (found := _NUMBER.match(after)):
                return before + layer, found, own
        return None

    def stored(name: str) -> str:
        name = plain_name(name)
        if (parts := split(name)) is None:
            return name
        prefix, found, own = parts
        return f"{prefix}{found[1]}{own[int(found[2])]}{found.string[found.end() :]}"

    def is_elsewhere(name: str) -> bool:
        parts = split(name)
        return parts is not None and int(parts[1][2]) in range(whole) and int(parts[1][2]) not in parts[2]

    for member in get_state(chunk).members.values():
        if member.spec.holders < groups.zero1.size() and split(plain_name(member.name)) is None:
            raise ValueError(
                f"layerzero.megatron.save and load: the name of {member.name!r} does not say which of the experts it "
                "is of: use Megatron's own format, torch_dist, with sharded_state_dict of chunks and optimizer"
            )
    return RankLocalNames(
        stored, lambda name: split(name) is not None, is_elsewhere, dist.get_rank(groups.expert_zero1) == 0
    )


def _numbers(chunk: ShardedChunk) -> dict[str, range]:
    """By the beginning of their names, without wrappers: which of its layer's experts this rank has."""
    found: dict[str, range] = {}
    for name, module in chunk.named_modules():
        own: Any = getattr(module, "local_expert_indices", None)
        if own and hasattr(module, "experts"):
            found[f"{module_name(plain_name(name))}.experts."] = range(own[0], own[-1] + 1)
    return found
