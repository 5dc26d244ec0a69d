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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.dtensor.local_shard import to_local
from layerzero.dtensor.op_errors import named_error, not_gathered, unsupported
from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = ["call_on_sharded", "is_in_place"]


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
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not all(isinstance(tensor, DTensor) for tensor in tensors):
                raise not_gathered(name, origin)
            is_init = getattr(func, "__module__", None) == nn.init.__name__  # disables gradients itself
            written = args[0] if args and is_in_place(func) and not is_init else None
            if isinstance(written, Derived) and written.requires_grad:  # it may be a view of a leaf
                raise unsupported(f"{name} outside torch.no_grad()", origin)
        try:
            made = func(*args, **kwargs)
        except RuntimeError as error:
            if (explained := named_error(error, func, origin)) is error:
                raise
            raise explained from error
        if type(made) not in (DTensor, tuple, list):
            return made
        return tree_map_only(DTensor, lambda tensor: _derive(tensor, origin), made)


def is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and (not name.endswith("__") or name.startswith("__i")))


def _derive(made: DTensor, origin: RowShardSpec) -> Tensor:
    if type(made) is not DTensor:
        return made
    derived: Derived = _Derive.apply(made, origin)  # type: ignore[no-untyped-call]
    derived.origin = origin
    return derived


class _Derive(torch.autograd.Function):
    """Identity function whose result is a derived tensor. Its backward raises if the gradient would be misplaced."""

    @staticmethod
    def forward(ctx: Any, made: DTensor, origin: RowShardSpec) -> Derived:
        ctx.origin = origin
        ctx.is_reduction = made.ndim == 0 and bool(origin.shape) and not origin.is_fully_local
        return Derived(made._local_tensor, made._spec, requires_grad=False)  # type: ignore[no-untyped-call, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.is_reduction:
            raise not_gathered("a loss", ctx.origin)
        return gradients[0], None
