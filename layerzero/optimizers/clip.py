"""Clip gradients by their norm over all parameters on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.comm.collectives import all_reduce_group
from layerzero.dtensor.local_shard import plain
from layerzero.engine.hooks import get_states
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.wrapped_optimizer import record_writes
from layerzero.utils.torch_compat import foreach_mul_, foreach_norm


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most `max_norm`. Return the norm before scaling.

    The norm equals the norm of the full model in one process. Gradients accumulated inside ``no_sync`` are reduced
    first. All ranks must call this function. Gradients of parameters in `ignored_params` and `ignored_modules` are
    neither counted nor scaled.

    Args:
        model: a sharded model, or a module that contains sharded models. In the second case, the norm is taken over
            all of these models.
        max_norm: maximum allowed norm, at least 0.
        norm_type: p in the p-norm, which may be ``float("inf")``.
        extra_groups: process groups that contain ranks with other parts of the same model (tensor or pipeline
            parallel).
        error_if_nonfinite: if True and the norm is NaN or infinite, raise RuntimeError on all ranks before scaling.

    Returns:
        The norm before scaling, as a 0-dim tensor on the device, which is the same on all ranks. Its dtype is fp32, or
        fp64 if any parameter is fp64.

    Example::

        norm = layerzero.clip_grad_norm_(model, 1.0)
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative or NaN, got {max_norm}. To compute only the norm, pass inf")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    lz_states = get_states(model)
    if "" not in lz_states:
        _refuse_unsharded_gradients(model, lz_states)
    for lz_state in lz_states.values():
        lz_state.scheduler.complete_gradients(without_backward=lz_state.gradients.has_run_no_backward)
    total = _total_norm(lz_states.values(), norm_type, extra_groups)
    is_fp64 = any(m.master.dtype == torch.float64 for lz_state in lz_states.values() for m in lz_state.members.values())
    total = total.to(torch.float64 if is_fp64 else torch.float32)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot "
            "be clipped. Skip this step, or pass error_if_nonfinite=False"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for lz_state in lz_states.values():
        _scale_gradients(lz_state, coefficient)
    return total


def _scale_gradients(lz_state: LayerZeroState, coefficient: Tensor) -> None:
    gradients = [m.sharded.grad for m in lz_state.members.values() if m.sharded.grad is not None]
    if shards := [shard for gradient in gradients if (shard := plain(gradient)).numel()]:
        record_writes(gradients)
        foreach_mul_(shards, coefficient.to(shards[0].device))
    lz_state.gradients.scale_residuals(coefficient)


def _total_norm(
    lz_states: Iterable[LayerZeroState], norm_type: float, extra_groups: Sequence[dist.ProcessGroup]
) -> Tensor:
    """Return the norm of all gradients of all models, as a 0-dim fp64 tensor."""
    infinite = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    sent, *other_sums = [_reduce_norm(lz_state, norm_type, op) for lz_state in lz_states]
    for other_sum in other_sums:
        sent = torch.maximum(sent, other_sum) if infinite else sent + other_sum
    for group in extra_groups:
        all_reduce_group(sent, op, group)
    return sent.view(torch.float64) if infinite else sent.pow(1.0 / norm_type)


def _reduce_norm(lz_state: LayerZeroState, norm_type: float, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Return the sum of ``abs(g) ** norm_type`` over all gradients of one model, on all of its ranks.

    For the infinity norm, return the largest absolute value.

    Returns:
        0-dim fp64 tensor. For the infinity norm, the bits of the fp64 value, as a 0-dim int64 tensor.
    """
    gradients = [
        (m.spec.model_parallel, plain(m.sharded.grad)) for m in lz_state.members.values() if m.sharded.grad is not None
    ]
    # Count copies on model-parallel axes once.
    counted = [
        shard
        for model_parallel, shard in gradients
        if shard.numel() and (model_parallel is None or model_parallel.is_primary_copy)
    ]
    # With Offload(optimizer=True), shards are in host memory, but communicators need tensors on the device.
    device = lz_state.mesh_info.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        norms = torch.stack([norm.double() for norm in foreach_norm(counted, norm_type)])
        total = (norms.max().abs() if math.isinf(norm_type) else norms.pow(norm_type).sum()).to(device)
    # A backend's MAX may drop a NaN. The bits of non-negative floats, read as integers, have the same order as the
    # floats, and NaN is last.
    sent = total.view(torch.int64) if math.isinf(norm_type) else total
    lz_state.ranks.all_reduce(sent, op)
    return sent


def _refuse_unsharded_gradients(model: nn.Module, lz_states: Mapping[str, LayerZeroState]) -> None:
    """Raise ValueError if a parameter in `model`, but outside its sharded submodules, has a gradient.

    layerzero does not average the gradients of such parameters.
    """
    sharded_ids = {id(parameter) for lz_state in lz_states.values() for parameter in lz_state.model.parameters()}
    outside_names = [name for name, p in model.named_parameters() if id(p) not in sharded_ids and p.grad is not None]
    if outside_names:
        raise ValueError(
            f"clip_grad_norm_: parameter {outside_names[0]!r} ({len(outside_names)} like it) has a gradient but is not "
            f"in the sharded models {', '.join(map(repr, lz_states))}, so its gradient is not averaged over the ranks. "
            "Shard this parameter, or call clip_grad_norm_ for each sharded model"
        )
