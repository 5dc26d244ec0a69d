"""Represent a handle's parameter in its gathered, sharded and master forms, and find it by parameter object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.dtensor.local_shard import LocalShard
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.dtensor.stale_parameter import current
from layerzero.utils.torch_compat import will_execute


@dataclass(eq=False)
class ManagedParam:
    """One parameter of a handle: its modules, and its gathered, sharded and master forms."""

    name: str  # fully qualified name; the first one if the parameter is tied
    module_refs: tuple[tuple[dict[str, Any], str], ...]  # (module._parameters, attribute); several if tied
    gathered: nn.Parameter  # the full parameter in compute dtype, a view of the full buffer
    sharded: nn.Parameter  # the sharded parameter that the user sees, a RowShardedTensor
    master: Tensor  # this rank's rows, a plain tensor in master dtype, updated by the optimizer
    spec: RowShardSpec
    shard_slice: slice  # this rank's elements inside the ZeRO-1 shard
    original_id: int  # id of the parameter that `sharded` has replaced, for tables that are keyed by id
    accumulate_grad: Node  # autograd node that accumulates the gradient of `gathered`
    shown: nn.Parameter = field(init=False)  # parameter that modules use in passes: `gathered`, or in full precision
    # `master` as the parameter that optimizers step. It has the attributes of `sharded`, also those that are set later.
    master_param: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.gathered
        self.master_param = nn.Parameter(self.master, requires_grad=self.sharded.requires_grad)
        self.master_param.__dict__ = self.sharded.__dict__

    def change_rows(self, master: Tensor, spec: RowShardSpec, local: slice, tracker: MutationTracker) -> None:
        """Replace the master rows that this rank stores. The sharded parameter remains the same object.

        Args:
            master: rows in master dtype, ``[rows, *rest]``.
            spec: rows of the parameter on each rank.
            local: slice of the ZeRO-1 shard that contains the rows.
            tracker: object that records the user's writes to the rows.
        """
        self.master, self.spec, self.shard_slice = master, spec, local
        self.master_param.data = master
        assert isinstance(self.sharded, RowShardedTensor)
        self.sharded._local_tensor = LocalShard(master, spec, tracker)

    def close(self) -> None:
        """Drop the gathered parameter, which a reference to the sharded parameter would otherwise keep alive."""
        self.gathered = self.shown = nn.Parameter(torch.empty(0), requires_grad=False)
        del self.accumulate_grad
        assert isinstance(self.sharded, RowShardedTensor)
        self.sharded.gathered = self.sharded.grad = None

    def will_receive_grad(self) -> bool:
        """Return whether the current backward pass will produce a gradient of the gathered parameter."""
        try:
            return bool(will_execute(self.accumulate_grad))
        except RuntimeError:  # autograd.grad of the gathered parameter itself
            return True


class ParamRegistry:
    """Registry that finds managed parameters by parameter object, for example by a parameter of an optimizer.

    Args:
        members: managed parameters of the model, by name.
        ignored: parameters of the model that are not sharded.
    """

    def __init__(self, members: Mapping[str, ManagedParam], ignored: Iterable[nn.Parameter]) -> None:
        self._member_of_id = {
            key: member
            for member in members.values()
            for key in (member.original_id, id(member.sharded), id(member.master_param))
        }
        self._ignored = WeakIdKeyDictionary(dict.fromkeys(ignored))

    def managed_param(self, parameter: Tensor | int) -> ManagedParam | None:
        """Return the managed parameter of `parameter`, or None if it is not managed.

        Args:
            parameter: a sharded, stale or master parameter, or the id of one.
        """
        if isinstance(parameter, int):
            return self._member_of_id.get(parameter)
        member = self._member_of_id.get(id(parameter))
        is_same = member is not None and (parameter is member.master_param or current(parameter) is member.sharded)
        return member if is_same else None

    def is_ignored(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is a parameter of the model that `shard_model` left unsharded."""
        return parameter in self._ignored
