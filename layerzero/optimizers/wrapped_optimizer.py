"""Helpers of ShardedOptimizer that step the wrapped optimizer, detect its writes and check its groups.

[Note: Tables of parameters]
An optimizer may refer to parameters outside of its groups and its state: in dicts that are keyed by parameter or by
``id(parameter)``, in sets and in lists. As the groups do, these containers refer to sharded parameters between steps,
where users fill and read them, and to masters during a step. Containers are changed in place, also containers inside
containers and inside the attributes of objects.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType, NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.dtensor.local_shard import find_local_shard, local_shard, plain, written_values
from layerzero.optimizers.listed_params import ListedParam
from layerzero.utils.torch_compat import TorchDispatchMode

HOOKS = tuple(
    f"_optimizer_{event}_{moment}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for moment in ("pre", "post")
)
_NOT_TABLES = ("params", "param_names", "param_groups", "state", *HOOKS)  # attributes and settings
_LEVELS_OF_OBJECTS = 4  # depth of nested containers in the attributes of an object
_LEVELS = 7  # depth of nested containers, where a dict has two levels: itself and its pairs of keys and values
_LEAVES = (float, str, bool, NoneType)
_OPAQUE = (torch.nn.Module, Optimizer, FunctionType, ModuleType, type)  # objects whose attributes are not searched
_HOOKED_CODE = Optimizer.profile_hook_step(lambda self: None).__code__


def unwrap_step(step: Any) -> Any:
    """Return an optimizer class's ``step`` without torch's hook wrapper, which also runs the global hooks."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED_CODE else step


def has_step_of_its_own(inner: Optimizer) -> bool:
    """Return whether the instance has a ``step`` that is not that of its class. The wrapper of a scheduler is none."""
    replaced = vars(inner).get("step")
    return replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched")


def step_without_global_hooks(inner: Optimizer, update: Callable[[Callable[[], Any]], Any]) -> None:
    """Call ``inner.step()`` with the hooks of the instance but without torch's global hooks.

    The wrapper's own step runs the global hooks.

    Args:
        update: function that receives a function that steps `inner`, and calls it one or more times.
    """
    bare = unwrap_step(type(inner).step)
    if bare is type(inner).step or has_step_of_its_own(inner):
        update(inner.step)  # a custom step, which is called unchanged
        return
    if "step" in vars(inner):
        vars(inner)["_opt_called"] = True  # the only effect of a scheduler's step wrapper
    args: tuple[Any, ...] = (inner,)
    kwargs: dict[str, Any] = {}
    for pre_hook in list(inner._optimizer_step_pre_hooks.values()):
        changed = pre_hook(inner, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    try:
        update(functools.partial(bare, *args, **kwargs))
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(_MIXED.format(name=type(inner).__name__)) from error
    for post_hook in list(inner._optimizer_step_post_hooks.values()):
        post_hook(inner, args, kwargs)


def refuse_mixed_dtensors(inner: Optimizer, group: Mapping[str, Any], listed: Sequence[ListedParam]) -> None:
    """Raise ValueError if one foreach or fused call would update both sharded parameters and DTensors.

    Args:
        inner: optimizer to which the group is added.
        group: settings of the group, which override the defaults of `inner`.
        listed: parameters of the group.
    """
    foreign = sum(each.member is None and isinstance(each.parameter, DTensor) for each in listed)
    settings = {**inner.defaults, **group}
    if 0 < foreign < len(listed) and (settings.get("foreach") or settings.get("fused")):
        raise ValueError(_MIXED.format(name=type(inner).__name__))


_MIXED = (
    "{name} updates all tensors of a parameter group at once, which is not possible if one group has sharded "
    "parameters (plain tensors inside layerzero) and DTensors of another framework. Move the DTensors that "
    "ignored_params contains to a separate parameter group, or to a separate optimizer whose step() you call yourself"
)


class WriteDetector(TorchDispatchMode):
    """Dispatch mode that calls a function before the first operation that writes to the memory of `tensors`."""

    def __init__(self, tensors: Iterable[Tensor], on_first_write: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = False
        self._on_first_write = on_first_write
        self._memory = {each.untyped_storage()._cdata for each in tensors if not isinstance(each, DTensor)}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._seen and any(map(self._is_in_memory, written_values(func, args, kwargs))):
            self._on_first_write()
            self._seen = True
        return func(*args, **kwargs)

    def _is_in_memory(self, value: Any) -> bool:
        return type(value) in (Tensor, torch.nn.Parameter) and value.untyped_storage()._cdata in self._memory


def reduced_grad_rows(gradient: Tensor) -> Tensor | None:
    """Return this rank's rows of a gradient, or None if the gradient is not reduced yet."""
    local = find_local_shard(gradient)
    return plain(gradient) if local is None or local.tracker.access_error is None else None


def record_writes(parameters: Iterable[Tensor]) -> None:
    """Record a write to sharded parameters or gradients that their mutation trackers cannot detect by themselves."""
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        local_shard(parameter).tracker.record_write()


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
    items = _items_of(value)
    if items is None:
        # Objects inside of objects are not searched: a logger, for example, refers to all other loggers.
        if levels > _LEVELS_OF_OBJECTS and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
            _replace_in(vars(value), find, _LEVELS_OF_OBJECTS)
        return value
    new_items = [_replace_in(item, find, levels - 1) for item in items]
    if all(map(operator.is_, items, new_items)):
        return value
    if isinstance(value, (tuple, frozenset)):
        return value._make(new_items) if hasattr(value, "_make") else kind(new_items)
    _refill(value, new_items)
    return value


def _items_of(value: Any) -> list[Any] | None:
    """Return the elements of a container, or the pairs of a dict. Return None for other objects."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    return list(value.items()) if isinstance(value, (dict, WeakKeyDictionary, WeakIdKeyDictionary)) else None


def _refill(container: Any, items: list[Any]) -> None:
    """Replace the items of a mutable container, which are those of :func:`_items_of`."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    elif isinstance(container, set):
        container.update(items)
    else:
        for key, each in items:  # Counter.update would count the pairs
            container[key] = each
