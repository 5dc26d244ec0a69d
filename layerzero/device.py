"""The one place that knows about devices."""

from __future__ import annotations

import torch

__all__ = ["compute_device", "default_device_type"]


def default_device_type() -> str:
    """The accelerator's type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def compute_device(device_type: str) -> torch.device:
    """This rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
