"""One step of an optimizer, taken in parts: its parameters one after the other, though it counts one step.

An optimizer keeps numbers for itself: a count of steps in its groups, a rate in its attributes. Each part would change
them again, and how many parts there are differs from rank to rank. So each part begins with the numbers of before the
step, and what remains is what a part leaves in which none of those parameters had a gradient, as on a rank that owns
none. Whether an optimizer can be stepped so is found out: see compatibility_trial.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Turn", "step_param_by_param"]

Turn = tuple[MutableMapping[str, Any], Tensor]  # a group of the optimizer, and a parameter to step with its settings

_MOST_ELEMENTS = 64  # of a tensor that is a number or some; others are data


def step_param_by_param(optimizer: Optimizer, take_step: Callable[[], Any], turns: Iterable[Turn]) -> None:
    """Step what has a gradient now, then parameter by parameter what `turns` bring.

    Args:
        take_step: steps `optimizer`.
        turns: each parameter is whole and has its gradient from when it comes until the next one is asked for.
    """
    before = _Numbers(optimizer)
    take_step()
    after = _Numbers(optimizer)
    groups = optimizer.param_groups
    try:
        for group, parameter in turns:
            before.put_back()
            listed, group["params"] = group["params"], [parameter]
            optimizer.param_groups = [group]  # type: ignore[list-item]
            try:
                take_step()
            finally:
                group["params"], optimizer.param_groups = listed, groups
    finally:
        after.put_back()


class _Numbers:
    """What an optimizer keeps for itself, beside the state of its parameters, as it is now."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        tables = [*optimizer.param_groups, vars(optimizer), *(t for t in own.values() if isinstance(t, dict))]
        self._kept = [(table, {k: _copy(v) for k, v in table.items() if _is_number(v)}) for table in tables]

    @torch.no_grad()
    def put_back(self) -> None:
        for table, kept in self._kept:
            for key in [key for key, value in table.items() if _is_number(value) and key not in kept]:
                del table[key]
            for key, value in kept.items():
                _put(table, key, value)


def _put(table: MutableMapping[str, Any], key: str, value: Any) -> None:
    now = table.get(key)
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        now.copy_(value)  # it stays the tensor that others hold
    else:
        table[key] = _copy(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= _MOST_ELEMENTS and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str, complex))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
