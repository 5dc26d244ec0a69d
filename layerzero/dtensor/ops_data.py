"""Replacing the memory of a sharded parameter: what ``p.data = ...``, ``model.to(...)`` and ``share_memory()`` ask for.

[Note: Moves of a module]
``nn.Module._apply``, which ``to``, ``half`` and ``cpu`` call, calls a function on each parameter, asks torch whether
the parameter can take what came out as its ``data``, and assigns it. Where the result can be taken apart into others
(``__tensor_flatten__``), it swaps tensors instead, which the engine's references to parameters forbid: a sharded
parameter therefore says that it cannot, nor could it be put together again. A move that changes nothing thus assigns a
parameter to itself; torch's question is the place where any other is refused, before it has changed a parameter.

``to_empty()`` on the device where a parameter lies already, as after ``fully_shard`` on meta, asks for memory, which
there is, and for no values: a tensor that ``empty_like`` made, and nobody has written since, is not copied. What was
unwritten stays so, and is told at the first forward. Buffers are torch's, and are new and empty.
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

__all__ = ["CALLS", "AbsentAttribute", "carry_over", "note_empty"]


def carry_over(source: nn.Parameter, *, gathered: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let the user's attributes and hooks on a parameter, and their removal handles, work on what takes its place."""
    for target in (gathered, sharded):
        for name, value in vars(source).items():
            if name not in _NOT_THE_USERS:
                setattr(target, name, value)
    if source._backward_hooks is not None:
        gathered._backward_hooks = source._backward_hooks
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        sharded._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


# Of who accumulated gradients before, and of DTensors themselves.
_NOT_THE_USERS = {"main_grad", "grad_added_to_main_grad", "_local_tensor", "_spec"}


class AbsentAttribute:
    """An attribute that a class has inherited and does not have."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


@torch.no_grad()
def assign_data(target: RowShardedTensor, value: Tensor) -> None:
    """``target.data = value``: copies the values of a tensor that is sharded alike.

    Raises:
        ValueError: `value` is whole, or differs in its rows, dtype or device.
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


def can_take(target: RowShardedTensor, moved: Tensor) -> bool:
    """A module is being moved: True where that changes nothing. See [Note: Moves of a module].

    Raises:
        TypeError: it would change something.
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


def note_empty(func: Any, made: Tensor) -> Tensor:
    """What ``torch.empty_like`` has made of a sharded tensor is watched until somebody writes it."""
    local: Any = getattr(made, "_local_tensor", None)
    if func is torch.empty_like and hasattr(local, "tracker"):
        local.tracker = MutationTracker()
        local.tracker.uninitialized = True
    return made


def _is_empty(tensor: Any) -> bool:
    """``torch.empty_like`` has made it of a sharded tensor, and nobody has written it since."""
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


CALLS: dict[
    Any, Callable[..., Any]
] = {  # functions of torch, as __torch_function__ sees them, and what takes their place
    Tensor.data.__get__: lambda tensor, *_: tensor.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: assign_data,  # type: ignore[attr-defined]
    **{access: resolve_first(access) for access in OF_GRADIENTS},
    torch._has_compatible_shallow_copy_type: can_take,
    Tensor.share_memory_: refuse_sharing,
}
