"""Check that sharded parameters are updated only by the results of `shard_optimizer`."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.hooks import has_unfinished_units
from layerzero.engine.state import LayerZeroState

_ALL_STATES: weakref.WeakSet[LayerZeroState] = weakref.WeakSet()  # a global hook must not keep a model alive


def guard_optimizers(lz_state: LayerZeroState | None) -> None:
    """Make ``step()`` raise for optimizers over this model's parameters, except for results of `shard_optimizer`.

    It also raises for the optimizers that `shard_optimizer` has wrapped. Such a step would neither reduce accumulated
    gradients nor refresh compute weights. An optimizer that was built before `shard_model` would update tensors that
    the model no longer uses.

    Args:
        lz_state: state of the model, or None if the model is not complete; see ``layerzero.fully_shard``.
    """
    if lz_state is not None:
        _ALL_STATES.add(lz_state)
    _register_step_hook_once()


@functools.cache
def _register_step_hook_once() -> None:
    # One permanent hook serves all models in the process. A hook per model could be removed, when its model is garbage
    # collected, while torch iterates over its hooks.
    register_optimizer_step_pre_hook(_refuse_unsharded_step)


def _refuse_unsharded_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if has_unfinished_units():
        _refuse_unfinished_params(optimizer)
    for lz_state in list(_ALL_STATES):
        if lz_state.closed or optimizer in lz_state.optimizers:
            continue
        shares_groups = [each for each in lz_state.optimizers if each.param_groups is optimizer.param_groups]
        if shares_groups and all(getattr(each, "inner", None) is not optimizer for each in shares_groups):
            continue  # This optimizer wraps a sharded optimizer. The parameters detect its other writes.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                member = lz_state.parameters.managed_param(parameter)
                # During a sharded step the groups hold masters, and a custom step may call a base class that has hooks.
                if member is not None and parameter is not member.master_param:
                    raise _error(optimizer, member.name)


def _refuse_unfinished_params(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter, RowShardedTensor) and parameter._local_tensor.spec.mesh_info.groups.deferred:
            raise _error(optimizer, parameter._local_tensor.spec.name)


def _error(optimizer: torch.optim.Optimizer, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(optimizer).__name__}.step() would update parameter {name!r}, which layerzero has sharded. Call step() "
        "on the optimizer returned by layerzero.shard_optimizer(optimizer, model)"
    )
