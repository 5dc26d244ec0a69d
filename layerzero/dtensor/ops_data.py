"""Handle operators that replace a sharded parameter's memory, such as ``p.data = ...`` and ``model.to(...)``.

[Note: Module moves and conversions]
``to``, ``half`` and ``cpu`` call ``nn.Module._apply``. This method applies a function to each parameter, calls
``torch._has_compatible_shallow_copy_type`` to test whether the result can become the parameter's ``data``, and assigns
the result. If the result has ``__tensor_flatten__``, the method swaps the tensors instead. The engine refers to
parameters, so they must not be swapped. Therefore sharded parameters hide that attribute. A move that changes nothing
then assigns a parameter to itself. Any other move raises an error in the test, before torch changes a parameter.

``to_empty()`` on the parameter's device, as after ``fully_shard`` on meta, only has to provide memory, and the memory
is already allocated. Therefore a tensor is not copied if ``empty_like`` created it and nothing has been written to it.
Uninitialized parameters stay uninitialized, and the first forward reports them. torch replaces buffers with new, empty
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.dtensor.lazy_grad import GRAD_ACCESSORS, resolve_first
from layerzero.dtensor.local_shard import find_local_shard, local_shard
from layerzero.utils.torch_compat import can_move_data


def copy_attributes_and_hooks(source: nn.Parameter, *, gathered: nn.Parameter, sharded: nn.Parameter) -> None:
    """Copy the user's attributes and hooks from a parameter to its replacements.

    Handles that remove these hooks remain valid.
    """
    for target in (gathered, sharded):
        for name, value in vars(source).items():
            if name not in _NOT_THE_USERS:
                setattr(target, name, value)
    if source._backward_hooks is not None:
        gathered._backward_hooks = source._backward_hooks
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        sharded._post_accumulate_grad_hooks = hooks


# Attributes from earlier gradient accumulation, and attributes that belong to DTensor.
_NOT_THE_USERS = {"main_grad", "grad_added_to_main_grad", "_local_tensor", "_spec"}


class AbsentAttribute:
    """Descriptor that hides an inherited attribute."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


@torch.no_grad()
def assign_data(target: DTensor, value: Tensor) -> None:
    """Implement ``target.data = value`` by copying the values of a tensor with the same sharding.

    Raises:
        ValueError: `value` is not sharded, or its rows, dtype or device differ from those of `target`.
    """
    if value is target or _is_empty(value):
        return
    rows, value_rows = local_shard(target), find_local_shard(value)
    spec = rows.spec
    if (
        value_rows is None
        or not isinstance(value, DTensor)
        or not spec.same_sharding(value_rows.spec)
        or (value.shape, value_rows.row_dim) != (target.shape, rows.row_dim)
        or (value_rows.dtype, value_rows.device) != (rows.dtype, rows.device)
    ):
        raise ValueError(
            f".data of parameter {spec.name!r} ({list(spec.shape)}, {rows.dtype} on {rows.device}), of which this rank "
            f"has rows {spec.rows}, was assigned {_describe_tensor(value)}. Assign a sharded tensor that was created "
            "from the parameter, or assign full tensors inside layerzero.unsharded(model, writeback=True), where "
            "vector_to_parameters is also supported"
        )
    rows.copy_(value_rows)


def check_move_is_noop(target: DTensor, moved: Tensor) -> bool:
    """Return True if `moved`, the result of a module move, leaves `target` unchanged.

    See [Note: Module moves and conversions].

    Raises:
        TypeError: the move would change or replace the parameter.
    """
    name = local_shard(target).spec.name
    for setting in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion"):
        if getattr(torch.__future__, f"get_{setting}")():
            raise TypeError(
                f"torch.__future__.set_{setting}(True) would replace parameter {name!r}, which layerzero has sharded. "
                "Set it to False around this call"
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
        f"parameter {name!r} cannot be moved {change}: layerzero has sharded it and does not replace its memory. Move "
        "or convert the model before shard_model. To set the precision of forwards and backwards, use mp_policy"
    )


def mark_uninitialized(func: Any, made: Tensor) -> Tensor:
    """Mark `made` as uninitialized until its first write if `func` is ``torch.empty_like``, and return it."""
    if func is torch.empty_like and (local := find_local_shard(made)) is not None:
        local.tracker.uninitialized = True
    return made


def _is_empty(tensor: Any) -> bool:
    """Return whether ``torch.empty_like`` of a sharded tensor created `tensor` and nothing has been written to it."""
    local = find_local_shard(tensor) if isinstance(tensor, DTensor) else None
    return local is not None and local.tracker.uninitialized


def refuse_sharing(target: DTensor) -> NoReturn:
    raise TypeError(
        f"share_memory() of parameter {local_shard(target).spec.name!r} is not supported: layerzero has sharded it. "
        "Share the tensors of layerzero.full_state_dict(model, rank0_only=False)"
    )


def _describe_tensor(value: Any) -> str:
    kind = "a parameter" if isinstance(value, nn.Parameter) else "a tensor"
    local = getattr(value, "_local_tensor", None)
    rows = "" if local is None else f", with local shape {list(local.shape)}"
    return f"{kind} of shape {list(value.shape)}, {value.dtype} on {value.device}{rows}"


_DATA: Any = Tensor.data
# Replacement for each torch function, as passed to __torch_function__.
FUNCTION_OVERRIDES: dict[Any, Callable[..., Any]] = {
    _DATA.__get__: lambda tensor, *_: tensor.detach(),
    _DATA.__set__: assign_data,
    **{access: resolve_first(access) for access in GRAD_ACCESSORS},
    can_move_data: check_move_is_noop,
    Tensor.share_memory_: refuse_sharing,
}
