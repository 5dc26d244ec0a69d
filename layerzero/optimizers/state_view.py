"""State of the wrapped optimizer, keyed by sharded parameter instead of master."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from layerzero.optimizers.torch_state_dict import asked_by_torch, first_state

__all__ = ["ParamKeyedState"]


class ParamKeyedState(MutableMapping[Tensor, dict[str, Any]]):
    """View of the inner optimizer's state, keyed by the sharded parameters that the groups list between steps."""

    def __init__(self, inner: torch.optim.Optimizer, master_of: Mapping[int, Tensor]) -> None:
        self._inner = inner
        self._master_of = master_of

    def _master(self, parameter: Tensor) -> Tensor:
        return self._master_of[id(parameter)]

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        inner, master = self._inner, self._master(parameter)
        if master not in inner.state and asked_by_torch():  # see [Note: torch's get_state_dict]
            group = next(g for g in inner.param_groups if any(parameter is other for other in g["params"]))
            return first_state(inner, group, master)
        values: dict[str, Any] = inner.state[master]
        return values

    def __setitem__(self, parameter: Tensor, values: dict[str, Any]) -> None:
        self._inner.state[self._master(parameter)] = values

    def __delitem__(self, parameter: Tensor) -> None:
        del self._inner.state[self._master(parameter)]

    def __contains__(self, parameter: object) -> bool:
        master = self._master_of.get(id(parameter))
        return master is not None and master in self._inner.state

    def __iter__(self) -> Iterator[Tensor]:
        return (p for group in self._inner.param_groups for p in group["params"] if p in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return (
            len(self) > 0 or asked_by_torch()
        )  # torch steps the optimizer if the state is empty; see [Note: torch's get_state_dict]
