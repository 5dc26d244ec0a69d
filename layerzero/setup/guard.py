"""Refuses optimizers that would train nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.engine.runtime import Runtime

__all__ = ["guard_optimizers"]


def guard_optimizers(runtime: Runtime) -> None:
    """Make every optimizer that steps this model's parameters go through `shard_optimizer`.

    The hook does nothing once the runtime is gone. Sharded parameters stepped on their own would miss the reduction of
    accumulated gradients and the refresh; parameters from before sharding are no longer the model's.
    """
    # A weak reference: a global hook must not keep a model alive.
    weak = weakref.ref(runtime)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        runtime = weak()
        if runtime is None or optimizer in runtime.optimizers:
            return
        if any(optimizer.param_groups is sharded.param_groups for sharded in runtime.optimizers):
            return  # an optimizer around a sharded one, which it steps; what else it does is seen by the parameters
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                member = runtime.parameters.member_of(parameter)
                if member is not None:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} steps {member.name!r}, which layerzero has sharded; "
                        "use optimizer = layerzero.shard_optimizer(optimizer, model)"
                    )

    # Never removed: a model may be collected while torch walks its hooks, which must not change then. What stays behind
    # is this function with a dead reference.
    register_optimizer_step_pre_hook(check)
