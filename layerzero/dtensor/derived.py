"""Tensors that autograd derives from sharded parameters, through which no gradient can flow back.

[Note: No gradient through a sharded tensor]
DTensor expands the gradient of ``p.square().sum()`` to the shape of `p` and shards this gradient evenly, unlike the
rows of `p`. If such a scalar is added to the model's own loss, which is a plain tensor, DTensors reach the model's
backward. In both cases torch raises an error that does not name the parameter. Therefore tensors that autograd derives
from a parameter have the class :class:`Derived`. A derived tensor raises an error if it is combined with a plain tensor
that requires a gradient, or if a gradient flows back through a reduction of it. The second check is skipped if one rank
has all rows of `p`. ``p.to_local()`` returns a plain tensor, whose gradient has the shape of the local rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.dtensor.local_shard import outside_dtensor
from layerzero.dtensor.op_errors import named_error, penalty_message
from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = ["set_origin"]


class Derived(DTensor):
    """DTensor that autograd has derived from one or more sharded parameters."""

    origin: RowShardSpec  # spec of the sharded parameter, or of the first one if there are several

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        derived = next(tensor for tensor in tensors if isinstance(tensor, cls))
        with torch._C.DisableTorchFunctionSubclass():
            mixes_with_plain = any(not isinstance(t, DTensor) and t.requires_grad for t in tensors)
            starts_backward = func is Tensor.backward and not derived.origin.is_fully_local
            if (mixes_with_plain or starts_backward) and torch.is_grad_enabled():
                raise RuntimeError(penalty_message(derived.origin))
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                raise named_error(error, func, derived.origin) from error
        return set_origin(result, derived.origin)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        return outside_dtensor(super().to_local(grad_placements=grad_placements))


def set_origin(made: Any, origin: RowShardSpec) -> Any:
    """Convert each DTensor in `made` to :class:`Derived` in place, and return `made`."""
    if type(made) not in (DTensor, tuple, list):
        return made
    return tree_map_only(DTensor, partial(_set_origin, origin), made)


def _set_origin(origin: RowShardSpec, result: DTensor) -> DTensor:
    if type(result) is DTensor:
        result.__class__ = Derived
        result.origin = origin  # type: ignore[attr-defined]
        if result.grad_fn is not None and result.ndim == 0 and origin.shape and not origin.is_fully_local:
            result.register_hook(partial(_raise_penalty_error, origin))  # type: ignore[no-untyped-call]
    return result


def _raise_penalty_error(origin: RowShardSpec, gradient: Tensor) -> None:
    raise RuntimeError(penalty_message(origin))
