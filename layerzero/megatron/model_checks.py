"""Compute norms of the full model, compare the weights of replicas, and refuse gradients that are not finite."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.extend import get_state, local_rows, torch_compat
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.parallel_groups import ProcessGroups, all_gather_object
from layerzero.reliability import nonfinite_text


def is_counted(parameter: Tensor, groups: ProcessGroups) -> bool:
    """Return whether this rank's rows of a parameter count in sums over all ranks of the model.

    Copies that another rank counts are excluded. These are word embeddings shared with another pipeline stage, and,
    except on the first tensor-parallel rank, parameters that are replicated over tensor-parallel ranks.
    """
    if getattr(parameter, "shared", False):
        return False
    return bool(getattr(parameter, "tensor_model_parallel", False)) or dist.get_rank(groups.tensor) == 0


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements of plain tensors on this rank, as a 0-dim fp32 tensor."""
    if not (tensors := [part for part in tensors if part.numel()]):
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([norm.float() for norm in torch_compat.foreach_norm(tensors)]).square().sum()


def reduce_over_model(value: Tensor, groups: ProcessGroups, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce `value` in place over data-parallel ranks, then over model-parallel ranks, and return `value`."""
    for group in (groups.zero1, groups.model):
        dist.all_reduce(value, op=op, group=group)
    return value


@torch.no_grad()
def params_norm(model: ShardedChunk | Sequence[ShardedChunk], force_create_fp32_copy: bool = False) -> float:
    """Return the 2-norm of all masters in the full model, for ``--log-params-norm``.

    All ranks must call this function.
    """
    chunks = [model] if isinstance(model, ShardedChunk) else list(model)
    groups, device = chunks[0].groups, get_state(chunks[0]).mesh_info.device
    counted = [local_rows(p) for chunk in chunks for p in chunk.parameters() if is_counted(p, groups)]
    return math.sqrt(reduce_over_model(sum_of_squares(counted, device), groups).item())


@torch.no_grad()
def replicas_agree(model: Sequence[ShardedChunk], cross_check: bool = False) -> bool:
    """Return whether the compute weights of all replicas are bitwise equal. All ranks must call this function.

    This implements ``--check-weight-hash-across-dp-replicas-interval``. Each rank hashes its ZeRO-3 shards. Ranks of
    different replicas with the same shard must have equal hashes.
    """
    digests: dict[tuple[Any, ...], Any] = {}  # by chunk index, ranks of the mesh, ZeRO-3 size and ZeRO-3 rank
    for index, chunk in enumerate(model):
        chunk.start_param_sync()
        for handle in get_state(chunk).handles:
            grid = handle.mesh_info.grid
            shard = (index, handle.mesh_info.ranks, grid.zero3_size, grid.zero3_rank)
            digest = digests.setdefault(shard, hashlib.sha1(usedforsecurity=False))
            digest.update(handle.weights.read_zero3().cpu().view(torch.uint8).numpy().tobytes())
    own_digests = {(shard, digest.hexdigest()) for shard, digest in digests.items()}
    all_digests = set().union(*all_gather_object(model[0].groups, own_digests))
    return len(all_digests) == len({shard for shard, _ in all_digests})


def refuse_nonfinite(chunks: Iterable[ShardedChunk], groups: ProcessGroups) -> None:
    """Raise an error on all ranks of the model if any rank has a final gradient that is NaN or infinite.

    All ranks must call this function.

    Raises:
        RuntimeError: a final gradient is not finite. The message names the ranks and the parameters.
    """
    own_messages: list[str] = []
    final: list[str] = []
    for chunk in chunks:
        if chunk.own_gradients is not None:
            own_messages += [f"rank {dist.get_rank()}: {text}" for text in chunk.own_gradients.nonfinite_messages()]
        final += [name for name, rows in chunk.gradient_rows().items() if not torch.isfinite(rows).all()]
    entries = all_gather_object(groups, (own_messages, final))
    if not any(final for _, final in entries):
        return
    details = nonfinite_text(
        [text for messages, _ in entries for text in messages], [name for _, final in entries for name in final]
    )
    raise RuntimeError(
        f"layerzero.megatron: gradients are not finite, and no parameter has been updated: {details}. To skip this "
        "batch, call zero_grad_buffer() of all chunks. To disable the check, pass check_for_nan_in_grad=False to wrap"
    )
