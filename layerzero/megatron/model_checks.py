"""Compute the norm of all masters, and compare the weights of replicas, for Megatron's training loop."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.dtensor.local_shard import plain
from layerzero.engine.hooks import get_state
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.parallel_groups import ProcessGroups

__all__ = ["is_counted", "params_norm", "replicas_agree"]


def is_counted(parameter: Tensor, groups: ProcessGroups) -> bool:
    """Return whether this rank's rows of a parameter count in sums over all ranks of the model.

    Copies that another rank counts are excluded. These are word embeddings shared with another pipeline stage, and,
    except on the first tensor-parallel rank, parameters that are replicated over tensor-parallel ranks.
    """
    if getattr(parameter, "shared", False):
        return False
    return bool(getattr(parameter, "tensor_model_parallel", False)) or dist.get_rank(groups.tensor) == 0


@torch.no_grad()
def params_norm(model: ShardedChunk | Sequence[ShardedChunk], force_create_fp32_copy: bool = False) -> float:
    """Return the 2-norm of all masters in the full model, for ``--log-params-norm``.

    All ranks must call this function.
    """
    chunks = [model] if isinstance(model, ShardedChunk) else list(model)
    groups, device = chunks[0].groups, get_state(chunks[0]).mesh_info.device
    squares = torch.zeros((), dtype=torch.float32, device=device)
    for chunk in chunks:
        rows = [plain(p) for p in chunk.parameters() if is_counted(p, groups)]
        if rows := [part for part in rows if part.numel()]:
            squares += torch.stack([norm.float() for norm in torch._foreach_norm(rows)]).square().sum()
    for group in (groups.zero1, groups.model):
        dist.all_reduce(squares, group=group)
    return math.sqrt(squares.item())


@torch.no_grad()
def replicas_agree(model: Sequence[ShardedChunk], cross_check: bool = False) -> bool:
    """Return whether the compute weights of all replicas are bitwise equal. All ranks must call this function.

    This implements ``--check-weight-hash-across-dp-replicas-interval``. Each rank hashes its ZeRO-3 shards. Ranks of
    different replicas with the same shard must have equal hashes.
    """
    groups, device = model[0].groups, get_state(model[0]).mesh_info.device
    digests: dict[tuple[Any, ...], Any] = {}  # by chunk index, ranks of the mesh, and ZeRO-3 rank
    for index, chunk in enumerate(model):
        chunk.start_param_sync()
        for handle in get_state(chunk).handles:
            shard = (index, handle.mesh_info.ranks, handle.mesh_info.grid.zero3_rank)
            digest = digests.setdefault(shard, hashlib.sha1(usedforsecurity=False))
            digest.update(handle.weights.read_zero3().cpu().view(torch.uint8).numpy().tobytes())
    own_digests = {(shard, digest.hexdigest()) for shard, digest in digests.items()}
    gathered: list[Any] = [None] * groups.zero1.size()
    dist.all_gather_object(gathered, own_digests, group=groups.zero1)
    all_digests = set().union(*gathered)
    is_equal = len(all_digests) == len({shard for shard, _ in all_digests})
    verdict = torch.tensor([float(is_equal)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=groups.model)
    return bool(verdict.item())
