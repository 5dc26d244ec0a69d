"""One parameter of a handle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.dtensor.row_shard_spec import MutationTracker, RowShardSpec
from layerzero.dtensor.sharded_tensor import LocalShard, RowShardedTensor

__all__ = ["ManagedParam", "ParamRegistry"]


@dataclass(eq=False)
class ManagedParam:
    """One parameter of a handle: where the model holds it, and its stand-ins."""

    name: str  # fully qualified, the first of its names
    module_refs: tuple[tuple[dict[str, Any], str], ...]  # every (parameters of a module, attribute); several when tied
    gathered: nn.Parameter  # the whole parameter, compute dtype; a view of the full buffer
    sharded: nn.Parameter  # the sharded parameter that the user sees, a RowShardedTensor
    master: Tensor  # this rank's rows, plain, master dtype: what the optimizer updates
    spec: RowShardSpec
    shard_slice: slice  # this rank's elements inside the ZeRO-1 shard
    accumulate_grad: Node  # autograd's node that delivers the gradient of the leaf
    evaluated: nn.Parameter | None = None  # inside layerzero.full_precision: computes in place of the leaf

    def recut(self, master: Tensor, span: RowShardSpec, local: slice, watch: MutationTracker) -> None:
        """Have other rows on this rank; the sharded parameter stays the object that users hold."""
        self.master, self.spec, self.shard_slice = master, span, local
        assert isinstance(self.sharded, RowShardedTensor)
        self.sharded._local_tensor = LocalShard(master, span, watch)

    def close(self) -> None:
        """Drop the gathered parameter, which an optimizer would keep alive."""
        self.gathered = nn.Parameter(torch.empty(0), requires_grad=False)
        del self.accumulate_grad
        assert isinstance(self.sharded, RowShardedTensor)
        self.sharded.gathered = self.sharded.grad = None

    def will_receive_grad(self) -> bool:
        """The backward that runs now delivers a gradient of the whole parameter."""
        try:
            return bool(torch._C._will_engine_execute_node(self.accumulate_grad))  # type: ignore[attr-defined]
        except RuntimeError:  # autograd.grad for the leaf itself
            return True


class ParamRegistry:
    """Whose a parameter is that somebody holds: an optimizer, for instance.

    Args:
        members: of the model, by name.
        ignored: parameters of it that were left alone.
    """

    def __init__(self, members: Mapping[str, ManagedParam], ignored: Iterable[nn.Parameter]) -> None:
        self._members = members
        self._member_of = WeakIdKeyDictionary({member.sharded: member for member in members.values()})
        self._origins = WeakIdKeyDictionary()  # parameter before sharding -> member
        self._ignored = WeakIdKeyDictionary(dict.fromkeys(ignored))

    def remember_origins(self, origins: Iterable[tuple[nn.Parameter, str]]) -> None:
        """Know the parameters that the model had before sharding, and their names: an optimizer may hold them."""
        for parameter, name in origins:
            self._origins[parameter] = self._members[name]

    def managed_param(self, parameter: Tensor) -> ManagedParam | None:
        """Of a sharded parameter, or of one that the model had before sharding; None if it has neither."""
        member: ManagedParam | None = self._member_of.get(parameter)  # type: ignore[no-untyped-call]
        if member is None:
            member = self._origins.get(parameter)  # type: ignore[no-untyped-call]
        return member

    def is_ignored(self, parameter: Tensor) -> bool:
        """The model had it when it was sharded, and shard_model was told to leave it alone."""
        return parameter in self._ignored
