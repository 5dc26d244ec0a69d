"""Check for NaN and infinite gradients before a step. If there is such a gradient, all ranks raise an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from layerzero.dtensor.local_shard import plain
from layerzero.megatron.parallel_groups import ProcessGroups, all_gather_object
from layerzero.reliability.local_gradient_check import nonfinite_text

__all__ = ["refuse_nonfinite"]


def refuse_nonfinite(chunks: Iterable[Any], groups: ProcessGroups) -> None:
    """Raise an error on all ranks of the model if any rank has a final gradient that is NaN or infinite.

    All ranks must call this function.

    Raises:
        RuntimeError: a final gradient is not finite. The message names the ranks and the parameters.
    """
    chunks = list(chunks)
    rank = dist.get_rank()
    own_messages = [
        f"rank {rank}: {text}"
        for chunk in chunks
        if chunk.own_gradients
        for text in chunk.own_gradients.nonfinite_messages()
    ]
    final = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None and not torch.isfinite(plain(parameter.grad)).all():
                final.append(name)
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
