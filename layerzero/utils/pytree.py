"""Iterate over the tensors in nested inputs and outputs of modules, and convert their dtypes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 8  # maximum depth of objects with attributes


def iter_tensors(value: Any, _depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors nested in `value`, in order.

    The function searches tuples, lists, mappings, dataclasses and the attributes of other objects.
    """
    items: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, (dict, Mapping)):  # the check of the abstract class is slow
        items = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        items = tuple(vars(value).values()) if _depth < _DEEPEST else ()  # such objects may form cycles
    for item in items:
        if isinstance(item, Tensor):
            yield item
        else:
            yield from iter_tensors(item, _depth + 1)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`, as :func:`map_tensors` does."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with the results of `change` in place of its tensors.

    Containers whose tensors change are copied, not modified in place. Unlike :func:`iter_tensors`, the function does
    not search mappings other than dicts, or attributes of objects that are not dataclasses.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(map(operator.is_, value, items)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # namedtuples have _fields
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _map_fields(value, change)
    return value


def _map_fields(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    # An object that is both a dict and a dataclass, like many model outputs, has equal items and fields.
    is_dict, is_dataclass = isinstance(value, dict), dataclasses.is_dataclass(value)
    names = list(value) if is_dict else [field.name for field in dataclasses.fields(value)]
    changed = value
    for name in names:
        old = value[name] if is_dict else getattr(value, name)
        if (new := map_tensors(old, change)) is old:
            continue
        changed = copy.copy(value) if changed is value else changed
        if is_dict:
            changed[name] = new
        if is_dataclass:
            object.__setattr__(changed, name, new)  # the dataclass may be frozen
    return changed
