"""Random numbers in sharded tensors.

[Note: Numbers by global row]
All ranks usually have one seed. If each filled its rows as a tensor of their own, the same numbers would come in the
rows of all ranks. So each rank draws for the whole tensor, and keeps its rows: what one process with the same seed
would draw, after which every rank's generator is where that process's would be. It takes the memory of one whole
tensor. That works where an element's number does not depend on how many draws the values of others took.

``nn.init.trunc_normal_`` draws again until no number is out of its bounds, which each rank would ask of its own rows
only, and torch does not ask a tensor's class about it, only about the first draw inside. There, all of it is done on
the whole tensor, after which nothing is out of bounds. torch 2.14 would gather rows to find that out, so what it
compares with its bounds is a tensor that answers by itself.
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

__all__ = ["call_whole", "draw_whole", "draws", "is_drawing", "is_truncating", "makes_alike"]

_FILLS = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_MAKES = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "native_dropout", "_fused_dropout")
_OTHERS = ("poisson", "binomial", "multinomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise")
_DRAWING = {f"aten::{name}" for name in (*_FILLS, *_MAKES)}
_REFUSED = {f"aten::{name}{suffix}" for name in _OTHERS for suffix in ("", "_", "_functional")}

# What users call, as __torch_function__ sees it. torch.nn.init's others call these.
_FILLING = {
    *(getattr(Tensor, name) for name in _FILLS),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, torch.eye),  # torch.eye(out=) resizes its output
}
_FUNCTIONS = {
    *_FILLING,
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli, torch.normal),
    *(F.dropout, torch.dropout, torch.dropout_),
}
# What they make may be drawn into with a generator, which DTensor would drop on the CPU.
_ALIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
_TRUNC_NORMAL = nn.init._no_grad_trunc_normal_


def is_drawing(func: Any, args: Any, kwargs: Any) -> bool:
    """A call of a function of torch that is to be made on whole tensors; one with a gradient is left to autograd."""
    return func in _FUNCTIONS and (func in _FILLING or not _needs_gradient(args, kwargs))


def makes_alike(func: Any) -> bool:
    """`func`, a function of torch, makes a tensor that random numbers may be drawn into."""
    return func in _ALIKE


def draws(func: Any, span: RowShardSpec) -> bool:
    """An operator draws a random number for each element of a tensor of rows.

    Raises:
        NotImplementedError: it draws random numbers in some other way.
    """
    name = func._schema.name
    if name in _DRAWING:
        return True
    if name in _REFUSED:
        raise NotImplementedError(_not_by_rows(func.__name__, span))
    return False


def call_whole(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As :func:`draw_whole`, from a ``__torch_function__``: the caller's caller has called `func`.

    Raises:
        NotImplementedError: ``nn.init.trunc_normal_`` with bounds for which it draws in another way.
    """
    caller = sys._getframe(2)
    if not is_truncating(caller):
        return draw_whole(func, args, kwargs)
    given = caller.f_locals
    if "accept_buf" in given:
        raise NotImplementedError(
            "nn.init.trunc_normal_ of a parameter that layerzero has sharded, with bounds that leave out most numbers, "
            "is not supported: initialise before shard_model, or inside layerzero.unsharded(model, writeback=True)"
        )
    if func is not Tensor.normal_:  # older versions of torch map uniform numbers one by one
        return draw_whole(func, args, kwargs)
    settings = {name: given[name] for name in ("mean", "std", "a", "b", "generator")}
    drawn = draw_whole(lambda whole, *_, **__: _TRUNC_NORMAL(whole, **settings), args, kwargs)
    return drawn.within_bounds()


def is_truncating(caller: FrameType) -> bool:
    """It is ``nn.init.trunc_normal_``, which looks whether all is within its bounds: so it is, on all ranks at once."""
    return caller.f_code is _TRUNC_NORMAL.__code__


def draw_whole(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func` on whole tensors, and keep this rank's rows of what it draws; see [Note: Numbers by global row].

    Some argument is a RowShardedTensor or a LocalShard. What `func` returns is of the same kind; an argument that it
    returns has been overwritten.
    """
    wholes: dict[int, tuple[Any, Any]] = {}  # by id of the whole tensor: the argument and its rows

    def make_whole(argument: Tensor) -> Tensor:
        rows = getattr(argument, "_local_tensor", argument)
        span: RowShardSpec | None = getattr(rows, "spec", None)
        if span is None:
            return argument
        if tuple(rows.shape) != (len(span.rows), *span.shape[1:]) or not rows.is_contiguous():  # transposed, say
            raise NotImplementedError(_not_by_rows(getattr(func, "__name__", str(func)), span))
        whole = torch.zeros(span.true_shape or (1,), dtype=rows.dtype, device=rows.device)
        with torch.no_grad():
            whole[span.global_slices] = rows.as_subclass(torch.Tensor)
        whole.requires_grad_(argument.requires_grad)  # an edit of a parameter outside no_grad is refused by torch
        wholes[id(whole)] = argument, rows
        kept.append(whole)
        return whole

    kept: list[Tensor] = []  # or another tensor might get the id of one of them
    args, kwargs = tree_map_only(Tensor, make_whole, (args, kwargs))
    out = func(*args, **kwargs)
    first, first_rows = next(iter(wholes.values()))
    here = first_rows.spec.global_slices

    @torch.no_grad()
    def keep_rows(result: Tensor) -> Tensor:
        if id(result) not in wholes:
            like: Tensor = first.with_rows(result[here].clone())
            return like
        argument, rows = wholes[id(result)]
        rows.copy_(result[here])
        overwritten: Tensor = argument
        return overwritten

    return tree_map_only(Tensor, keep_rows, out)


def _needs_gradient(args: Any, kwargs: Any) -> bool:
    """A backward is to pass through what is made of these arguments."""
    return torch.is_grad_enabled() and any(
        leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
    )


def _not_by_rows(what: str, span: RowShardSpec) -> str:
    return (
        f"{what} on a tensor derived from parameter {span.name!r}: each rank would draw the same random numbers for "
        "other rows. Draw into the parameter itself or into a tensor like it (p.normal_(), torch.rand_like(p)), or "
        "into the whole parameter inside layerzero.unsharded(model, writeback=True); parametrizations belong before "
        "shard_model"
    )
