"""Copy an optimizer so that the copy steps different parameters and shares no mutable state with the original.

[Note: Copies of optimizers]
torch's ``Optimizer.__getstate__`` returns only defaults, state and groups. ``copy.copy`` and ``copy.deepcopy`` drop all
other attributes, but most third-party optimizers have such attributes. Therefore the attributes are deep-copied one by
one. The memo dict of ``copy.deepcopy`` maps the original's parameters and state to the new ones, so that attributes
that refer to them are not copied again.

[Note: Tables of parameters]
An optimizer may refer to parameters outside of its groups and its state: in dicts that are keyed by parameter or by
``id(parameter)``, in sets and in lists. As the groups do, these containers refer to sharded parameters between steps,
where users fill and read them, and to masters during a step. Containers are changed in place, also containers inside
containers and inside the attributes of objects.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType, NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.stale_parameter import current

__all__ = ["HOOKS", "copy_optimizer", "inner_optimizers", "replace_params", "unwrap_step", "user_attributes"]

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_NOT_TABLES = ("params", "param_names", "param_groups", "state", *HOOKS)  # attributes and settings
_LEVELS_OF_OBJECTS = 4  # depth of nested containers in the attributes of an object
_LEVELS = 7  # depth of nested containers, where a dict has two levels: itself and its pairs of keys and values
_LEAVES = (float, str, bool, NoneType)
_OPAQUE = (torch.nn.Module, Optimizer, FunctionType, ModuleType, type)  # objects whose attributes are not searched
_NOT_THE_USERS = {"gathered", "_is_param", "main_grad", "grad_added_to_main_grad"}  # attributes of sharded parameters
_HOOKED_CODE = Optimizer.profile_hook_step(lambda self: None).__code__
# Types of resources outside of the optimizer. The copy refers to the same objects as the original.
_SHARED = (ModuleType, dist.ProcessGroup, DeviceMesh, torch.Stream, torch.Event)


def copy_optimizer(optimizer: Optimizer, groups: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]]) -> Optimizer:
    """Return a copy of the optimizer that has the same class, attributes and settings but steps other parameters.

    References to parameters in attributes become references to the new parameters, if possible with the same number of
    dims. A new parameter gets the attributes of an old one.

    If a parameter in a group has state, all parameters in the copied group get similar state, because some optimizers
    create state in their constructor.

    Args:
        optimizer: the original, which is not changed.
        groups: pairs of a group of the optimizer, including ``"params"``, and the parameters that replace the group's
            parameters.

    Raises:
        Exception: an attribute cannot be copied. The error comes from the attribute's copy method.
    """
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    state.update({key: copy.deepcopy(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    memo: dict[int, Any] = {id(optimizer.state): state}
    all_parameters = [old for group in optimizer.param_groups for old in group["params"]]
    new_groups = []
    for settings, parameters in groups:
        old_parameters = list(settings["params"])
        for index, old in enumerate(old_parameters):
            alike = [parameter for parameter in parameters if _row_ndim(parameter) == _row_ndim(old)] or parameters
            memo[id(old)] = alike[index % len(alike)]
        examples = {_row_ndim(old): current(old) for old in reversed(old_parameters or all_parameters)}
        for parameter in parameters:
            old = examples.get(_row_ndim(parameter), next(iter(examples.values())))
            for name, value in user_attributes(old).items():
                vars(parameter)[name] = _convert_value(value, old, parameter) if isinstance(value, Tensor) else value
        memo[id(settings["params"])] = list(parameters)
        parameter_with_state = next((old for old in old_parameters if optimizer.state.get(old)), None)
        if parameter_with_state is not None:
            for parameter in parameters:
                values = optimizer.state[parameter_with_state].items()
                state[parameter] = {
                    key: _convert_value(value, parameter_with_state, parameter) for key, value in values
                }
        new_groups.append((settings, list(parameters)))
    # Other attributes may also refer to parameters. These references must not become copies of the parameters.
    for old in (*all_parameters, *(key for key in optimizer.state if isinstance(key, Tensor))):
        memo.setdefault(id(old), groups[0][1][0])
    ids = {id(old): memo[id(old)] for old in all_parameters}
    memo[id(optimizer.param_groups)] = [
        {**{key: _copy_value(value, memo) for key, value in settings.items() if key != "params"}, "params": parameters}
        for settings, parameters in new_groups
    ]
    optimizer_copy: Optimizer = _create_blank(optimizer, memo)
    _copy_attributes(optimizer_copy, optimizer, memo)
    for settings in (vars(optimizer_copy), *optimizer_copy.param_groups):
        replace_params(settings, lambda reference: ids.get(reference) if isinstance(reference, int) else None)
    return optimizer_copy


def replace_params(settings: dict[Any, Any], find: Callable[[Tensor | int], Tensor | None]) -> None:
    """Replace parameters and their ids in an optimizer's attributes or a group; see [Note: Tables of parameters].

    Args:
        find: function that returns the replacement of a tensor, or of the tensor with an id. None means no replacement.
    """
    for name, value in settings.items():
        if name not in _NOT_TABLES:
            settings[name] = _replace_in(value, find, _LEVELS)


def _replace_in(value: Any, find: Callable[[Tensor | int], Tensor | None], levels: int) -> Any:
    kind = type(value)
    if isinstance(value, Tensor) or kind is int:
        new = find(value)
        return value if new is None else id(new) if kind is int else new
    if kind in _LEAVES or not levels:
        return value
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = list(value)
    elif isinstance(value, (dict, WeakKeyDictionary, WeakIdKeyDictionary)):
        items = list(value.items())
    else:
        # Objects inside of objects are not searched: a logger, for example, refers to all other loggers.
        if levels > _LEVELS_OF_OBJECTS and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
            _replace_in(vars(value), find, _LEVELS_OF_OBJECTS)
        return value
    new_items = [_replace_in(item, find, levels - 1) for item in items]
    if all(map(operator.is_, items, new_items)):
        return value
    if isinstance(value, (tuple, frozenset)):
        return value._make(new_items) if hasattr(value, "_make") else kind(new_items)
    value.clear()
    if isinstance(value, (list, deque)):
        value.extend(new_items)
    elif isinstance(value, set):
        value.update(new_items)
    else:
        for key, each in new_items:  # Counter.update would count the pairs
            value[key] = each
    return value


def _row_ndim(parameter: Tensor) -> int:
    """Return the number of dims of a parameter. A parameter without dims has one, because it is stored as one row."""
    return max(current(parameter).ndim, 1)


def user_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that the user has set on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _NOT_THE_USERS}


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in the attributes of `optimizer`, which may be a wrapper."""
    optimizers = []
    for value in vars(optimizer).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        optimizers += [each for each in values if isinstance(each, Optimizer) and each is not optimizer]
    return optimizers


