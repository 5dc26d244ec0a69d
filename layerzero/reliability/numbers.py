"""Whether numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["any_not_finite", "few_names", "not_finite"]

_SHOWN = 3  # names in a message
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def any_not_finite(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """0-dim, bool, on `device`: a tensor holds a NaN or an infinity. One read of each; the host waits for nothing."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    for of_device in _by_device(tensors):
        found |= (~torch.isfinite(_largest(list(of_device.values())))).any().to(device, non_blocking=True)
    return found


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold a NaN or an infinity. One read of each; the host waits for the device."""
    return [
        name
        for of_device in _by_device(tensors)
        for name, fine in zip(of_device, torch.isfinite(_largest(list(of_device.values()))).tolist(), strict=True)
        if not fine
    ]


def _by_device(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Those that can hold something that is not finite."""
    looked = {name: tensor for name, tensor in tensors.items() if tensor.numel() and tensor.dtype in _WIDE}
    devices = dict.fromkeys(tensor.device for tensor in looked.values())
    return [{name: tensor for name, tensor in looked.items() if tensor.device == device} for device in devices]


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude of each: a sum of squares may overflow where every element is finite."""
    return torch.stack([norm.float() for norm in torch._foreach_norm(tensors, math.inf)])


def few_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
