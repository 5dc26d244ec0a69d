"""Copy an optimizer so that the copy steps different parameters and shares no mutable state with the original.

[Note: Copies of optimizers]
torch's ``Optimizer.__getstate__`` returns only defaults, state and groups. ``copy.copy`` and ``copy.deepcopy`` drop all
other attributes, but most third-party optimizers have such attributes. Therefore the attributes are deep-copied one by
one. The memo dict of ``copy.deepcopy`` maps the original's parameters and state to the new ones, so that attributes
that refer to them are not copied again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.stale_parameter import current

__all__ = ["copy_optimizer", "inner_optimizers", "unwrap_step"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_HOOKED_CODE = Optimizer.profile_hook_step(lambda self: None).__code__
# Types of resources outside of the optimizer. The copy refers to the same objects as the original.
_SHARED = (ModuleType, dist.ProcessGroup, DeviceMesh, torch.Stream, torch.Event)


def copy_optimizer(optimizer: Optimizer, groups: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]]) -> Optimizer:
    """Return a copy of the optimizer that has the same class, attributes and settings but steps other parameters.

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
    new_groups = []
    for settings, parameters in groups:
        old_parameters = list(settings["params"])
        memo.update({id(old): parameters[index % len(parameters)] for index, old in enumerate(old_parameters)})
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
    all_parameters = [old for group in optimizer.param_groups for old in group["params"]]
    for old in (*all_parameters, *(key for key in optimizer.state if isinstance(key, Tensor))):
        memo.setdefault(id(old), groups[0][1][0])
    memo[id(optimizer.param_groups)] = [
        {**{key: _copy_value(value, memo) for key, value in settings.items() if key != "params"}, "params": parameters}
        for settings, parameters in new_groups
    ]
    optimizer_copy: Optimizer = _create_blank(optimizer, memo)
    _copy_attributes(optimizer_copy, optimizer, memo)
    return optimizer_copy


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
        if key in _HOOKS:
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
