"""Build AdamW and SGD on the fastest kernels that support the given parameters."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.device.accelerator import default_device_type
from layerzero.optimizers.apex import DTYPES, apex_class, momentum_before_first
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer
from layerzero.utils.torch_compat import fused_kernel_devices

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

_log = logging.getLogger("layerzero")


def adamw(
    params: Params,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with the same updates as ``torch.optim.AdamW``.

    The function uses the first implementation in this list that supports all parameters: NVIDIA Apex's ``FusedAdam``
    (fp32, bf16 or fp16, on CUDA, without `amsgrad` and `maximize`), torch's fused kernel, torch's foreach kernels. The
    logger ``"layerzero"`` reports the chosen implementation in one line, and :func:`implementation` returns it.

    Apex counts steps per group, and torch counts steps per parameter. If a parameter gets its first gradient later than
    the rest of its group, Apex computes a different bias correction. Neither Apex nor torch can load a ``state_dict()``
    of the other implementation.

    Args:
        params: parameters, ``named_parameters()`` or groups, obtained before or after :func:`layerzero.shard_model`.
            Parameters on ``meta`` are assumed to be moved to the accelerator later. Apex is used only if all parameters
            are already on CUDA.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, with the same defaults. Groups may override them.

    Returns:
        An optimizer to pass to :func:`layerzero.shard_optimizer`. Its state has the dtype of the masters, fp32.

    Raises:
        TypeError, ValueError: as raised by torch's constructor.

    Example::

        optimizer = layerzero.optimizers.adamw(model.parameters(), lr=3e-4, weight_decay=0.1)
        optimizer = layerzero.shard_optimizer(optimizer, model)
    """
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    torch_only = {"amsgrad": amsgrad, "maximize": maximize}
    return _build_optimizer(params, torch.optim.AdamW, "FusedAdam", settings, torch_only)


def sgd(
    params: Params,
    *,
    lr: float = 1e-3,
    momentum: float = 0,
    dampening: float = 0,
    weight_decay: float = 0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build SGD with momentum (Sutskever et al. 2013) with the same updates as ``torch.optim.SGD``.

    The implementation is chosen as in :func:`adamw`, with Apex's ``FusedSGD`` (fp32 or fp16, without `dampening` and
    `maximize`).

    Args:
        params: as for :func:`adamw`.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch, with the same defaults. Groups may
            override them.

    Returns:
        An optimizer to pass to :func:`layerzero.shard_optimizer`.

    Raises:
        TypeError, ValueError: as raised by torch's constructor.

    Example::

        optimizer = layerzero.optimizers.sgd(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    torch_only = {"dampening": dampening, "maximize": maximize}
    return _build_optimizer(params, SGD, "FusedSGD", settings, torch_only)


def implementation(optimizer: Optimizer) -> str:
    """Return an optimizer's implementation: ``"apex"``, ``"fused"``, ``"foreach"``, or ``"torch's choice"``.

    Args:
        optimizer: any optimizer, before or after :func:`layerzero.shard_optimizer`.

    Returns:
        The name of the implementation. ``"torch's choice"`` means that neither `fused` nor `foreach` is set. In this
        case, torch chooses the implementation in each step.

    Raises:
        TypeError: `optimizer` is not a ``torch.optim.Optimizer``.

    Example::

        >>> layerzero.optimizers.implementation(layerzero.optimizers.adamw(model.parameters()))  # doctest: +SKIP
        'fused'
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"implementation expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass an optimizer, "
            "before or after shard_optimizer"
        )
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    if apex_class(inner) is not None:
        return "apex"
    for kind in ("fused", "foreach"):
        if inner.defaults.get(kind):
            return kind
    return "torch's choice"


def _build_optimizer(
    params: Params,
    torch_class: Callable[..., Optimizer],
    apex_name: str,
    settings: Mapping[str, Any],
    torch_only: Mapping[str, Any],
) -> Optimizer:
    """Build the optimizer and log the chosen implementation. Apex does not support the settings in `torch_only`."""
    groups = Optimizer(params, {}).param_groups  # torch converts iterators to lists
    tensors = [parameter for group in groups for parameter in group["params"]]
    devices = sorted({default_device_type() if tensor.is_meta else tensor.device.type for tensor in tensors})
    device_names = " and ".join(devices)
    apex = _find_apex(apex_name, groups, tensors, torch_only)
    if not isinstance(apex, str):
        _log.info("%s on %s: NVIDIA Apex's %s", torch_class.__name__, device_names, apex_name)
        return apex(groups, **settings)
    fused = all(device in fused_kernel_devices() for device in devices)
    fused = fused and all(tensor.is_floating_point() for tensor in tensors)
    optimizer = torch_class(groups, **settings, **torch_only, fused=fused, foreach=not fused)
    kernels = "fused" if fused else "foreach"
    _log.info("%s on %s: torch's %s kernels, because %s", torch_class.__name__, device_names, kernels, apex)
    return optimizer


def _find_apex(
    name: str, groups: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor], torch_only: Mapping[str, Any]
) -> Callable[..., Optimizer] | str:
    """Return the Apex class, or the reason why it cannot be used."""
    if not all(tensor.device.type == "cuda" for tensor in tensors):
        return "NVIDIA Apex needs all parameters on CUDA"
    supported = DTYPES[name]
    if not all(tensor.dtype in supported for tensor in tensors):
        return f"NVIDIA Apex's {name} supports only {', '.join(str(d).removeprefix('torch.') for d in supported)}"
    if unsupported := sorted({key for group in (torch_only, *groups) for key in torch_only if group.get(key)}):
        return f"NVIDIA Apex does not support {', '.join(unsupported)}"
    try:
        # Import the extension first. The package named apex on PyPI is a different project and must not be imported.
        importlib.import_module("amp_C")
        kind: Callable[..., Optimizer] = getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError, OSError) as error:
        return f"NVIDIA Apex was not found ({error})"
    return kind


class SGD(torch.optim.SGD):  # has the same name as torch's class, because checkpoints store the name
    """SGD that supports parameters whose first gradients arrive in different steps.

    torch's fused kernel needs momentum buffers either for all parameters or for none.
    """

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor | None]
    ) -> bool:
        of_torch: Any = super()
        sparse: bool = of_torch._init_group(group, params, grads, momenta)
        if group["fused"] and any(momentum is not None for momentum in momenta):
            for index, (parameter, gradient) in enumerate(zip(params, grads, strict=True)):
                if momenta[index] is None:
                    momenta[index] = momentum_before_first(group, parameter, gradient)
        return sparse
