"""Store tensor subclasses, such as quantized weights, as their plain inner tensors.

The method ``__tensor_flatten__`` of a class returns these inner tensors and the remaining metadata. A load constructs
no subclass tensors. The model already has tensors with the same classes and settings, and the load fills the plain
tensors inside them. Therefore no class is looked up by a name from a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.json_codec import has_own_memory
from layerzero.dtensor.local_shard import LocalShard

__all__ = ["flatten_subclass", "has_inner_tensors", "is_subclass_entry", "to_subclass_entry"]

_DEVICE = re.compile(r"device\([^()]*\)")
_NOT_IN_WORDS = (" at 0x", "tensor(", "array(", "...")  # parts of the default repr of an object, or of a truncated repr


def has_inner_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor, other than a sharded one, stores its values in other tensors, as quantized ones do."""
    return not has_own_memory(tensor) and not isinstance(tensor, (DTensor, LocalShard))


def flatten_subclass(name: str, tensor: Tensor) -> tuple[str, dict[str, Tensor]] | None:
    """Return a description of a subclass tensor (class, shape and metadata), and its plain tensors by name.

    Args:
        name: name of the tensor in error messages.

    Returns:
        The description and the plain tensors. None if the tensor has no inner tensors, its class has no
        ``__tensor_flatten__``, the repr of its metadata is incomplete, or an inner tensor cannot be filled in place.

    Raises:
        TypeError: ``__tensor_flatten__`` raised an error.
    """
    if not has_inner_tensors(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    try:
        names, context = tensor.__tensor_flatten__()
        description = f"{kind} of {list(tensor.shape)} with {_DEVICE.sub('a device', repr(context))}"
        first_read = {part: getattr(tensor, part) for part in names}
        second_read = {part: getattr(tensor, part) for part in names}
    except Exception as error:
        raise TypeError(f"{name}: {kind}.__tensor_flatten__ failed: {type(error).__name__}: {error}") from error
    if any(sign in description for sign in _NOT_IN_WORDS):
        return None
    leaves: dict[str, Tensor] = {}
    for part, attribute in first_read.items():
        if isinstance(attribute, Tensor) and has_inner_tensors(attribute):
            if (flattened := flatten_subclass(f"{name}.{part}", attribute)) is None:
                return None
            description += f"; {part}: {flattened[0]}"
            leaves |= {f"{part}.{key}": value for key, value in flattened[1].items()}
        elif _can_be_filled(attribute, second_read[part]):
            leaves[part] = attribute
        else:
            return None
    return description, leaves


def _can_be_filled(value: Any, second_read: Any) -> bool:
    """Return whether two reads of an attribute returned a plain tensor on the same memory, not temporary copies."""
    is_plain = (
        isinstance(value, Tensor) and not isinstance(value, (DTensor, LocalShard)) and value.layout is torch.strided
    )
    return is_plain and value.data_ptr() == second_read.data_ptr()


def to_subclass_entry(name: str, value: Tensor) -> Any:
    """Return the checkpoint entry for a tensor: a dict if it can be flattened, otherwise the tensor itself."""
    parts = flatten_subclass(name, value)
    return value if parts is None else {"of": parts[0], "tensors": parts[1]}


def is_subclass_entry(entry: Any) -> bool:
    """Return whether `entry`, a JSON value in a checkpoint, has the form that :func:`to_subclass_entry` returns."""
    return isinstance(entry, Mapping) and entry.keys() == {"of", "tensors"} and isinstance(entry["tensors"], Mapping)
