"""View of the wrapped optimizer's state, keyed by sharded parameter instead of by master.

[Note: State of owned parameters]
Only the owner of a full parameter stores its state. All ranks see this state in the view, as sharded tensors whose rows
are all on the owner, so that reads and writes are the same operations on all ranks. The first access after a step
communicates the names and shapes of the owners' states. Therefore every rank must access the view of an optimizer that
has owned parameters.
"""

from __future__ import annotations

import operator
from collections import UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.optimizers.listed_params import ListedParam, ListedParams
from layerzero.optimizers.optimizer_state import Holder, to_public_value, to_stored_value
from layerzero.optimizers.update_rule import FullParam, UpdateRule


class MasterKeyedState(defaultdict[Any, Any]):
    """State of the inner optimizer, keyed by master.

    A lookup by sharded parameter raises RuntimeError. A plain defaultdict would silently create an empty state.
    """

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, RowShardedTensor):
            raise RuntimeError(
                "a sharded parameter was looked up in the state of the optimizer that was passed to shard_optimizer, "
                "but this state is no longer keyed by sharded parameters. Use the optimizer that shard_optimizer "
                "returned"
            )
        return super().__missing__(key)


class ParamKeyedState(MutableMapping[Any, Any]):
    """View of the inner optimizer's state, keyed by the sharded parameters that the groups list between steps.

    Iteration, ``len`` and ``in`` skip parameters without state. Tensors of local rows are shown as sharded tensors, as
    in ``ShardedOptimizer.state_dict``. They share memory with the state. Keys that are not parameters are shown as is.

    Args:
        inner: the wrapped optimizer.
        params: parameters of the optimizer.
        update_rule: has the parameters that owners update in full.
        new: state that torch's functions have created, by the id of the parameter; see [Note: torch's get_state_dict].
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        params: ListedParams,
        update_rule: UpdateRule,
        new: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._inner = inner
        self._params = params
        self._update_rule = update_rule
        self._new = new
        self._received: Mapping[str, Any] | None = None  # states of owned parameters, until the state changes

    @property
    def stored(self) -> MasterKeyedState:
        """State of the inner optimizer. If a new state was assigned to the inner optimizer, it is keyed by master."""
        if not isinstance(self._inner.state, MasterKeyedState):
            assigned = self._inner.state
            self._inner.state = MasterKeyedState(dict)
            self.replace(assigned)
        return self._inner.state

    def replace(self, values: Mapping[Any, Any]) -> None:
        """Replace the state, as ``optimizer.state = values`` does in torch."""
        if values is not self:
            items = [(key, value) for key, value in values.items() if self._key_of(key) is not None]
            self.clear()
            self.update(items)

    def forget_owners(self) -> None:
        """Communicate the states of owned parameters again at the next access. All ranks must call this method."""
        self._received = None

    def stored_by_param(self) -> Iterator[tuple[ListedParam, Any]]:
        """Yield the parameters that have state on this rank, and their state with local rows."""
        for each in self._params:
            if values := self.stored.get(each.master):  # a lookup may have created an empty dict
                yield each, values

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
        values = to_stored_value("", values.data if isinstance(values, _StateValues) else values, holder)
        self.forget_owners()
        if not isinstance(holder, FullParam) or holder.is_owned_by_this_rank:
            self.stored[master] = values

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self.stored.pop(self._key_of(key), None)
        self.forget_owners()

    def __contains__(self, key: object) -> bool:
        holder = self.holder_of(key)
        if isinstance(holder, FullParam):
            return holder.member.name in self._owned_elsewhere()
        listed = self._params.get(key)
        return (key if listed is None else listed.master) in self.stored or id(key) in self._new

    def __iter__(self) -> Iterator[Any]:
        yield from (each.parameter for each in self._params if each.parameter in self)
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
        listed = self._params.get(key)  # by master in a state that the inner optimizer assigned
        if listed is None:
            raise KeyError(
                f"the optimizer has no parameter that is this tensor of shape {list(key.shape)}. Use a parameter that "
                "optimizer.param_groups lists"
            )
        return listed.master

    def holder_of(self, key: object) -> Holder:
        """Return the :data:`Holder` of the state under a key."""
        listed = self._params.get(key)
        if listed is None or listed.parameter is not key:  # state by master has local rows
            return None
        return self._update_rule.owned.get(id(key)) or listed.member

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


class _StateValues(UserDict[str, Any]):
    """View of one parameter's state. It shows local rows as sharded tensors, and stores sharded tensors as local rows.

    Args:
        stored: state with local rows.
        holder: describes the sharding of the state. If it is None, as in a copy that another package creates by
            ``type(values)({...})``, `stored` is shown as is.
    """

    def __init__(self, stored: Mapping[str, Any], holder: Holder = None) -> None:
        self.data: Any = stored  # not a copy
        self._holder = holder

    def __getitem__(self, key: str) -> Any:
        return _show(self.data[key], self._holder)

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = to_stored_value(key, value, self._holder)

    # UserDict merges `data`, which has local rows.

    def __or__(self, other: Any) -> Any:
        return dict(self) | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | dict(self)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:  # copies and pickles are plain dicts
        return dict, (dict(self),)

    def __copy__(self) -> Any:
        return dict(self)


def _show(value: Any, holder: Holder) -> Any:
    """Return a value of the state for users. Nested tables are views, and lists with sharded tensors are tuples."""
    if holder is None:
        return value
    if isinstance(value, Mapping):
        return _StateValues(value, holder)
    if isinstance(value, (list, tuple)):
        shown = tuple(_show(item, holder) for item in value)
        # A tuple, because changes of a copied list would be lost without an error.
        return value if all(map(operator.is_, shown, value)) else shown
    return to_public_value(value, holder)
