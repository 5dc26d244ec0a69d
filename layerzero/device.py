"""The one place that knows about devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Mark", "Transfers", "compute_device", "default_device_type"]

Mark = Any  # a place in the order of the copies: the device's event, None on the CPU


def default_device_type() -> str:
    """The accelerator's type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def compute_device(device_type: str) -> torch.device:
    """This rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


class Transfers:
    """Copies between a device and pinned host memory that run beside the computation, one after the other.

    On the CPU, where there is nothing to run beside, a copy is done when :meth:`copy` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = device.type != "cpu"
        self._streams: Any = torch.get_device_module(device)
        self._side: Any = self._streams.Stream(device) if self.pins else None

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D [numel] in host memory, pinned where there is a device."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.pins)

    def copy(self, target: Tensor, source: Tensor) -> Mark:
        """Start a copy that sees all that has been computed so far.

        Neither tensor may be touched, nor `source` be written, before :meth:`wait` for the mark that this returns.
        Later copies come after it by themselves.
        """
        if self._side is None:
            target.copy_(source)
            return None
        self._side.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._side):
            target.copy_(source, non_blocking=True)
        return self._side.record_event()

    def wait(self, mark: Mark) -> None:
        """Let what is computed from here on come after the copy. The host does not wait."""
        if mark is not None:
            self._streams.current_stream(self.device).wait_event(mark)
