"""Torch operations on sharded parameters: each raises one error on all ranks, or is right on all of them."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import layerzero
from layerzero.dtensor.local_shard import plain
from tests.support.ranks import run_ranks

# Shapes of parameters by unit. The parameters of a unit are cut unevenly: some ranks have one row, and some have none.
UNITS: dict[str, dict[str, tuple[int, ...]]] = {
    "first": {"wide": (7, 4), "square": (4, 4)},
    "second": {"tall": (5, 4), "few_rows": (3, 4)},
    "third": {"stack": (3, 2, 2), "vector": (9,)},
    "fourth": {"one_row": (1, 6), "one_column": (5, 1), "short_vector": (2,), "scalar": ()},
}


class Unit(nn.Module):
    """Parameters with distinct positive values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.arange(max(1, torch.Size(shape).numel())) * 7 % 11 + 1
            self.register_parameter(name, nn.Parameter(values.view(shape) / 16))

    def forward(self, x: Tensor) -> Tensor:
        return sum(p.sum() for p in self.parameters()) * x


def _model(units: Sequence[str]) -> nn.Module:
    return nn.ModuleDict({name: Unit(UNITS[name]) for name in units})


EXHAUSTIVE = pytest.mark.exhaustive
UNARY = (
    *("abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "cos", "cosh"),
    *("deg2rad", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "isfinite", "isinf"),
    *("isnan", "isneginf", "isreal", "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit", "neg"),
    *("positive", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc", "sinh"),
    *("sqrt", "square", "tan", "tanh", "trunc", "nan_to_num"),
)
IN_PLACE = ("abs_", "ceil_", "exp_", "neg_", "relu_", "round_", "sigmoid_", "sqrt_", "square_", "tanh_", "zero_")
BINARY = (
    *("add", "atan2", "div", "eq", "floor_divide", "fmax", "fmin", "fmod", "ge", "gt", "hypot", "le", "logaddexp"),
    *("logical_and", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "ne", "nextafter", "pow"),
    *("remainder", "sub", "true_divide", "xlogy", "heaviside", "copysign"),
)
REDUCED = ("sum", "mean", "amax", "amin", "prod", "norm", "all", "any", "logsumexp", "var", "std", "median", "argmax")
Op = Callable[[Tensor, Tensor], Any]  # of a parameter, and a tensor that is sharded like it


def _of_one(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Op:
    return lambda p, q: function(p, *args, **kwargs)


def _sharded_by_torch(p: Tensor) -> Tensor:
    ones = torch.ones(tuple(p.shape))
    if not isinstance(p, DTensor) or not p.ndim:
        return ones
    return distribute_tensor(ones, p.device_mesh, [Shard(0)] * p.device_mesh.ndim)


def _of_reduced(method: str, name: str, **kwargs: Any) -> Op:
    """Return a method of a parameter that is called with a reduction of the parameter."""
    return lambda p, q: getattr(p, method)(getattr(torch, name)(p, **kwargs))


OPS: dict[str, Op] = {
    **{name: _of_one(getattr(torch, name)) for name in UNARY},
    **{name: _of_one(getattr(Tensor, name)) for name in IN_PLACE},
    **{name: getattr(torch, name) for name in BINARY},
    **{f"{name} of a number": _of_one(getattr(torch, name), 0.5) for name in ("add", "mul", "pow", "fmod")},
    **{name: _of_one(getattr(torch, name)) for name in (*REDUCED, "count_nonzero", "max", "min", "aminmax")},
    **{f"{name} over rows": _of_one(getattr(torch, name), dim=0) for name in (*REDUCED, "max", "min")},
    **{f"{name} of each row": _of_one(getattr(torch, name), dim=-1) for name in REDUCED},
    **{f"{name} over rows, kept": _of_one(getattr(torch, name), dim=0, keepdim=True) for name in REDUCED},
    **{
        f"{method} the {name} over rows": _of_reduced(method, name, dim=0, keepdim=True)
        for method in ("sub_", "sub", "mul_", "div", "copy_", "lt", "maximum")
        for name in ("mean", "amax", "sum", "norm")
    },
    **{
        f"{method} the {name} of each row": _of_reduced(method, name, dim=-1, keepdim=True)
        for method in ("sub_", "div")
        for name in ("sum", "amax", "norm")
    },
    **{
        f"{method} the {name}": _of_reduced(method, name)
        for method in ("sub_", "div", "copy_", "fill_")
        for name in ("mean", "amax", "norm")
    },
    "mean of squares": lambda p, q: p.square().mean(),
    "mean of row sums": lambda p, q: p.flatten(1).sum(1).mean(),
    "mean of column sums": lambda p, q: p.sum(0).mean(),
    "mean of a transposed one": lambda p, q: p.mT.mean(),
    "mean of a slice": lambda p, q: p[:, :1].mean(),
    "huber_loss": F.huber_loss,
    "add_ with alpha": lambda p, q: p.add_(q, alpha=0.5),
    "addcmul_": lambda p, q: p.addcmul_(q, q, value=0.5),
    "addcdiv": lambda p, q: p.addcdiv(q, q, value=0.5),
    "lerp_": lambda p, q: p.lerp_(q, 0.25),
    "copy_": lambda p, q: p.copy_(q),
    "fill_": lambda p, q: p.fill_(2.0),
    "clamp_": lambda p, q: p.clamp_(0.2, 0.4),
    "clamp to tensors": lambda p, q: p.clamp(q * 0.5, q),
    "where": lambda p, q: torch.where(p > 0.3, p, q),
    "masked_fill_": lambda p, q: p.masked_fill_(p > 0.3, 0.0),
    "masked_fill": lambda p, q: p.masked_fill(p > 0.3, 0.0),
    "masked_select": lambda p, q: torch.masked_select(p, p > 0.3),
    "index by a mask": lambda p, q: p[p > 0.3],
    "assign by a mask": lambda p, q: p.__setitem__(p > 0.3, 0.0),
    "first row": lambda p, q: p[0],
    "last row": lambda p, q: p[-1],
    "some rows": lambda p, q: p[1:3],
    "every other row": lambda p, q: p[::2],
    "rows by a list": lambda p, q: p[[0, 1]],
    "first column": lambda p, q: p[..., 0],
    "some columns": lambda p, q: p[..., :2],
    "assign a row": lambda p, q: p.__setitem__(0, 0.0),
    "assign some rows": lambda p, q: p.__setitem__(slice(0, 2), 0.0),
    "assign a column": lambda p, q: p.__setitem__((..., 0), 0.0),
    "select": lambda p, q: p.select(0, 0),
    "narrow": lambda p, q: p.narrow(0, 0, 1),
    "narrow columns": lambda p, q: p.narrow(-1, 0, 1),
    "index_select": lambda p, q: p.index_select(0, torch.tensor([0])),
    "index_select columns": lambda p, q: p.index_select(-1, torch.tensor([0])),
    "index_fill_": lambda p, q: p.index_fill_(0, torch.tensor([0]), 0.0),
    "index_add_": lambda p, q: p.index_add_(0, torch.tensor([0]), q[:1]),
    "index_copy_": lambda p, q: p.index_copy_(0, torch.tensor([0]), q[:1]),
    "gather": lambda p, q: torch.gather(p, 0, torch.zeros(tuple(p.shape), dtype=torch.int64)),
    "scatter_": lambda p, q: p.scatter_(0, torch.zeros(tuple(p.shape), dtype=torch.int64), 0.0),
    "take": lambda p, q: torch.take(p, torch.tensor([0])),
    "split": lambda p, q: p.split(2),
    "chunk": lambda p, q: p.chunk(2),
    "unbind": lambda p, q: p.unbind(0),
    "split columns": lambda p, q: p.split(1, -1),
    "cat": lambda p, q: torch.cat([p, q]),
    "cat columns": lambda p, q: torch.cat([p, q], -1),
    "stack": lambda p, q: torch.stack([p, q]),
    "stack last": lambda p, q: torch.stack([p, q], -1),
    "transpose": lambda p, q: p.transpose(0, -1),
    "t": lambda p, q: p.t(),
    "T": lambda p, q: p.mT,
    "permute": lambda p, q: p.permute(*range(p.ndim)[::-1]),
    "flip": lambda p, q: p.flip(0),
    "flip columns": lambda p, q: p.flip(-1),
    "roll": lambda p, q: p.roll(1, 0),
    "roll all": lambda p, q: p.roll(1),
    "sort": lambda p, q: torch.sort(p, dim=0),
    "sort each row": lambda p, q: torch.sort(p, dim=-1),
    "topk": lambda p, q: torch.topk(p, 1, dim=0),
    "topk of each row": lambda p, q: torch.topk(p, 1, dim=-1),
    "kthvalue": lambda p, q: torch.kthvalue(p, 1, dim=0),
    "argsort": lambda p, q: torch.argsort(p, dim=0),
    "unique": lambda p, q: torch.unique(p),
    "nonzero": lambda p, q: torch.nonzero(p > 0.3),
    "cumsum": lambda p, q: torch.cumsum(p, 0),
    "cumsum of each row": lambda p, q: torch.cumsum(p, -1),
    "cumprod": lambda p, q: torch.cumprod(p, 0),
    "cummax": lambda p, q: torch.cummax(p, 0),
    "diff": lambda p, q: torch.diff(p, dim=0),
    "softmax": lambda p, q: torch.softmax(p, 0),
    "softmax of each row": lambda p, q: torch.softmax(p, -1),
    "log_softmax": lambda p, q: torch.log_softmax(p, 0),
    "logcumsumexp": lambda p, q: torch.logcumsumexp(p, 0),
    "quantile": lambda p, q: torch.quantile(p, 0.5),
    "histc": lambda p, q: torch.histc(p, 4, 0.0, 1.0),
    "view": lambda p, q: p.view(-1),
    "reshape": lambda p, q: p.reshape(-1),
    "flatten": lambda p, q: p.flatten(),
    "flatten later dims": lambda p, q: p.flatten(1),
    "unflatten": lambda p, q: p.unflatten(-1, (1, -1)),
    "squeeze": lambda p, q: p.squeeze(),
    "squeeze rows": lambda p, q: p.squeeze(0),
    "squeeze columns": lambda p, q: p.squeeze(-1),
    "unsqueeze": lambda p, q: p.unsqueeze(0),
    "unsqueeze columns": lambda p, q: p.unsqueeze(-1),
    "expand": lambda p, q: p.expand(2, *p.shape),
    "expand a new dim": lambda p, q: p.unsqueeze(0).expand(2, *[-1] * p.ndim),
    "reshape to a column": lambda p, q: p.reshape(-1, 1),
    "repeat": lambda p, q: p.repeat(2, *[1] * (p.ndim - 1)),
    "tile": lambda p, q: p.tile(2),
    "repeat_interleave": lambda p, q: p.repeat_interleave(2, 0),
    "tril": lambda p, q: p.tril(),
    "triu_": lambda p, q: p.triu_(),
    "diagonal": lambda p, q: p.diagonal(),
    "diag": lambda p, q: torch.diag(p),
    "trace": lambda p, q: torch.trace(p),
    "pad": lambda p, q: F.pad(p, (1, 1)),
    "pad rows": lambda p, q: F.pad(p, (0, 0, 1, 0)),
    "dot": torch.dot,
    "vdot": torch.vdot,
    "mv": lambda p, q: torch.mv(p, q[0]),
    "matmul": lambda p, q: p @ q.transpose(0, -1),
    "gram": lambda p, q: p.transpose(0, -1) @ q,
    "outer": torch.outer,
    "einsum": lambda p, q: torch.einsum("ij,ij->", p, q),
    "einsum of rows": lambda p, q: torch.einsum("ij,ij->i", p, q),
    "einsum of columns": lambda p, q: torch.einsum("ij,ij->j", p, q),
    "embedding": lambda p, q: F.embedding(torch.tensor([0]), p),
    "add a tensor that torch has sharded": lambda p, q: p + _sharded_by_torch(p),
    "linear with a plain tensor": lambda p, q: F.linear(torch.ones(2, p.shape[-1]), p),
    "add a plain tensor": lambda p, q: p + torch.ones(tuple(p.shape)),
    "add_ a plain row": lambda p, q: p.add_(torch.ones(p.shape[-1:])),
    "copy_ of a full tensor": lambda p, q: p.copy_(torch.ones(tuple(p.shape))),
    "mul by a plain scalar": lambda p, q: p * torch.tensor(2.0),
    "sub_ the first row": lambda p, q: p.sub_(p[:1]),
    "sub_ the row sums": lambda p, q: p.sub_(p.sum(-1)),
    "sub the column sums": lambda p, q: p.sub(p.sum(0)),
    "sub_ the transposed": lambda p, q: p.sub_(q.transpose(0, -1)),
    "div by the full norm": lambda p, q: p / p.norm(dim=0),
    "normalize": lambda p, q: F.normalize(p, dim=0),
    "normalize rows": lambda p, q: F.normalize(p, dim=-1),
    "renorm": lambda p, q: torch.renorm(p, 2, 0, 1.0),
    "layer_norm": lambda p, q: F.layer_norm(p, p.shape[-1:]),
    "cosine_similarity": lambda p, q: F.cosine_similarity(p, q, dim=0),
    "cosine_similarity of rows": lambda p, q: F.cosine_similarity(p, q, dim=-1),
    "dist": torch.dist,
    "cdist": torch.cdist,
    "mse_loss": F.mse_loss,
    "mse_loss summed": lambda p, q: F.mse_loss(p, q, reduction="sum"),
    "l1_loss summed": lambda p, q: F.l1_loss(p, q, reduction="sum"),
    "allclose": torch.allclose,
    "equal": torch.equal,
    "isclose": torch.isclose,
    "std_mean": lambda p, q: torch.std_mean(p),
    "var_mean over rows": lambda p, q: torch.var_mean(p, 0),
    "nansum": lambda p, q: torch.nansum(p),
    "nanmean": lambda p, q: torch.nanmean(p),
    "matrix norm": lambda p, q: torch.linalg.matrix_norm(p),
    "nuclear norm": lambda p, q: torch.linalg.matrix_norm(p, "nuc"),
    "svd": lambda p, q: torch.linalg.svdvals(p),
    "qr": lambda p, q: torch.linalg.qr(p),
    "inverse": lambda p, q: torch.linalg.inv(p),
    "det": lambda p, q: torch.linalg.det(p),
    "max of two": torch.max,
    "zeros_like": lambda p, q: torch.zeros_like(p),
    "full_like": lambda p, q: torch.full_like(p, 3.0),
    "empty_like, filled": lambda p, q: torch.empty_like(p).fill_(1.0),
    "new_zeros": lambda p, q: p.new_zeros(tuple(p.shape)),
    "clone": lambda p, q: p.clone(),
    "contiguous": lambda p, q: p.contiguous(),
    "bfloat16": lambda p, q: p.bfloat16(),
    "to int": lambda p, q: (16 * p).int(),
    "float of the double": lambda p, q: p.double().float(),
    "rows in a loop": lambda p, q: [row.sum() for row in p],
    "foreach add_": lambda p, q: torch._foreach_add_([p, p], [q, q]),
    "foreach mul": lambda p, q: torch._foreach_mul([p, q], 2.0),
    "foreach norm": lambda p, q: torch._foreach_norm([p, q]),
    "foreach infinite norm": lambda p, q: torch._foreach_norm([p, q], float("inf")),
    "foreach sqrt": lambda p, q: torch._foreach_sqrt([p, q]),
    "foreach lerp_": lambda p, q: torch._foreach_lerp_([p], [q], 0.5),
    "foreach addcdiv_": lambda p, q: torch._foreach_addcdiv_([p], [q], [q], 0.5),
    "foreach copy_": lambda p, q: torch._foreach_copy_([p], [q]),
    "foreach maximum": lambda p, q: torch._foreach_maximum([p], [q]),
    "foreach add of row means": lambda p, q: torch._foreach_add([p], [p.mean(0, keepdim=True)]),
    "foreach max": lambda p, q: torch._foreach_max([p]),
    "in-place operator": lambda p, q: p.__imul__(2),
    "right operator": lambda p, q: 1 - p,
    "infinite norm over rows": lambda p, q: torch.linalg.vector_norm(p, float("inf"), dim=0),
    "zero norm": lambda p, q: torch.linalg.vector_norm(p, 0),
    "norm of three": lambda p, q: torch.linalg.vector_norm(p, 3),
    "item": lambda p, q: p.norm().item(),
}


# Some ranks raised an error, and others did not, when a refusal depended on the rows of the rank.
COMBINE_ROWS = (
    *("sub_ the mean over rows", "div the norm over rows", "normalize rows", "aminmax", "foreach max", "foreach norm"),
    *("expand a new dim", "einsum", "einsum of rows", "einsum of columns", "flatten", "reshape to a column", "dot"),
    *("add a tensor that torch has sharded", "embedding", "new_zeros", "add", "sum over rows", "norm"),
)

# Results of these differ between a 0-dim tensor and the tensor with one row that represents it.
_NOT_OF_SCALARS = ("kept", "narrow columns", "some columns")


def _parts(result: Any, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a result, and the part of the expected tensor that it should be equal to."""
    if not isinstance(result, DTensor):
        return result, expected
    if any(isinstance(placement, Partial) for placement in result.placements):
        return result.full_tensor(), expected
    local = plain(result)
    if all(isinstance(placement, Replicate) for placement in result.placements):
        return local, expected
    (dim,) = {placement.dim % max(1, result.ndim) for placement in result.placements}
    rows = result._local_tensor.spec.rows
    return local, torch.atleast_1d(expected).narrow(dim, rows.start, len(rows))


def _difference(result: Any, expected: Any) -> str | None:
    """Describe how the result of an operation differs from that of one process."""
    ours, theirs = tree_leaves(result), tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, expected {len(theirs)}"
    for value, other in zip(ours, theirs, strict=True):
        if not isinstance(value, Tensor):
            if value != other:
                return f"{value}, expected {other}"
        elif value.shape != other.shape:
            return f"shape {list(value.shape)}, expected {list(other.shape)}"
        else:
            part, wanted = _parts(value.detach(), other)
            if part.shape != wanted.shape or not torch.allclose(plain(part), wanted, equal_nan=True):
                return f"{part}, expected {wanted}"
    return None


@torch.no_grad()
def _outcomes(rank: int, size: int, keys: Sequence[str], units: Sequence[str]) -> dict[str, str]:
    """Return by operation and parameter: "" if its result is right, otherwise the error or the difference."""
    warnings.simplefilter("ignore")
    model, outcomes = layerzero.shard_model(_model(units), zero3_size=size, units=list(units)), {}
    originals = {name: p.detach().clone() for name, p in _model(units).named_parameters()}
    for key in keys:
        for name, p in model.named_parameters():
            if not p.ndim and key.endswith(_NOT_OF_SCALARS):
                continue
            full = originals[name].clone()
            p.copy_(full)
            expected: Any = None
            with contextlib.suppress(Exception):  # such as that of a matrix operation of a vector
                expected = (OPS[key](full, torch.full_like(full, 0.5)),)
            try:
                result = OPS[key](p, torch.full_like(p, 0.5))
                difference = expected and (_difference(result, expected[0]) or _difference(p.detach(), full))
            except Exception as error:
                outcomes[f"{key} of {name}"] = f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
                if isinstance(error, RuntimeError) and "gloo" in str(error):  # another rank has raised
                    return outcomes
                continue
            outcomes[f"{key} of {name}"] = f"wrong: {difference}" if difference else ""
    return outcomes


def _check(world_size: int, size: int, keys: Sequence[str], units: Sequence[str]) -> None:
    # The time limits are generous, because an operation that fails on some ranks only is found by the first of them.
    ranks = run_ranks(_outcomes, size, keys, units, world_size=world_size, pg_timeout=20, timeout=600)
    for key, first in ranks[0].items():
        outcomes = [outcome.get(key) for outcome in ranks]
        assert all(outcome == first for outcome in outcomes), f"{key}: {outcomes}"
        assert not first.startswith("wrong"), f"{key}: {first}"
    right = sum(outcome == "" for outcome in ranks[0].values())
    assert right > len(ranks[0]) / 4, f"only {right} of {len(ranks[0])} are right"


def test_operations_that_combine_rows_are_right_or_raise_one_error_on_all_ranks() -> None:
    _check(4, 2, COMBINE_ROWS, ("second", "fourth"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "size"), [(2, 2), (4, 2), pytest.param(2, 1, marks=EXHAUSTIVE), pytest.param(4, 4, marks=EXHAUSTIVE)]
)
def test_each_operation_is_right_on_all_ranks_or_raises_one_error_on_all(world_size: int, size: int) -> None:
    assert len(OPS) > 300
    _check(world_size, size, list(OPS), list(UNITS))