def unwrap_step(step: Any) -> Any:
    """Return an optimizer class's ``step`` without torch's hook wrapper, which also runs the global hooks."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED_CODE else step


def _create_blank(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    memo[id(optimizer)] = optimizer_copy = object.__new__(type(optimizer))
    return optimizer_copy


def _copy_attributes(optimizer_copy: Optimizer, optimizer: Optimizer, memo: dict[int, Any]) -> None:
    for inner in inner_optimizers(optimizer):
        if id(inner) not in memo:
            memo.setdefault(id(inner.state), defaultdict(dict))
            _copy_attributes(_create_blank(inner, memo), inner, memo)
    for key, value in vars(optimizer).items():
        if key in HOOKS:
            vars(optimizer_copy)[key] = OrderedDict()
        elif key != "step":  # a scheduler may have replaced `step` with a function that is bound to the original
            vars(optimizer_copy)[key] = _copy_value(value, memo)


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, _SHARED):
        return value
    if isinstance(value, Tensor) and not value.is_leaf:
        value = value.detach()
    return copy.deepcopy(value, memo)


def _convert_value(value: Any, old: Tensor, parameter: Tensor) -> Any:
    """Convert a state value of the parameter `old` to a state value for `parameter`.

    A tensor with the shape of `old` becomes a tensor with the shape of `parameter`, filled with the first element of
    `value`. Other values are copied.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value, old = plain(value.detach()), current(old)
    if value.ndim and value.shape in (old.shape, plain(old).shape):
        first_element = value.flatten()[:1]
        return torch.full_like(parameter, float(first_element) if first_element.numel() else 0.0, dtype=value.dtype)
    return value.clone()
