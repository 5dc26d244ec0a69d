"""Call torch functions with sharded parameters, and with tensors that autograd derives from them.

[Note: No gradient through a sharded tensor]
DTensor expands the gradient of ``p.square().sum()`` to the shape of `p` and shards this gradient evenly, unlike the
rows of `p`. If such a scalar is added to the model's own loss, which is a plain tensor, DTensors reach the model's
backward. In both cases torch raises an error that does not name the parameter. Therefore tensors that torch derives
from a parameter have the class :class:`Derived`. A derived tensor raises an error if it is combined with a plain tensor
that requires a gradient, or if a gradient flows back through a reduction of it. The second check is skipped if one rank
has all rows of `p`. ``p.to_local()`` returns a plain tensor, whose gradient has the shape of the local rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.dtensor.local_shard import to_local
from layerzero.dtensor.op_errors import named_error, not_gathered, write_to_derived
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.typed_torch import apply_function, make_dtensor
from layerzero.utils.torch_compat import DisableTorchFunctionSubclass, TorchDispatchMode, tree_leaves, tree_map_only

_OPERATORS = vars(operator)
_WRITING_OPERATORS = {name for name in _OPERATORS if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS}
_NO_WRITES = ("requires_grad_", "detach_")  # their names end like those of in-place functions


class Derived(DTensor):
    """DTensor that torch has derived from one or more sharded parameters."""

    origin: RowShardSpec  # spec of the sharded parameter, or of the first one if there are several

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        derived = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return call_on_sharded(func, args, kwargs or {}, derived.origin)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        return to_local(self, grad_placements)


def call_on_sharded(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], origin: RowShardSpec) -> Any:
    """Call a torch function with sharded or derived tensors, and return its results as derived tensors.

    Raises:
        RuntimeError: plain tensors that require a gradient are mixed with the sharded tensors, or torch raises an
            error of which layerzero knows the reason.
        NotImplementedError: the call would write to a derived tensor that autograd tracks.
    """
    name = getattr(func, "__name__", str(func))
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled():
            if _mixes_plain_tensors(args, kwargs):
                raise not_gathered(name, origin)
            if name not in _NO_WRITES and _writes_to_derived(func, args, kwargs):
                raise write_to_derived(name, origin)
        try:
            made = func(*args, **kwargs)
        except RuntimeError as error:
            if (explained := named_error(error, func, origin)) is error:
                raise
            raise explained from error
        if type(made) not in (DTensor, tuple, list):
            return made
        return tree_map_only(DTensor, lambda tensor: _derive(tensor, origin), made)


def _mixes_plain_tensors(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether plain tensors that require a gradient are among the arguments, and torch might not refuse them."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_derived = any(isinstance(tensor, Derived) for tensor in tensors)
    plain = [tensor for tensor in tensors if tensor.requires_grad and not isinstance(tensor, DTensor)]
    # torch itself refuses to mix parameters with plain tensors, except for those with one element.
    return any(is_derived or tensor.numel() == 1 for tensor in plain)


def _writes_to_derived(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether `func` writes to a derived tensor that autograd tracks. This tensor may be a view of a leaf."""
    is_init = getattr(func, "__module__", None) == nn.init.__name__  # disables gradients itself
    written = tree_leaves(args[:1]) if is_in_place(func, kwargs) and not is_init else []
    return any(isinstance(leaf, Derived) and leaf.requires_grad for leaf in written)


def is_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call to the torch function `func` changes its first argument."""
    name = func.__name__
    if kwargs.get("inplace"):  # functions of torch.nn.functional pass it on by keyword
        return True
    return name == "__setitem__" or name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _derive(made: DTensor, origin: RowShardSpec) -> Tensor:
    if type(made) is not DTensor:
        return made
    derived = apply_function(_Derive, made, origin)
    assert isinstance(derived, Derived)
    derived.origin = origin
    return derived


class _DetachAsDerived(TorchDispatchMode):
    """In this mode, ``detach`` of a DTensor returns a derived tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Derived:
        (made,) = args
        return make_dtensor(Derived, made._local_tensor, made._spec)


class _Derive(torch.autograd.Function):
    """Identity function whose result is a derived tensor. Its backward raises if the gradient would be misplaced."""

    @staticmethod
    def forward(ctx: Any, made: DTensor, origin: RowShardSpec) -> Tensor:
        data_axes = origin.mesh_info.flat_mesh.ndim
        keeps_rows = all(placement.is_shard() for placement in made._spec.placements[-data_axes:])
        ctx.origin = origin
        ctx.is_reduction = bool(origin.shape) and not origin.is_fully_local and not keeps_rows
        # Both share a version counter, by which autograd notices writes.
        with _DetachAsDerived():  # type: ignore[no-untyped-call]
            return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.is_reduction:
            raise not_gathered("a loss", ctx.origin)
        return gradients[0], None
