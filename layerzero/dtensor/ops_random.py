"""Handle operators that draw random numbers into sharded tensors.

[Note: Random numbers by global row]
All ranks usually have the same seed. If each rank drew numbers only for its own rows, the rows on all ranks would get
the same numbers. Therefore each rank draws numbers for the full tensor and copies its rows. The result and the state of
the generator are the same as in one process with the same seed. This method needs memory for one full tensor. The
result is correct for distributions in which the number of draws for an element does not depend on the values of other
elements.

``nn.init.trunc_normal_`` draws again until all numbers are within its bounds, but each rank would check only its own
rows. torch calls ``__torch_function__`` for the first draw inside this function, but not for the function itself.
Therefore that call runs the complete function on the full tensor, after which all numbers are within the bounds. The
comparisons with the bounds that follow would be partial values, or gathers with torch 2.14. Therefore the draw returns
a tensor that evaluates these comparisons without communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from layerzero.dtensor.op_errors import unsupported
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.typed_torch import make_dtensor
from layerzero.utils.torch_compat import DisableTorchFunctionSubclass, tree_leaves, tree_map_only, trunc_normal_

_FILLS = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_MAKES = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "native_dropout", "_fused_dropout")
_DRAWING = {f"aten::{name}" for name in (*_FILLS, *_MAKES)}

# Functions that users call, as passed to __torch_function__. Other functions of torch.nn.init call these functions.
_FILLING = {
    *(getattr(Tensor, name) for name in _FILLS),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, torch.eye),  # torch.eye(out=) resizes the output
}
_FUNCTIONS = {
    *_FILLING,
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli, torch.normal),
    *(F.dropout, torch.dropout, torch.dropout_),
}
# Users may pass a generator to draw numbers into the results. A plain DTensor would ignore the generator on the CPU.
LIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}


def is_drawing_function(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call to the torch function `func` draws random numbers and must therefore run on full tensors.

    Calls that autograd records are excluded, unless they fill a tensor in place.
    """
    return func in _FUNCTIONS and (func in _FILLING or not _needs_gradient(args, kwargs))


def is_drawing_operator(func: Any, spec: RowShardSpec) -> bool:
    """Return whether an operator draws one random number for each element.

    Raises:
        NotImplementedError: the operator draws random numbers, but not one for each element.
    """
    is_drawing = func._schema.name in _DRAWING
    if torch.Tag.nondeterministic_seeded in func.tags and not is_drawing:
        raise unsupported(func.__name__, spec)
    return is_drawing


def call_on_full(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run :func:`draw_full`, with special handling of calls to `func` from ``nn.init.trunc_normal_``.

    Call this function directly from ``__torch_function__``, because it inspects the frame that has called `func`.

    Raises:
        NotImplementedError: the bounds passed to ``nn.init.trunc_normal_`` make it use another sampling method.
    """
    caller = sys._getframe(2)
    if caller.f_code is not trunc_normal_.__code__:
        return draw_full(func, args, kwargs)
    if "accept_buf" in caller.f_locals:
        raise unsupported("nn.init.trunc_normal_ with bounds that exclude most numbers", args[0]._local_tensor.spec)
    if func is not Tensor.normal_:  # older versions of torch transform uniform numbers element by element
        return draw_full(func, args, kwargs)
    settings = {name: caller.f_locals[name] for name in ("mean", "std", "a", "b", "generator")}
    drawn = draw_full(lambda whole, *_, **__: trunc_normal_(whole, **settings), args, kwargs)
    return make_dtensor(_WithinBounds, drawn._local_tensor, drawn._spec)


class _WithinBounds(DTensor):
    """Values that ``nn.init.trunc_normal_`` has drawn within its bounds. It compares them with the bounds again."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.lt, Tensor.gt):
            return torch.zeros((), dtype=torch.bool, device="cpu")
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def draw_full(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func` on full tensors and return this rank's rows; see [Note: Random numbers by global row].

    At least one argument must be a RowShardedTensor or a LocalShard. New results have the class of the first such
    argument. If `func` returns one of its arguments, the argument is overwritten and returned.
    """
    full_tensors: dict[int, tuple[Any, Any]] = {}  # by id of the full tensor: (argument, rows of the argument)

    def make_full(argument: Tensor) -> Tensor:
        rows: Any = getattr(argument, "_local_tensor", argument)
        spec: RowShardSpec | None = getattr(rows, "spec", None)
        if spec is None:
            return argument
        row_dim = getattr(rows, "row_dim", None)
        is_row_major = rows.is_contiguous() if row_dim is None else row_dim == -rows.ndim
        if tuple(rows.shape) != (len(spec.rows), *spec.shape[1:]) or not is_row_major:  # for example transposed
            raise unsupported(getattr(func, "__name__", str(func)), spec)
        rows = rows.view_as(rows)  # outside of a DTensor
        full = torch.zeros(spec.full_shape or (1,), dtype=rows.dtype, device=rows.device)
        with torch.no_grad():
            full[spec.global_slices] = rows.as_subclass(torch.Tensor)
        full.requires_grad_(argument.requires_grad)  # so that torch refuses in-place writes outside no_grad
        full_tensors[id(full)] = argument, rows
        kept_alive.append(full)
        return full

    kept_alive: list[Tensor] = []  # keeps the full tensors alive, so that no other tensor gets their ids
    args, kwargs = tree_map_only(Tensor, make_full, (args, kwargs))
    output = func(*args, **kwargs)
    first_argument, first_rows = next(iter(full_tensors.values()))
    own_slices = first_rows.spec.global_slices

    @torch.no_grad()
    def keep_rows(result: Tensor) -> Tensor:
        if id(result) not in full_tensors:
            new_tensor: Tensor = first_argument.with_rows(result[own_slices].clone())
            return new_tensor
        argument, rows = full_tensors[id(result)]
        rows.copy_(result[own_slices])
        overwritten: Tensor = argument
        return overwritten

    return tree_map_only(Tensor, keep_rows, output)


def _needs_gradient(args: Any, kwargs: Any) -> bool:
    """Return whether autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(
        leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
    )
