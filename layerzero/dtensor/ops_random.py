"""Handle operators that draw random numbers into sharded tensors.

[Note: Random numbers by global row]
All ranks usually have the same seed. If each rank drew numbers only for its own rows, the rows on all ranks would get
the same numbers. Therefore each rank draws numbers for the full tensor and copies its rows. The result and the state of
the generator are the same as in one process with the same seed. This method needs memory for one full tensor. The
result is correct for distributions in which the number of draws for an element does not depend on the values of other
elements.

``nn.init.trunc_normal_`` draws again until all numbers are within its bounds, but each rank would check only its own
rows. torch calls ``__torch_function__`` for the first draw inside this function, but not for the function itself.
Therefore that call runs the complete function on the full tensor, after which all numbers are within the bounds. torch
2.14 would then gather rows to compare them with the bounds. Therefore the draw returns a tensor that evaluates these
comparisons without communication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = [
    "call_on_full",
    "draw_full",
    "is_drawing_function",
    "is_drawing_operator",
    "is_fillable_like",
    "is_in_trunc_normal",
]

_FILLS = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_MAKES = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "native_dropout", "_fused_dropout")
_OTHERS = ("poisson", "binomial", "multinomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise")
_DRAWING = {f"aten::{name}" for name in (*_FILLS, *_MAKES)}
_REFUSED = {f"aten::{name}{suffix}" for name in _OTHERS for suffix in ("", "_", "_functional")}

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
_ALIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
_TRUNC_NORMAL = nn.init._no_grad_trunc_normal_


def is_drawing_function(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call to the torch function `func` draws random numbers and must therefore run on full tensors.

    Calls that autograd records are excluded, unless they fill a tensor in place.
    """
    return func in _FUNCTIONS and (func in _FILLING or not _needs_gradient(args, kwargs))


def is_fillable_like(func: Any) -> bool:
    """Return whether `func` is empty_like, zeros_like, ones_like or full_like, whose results users may fill."""
    return func in _ALIKE


def is_drawing_operator(func: Any, spec: RowShardSpec) -> bool:
    """Return whether an operator draws one random number for each element.

    Raises:
        NotImplementedError: the operator draws random numbers, but not one for each element.
    """
    name = func._schema.name
    if name in _DRAWING:
        return True
    if name in _REFUSED:
        raise NotImplementedError(_not_by_rows_message(func.__name__, spec))
    return False


def call_on_full(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run :func:`draw_full`, with special handling of calls to `func` from ``nn.init.trunc_normal_``.

    Call this function directly from ``__torch_function__``, because it inspects the frame that has called `func`.

    Raises:
        NotImplementedError: the bounds passed to ``nn.init.trunc_normal_`` make it use another sampling method.
    """
    caller = sys._getframe(2)
    if not is_in_trunc_normal(caller):
        return draw_full(func, args, kwargs)
    caller_locals = caller.f_locals
    if "accept_buf" in caller_locals:
        raise NotImplementedError(
            "nn.init.trunc_normal_ of a parameter that layerzero has sharded is not supported for bounds that exclude "
            "most numbers. Initialize it before shard_model, or inside layerzero.unsharded(model, writeback=True)"
        )
    if func is not Tensor.normal_:  # older versions of torch transform uniform numbers element by element
        return draw_full(func, args, kwargs)
    settings = {name: caller_locals[name] for name in ("mean", "std", "a", "b", "generator")}
    result = draw_full(lambda whole, *_, **__: _TRUNC_NORMAL(whole, **settings), args, kwargs)
    return result.alias_without_redraw()


def is_in_trunc_normal(caller: FrameType) -> bool:
    """Return whether `caller` is a frame of ``nn.init.trunc_normal_``.

    Code in this frame may read partial values. It reads them only to check bounds, and all rows are within the bounds.
    """
    return caller.f_code is _TRUNC_NORMAL.__code__


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
            raise NotImplementedError(_not_by_rows_message(getattr(func, "__name__", str(func)), spec))
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


def _not_by_rows_message(what: str, spec: RowShardSpec) -> str:
    return (
        f"{what} on a tensor derived from parameter {spec.name!r} is not supported: each rank would draw the same "
        "random numbers for different rows. Fill the parameter itself or a tensor like it (p.normal_(), "
        "torch.rand_like(p)), or fill the full parameter inside layerzero.unsharded(model, writeback=True). Apply "
        "parametrizations before shard_model"
    )
