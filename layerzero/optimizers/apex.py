"""Define which of NVIDIA Apex's optimizers and settings are supported, and prepare their steps.

[Note: Apex optimizers]
This module does not import Apex. It recognizes Apex optimizers by the module of their class. Classes from
``apex.optimizers`` are in an allowlist and need no compatibility trial. Derived classes follow the same rules, but also
go through the trial. Before each step, :func:`with_preparation` works around two defects of these classes:

- FusedAdam steps only the groups and parameters that were passed to its constructor.
- FusedSGD overwrites all momentum buffers of a launch if the last parameter of the launch has none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_16_AND_32 = (torch.float32, torch.float16)
# Dtypes that each class updates. FusedSGD silently skips parameters with other dtypes.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "FusedAdam": (torch.float32, torch.bfloat16, torch.float16),
    "FusedAdagrad": _16_AND_32,
    "FusedLAMB": _16_AND_32,
    "FusedSGD": _16_AND_32,
}
_NEED_FULL_PARAMS = {"FusedLAMB"}
_INSTEAD = "Use FusedAdam, FusedSGD, FusedAdagrad or FusedLAMB of apex.optimizers, or layerzero.optimizers.adamw"
_REFUSED = {
    "FusedNovoGrad": "it stores the norms of all gradients of a group in one list, so it must step all of them at once",
    "FusedMixedPrecisionLamb": "it stores copies of the parameters and cannot step a group without gradients",
}
_IN_16_BITS = "Keep parameters in fp32, and compute in 16 bits with shard_model(mp_policy=...)"
_REFUSED_ATTRIBUTES = {
    "_amp_stash": " was passed to apex.amp.initialize, which makes it step copies of the parameters. Leave "
    f"apex.amp.initialize out. {_IN_16_BITS}",
    "master_weights": "(master_weights=True) is not supported: it stores fp32 copies of the full parameters that it "
    f"was built with, but this rank has only some of their rows. Leave master_weights out. {_IN_16_BITS}",
    "capturable": "(capturable=True) is not supported: it is for CUDA graphs of step(), which would replay a step "
    "without its collectives. Leave capturable out",
}


def apex_class(optimizer: Optimizer) -> type | None:
    """Return the optimizer's class or base class that the package ``apex`` defines, or None if there is none."""
    return next((kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] == "apex"), None)


def apex_needs_full_params(optimizer: Optimizer) -> bool | None:
    """Return whether an Apex optimizer needs full parameters, or None for derived classes and other optimizers."""
    kind = apex_class(optimizer)
    return kind.__name__ in _NEED_FULL_PARAMS if kind is not None and kind is type(optimizer) else None


def require_supported_apex(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer is an Apex optimizer whose class or settings are not supported."""
    kind = apex_class(optimizer)
    if kind is None:
        return
    name = kind.__name__
    if kind.__module__.startswith("apex.contrib"):
        raise ValueError(f"{name} of apex.contrib is not supported: it shards or copies parameters itself. {_INSTEAD}")
    if name not in DTYPES:
        reason = _REFUSED.get(name, "layerzero has no rules for this class")
        raise ValueError(f"{name} of NVIDIA Apex is not supported: {reason}. {_INSTEAD}")
    for attribute, reason in _REFUSED_ATTRIBUTES.items():
        if getattr(optimizer, attribute, False):
            raise ValueError(f"{name}{reason}")
    limit = optimizer.defaults.get("max_grad_norm", float("inf"))
    if limit != float("inf"):
        raise ValueError(
            f"{name}(max_grad_norm={limit}) is not supported: it clips by the norm of all gradients, but a rank has "
            "only the gradients of the parameters that it owns. Use max_grad_norm=float('inf'), and call "
            "layerzero.clip_grad_norm_(model, ...) before step()"
        )


def require_apex_dtypes(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if the optimizer is an Apex optimizer that does not update parameters of these dtypes."""
    kind = apex_class(optimizer)
    if kind is None:
        return
    supported = DTYPES[kind.__name__]
    for parameter in parameters:
        if parameter.dtype not in supported:
            dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in supported)
            raise ValueError(
                f"NVIDIA Apex's {kind.__name__} does not update a parameter of {parameter.dtype}: its kernels support "
                f"only {dtypes}. {_IN_16_BITS}, or use an optimizer of torch"
            )


def refuse_apex_offload(optimizer: Optimizer) -> None:
    """Raise NotImplementedError for Apex optimizers, because their kernels cannot update masters in host memory."""
    if (kind := apex_class(optimizer)) is not None:
        raise NotImplementedError(
            f"NVIDIA Apex's {kind.__name__} cannot be used with Offload(optimizer=True): its kernels need CUDA, but "
            "the masters are in host memory. Use torch.optim.AdamW(fused=True) or another optimizer of torch, or set "
            "Offload(optimizer=False)"
        )


def with_preparation(optimizer: Optimizer, take_step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that prepares an Apex optimizer and then calls `take_step`, which steps the optimizer.

    See [Note: Apex optimizers]. For other optimizers, return `take_step`.
    """
    kind = apex_class(optimizer)
    if kind is None:
        return take_step

    def prepare_and_step() -> Any:
        require_supported_apex(optimizer)  # settings may have been changed
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            require_apex_dtypes(optimizer, stepped)
            if kind.__name__ == "FusedSGD" and group["momentum"]:
                for dtype in _16_AND_32:
                    launched = [parameter for parameter in stepped if parameter.dtype == dtype]
                    _add_momenta(optimizer, group, launched)
        if hasattr(optimizer, "param_groups_master"):
            optimizer.param_groups_master = [
                {"params": [None] * len(group["params"])} for group in optimizer.param_groups
            ]
        return take_step()

    return prepare_and_step


def _add_momenta(optimizer: Optimizer, group: Mapping[str, Any], launched: Sequence[Tensor]) -> None:
    """Add missing momentum buffers for the parameters of one kernel launch, unless all of them are missing."""
    missing = [parameter for parameter in launched if "momentum_buffer" not in optimizer.state.get(parameter, {})]
    if len(missing) == len(launched):
        return
    decayed = not getattr(optimizer, "wd_after_momentum", False)
    for parameter in missing:
        assert parameter.grad is not None
        momentum = momentum_before_first(group, parameter, parameter.grad, decayed=decayed)
        optimizer.state[parameter]["momentum_buffer"] = momentum


def momentum_before_first(
    group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, *, decayed: bool = True
) -> Tensor:
    """Return the momentum to set before a parameter's first step, so that the step equals a step of torch's SGD.

    After the first step, torch's momentum is the gradient without dampening.

    Args:
        group: settings that apply to the parameter.
        parameter, gradient: values before the step.
        decayed: whether weight decay is added to the gradient before momentum.
    """
    if not group["dampening"]:
        return torch.zeros_like(parameter)
    start = -gradient if group.get("maximize") else gradient.clone()
    if decayed:
        start.add_(parameter, alpha=group["weight_decay"])
    return start.mul_(group["dampening"] / group["momentum"])
