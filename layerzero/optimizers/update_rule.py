"""Define who updates which rows: each rank its own rows, or an owner the full parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from layerzero.comm.observers import StepObserver
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.engine.managed_param import ManagedParam


class FullParam(ABC):
    """Parameter that one rank, its owner, updates in full. The owner has all of the parameter's optimizer state.

    Attributes:
        member: the sharded parameter.
        is_owned_by_this_rank: True on the owner.
    """

    member: ManagedParam

    @property
    @abstractmethod
    def is_owned_by_this_rank(self) -> bool: ...

    @property
    def master(self) -> Tensor:
        """Entry in the group during a step: this rank's rows, or the full parameter during the owner's step."""
        return self.member.master_param

    @abstractmethod
    def global_state_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the global shape of a state tensor whose shape on the owner is `shape`, or None if it has none."""

    @abstractmethod
    def state_spec(self, shape: Sequence[int]) -> RowShardSpec:
        """Return the sharding of a state tensor of global shape `shape` whose rows are all on the owner."""


class UpdateRule(StepObserver):
    """Rule of element-wise optimizers: each rank updates its rows. A derived class lets owners update full parameters.

    Attributes:
        owned: parameters that an owner updates in full, keyed by the id of the sharded parameter.
    """

    hears_collectives = False

    def __init__(self) -> None:
        self.owned: Mapping[int, FullParam] = {}

    def add_group(self, group: MutableMapping[str, Any], members: Sequence[ManagedParam]) -> None:
        """Prepare the updates of a new parameter group with the sharded parameters `members`. All ranks must call."""

    def step(self, take_step: Callable[[], Any]) -> None:
        """Update all parameters of the optimizer. `take_step` steps the wrapped optimizer on masters."""
        take_step()

    def add_remote_owner_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, keyed by parameter name, with the state of parameters that other ranks own.

        If there are owned parameters, every rank must call this method.
        """
        return dict(state)
