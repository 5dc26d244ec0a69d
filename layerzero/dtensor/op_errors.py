"""Error messages for refused operations on sharded tensors, with the alternatives."""

from __future__ import annotations

from typing import Any

from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = ["MOVED", "TOO_COARSE", "named_error", "penalty_error", "row_cut_error", "row_move_error"]

MOVED = (
    "these rows were taken from a parameter before shard_optimizer moved rows to the owners of whole parameters: take "
    "them from the parameter now"
)
TOO_COARSE = (
    "parameter {!r} was frozen when it was sharded, and its master is {}, too coarse to train; unfreeze it before "
    "shard_model, or convert it to float32 before"
)


def row_move_error(what: str, span: RowShardSpec) -> str:
    """Return the error message for an operation that would move rows between ranks."""
    return (
        f"{what} on a tensor derived from parameter {span.name!r}: layerzero cuts rows unevenly and DTensor would "
        "misplace them; use p.full_tensor(), layerzero.full_state_dict(model) or torch.distributed.checkpoint, and to "
        "change it as a whole layerzero.unsharded(model, writeback=True)"
    )


def penalty_error(span: RowShardSpec) -> str:
    """Return the error message for a gradient through a result that was computed from a sharded parameter."""
    return (
        f"a loss has a term computed from the sharded parameter {span.name!r}, such as a penalty on it. No gradient "
        "flows back through that DTensor: layerzero cuts rows unevenly, and the model's own loss is a plain tensor. "
        "Compute the term from this rank's rows, so that each row counts once: loss + 0.1 * "
        "p.to_local().square().sum(). Or use the optimizer's weight_decay, or compute the term from gathered weights "
        "inside layerzero.gathered(module)"
    )


def _not_gathered(func: Any, span: RowShardSpec) -> str:
    return (
        f"{getattr(func, '__name__', func)} mixes a plain tensor with parameter {span.name!r}, of which this rank has "
        f"{len(span.rows)} of {span.count} rows. A parameter is whole only while the forward of its unit runs: call "
        "the model as a whole, model(x) and not model.forward(x), and leave a module out of units if another one reads "
        "its parameters; parametrizations belong before shard_model. To compute with it elsewhere with gradients, such "
        "as in a fused cross-entropy, use `with layerzero.gathered(module):`. To read the full parameter, use "
        "layerzero.unsharded or p.full_tensor()"
    )


def row_cut_error(func: Any, span: RowShardSpec) -> str:
    """Return the error message for an operation that expects rows to be cut as torch cuts them."""
    return (
        f"{getattr(func, '__name__', func)} reshapes parameter {span.name!r} as if torch had cut its rows, of which "
        f"layerzero has put {len(span.rows)} of {span.count} on this rank. weight_norm, spectral_norm, "
        "parametrizations, pruning and other wrappers (FSDP) belong before shard_model, or instead of it. "
        "To look at it whole, use layerzero.unsharded or p.full_tensor()"
    )


_EXPLAINED = {  # by a part of torch's error message
    "mixed torch.Tensor and DTensor": _not_gathered,
    "is invalid for input of size": row_cut_error,
    "must match the existing size": row_cut_error,
}


def named_error(error: RuntimeError, func: Any, span: RowShardSpec) -> RuntimeError:
    """Return an error that names the parameter, to raise in place of torch's `error`.

    Return `error` itself if its message is not a known one.
    """
    explain = next((explain for text, explain in _EXPLAINED.items() if text in str(error)), None)
    return error if explain is None else RuntimeError(explain(func, span))
