"""Rules for NVIDIA Apex's optimizers: supported classes and settings, and preparation of a step.

[Note: Apex's optimizers]
Apex is not imported here; its optimizers are recognized by the module of their class. Classes of ``apex.optimizers``
are known by name and need no compatibility trial. The same rules apply to derived classes, which go through the trial.
:func:`prepared` works around two defects of these classes before each step:

- FusedAdam steps only the groups and parameters that were passed to its constructor.
- FusedSGD overwrites all momenta of a launch if the last parameter of the launch has no momentum yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "DTYPES",
    "apex_class",
    "apex_needs_full_params",
    "momentum_before_first",
    "prepared",
    "refuse_apex",
    "refuse_dtypes",
    "refuse_host",
]

_16_AND_32 = (torch.float32, torch.float16)
# Dtypes that each class updates. FusedSGD silently skips parameters of other dtypes.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "FusedAdam": (torch.float32, torch.bfloat16, torch.float16),
    "FusedAdagrad": _16_AND_32,
    "FusedLAMB": _16_AND_32,
    "FusedSGD": _16_AND_32,
}
_NEED_FULL_PARAMS = {"FusedLAMB"}
_INSTEAD = "Use FusedAdam, FusedSGD, FusedAdagrad or FusedLAMB of apex.optimizers, or layerzero.optimizers.adamw"
_REFUSED = {
    "FusedNovoGrad": "it keeps the norms of all gradients of a group in one list, and so must step all of them at once",
    "FusedMixedPrecisionLamb": "it keeps copies of the parameters, and cannot step a group without gradients",
}


def apex_class(optimizer: Optimizer) -> type | None:
    """Return the optimizer's class or base class from the package ``apex``; None if it has none."""
    return next((kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] == "apex"), None)


def apex_needs_full_params(optimizer: Optimizer) -> bool | None:
    """Return whether an optimizer of Apex needs full parameters; None for derived classes and other optimizers."""
    kind = apex_class(optimizer)
    return kind.__name__ in _NEED_FULL_PARAMS if kind is not None and kind is type(optimizer) else None


def refuse_apex(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer is one of Apex's and layerzero does not support its class or settings."""
    kind = apex_class(optimizer)
    if kind is None:
        return
    name = kind.__name__
    if kind.__module__.startswith("apex.contrib"):
        raise ValueError(f"{name} of apex.contrib is not supported: it shards or copies parameters itself. {_INSTEAD}")
    if name not in DTYPES:
        reason = _REFUSED.get(name, "layerzero does not know it")
        raise ValueError(f"{name} of NVIDIA Apex is not supported: {reason}. {_INSTEAD}")
    if hasattr(optimizer, "_amp_stash"):
        raise ValueError(
            f"{name} has been through apex.amp, which keeps copies of the parameters and steps those. Leave "
            "apex.amp.initialize out: keep parameters in fp32, and compute in 16 bits with shard_model(mp_policy=...)"
        )
    if getattr(optimizer, "master_weights", False):
        raise ValueError(
            f"{name}(master_weights=True) is not supported: it keeps fp32 copies of the whole parameters that it was "
            "built with, where this rank has some rows. Leave it out: keep parameters in fp32, and compute in 16 bits "
            "with shard_model(mp_policy=...)"
        )
    if getattr(optimizer, "capturable", False):
        raise ValueError(
            f"{name}(capturable=True) is not supported: it is for CUDA graphs of step(), which would replay a step "
            "without its collectives. Leave it out"
        )
    limit = optimizer.defaults.get("max_grad_norm", float("inf"))
    if limit != float("inf"):
        raise ValueError(
            f"{name}(max_grad_norm={limit}) is not supported: it clips by the norm of all gradients, and a rank has "
            "those of its own parameters. Use max_grad_norm=float('inf'), and call layerzero.clip_grad_norm_(model, "
            "...) before step()"
        )


def refuse_dtypes(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if the optimizer is one of Apex's and does not update parameters of these dtypes."""
    kind = apex_class(optimizer)
    known = None if kind is None else DTYPES.get(kind.__name__)
    if kind is None or known is None:
        return
    for parameter in parameters:
        if parameter.dtype not in known:
            dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in known)
            raise ValueError(
                f"NVIDIA Apex's {kind.__name__} does not update a parameter of {parameter.dtype}: its kernels take "
                f"{dtypes} only. Keep parameters in fp32, and compute in 16 bits with "
                "shard_model(mp_policy=...), or use an optimizer of torch"
            )


def refuse_host(optimizer: Optimizer) -> None:
    """Raise NotImplementedError for optimizers of Apex, because their kernels cannot update masters in host memory."""
    if (kind := apex_class(optimizer)) is not None:
        raise NotImplementedError(
            f"NVIDIA Apex's {kind.__name__} cannot be used with offload_optimizer=True: its kernels need CUDA, and the "
            "masters are in host memory. Use torch.optim.AdamW(fused=True) or another optimizer of torch, or "
            "offload_optimizer=False"
        )


def prepared(optimizer: Optimizer, take_step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that prepares an optimizer of Apex and then calls `take_step`, which steps the optimizer.

    See [Note: Apex's optimizers]. For other optimizers, return `take_step`.
    """
    kind = apex_class(optimizer)
    if kind is None:
        return take_step

    def prepare_and_step() -> Any:
        refuse_apex(optimizer)  # settings may have been changed
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            refuse_dtypes(optimizer, stepped)
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


def _add_momenta(optimizer: Optimizer, group: Mapping[str, Any], launched: Iterable[Tensor]) -> None:
    """Add missing momenta to the state of the parameters of one launch, unless all are missing."""
    kept = {parameter: "momentum_buffer" in optimizer.state.get(parameter, {}) for parameter in launched}
    if not any(kept.values()):
        return
    decayed = not getattr(optimizer, "wd_after_momentum", False)
    for parameter, has_momentum in kept.items():
        if not has_momentum:
            assert parameter.grad is not None
            momentum = momentum_before_first(group, parameter, parameter.grad, decayed=decayed)
            optimizer.state[parameter]["momentum_buffer"] = momentum


def momentum_before_first(
    group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, *, decayed: bool = True
) -> Tensor:
    """Return the momentum to set before a parameter's first step, so that SGD gives the same result as torch's SGD.

    After its first step, torch's momentum is the gradient without dampening.

    Args:
        group: settings of the parameter.
        parameter, gradient: values before the step.
        decayed: whether weight decay is added to the gradient before momentum.
    """
    if not group["dampening"]:
        return torch.zeros_like(parameter)
    start = -gradient if group.get("maximize") else gradient.clone()
    if decayed:
        start.add_(parameter, alpha=group["weight_decay"])
    return start.mul_(group["dampening"] / group["momentum"])
