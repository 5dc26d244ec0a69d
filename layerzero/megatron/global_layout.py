"""Where the parameters of a stage and tensor rank lie in the whole model, as Megatron's modules say it."""

from __future__ import annotations

import re
from typing import Any

from layerzero.checkpoint.json_codec import MergedValue
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.engine.hooks import get_state
from layerzero.megatron.chunk import ShardedChunk

__all__ = ["layer_of", "module_name", "places_of"]

_LAYER = re.compile(r".*?\blayers\.\d+\.")


def module_name(name: str) -> str:
    """The name that a parameter has in Megatron's model, without the wrappers around it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def places_of(chunk: ShardedChunk, apart: RankLocalNames) -> dict[str, Any] | MergedValue:
    """By name: the parameter's name in the whole model, its shape there, and the runs of rows that it has of it.

    Args:
        apart: what it calls experts that are others on other data-parallel ranks.

    Returns:
        ``{name: {"name": ..., "shape": [...], "pieces": [[first, stop, [offset, ...]], ...]}}``, plain data and, but
        for such experts, the same on all data-parallel ranks; ``{"because": text}`` where the modules do not say it.
    """
    if not hasattr(chunk.module, "sharded_state_dict"):
        return {"because": f"{type(chunk.module).__name__} has no sharded_state_dict that would say it"}
    members = get_state(chunk).members.values()
    # Each layer under a key of its own, with its number in the whole model.
    metadata = {"non_homogeneous_layers": True}
    try:
        from layerzero.megatron.sharded_model_state import global_params  # noqa: PLC0415

        _, found = global_params(chunk.module, members, metadata, of_all_ranks=True)
    except Exception as error:  # a save is none the worse for it
        return {"because": f"{type(error).__name__}: {error}"}
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for member in members:
        if member.name not in found:
            return {"because": f"its modules do not say where {member.name!r} belongs"}
        where, dims = found[member.name], len(member.spec.shape)
        stored = apart.stored(member.name)
        name = module_name(stored)
        # The last stage's copy of the word embeddings has their key; elsewhere keys may be named for other modules.
        copied = getattr(member.gathered, "shared", False)
        (own if apart.is_apart(stored) else common)[name] = {
            "name": where.key if copied else layer_of(where.key) + name.removeprefix(layer_of(name)),
            "shape": list(where.pieces[0][1].global_shape[-dims:]),
            "pieces": [[rows.start, rows.stop, list(piece.global_offset[-dims:])] for rows, piece in where.pieces],
        }
    return MergedValue(common, own)


def layer_of(name: str) -> str:
    """The beginning of a name or key that says which layer it is of; empty where it is of none."""
    found = _LAYER.match(name)
    return found[0] if found else ""
