"""View of the wrapped optimizer's state, keyed by sharded parameter instead of by master.

[Note: State of owned parameters]
Only the owner of a full parameter stores its state. All ranks see this state in the view, as sharded tensors whose rows
are all on the owner, so that reads and writes are the same operations on all ranks. The first access after a step
communicates the names and shapes of the owners' states. Therefore every rank must access the view of an optimizer that
has owned parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from layerzero.engine.managed_param import ManagedParam, ParamRegistry
from layerzero.optimizers.optimizer_state import Holder, to_public_value, to_stored_value
from layerzero.optimizers.update_rule import FullParam, UpdateRule
from layerzero.optimizers.wrapped_optimizer import MasterKeyedState

__all__ = ["ParamKeyedState"]


class ParamKeyedState(MutableMapping[Any, Any]):
    """View of the inner optimizer's state, keyed by the sharded parameters that the groups list between steps.

    Iteration, ``len`` and ``in`` skip parameters without state. Tensors of local rows are shown as sharded tensors, as
    in ``ShardedOptimizer.state_dict``. They share memory with the state. Keys that are not parameters are shown as is.

    Args:
        inner: the wrapped optimizer.
        members: managed parameters, by id of the sharded parameter. None: a parameter that is not sharded.
        parameters: managed parameters of the model.
        update_rule: has the parameters that owners update in full.
        new: state that torch's functions have created, by the id of the parameter; see [Note: torch's get_state_dict].
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        members: Mapping[int, ManagedParam | None],
        parameters: ParamRegistry,
        update_rule: UpdateRule,
        new: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._inner = inner
        self._members = members
        self._parameters = parameters
        self._update_rule = update_rule
        self._new = new
        self._received: Mapping[str, Any] | None = None  # states of owned parameters, until the state changes

    @property
    def stored(self) -> MasterKeyedState:
        """State of the inner optimizer. If a new state was assigned to the inner optimizer, it is keyed by master."""
        if not isinstance(self._inner.state, MasterKeyedState):
            assigned = self._inner.state
            self._inner.state = MasterKeyedState({}, type(self._inner).__name__)
            self.replace(assigned)
        return self._inner.state  # type: ignore[return-value]

    def replace(self, values: Mapping[Any, Any]) -> None:
        """Replace the state, as ``optimizer.state = values`` does in torch."""
        if values is not self:
            items = [(key, value) for key, value in values.items() if self._key_of(key) is not None]
            self.clear()
            self.update(items)

    def forget_owners(self) -> None:
        """Communicate the states of owned parameters again at the next access. All ranks must call this method."""
        self._received = None

    def stored_by_param(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield the parameters that have state on this rank, and their state with local rows."""
        stored = self.stored
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if values := stored.get(self._key_of(parameter)):  # a lookup may have created an empty dict
                    yield parameter, values

    def __getitem__(self, key: Any) -> Any:
        master, holder = self._key_of(key), self.holder_of(key)
        if id(key) in self._new:
            return self._new[id(key)]  # to load a flattened state, torch's set_state_dict reads the keys
        if isinstance(holder, FullParam) and key not in self and key.requires_grad:
            raise KeyError(
                f"the optimizer has no state for a parameter of shape {list(key.shape)} on this rank, because "
                "the state of a full parameter is on its owner. Call optimizer.state_dict_by_name() on every rank"
            )
        if isinstance(holder, FullParam) and key in self and master not in self.stored:
            return _show(self._owned_elsewhere()[holder.member.name], holder)
        return _show(self.stored[master], holder)

    def __setitem__(self, key: Any, values: Any) -> None:
        master, holder = self._key_of(key), self.holder_of(key)
        values = to_stored_value("", values.stored if isinstance(values, _StateValues) else values, holder)
        self.forget_owners()
        if not isinstance(holder, FullParam) or holder.is_owned_by_this_rank:
            self.stored[master] = values

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self.stored.pop(self._key_of(key), None)
        self.forget_owners()

    def __contains__(self, key: object) -> bool:
        holder = self.holder_of(key)  # type: ignore[arg-type]
        if isinstance(holder, FullParam):
            return holder.member.name in self._owned_elsewhere()
        return (self._key_of(key) if id(key) in self._members else key) in self.stored or id(key) in self._new

    def __iter__(self) -> Iterator[Any]:
        yield from (p for group in self._inner.param_groups for p in group["params"] if p in self)
        yield from (key for key in self.stored if not isinstance(key, Tensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        # Hazard: torch's get_state_dict calls step() if the view is false. An optimizer with owners would then take a
        # step, because only one without owners recognizes this call. See [Note: torch's get_state_dict].
        return bool(self._update_rule.owned) or any(True for _ in self)

    # As in a defaultdict, these methods do not create state.

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            return self[key]
        return default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        self.stored.clear()
        self.forget_owners()

    def _key_of(self, key: Any) -> Any:
        """Return the key of the inner optimizer's state: the master of a parameter, or another key itself."""
        if not isinstance(key, Tensor):
            return key
        if id(key) in self._members:
            member = self._members[id(key)]
            return key if member is None else member.master_param
        member = self._parameters.managed_param(key)
        if member is None or key is not member.master_param or id(member.sharded) not in self._members:
            raise KeyError(
                f"the optimizer has no parameter that is this tensor of shape {list(key.shape)}. Use a parameter that "
                "optimizer.param_groups lists"
            )
        return key

    def holder_of(self, key: object) -> Holder:
        """Return the :data:`Holder` of the state under a key."""
        return self._update_rule.owned.get(id(key)) or self._members.get(id(key))

    def _owned_elsewhere(self) -> Mapping[str, Any]:
        """Return the states of all owned parameters, by name, in public form. Every rank must call this method."""
        if self._received is None:
            owned = [each for each in self._update_rule.owned.values() if each.master in self.stored]
            own = {
                each.member.name: {key: to_public_value(value, each) for key, value in self.stored[each.master].items()}
                for each in owned
            }
            self._received = self._update_rule.add_remote_owner_state(own)
        return self._received


class _StateValues(MutableMapping[str, Any]):
    """View of one parameter's state. It shows local rows as sharded tensors, and stores sharded tensors as local rows.

    Args:
        stored: state with local rows.
        holder: describes the sharding of the state. If it is None, as in a copy that another package creates by
            ``type(values)({...})``, `stored` is shown as is.
    """

    def __init__(self, stored: MutableMapping[str, Any], holder: Holder = None) -> None:
        self.stored = stored
        self._holder = holder

    def __getitem__(self, key: str) -> Any:
        return _show(self.stored[key], self._holder)

    def __setitem__(self, key: str, value: Any) -> None:
        self.stored[key] = to_stored_value(key, value, self._holder)

    def __delitem__(self, key: str) -> None:
        del self.stored[key]

    def __contains__(self, key: object) -> bool:
        return key in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:  # copies and pickles are plain dicts
        return dict, (dict(self),)


def _show(value: Any, holder: Holder) -> Any:
    """Return a value of the state for users. Nested tables are views, and lists with sharded tensors are tuples."""
    if holder is None:
        return value
    if isinstance(value, Mapping):
        return _StateValues(value, holder)  # type: ignore[arg-type]
    if isinstance(value, (list, tuple)):
        shown = tuple(_show(item, holder) for item in value)
        # A tuple, because changes of a copied list would be lost without an error.
        return value if all(map(operator.is_, shown, value)) else shown
    return to_public_value(value, holder)
