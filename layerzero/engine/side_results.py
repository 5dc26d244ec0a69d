"""Find the results of a unit's forward pass besides its outputs, and give outputs the latest nodes of their graph.

[Note: Side results]
A forward may compute results that it does not return, such as an auxiliary loss that it stores in an attribute. If the
nodes of such a result are later than those of the outputs, a backward pass runs them before the hooks of the outputs
have gathered the unit. Therefore the outputs are then replaced by tensors with the same memory, whose nodes are the
latest of the call. (They are not views. An in-place operation of the caller on a view would drop the hooks.) Results in
attributes of the unit's modules get the hooks, too. A forward whose only result is an iterator or a function raises an
error. In other cases in which the loss depends on no tensor that has a hook, a parameter gets its gradient before the
unit is gathered. This raises an error, too, unless autograd has already read the freed weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.engine.passes import UnitCall
from layerzero.engine.unit import Unit, split_at_units
from layerzero.utils.pytree import iter_tensors, map_tensors
from layerzero.utils.torch_compat import REGISTRY_KEY, autograd_sequence_number

# Every forward pass searches attributes of these classes. To search others would take longer than a small unit.
_RESULTS = {Tensor, list, tuple, dict}
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {REGISTRY_KEY}
_NOT_RESULTS = _OF_EVERY_MODULE - {"_buffers"}  # parameters, modules and hooks
_MOST_RESULTS = 256  # number of items of an attribute that every forward pass searches


class SideResults:
    """Results that calls of `units` have stored in attributes of their modules; see [Note: Side results]."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._attributes: dict[Unit, _Attributes] = {}  # of the modules of a unit and inside of it

    def find(self, call: UnitCall, *, in_objects: bool) -> list[Tensor]:
        """Return the tensors with a graph that a call has stored in attributes of the unit's modules.

        Args:
            in_objects: if True, search all objects in attributes. If False, search only short lists, tuples and dicts
                in the modules outside of nested units, and only if the unit's weights are freed before the backward
                pass, because every forward pass searches.
        """
        unit = call.unit
        if autograd_sequence_number() == call.first_node:
            return []
        if in_objects:
            tables = (vars(each) for module in unit.modules for each in module.modules())
            found = iter_tensors([value for table in tables for value in table.values()])
        elif unit.needs_gather:
            found = (each for each in self._attributes_of(unit).items() if isinstance(each, Tensor))
        else:
            return []
        return [each for each in found if each.requires_grad and is_computed_in(each, call)]

    def _attributes_of(self, unit: Unit) -> _Attributes:
        if unit not in self._attributes:
            others = {module for each in self._units if each is not unit for module in each.modules}
            own_modules, _ = split_at_units(unit.modules, others.__contains__)
            self._attributes[unit] = _Attributes(own_modules)
        return self._attributes[unit]


class _Attributes:
    """Attributes of modules in which a forward pass may store results.

    A module of a class of torch stores nothing itself. If it has only the attributes of its class at the first search,
    it is searched only when it has got more, for instance from a hook.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]  # see [Note: References between model and state]
        self._counts = [len(vars(module)) if _stores_nothing(module) else -1 for module in modules]

    def items(self) -> list[Any]:
        """Return the values of attributes, and the items of short lists, tuples and dicts."""
        found: list[Any] = []
        for reference, count in zip(self._modules, self._counts, strict=True):
            if (module := reference()) is None or len(table := vars(module)) == count:
                continue
            for name, value in table.items():
                if value.__class__ in _RESULTS and name not in _NOT_RESULTS:
                    found += _items(value)
        return found


def _stores_nothing(module: nn.Module) -> bool:
    """Return whether a module of a class of torch has only the attributes of this class, and none for tensors."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules."):
        return False
    declared = (vars(each).get(name, ()) for each in kind.__mro__ for name in ("__constants__", "__annotations__"))
    if not vars(module).keys() <= _OF_EVERY_MODULE.union(*declared):  # the user may set another attribute again
        return False
    names = vars(module).keys() - _OF_EVERY_MODULE
    found = [value for name in names if (value := vars(module)[name]).__class__ in _RESULTS]
    return all(isinstance(value, tuple) and not any(isinstance(each, Tensor) for each in value) for value in found)


def _items(value: Any) -> Iterable[Any]:
    """Return a value itself, or the items of a short list, tuple or dict."""
    if isinstance(value, (list, tuple, dict)):
        return () if len(value) > _MOST_RESULTS else value.values() if isinstance(value, dict) else value
    return (value,)


def is_computed_in(tensor: Tensor, call: UnitCall) -> bool:
    """Return whether the forward pass of a call has computed the tensor, with a graph."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= call.first_node


def with_latest_nodes(call: UnitCall, output: Any, outputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Replace outputs by tensors whose nodes are later than all other nodes of a call, if the call has later nodes.

    Args:
        outputs: tensors in `output` that require a gradient.

    Returns:
        The output with replacements, and the replacements.
    """
    nodes = [tensor.grad_fn._sequence_nr() for tensor in outputs if tensor.grad_fn is not None]
    if not nodes or max(*nodes, call.first_node - 1) + 1 >= autograd_sequence_number():
        return output, []
    latest = {id(tensor): _LatestNode.apply(tensor) for tensor in outputs if _can_have_latest_node(tensor)}  # type: ignore[no-untyped-call]
    return map_tensors(output, lambda tensor: latest.get(id(tensor), tensor)), [*latest.values()]


class _LatestNode(torch.autograd.Function):
    """Identity function, whose result shares memory with its input but is not a view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _can_have_latest_node(tensor: Tensor) -> bool:
    """Return False for leaf tensors, and for sparse and nested tensors."""
    return tensor.grad_fn is not None and tensor.layout is torch.strided
