"""Handle reductions of sharded tensors, whose result on each rank is a partial value.

[Note: Partial scalars]
``p.sum()`` and similar reductions return a DTensor with a ``Partial`` placement. If torch needs the value, or the user
calls ``full_tensor()``, torch all-reduces the partial values. Every rank must take part. However, ``item()``,
``float()`` and ``bool()``, which a loop may call on one rank to print a value, would return this rank's partial value
without an error. Therefore the local tensor of such a DTensor is a :class:`PartialScalar`, which raises an error when
torch reads its value. The result of ``p.to_local().sum()`` is a plain tensor, because the user has requested this
rank's value. torch averages the means of the ranks, which is correct only if all ranks have the same number of rows.
Therefore such an average raises an error, and ``p.mean()`` divides a sum by the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from layerzero.comm.model_ranks import all_reduce_over
from layerzero.dtensor.model_parallel_spec import local_part
from layerzero.dtensor.op_errors import not_gathered, unsupported
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.utils.torch_compat import (
    DisableTorchDispatch,
    amp_unscale,
    disabled_torch_function,
    make_subclass,
    tree_leaves,
    tree_map_only,
)

COLLECTIVES = ("_c10d_functional", "c10d")  # namespaces of torch's collectives
_KEEPS_ROWS = ("all_reduce", "wait_tensor")
_NORMS = ("aten::linalg_vector_norm", "aten::_foreach_norm")
_LARGEST = ("aten::max", "aten::amax", "aten::_foreach_max")
_SMALLEST = ("aten::min", "aten::amin")


class PartialScalar(torch.Tensor):
    """Partial value of a reduction on this rank; see [Note: Partial scalars]."""

    spec: RowShardSpec
    made_by: str

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, plain: Tensor, spec: RowShardSpec, made_by: str) -> PartialScalar:
        part: PartialScalar = make_subclass(cls, plain, False)
        part.spec, part.made_by = spec, made_by
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        part = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func._schema.name == "aten::_local_scalar_dense":
            raise RuntimeError(_partial_value_message(part))
        if func.namespace in COLLECTIVES:
            refuse_uneven_collective(func, args, part.spec)
        with DisableTorchDispatch():
            output = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            return tree_map_only(cls, lambda value: value.value, output)
        return tree_map_only(Tensor, lambda t: t if isinstance(t, cls) else cls(t, part.spec, part.made_by), output)

    @property
    def value(self) -> Tensor:
        """This rank's value, as a plain tensor."""
        with DisableTorchDispatch():
            return self.as_subclass(torch.Tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PartialScalar({self.made_by} of {self.spec.name!r}, {self.value} of this rank)"


def _mean(tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``torch.mean`` of an unevenly sharded tensor as a sum divided by a count."""
    total = tensor.sum(dtype=dtype) if dim is None else tensor.sum(dim, keepdim, dtype=dtype)
    if not total.is_floating_point():
        raise TypeError(f"mean needs a floating-point dtype, got {total.dtype}. Pass dtype=torch.float32")
    return total / (tensor.numel() / max(1, total.numel()))


def _unscale(gradients: Sequence[Any], found: Tensor, inverse_scale: Tensor) -> None:
    """Unscale gradients for a ``GradScaler``, and report an overflow in any rank's rows to all ranks of the model.

    torch would report an overflow only along the axes on which the first gradient is sharded. torch also does not
    accept plain gradients in the same list.

    Raises:
        NotImplementedError: no gradient belongs to a parameter that all ranks of the model share.
    """
    rows = [local_part(gradient) for gradient in gradients]
    specs = [each.spec for each in rows if hasattr(each, "spec")]
    comms, device = specs[0].mesh_info.over_model, specs[0].mesh_info.device
    if all(spec.num_holders < math.prod(comm.size for comm in comms) for spec in specs):
        raise NotImplementedError(
            f"GradScaler is not supported for an optimizer whose gradients are all shared by only some ranks, such as "
            f"that of {specs[0].name!r}: a rank whose experts got no tokens has none of them and would not take part "
            "in the all-reduce. Add parameters that all ranks share to the optimizer, or make the experts one DTensor, "
            "Shard(0) on their axis"
        )
    amp_unscale(rows, found, inverse_scale)
    found_on_device = found.to(device)  # `found` is in host memory if the gradients are in host memory
    all_reduce_over(comms, found_on_device, dist.ReduceOp.MAX)
    found.copy_(found_on_device)


# Replacements for torch functions that are called with a sharded tensor, or with a list that contains one.
REDUCTIONS: dict[Any, Callable[..., Any]] = {
    torch.mean: _mean,
    Tensor.mean: _mean,
    amp_unscale: _unscale,
}
# Errors of functions for which DTensor assumes torch's own sharding.
REFUSED: dict[Any, Callable[[str, RowShardSpec], RuntimeError]] = {
    **dict.fromkeys((torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin), unsupported),
    **dict.fromkeys((F.embedding, torch.embedding), not_gathered),
}


def neutral_result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a norm, minimum or maximum on a rank without rows: that of one row with neutral elements.

    torch raises an error for an infinity norm, minimum or maximum over no rows, or returns a value that would change
    the result of all ranks. Return None for all other calls, which torch can compute.
    """
    name = func._schema.name
    if name not in (*_NORMS, *_LARGEST, *_SMALLEST):
        return None
    values, rest = args[0], args[1:]

    def with_row(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tensor.numel():
            return tensor
        return torch.full(shape, _neutral(name, rest, tensor.dtype), dtype=tensor.dtype, device=tensor.device)

    if isinstance(values, (list, tuple)):
        return func([with_row(tensor, (1,)) for tensor in values], *rest, **kwargs)
    dims = rest[1:2] if name in _NORMS else rest[:1]
    if values.numel() or (dims and not (dims[0] is None or isinstance(dims[0], list))):  # perhaps of two tensors
        return None
    if dims and dims[0] and not {0, -values.ndim}.intersection(dims[0]):  # each row has a result of its own
        return None
    return func(with_row(values, (1, *values.shape[1:])), *rest, **kwargs)


def _neutral(name: str, rest: Sequence[Any], dtype: torch.dtype) -> float | bool:
    """Return the value that changes no result of a norm, minimum or maximum."""
    if name in _NORMS:
        return math.inf if rest and rest[0] < 0 else 0.0
    is_smallest = name in _SMALLEST
    if dtype is torch.bool:
        return is_smallest
    if dtype.is_floating_point:
        return math.inf if is_smallest else -math.inf
    return torch.iinfo(dtype).max if is_smallest else torch.iinfo(dtype).min


def refuse_uneven_collective(func: Any, args: Sequence[Any], spec: RowShardSpec) -> None:
    """Raise an error if a torch collective assumes that all ranks have the same number of rows.

    Args:
        func: operator in one of the namespaces in COLLECTIVES.

    Raises:
        NotImplementedError: the collective moves rows between ranks, or averages over rows.
    """
    if not func.__name__.startswith(_KEEPS_ROWS) or "avg" in args:
        raise unsupported(f"an operation that uses {func.__name__}", spec)


def _partial_value_message(part: PartialScalar) -> str:
    spec = part.spec
    return (
        f"the value of {part.made_by} over parameter {spec.name!r}, or over a tensor derived from it, cannot be read "
        f"on one rank: this rank has {len(spec.rows)} of {spec.num_rows} rows, and the results of all ranks must be "
        "combined. Call full_tensor() first, on all ranks, as in p.norm().full_tensor().item(). To reduce only this "
        "rank's rows, use p.to_local(). "
        "layerzero.clip_grad_norm_(model, math.inf) returns the norm of all gradients"
    )
