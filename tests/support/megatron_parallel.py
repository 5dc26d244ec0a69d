# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Parts of a GPT that Megatron has only for GPUs: context-parallel attention and sequence-parallel norms."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn


def layer_spec(config: Any) -> Any:
    """Return the spec of Megatron's own layer; with context parallelism, use GatheringAttention.

    Megatron's local attention raises with context parallelism.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    if config.context_parallel_size > 1:
        spec.submodules.self_attention.submodules.core_attention = GatheringAttention
    return spec


def on_this_rank(*batch: Tensor) -> tuple[Tensor, ...]:
    """Return this context-parallel rank's piece of full sequences, [batch, sequence]."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    settings: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # since Megatron-Core 0.19
        settings["is_hybrid_cp"] = False
    named = {str(index): whole.contiguous() for index, whole in enumerate(batch)}
    pieces = get_batch_on_this_cp_rank(named, **settings)
    return tuple(pieces[name] for name in named)


def sum_over_pieces(*values: Tensor) -> list[Tensor]:
    """Return the sums over the context-parallel ranks, without gradients."""
    from megatron.core import parallel_state

    sums = torch.stack([value.detach().clone() for value in values])
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return list(sums)


class GatheringAttention(nn.Module):
    """Causal attention to the keys and values of all context-parallel ranks; replaces ``core_attention``."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **unused_too: Any) -> Tensor:
        """Map [sequence / cp, batch, heads, channels] each to [sequence / cp, batch, heads * channels]."""
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        key, value = _Gather.apply(key, group), _Gather.apply(value, group)
        pieces = [_positions(rank, group.size(), len(query)) for rank in range(group.size())]
        hidden = torch.cat(pieces) > pieces[group.rank()][:, None]
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key).float() * self.scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype)
        return torch.einsum("bhqk,kbhc->qbhc", weights, value).flatten(2)


def _positions(rank: int, ranks: int, length: int) -> Tensor:
    """Return the positions of a rank's piece in the sequence, which is split into 2 * ranks chunks.

    The piece has one chunk of the first half and one of the second half.
    """
    chunk = torch.arange(length // 2)
    return torch.cat([chunk + index * len(chunk) for index in (rank, 2 * ranks - 1 - rank)])


class _Gather(torch.autograd.Function):
    """All-gather along dim 0; in the backward each piece gets the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(pieces, piece.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class SequenceParallelNorm(nn.LayerNorm):
    """Layer norm that marks its parameters for sequence parallelism, which Megatron's wrapper of torch's refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @classmethod
    def used(cls) -> contextlib.AbstractContextManager[Any]:
        """Use this class instead of Megatron's wrapper inside the context."""
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return mock.patch.object(WrappedTorchNorm, "__new__", lambda _, *args, **kwargs: cls(*args, **kwargs))
