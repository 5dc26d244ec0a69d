"""Tensors of classes of their own (quantised bases), by the plain tensors that they are made of.

A class that has ``__tensor_flatten__`` says which these are, and what else makes up the tensor. A load builds nothing:
the model has a tensor of the same class and the same settings already, whose plain tensors are filled. So no class is
looked up by a name in a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.json_codec import has_own_memory
from layerzero.dtensor.sharded_tensor import LocalShard

__all__ = ["as_table", "flatten_subclass", "is_made_of_others", "is_table"]

_DEVICE = re.compile(r"device\([^()]*\)")
_NOT_IN_WORDS = (" at 0x", "tensor(", "array(", "...")  # an object without a text of its own, or with a part of it only


def is_made_of_others(tensor: Tensor) -> bool:
    """It is of a class that keeps its values in other tensors; layerzero's own are not meant."""
    return not has_own_memory(tensor) and not isinstance(tensor, (DTensor, LocalShard))


def flatten_subclass(name: str, tensor: Tensor) -> tuple[str, dict[str, Tensor]] | None:
    """What a tensor is, in words that are equal for equal ones, and the plain tensors that it is made of, by name.

    Args:
        name: of the tensor, for errors.

    Returns:
        None where it is made of no others, or its class does not say of which, or not in words.

    Raises:
        TypeError: its class has raised an error.
    """
    if not is_made_of_others(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    try:
        names, context = tensor.__tensor_flatten__()
        said = f"{kind} of {list(tensor.shape)} with {_DEVICE.sub('a device', repr(context))}"
        held = {part: getattr(tensor, part) for part in names}
        again = {part: getattr(tensor, part) for part in names}
    except Exception as error:
        raise TypeError(f"{name}: {kind}.__tensor_flatten__ has failed: {type(error).__name__}: {error}") from error
    if any(sign in said for sign in _NOT_IN_WORDS):
        return None
    found: dict[str, Tensor] = {}
    for part, inner in held.items():
        if isinstance(inner, Tensor) and is_made_of_others(inner):
            if (deeper := flatten_subclass(f"{name}.{part}", inner)) is None:
                return None
            said += f"; {part}: {deeper[0]}"
            found |= {f"{part}.{key}": value for key, value in deeper[1].items()}
        elif _can_be_filled(inner, again[part]):
            found[part] = inner
        else:
            return None
    return said, found


def _can_be_filled(value: Any, again: Any) -> bool:
    """Whether a plain tensor, asked for twice, is the same memory: what is made when asked for holds nothing."""
    plain = isinstance(value, Tensor) and not isinstance(value, (DTensor, LocalShard)) and value.layout is torch.strided
    return plain and value.data_ptr() == again.data_ptr()


def as_table(name: str, value: Tensor) -> Any:
    """What a checkpoint has for a tensor of a model's state dict."""
    parts = flatten_subclass(name, value)
    return value if parts is None else {"of": parts[0], "tensors": parts[1]}


def is_table(entry: Any) -> bool:
    """Some JSON of a checkpoint may be what :func:`as_table` has made."""
    return isinstance(entry, Mapping) and entry.keys() == {"of", "tensors"} and isinstance(entry["tensors"], Mapping)
