"""Clipping by the norm over all parameters of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.engine.hooks import runtime_of
from layerzero.optimizers.inner import note_edits
from layerzero.tensors.sharded import plain

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most `max_norm`; return the norm before that.

    The norm is that of one process holding the whole model. Gradients that backwards inside ``no_sync`` have left
    unreduced are reduced first. All ranks must call this. Parameters in `ignored_params` and `ignored_modules` are left
    out: their gradients are neither counted nor scaled.

    Args:
        model: from :func:`layerzero.shard_model`.
        max_norm: largest norm to keep.
        norm_type: p of the p-norm, ``float("inf")`` included.
        extra_groups: further process groups that hold other parts of the same model (tensor or pipeline parallel).
        error_if_nonfinite: raise if the norm is NaN or infinite, on all ranks, before anything is scaled.

    Returns:
        0-dim fp32 tensor on the device, equal on all ranks.

    Example::

        norm = layerzero.clip_grad_norm_(model, 1.0)
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    runtime = runtime_of(model)
    runtime.complete_gradients()
    held = [(m.span.face, plain(m.parameter.grad)) for m in runtime.members.values() if m.parameter.grad is not None]
    held = [(face, shard) for face, shard in held if shard.numel()]
    shards = [shard for _, shard in held]
    counted = [shard for face, shard in held if face is None or face.counts]  # of copies on further axes, one does

    # With offload_optimizer, shards are in host memory; communicators take tensors of the device only.
    device = runtime.topology.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(counted, norm_type)])
        total = (norms.max().abs() if math.isinf(norm_type) else norms.pow(norm_type).sum()).to(device)
    # A backend's MAX may drop a NaN. As integers, the bits of non-negative floats keep their order, and NaN is on top.
    sent = total.view(torch.int32) if math.isinf(norm_type) else total
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    runtime.everyone.reduce(sent, op)
    for group in extra_groups:
        dist.all_reduce(sent, op=op, group=group)
    if not math.isinf(norm_type):
        total = total.pow(1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}")
    if shards:
        note_edits(m.parameter.grad for m in runtime.members.values() if m.parameter.grad is not None)
        torch._foreach_mul_(shards, torch.clamp(max_norm / (total + 1e-6), max=1.0).to(shards[0].device))
    return total
