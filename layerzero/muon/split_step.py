"""Split an optimizer step into several parts that together count as a single step.

An optimizer may store scalars outside of its parameter state, such as a step count in its groups or a learning rate in
its attributes. Each part of a step would change these scalars again, and the number of parts differs between ranks.
Therefore each part starts with the scalars from before the step. After the step, the optimizer has the scalars from the
first part. The first part steps all parameters except those in `turns`, as on a rank that owns no parameters. The
compatibility trial decides whether an optimizer supports such a split; see compatibility_trial.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Turn = tuple[MutableMapping[str, Any], Tensor]  # (group of the optimizer, parameter to step with the group's settings)

_MOST_ELEMENTS = 64  # tensors with more elements are data and do not count as scalars


def step_param_by_param(optimizer: Optimizer, take_step: Callable[[], Any], turns: Iterable[Turn]) -> None:
    """Step all parameters that have a gradient at the time of the call, then the parameters in `turns` one by one.

    Args:
        take_step: function that steps `optimizer`.
        turns: iterator over pairs of a group and a parameter. The parameter is full and has its gradient until the
            iterator advances.
    """
    before = _NumbersSnapshot(optimizer)
    take_step()
    after = _NumbersSnapshot(optimizer)
    groups = optimizer.param_groups
    try:
        for group, parameter in turns:
            before.put_back()
            params, group["params"] = group["params"], [parameter]
            optimizer.param_groups = [group]  # type: ignore[list-item]
            try:
                take_step()
            finally:
                group["params"], optimizer.param_groups = params, groups
    finally:
        after.put_back()


class _NumbersSnapshot:
    """Copy of the scalars that an optimizer stores outside of its parameter state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = {
            id(table): (table, {k: _copy_number(v) for k, v in table.items() if _is_number(v)})
            for table in self._tables()
        }

    def _tables(self) -> list[Any]:
        """Return the dicts that may contain such scalars. The first step may add dicts to the state."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        nested = [value for key, value in state.items() if not isinstance(key, Tensor) and isinstance(value, dict)]
        return [*groups, vars(self._optimizer), state, *nested]

    @torch.no_grad()
    def put_back(self) -> None:
        for table in self._tables():
            _, numbers = self._kept.get(id(table), (table, {}))
            for key in [key for key, value in table.items() if _is_number(value) and key not in numbers]:
                del table[key]
            for key, value in numbers.items():
                _restore_value(table, key, value)


def _restore_value(table: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    current = table.get(key)
    if (
        isinstance(current, Tensor)
        and isinstance(value, Tensor)
        and current.shape == value.shape
        and current.dtype == value.dtype
    ):
        current.copy_(value)  # in place, because other code may refer to the tensor
    else:
        table[key] = _copy_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= _MOST_ELEMENTS and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, (int, float)) for each in value)
    return value is None or isinstance(value, (int, float, str, complex))


def _copy_number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
