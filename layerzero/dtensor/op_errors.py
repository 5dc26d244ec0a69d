"""Error messages for unsupported operations on sharded tensors. The messages suggest alternatives."""

from __future__ import annotations

from typing import Any

from layerzero.dtensor.row_shard_spec import RowShardSpec

__all__ = [
    "FROZEN_DTYPE_MESSAGE",
    "STALE_ROWS_MESSAGE",
    "even_sharding_message",
    "named_error",
    "no_gradient_message",
    "not_gathered_message",
    "penalty_message",
    "row_move_message",
]

STALE_ROWS_MESSAGE = (
    "these rows were read from a parameter before shard_optimizer moved rows to the owners of full parameters. Read "
    "them from the parameter again"
)
FROZEN_DTYPE_MESSAGE = (
    "parameter {!r} was frozen when it was sharded, and its master has dtype {}, which is too coarse for training. "
    "Unfreeze it before shard_model, or convert it to float32 before shard_model"
)


def row_move_message(what: str, spec: RowShardSpec) -> str:
    """Return the error message for an operation that would move rows between ranks."""
    return (
        f"{what} on a tensor derived from parameter {spec.name!r} is not supported, because ranks have different "
        "numbers of rows. For a mean, divide a sum: x.sum() / x.numel(). To read the full tensor, use p.full_tensor(), "
        "layerzero.full_state_dict(model) or torch.distributed.checkpoint. To change it, use "
        "layerzero.unsharded(model, writeback=True)"
    )


def penalty_message(spec: RowShardSpec) -> str:
    """Return the error message for a loss with a term that is computed from a sharded parameter."""
    return (
        f"a loss has a term computed from the sharded parameter {spec.name!r}, such as a penalty on it. No gradient "
        "flows back through this DTensor, because layerzero shards rows unevenly and the model's own loss is a plain "
        "tensor. Compute the term from this rank's rows, so that each row counts once: loss + 0.1 * "
        "p.to_local().square().sum(). Or use the optimizer's weight_decay, or compute the term from gathered weights "
        "inside layerzero.gathered(unit), where unit is the module with the parameter (units inside it stay sharded)"
    )


def not_gathered_message(func: Any, spec: RowShardSpec) -> str:
    """Return the error message for an operation on a plain tensor and a parameter that is not gathered."""
    return (
        f"{getattr(func, '__name__', func)} mixes a plain tensor with parameter {spec.name!r}, of which this rank has "
        f"{len(spec.rows)} of {spec.num_rows} rows. A parameter is gathered only while the forward of its unit runs. "
        "Call model(x), not model.forward(x). Do not make a module a unit if another module reads its parameters. "
        "Apply parametrizations before shard_model. To compute with the parameter elsewhere with gradients, such as in "
        "a fused cross-entropy, use `with layerzero.gathered(module):`. To read the full parameter, use "
        "layerzero.unsharded or p.full_tensor()"
    )


def even_sharding_message(func: Any, spec: RowShardSpec) -> str:
    """Return the error message for an operation that assumes torch's even row bounds."""
    return (
        f"{getattr(func, '__name__', func)} reshapes parameter {spec.name!r} as if torch had sharded it evenly, but "
        f"this rank has {len(spec.rows)} of {spec.num_rows} rows. Apply weight_norm, spectral_norm, parametrizations "
        "and pruning before shard_model, and do not combine it with other wrappers (FSDP). To read the full parameter, "
        "use layerzero.unsharded or p.full_tensor()"
    )


def no_gradient_message(spec: RowShardSpec) -> str:
    """Return the error message for ``torch.autograd.grad`` with respect to a parameter that units have used."""
    return (
        f"torch.autograd.grad found no gradient for parameter {spec.name!r}. Units compute with the gathered "
        "parameter, which autograd.grad does not reach. Call loss.backward(inputs=parameters) and read p.grad. "
        "autograd.grad returns gradients only of terms computed from p.to_local()"
    )


_EXPLAINED = {  # keyed by a substring of torch's error message
    "mixed torch.Tensor and DTensor": not_gathered_message,
    "is invalid for input of size": even_sharding_message,
    "must match the existing size": even_sharding_message,
}


def named_error(error: RuntimeError, func: Any, spec: RowShardSpec) -> RuntimeError:
    """Return an error that names the parameter. Raise it instead of torch's `error`.

    If there is no explanation for the message of `error`, return `error` itself.
    """
    explain = next((explain for text, explain in _EXPLAINED.items() if text in str(error)), None)
    return error if explain is None else RuntimeError(explain(func, spec))
