"""Support calls to units: run hooks, detect recursive calls and backward passes, refuse transforms, explain errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.utils.torch_compat import (
    PROXY_MODE,
    current_graph_task,
    dispatch_mode,
    functorch_interpreter,
    module_call_code,
    tracing_state,
)

_SHOWN = 4  # maximum number of buffers in a message


def call_with_hooks(
    self: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any, before: Callable[..., Any], after: Any
) -> Any:
    """Call `method` of a module between the hooks `before` and `after`, and return the result of `after`.

    If `before` or `method` raises, `after` receives None as the output, and the error is raised again.
    """
    try:
        args, kwargs = before(self, args, kwargs)
        output = method(*args, **kwargs)
    except Exception:
        after(self, args, None)
        raise
    return after(self, args, output)


def is_called(modules: Sequence[nn.Module]) -> bool:
    """Return whether a call to one of `modules` is on the Python call stack. Interrupted calls have left the stack."""
    return _calls_on_stack(modules) > 0


def is_recursive_call(modules: Sequence[nn.Module]) -> bool:
    """Return whether more than one call to the modules of one unit, `modules`, is on the Python call stack."""
    return _calls_on_stack(modules) > 1


def _calls_on_stack(modules: Sequence[nn.Module]) -> int:
    frame, calls, codes = inspect.currentframe(), 0, (module_call_code(), call_with_hooks.__code__)
    while frame is not None:
        calls += frame.f_code in codes and any(frame.f_locals.get("self") is module for module in modules)
        frame = frame.f_back
    return calls


def in_backward() -> bool:
    return current_graph_task() != -1


def require_no_transform(label: str) -> None:
    """Raise if a forward pass is traced or transformed, because weights can be gathered only in eager mode.

    Raises:
        RuntimeError: a trace, an export or a transform of torch.func is active. The error is raised before any
            collective is launched.
    """
    if functorch_interpreter() is not None:
        kind = functorch_interpreter().key().name.lower()
        raise RuntimeError(
            f"torch.func ({kind}) of {label} of a model sharded by layerzero is not supported: hooks gather weights "
            "and reduce gradients, and a transform does not trace them. Use loss.backward() for gradients and a batch "
            "dimension for vmap, or transform an unsharded copy (layerzero.full_state_dict)"
        )
    if tracing_state() is not None:
        _raise_capture_error("torch.jit.trace", label)
    if torch.compiler.is_exporting() or dispatch_mode(PROXY_MODE) is not None:
        _raise_capture_error("torch.export or make_fx", label)


def _raise_capture_error(operation: str, label: str) -> None:
    raise RuntimeError(
        f"{operation} of {label} of a model sharded by layerzero is not supported: it would record collectives. Load "
        "layerzero.full_state_dict(model) into an unsharded model, and capture that model. torch.compile is supported "
        "for units"
    )


def explain_dtype_error(
    error: BaseException | None, label: str, module: nn.Module, param_dtype: torch.dtype | None
) -> None:
    """Add a hint to torch's error about mixed dtypes if some buffers do not have the dtype of the compute weights."""
    if not isinstance(error, RuntimeError) or param_dtype is None or not error.args:
        return
    message = str(error.args[0])
    if "buffer_dtype" in message or not re.search(r"dtype|scalar type", message):
        return
    mismatched = [
        name for name, buffer in module.named_buffers() if buffer.is_floating_point() and buffer.dtype != param_dtype
    ]
    if mismatched:
        error.args = (f"{message}\n{_mixed_dtypes_message(label, mismatched, param_dtype)}", *error.args[1:])


def _mixed_dtypes_message(label: str, buffer_names: Sequence[str], param_dtype: torch.dtype) -> str:
    listed = ", ".join(repr(name) for name in buffer_names[:_SHOWN]) + (", ..." if len(buffer_names) > _SHOWN else "")
    return (
        f"(layerzero: {label} computes in mp_policy.param_dtype={param_dtype}, but its buffers {listed} have another "
        f"dtype. If the module cannot mix dtypes, such as batch norm on some devices, pass "
        f"mp_policy=layerzero.PrecisionPolicy(..., buffer_dtype={param_dtype}))"
    )
