"""View of the wrapped optimizer's state, keyed by sharded parameter instead of by master."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.optimizers.torch_state_dict import first_state

__all__ = ["ParamKeyedState"]


class ParamKeyedState(MutableMapping[Tensor, Any]):
    """View of the inner optimizer's state, keyed by the sharded parameters that the groups list between steps.

    Iteration, ``len`` and ``in`` skip parameters without state. A lookup of a trainable parameter that the optimizer
    has not stepped yet returns a read-only mapping with the parameter's initial state, as in
    ``ShardedOptimizer.state_dict``.

    Args:
        inner: the wrapped optimizer.
        master_of: mapping from the id of a sharded parameter to its master.
        owned: ids of the parameters whose state only their owner rank stores.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, master_of: Mapping[int, Tensor], owned: Collection[int] = ()
    ) -> None:
        self._inner = inner
        self._master_of = master_of
        self._owned = owned

    def _master(self, parameter: Tensor) -> Tensor:
        return self._master_of[id(parameter)]

    def __getitem__(self, parameter: Tensor) -> Any:
        master = self._master(parameter)
        if master in self._inner.state or not parameter.requires_grad:
            return self._inner.state[master]
        if id(parameter) in self._owned:
            raise KeyError(
                f"the optimizer has no state for a parameter of shape {list(parameter.shape)} on this rank, because "
                "the state of a full parameter is on its owner. Call optimizer.state_dict_by_name() on every rank"
            )
        groups = self._inner.param_groups
        group = next(group for group in groups if any(parameter is other for other in group["params"]))
        # To load a flattened state, torch's set_state_dict reads the names of the state's entries here. The mapping is
        # read-only, because it is not stored, and writes to it would be lost without an error.
        return MappingProxyType(first_state(self._inner, group, master))

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
        # Hazard: if the view were false before the first step, torch's get_state_dict and set_state_dict would step the
        # optimizer with zero gradients. See [Note: torch's get_state_dict].
        return True
