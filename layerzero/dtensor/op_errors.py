"""Error messages for unsupported operations on sharded tensors. The messages suggest alternatives."""

from __future__ import annotations

from typing import Any

from layerzero.dtensor.row_shard_spec import RowShardSpec

FROZEN_DTYPE_MESSAGE = (
    "parameter {!r} was frozen when it was sharded, and its master has dtype {}, which is too coarse for training. "
    "Unfreeze it before shard_model, or convert it to float32 before shard_model"
)


def unsupported(what: str, spec: RowShardSpec) -> NotImplementedError:
    """Return the error for a function without a rule for sharded tensors.

    Args:
        what: name of the function, or a phrase that describes it.
    """
    return NotImplementedError(
        f"{what} is not supported for parameter {spec.name!r}, or a tensor derived from it, because ranks have unequal "
        f"numbers of its rows: this rank has {len(spec.rows)} of {spec.num_rows}. Combine it only with tensors that "
        "are created from it, such as torch.zeros_like(p), and reduce it without keepdim. For a mean, divide a sum: "
        "x.sum() / x.numel(). For this rank's rows, use p.to_local(). To read the full tensor, call p.full_tensor() or "
        "layerzero.full_state_dict(model) on all ranks. To change or initialize it, use "
        "layerzero.unsharded(model, writeback=True). Apply weight_norm, spectral_norm, parametrizations and pruning "
        "before shard_model, and do not combine it with other wrappers (FSDP)"
    )


def not_gathered(what: str, spec: RowShardSpec) -> RuntimeError:
    """Return the error for an operation that mixes plain tensors with a parameter that is not gathered."""
    return RuntimeError(
        f"{what} mixes a plain tensor with parameter {spec.name!r}, of which this rank has "
        f"{len(spec.rows)} of {spec.num_rows} rows, or with a tensor derived from it. A parameter is gathered only "
        "while the forward of its unit runs. Call model(x), not model.forward(x). Do not make a module a unit if "
        "another module reads its parameters. Apply parametrizations before shard_model. For a penalty on the "
        "parameter, add a term of this rank's rows, so that each row counts once: loss + 0.1 * "
        "p.to_local().square().sum(); or use the optimizer's weight_decay. To compute with the parameter elsewhere "
        "with gradients, such as in a fused cross-entropy, use `with layerzero.gathered(module):` (units inside the "
        "module stay sharded). To read the full parameter, use layerzero.unsharded or p.full_tensor()"
    )


def write_to_derived(what: str, spec: RowShardSpec) -> NotImplementedError:
    """Return the error for an in-place function on a derived tensor that autograd tracks."""
    return NotImplementedError(
        f"{what} outside torch.no_grad() would write to a tensor derived from parameter {spec.name!r}, which autograd "
        "tracks. Use the function that returns a new tensor. To change the parameter, write under torch.no_grad()"
    )


def no_gradient_message(spec: RowShardSpec) -> str:
    """Return the error message for ``torch.autograd.grad`` with respect to a parameter that units have used."""
    return (
        f"torch.autograd.grad found no gradient for parameter {spec.name!r}. Units compute with the gathered "
        "parameter, which autograd.grad does not reach. Call loss.backward(inputs=parameters) and read p.grad. "
        "autograd.grad returns gradients only of terms computed from p.to_local()"
    )


def named_error(error: RuntimeError, func: Any, spec: RowShardSpec) -> RuntimeError:
    """Return an error that names the parameter. Raise it instead of torch's `error`.

    If the message of `error` is none of those that sharded tensors cause, return `error` itself.
    """
    name = getattr(func, "__name__", str(func))
    if "mixed torch.Tensor and DTensor" in str(error):
        return not_gathered(name, spec)
    if "is invalid for input of size" in str(error) or "must match the existing size" in str(error):
        return unsupported(name, spec)
    return error
