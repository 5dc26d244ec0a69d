"""Operators that replace the memory of a sharded parameter: ``p.data = ...``, ``model.to(...)``, ``share_memory()``.

[Note: Moves of a module]
``to``, ``half`` and ``cpu`` call ``nn.Module._apply``. It applies a function to each parameter, asks torch whether the
parameter can take the result as its ``data``, and assigns it. If the result has ``__tensor_flatten__``, it swaps the
tensors instead. The engine refers to parameters, so they must not be swapped: sharded parameters hide that attribute.
A move that changes nothing thus assigns a parameter to itself. Any other move is refused when torch asks, before it has
changed a parameter.

``to_empty()`` on the device of the parameter, as after ``fully_shard`` on meta, needs memory, which exists already, and
no values. So a tensor that was made by ``empty_like`` and not written since is not copied. Uninitialized parameters
stay uninitialized, and the first forward reports them. torch replaces buffers by new, empty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from layerzero.dtensor.lazy_grad import OF_GRADIENTS, resolve_first
from layerzero.dtensor.row_shard_spec import MutationTracker

if TYPE_CHECKING:
    from layerzero.dtensor.sharded_tensor import RowShardedTensor

__all__ = ["CALLS", "AbsentAttribute", "carry_over", "mark_uninitialized"]


def carry_over(source: nn.Parameter, *, gathered: nn.Parameter, sharded: nn.Parameter) -> None:
    """Move the user's attributes and hooks from a parameter to its replacements.

    Handles that remove these hooks stay valid.
    """
    for target in (gathered, sharded):
        for name, value in vars(source).items():
            if name not in _NOT_THE_USERS:
                setattr(target, name, value)
    if source._backward_hooks is not None:
        gathered._backward_hooks = source._backward_hooks
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        sharded._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


# Attributes of earlier gradient accumulation, and of DTensor itself.
_NOT_THE_USERS = {"main_grad", "grad_added_to_main_grad", "_local_tensor", "_spec"}


class AbsentAttribute:
    """Descriptor that hides an inherited attribute."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


@torch.no_grad()
def assign_data(target: RowShardedTensor, value: Tensor) -> None:
    """Implement ``target.data = value``: copy the values of a tensor that is sharded in the same way.

    Raises:
        ValueError: `value` is not sharded, or differs in rows, dtype or device.
    """
    if value is target or _is_empty(value):
        return
    span, mine = target._local_tensor.spec, target._local_tensor
    theirs = getattr(value, "_local_tensor", None)
    other = getattr(theirs, "spec", None)
    if (
        theirs is None
        or other is None
        or not span.same_sharding(other)
        or (theirs.shape, theirs.dtype, theirs.device) != (mine.shape, mine.dtype, mine.device)
    ):
        raise ValueError(
            f".data of parameter {span.name!r} ({list(span.shape)}, {mine.dtype} on {mine.device}), of which this rank "
            f"has rows {span.rows}, was assigned {_described(value)}. Assign a sharded tensor made from the parameter "
            "itself, or whole tensors inside layerzero.unsharded(model, writeback=True), where vector_to_parameters "
            "works, too"
        )
    mine.copy_(theirs)


def is_noop_move(target: RowShardedTensor, moved: Tensor) -> bool:
    """Return True if moving a module leaves `target` unchanged; see [Note: Moves of a module].

    Raises:
        TypeError: the move would change or replace the parameter.
    """
    name = target._local_tensor.spec.name
    for setting in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion"):
        if getattr(torch.__future__, f"get_{setting}")():
            raise TypeError(
                f"torch.__future__.set_{setting}(True) would replace parameter {name!r}, which layerzero has sharded; "
                "set it to False around this call"
            )
    if moved is target or (_is_empty(moved) and (moved.dtype, moved.device) == (target.dtype, target.device)):
        return True
    if moved.dtype != target.dtype:
        change = f"from {target.dtype} to {moved.dtype}"
    elif moved.device != target.device:
        change = f"from {target.device} to {moved.device}"
    else:
        change = "into other memory, or another memory format"
    raise TypeError(
        f"parameter {name!r} cannot be moved {change}: layerzero has sharded it, and keeps its memory. Move or convert "
        "the model before shard_model; for the precision of the forward and backward pass use mp_policy"
    )


def mark_uninitialized(func: Any, made: Tensor) -> Tensor:
    """Return `made`, marked as uninitialized until its first write if `func` is ``torch.empty_like``."""
    local: Any = getattr(made, "_local_tensor", None)
    if func is torch.empty_like and hasattr(local, "tracker"):
        local.tracker = MutationTracker()
        local.tracker.uninitialized = True
    return made


def _is_empty(tensor: Any) -> bool:
    """Return whether a tensor was made by ``torch.empty_like`` of a sharded tensor and not written since."""
    watch = getattr(getattr(tensor, "_local_tensor", None), "tracker", None)
    return watch is not None and watch.uninitialized


def refuse_sharing(target: RowShardedTensor) -> NoReturn:
    raise TypeError(
        f"share_memory() of parameter {target._local_tensor.spec.name!r} is not supported: layerzero has sharded it. "
        "Share the tensors of layerzero.full_state_dict(model, rank0_only=False)"
    )


def _described(value: Any) -> str:
    kind = "a parameter" if isinstance(value, nn.Parameter) else "a tensor"
    local = getattr(value, "_local_tensor", None)
    rows = "" if local is None else f", of which {list(local.shape)} here"
    return f"{kind} of shape {list(value.shape)}, {value.dtype} on {value.device}{rows}"


CALLS: dict[Any, Callable[..., Any]] = {  # by function of torch, as passed to __torch_function__: its replacement
    Tensor.data.__get__: lambda tensor, *_: tensor.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: assign_data,  # type: ignore[attr-defined]
    **{access: resolve_first(access) for access in OF_GRADIENTS},
    torch._has_compatible_shallow_copy_type: is_noop_move,
    Tensor.share_memory_: refuse_sharing,
}
