"""Iterate over the tensors in nested inputs and outputs of modules, and convert their dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["cast_floating", "iter_tensors", "map_tensors"]


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
    elif isinstance(value, Mapping):
        items = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        items = tuple(vars(value).values()) if _depth < _DEEPEST else ()  # such objects may form cycles
    for item in items:
        yield from iter_tensors(item, _depth + 1)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`. Containers are rebuilt, not modified in place."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with the results of `change` in place of its tensors. Containers are rebuilt.

    Unlike :func:`iter_tensors`, the function does not search mappings other than dicts, or attributes of objects that
    are not dataclasses.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _map_fields(value, change)
    return value


def _map_fields(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    # For dict subclasses and dataclasses. An object that is both, like many model outputs, has equal items and fields.
    names = list(value) if isinstance(value, dict) else [field.name for field in dataclasses.fields(value)]
    old = [value[name] if isinstance(value, dict) else getattr(value, name) for name in names]
    new = [map_tensors(item, change) for item in old]
    if all(before is after for before, after in zip(old, new, strict=True)):
        return value
    if dataclasses.is_dataclass(value):
        changed: Any = dict(zip(names, new, strict=True))
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    return type(value)(zip(names, new, strict=True))
