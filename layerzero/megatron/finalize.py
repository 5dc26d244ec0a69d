"""Replace Megatron's ``config.finalize_model_grads_func``, which schedules call after the last backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.extend import get_state, local_rows
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.default_units import language_model
from layerzero.megatron.parallel_groups import ProcessGroups


class FinalizeGradients:
    """Callable that completes the data-parallel reduction, and then sums gradients over model-parallel ranks.

    Only gradient shards are reduced over model-parallel ranks. With D data-parallel ranks, each rank therefore sends
    1/D of the bytes that it would send with Megatron's own function.
    """

    def __init__(self, config: Any, groups: ProcessGroups) -> None:
        self.config = config
        self.groups = groups

    @torch.no_grad()
    def __call__(
        self,
        model: Sequence[ShardedChunk],
        num_tokens: Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Make the gradients final, as ``megatron.core.distributed.finalize_model_grads`` does.

        Args:
            model: chunks of this rank.
            num_tokens: number of tokens on this rank. Gradients are divided by the total over data-parallel ranks. If
                None, gradients are not divided.
            pg_collection: unused. The process groups of the chunks are used instead.
            force_all_reduce: must be False.

        Raises:
            ValueError: `force_all_reduce` is True.
        """
        for chunk in model:
            chunk.finish_grad_sync(force_all_reduce)
        self._sum_over_tensor_ranks(model)
        self._sum_tied_embeddings(model)
        if getattr(self.config, "num_moe_experts", None):
            from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors  # noqa: PLC0415

            reset_model_temporary_tensors(self.config, list(model))
        if num_tokens is not None:
            self._divide_by(num_tokens, model)

    def _sum_over_tensor_ranks(self, model: Sequence[ShardedChunk]) -> None:
        """Sum or average the gradients of parameters that are replicated over tensor-parallel ranks.

        Each tensor-parallel rank uses such a parameter for only a part of the sequence or of the heads.
        """
        size = self.groups.tensor.size()
        if size == 1:
            return
        summed, averaged = [], []
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    continue
                if getattr(parameter, "average_gradients_across_tp_domain", False):
                    averaged.append(_gradient_rows(parameter))
                elif self._is_partial(name, parameter):
                    summed.append(_gradient_rows(parameter))
        for gradients, factor in ((summed, 1.0), (averaged, 1.0 / size)):
            _all_reduce(gradients, self.groups.tensor, factor)

    def _is_partial(self, name: str, parameter: nn.Parameter) -> bool:
        if self.config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
            return True
        return bool(self.config.qk_layernorm) and ("q_layernorm" in name or "k_layernorm" in name)

    def _sum_tied_embeddings(self, model: Sequence[ShardedChunk]) -> None:
        weight = tied_weight(model, self.groups)
        if weight is not None and weight.requires_grad:
            assert self.groups.embedding is not None
            _all_reduce([_gradient_rows(weight)], self.groups.embedding, 1.0)

    def _divide_by(self, num_tokens: Tensor, model: Sequence[ShardedChunk]) -> None:
        """Divide gradients by the total number of tokens in all micro-batches on all data-parallel ranks.

        The last stage broadcasts `num_tokens`, because only this stage has counted the tokens.
        """
        last = dist.get_process_group_ranks(self.groups.pipeline)[-1]
        dist.broadcast(num_tokens, src=last, group=self.groups.pipeline)
        dist.all_reduce(num_tokens, group=self.groups.zero1)
        if num_tokens > 0:
            for chunk in model:
                chunk.scale_gradients(1.0 / num_tokens)


def tied_weight(model: Sequence[ShardedChunk], groups: ProcessGroups) -> nn.Parameter | None:
    """Return this rank's copy of the word embedding that the first and last stages share.

    The result is None if the stages share no embedding, or if this rank's stage holds no copy. The gradient shards of
    the two copies are summed rank by rank. Therefore both copies must be sharded in the same way. To ensure this, each
    copy must be the only parameter of its unit.

    Raises:
        ValueError: the copy is not the only parameter of its unit.
    """
    if groups.embedding is None or groups.embedding.size() == 1:
        return None
    chunk = model[0] if groups.is_first_stage else model[-1]
    language: Any = language_model(chunk.module)
    if language is None or not getattr(language, "share_embeddings_and_output_weights", False):
        return None
    weight: nn.Parameter | None = language.shared_embedding_or_output_weight()
    if weight is None:
        return None
    lz_state = get_state(chunk)
    member = lz_state.parameters.managed_param(weight)
    holder = next((handle for handle in lz_state.handles if member in handle.members), None)
    if member is None or holder is None or len(holder.members) > 1:
        raise ValueError(
            "the word embedding that the first and the last pipeline stage share must be the only parameter of its "
            "unit on both stages. Make embedding.word_embeddings and output_layer units"
        )
    return weight


def _gradient_rows(parameter: nn.Parameter) -> Tensor:
    """Return this rank's rows of a parameter's final gradient, as a tensor that the caller may modify in place.

    If no data-parallel rank used the parameter, set its gradient to zeros first.
    """
    if parameter.grad is None:  # another model-parallel rank may have a gradient, and the collective needs all ranks
        parameter.grad = torch.zeros_like(parameter)
    return local_rows(parameter.grad)


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup, factor: float) -> None:
    tensors = [part for part in tensors if part.numel()]
    if not tensors:
        return
    flat = torch.cat([part.reshape(-1) for part in tensors])
    dist.all_reduce(flat, group=group)
    if factor != 1.0:
        flat.mul_(factor)
    for part, total in zip(tensors, torch.split(flat, [part.numel() for part in tensors]), strict=True):
        part.copy_(total.view(part.shape))
