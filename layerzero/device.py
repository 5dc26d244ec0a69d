"""The one place that knows about devices."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Clock", "DeviceClock", "compute_device", "default_device_type"]


def default_device_type() -> str:
    """The accelerator's type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def compute_device(device_type: str) -> torch.device:
    """This rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


class Clock:
    """Host time, which is the time of work on the CPU."""

    sees_other_threads = True  # a stamp may be taken in any thread

    def __init__(self) -> None:
        self.epoch = time.time()  # seconds: the moment 0 of this clock
        self._zero = time.perf_counter_ns()

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        return cls() if device.type == "cpu" else DeviceClock(device)

    def now(self) -> Any:
        return time.perf_counter_ns()

    def microseconds(self, stamp: Any) -> float:
        """Since the clock was made."""
        return float(stamp - self._zero) / 1e3


class DeviceClock(Clock):
    """The time at which the current stream of a device gets to where the stamp was taken."""

    sees_other_threads = False  # the current stream of a backend's thread is another one

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.accelerator.synchronize(device)
        super().__init__()
        self._first = self.now()

    def now(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def microseconds(self, stamp: Any) -> float:
        stamp.synchronize()
        return 1e3 * float(self._first.elapsed_time(stamp))
