"""The one place that knows about devices."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Clock",
    "CopyMark",
    "DeviceClock",
    "HomeStream",
    "Transfers",
    "compute_device",
    "default_device_type",
    "finish_copies",
    "host_memory",
]

CopyMark = Any  # a place in the order of the copies: the device's event, None on the CPU


def default_device_type() -> str:
    """The accelerator's type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def compute_device(device_type: str) -> torch.device:
    """This rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def host_memory(numel: int, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """1-D [numel] in host memory, pinned where `device` is not the CPU."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


def finish_copies(device: torch.device) -> None:
    """Return when everything in the current stream of a device is done, copies to the host among it."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class HomeStream:
    """The stream that was current when a model was sharded: its gradients land there, its exchanges start from there.

    On the CPU there are no streams, and a check costs the look at an attribute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None if device.type == "cpu" else self._current()

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def check(self) -> None:
        """Raise if another stream is current now."""
        if self._stream is not None and (current := self._current()) != self._stream:
            raise RuntimeError(
                f"the current stream of {self._device} is {current}, but shard_model was called under {self._stream}, "
                "where gradients land: they would be read before they are there. Call shard_model inside the same "
                "`with torch.cuda.stream(...)` as the loop, or run the loop on the stream of shard_model"
            )


class Transfers:
    """Copies between a device and pinned host memory that run beside the computation, one after the other.

    On the CPU, where there is nothing to run beside, a copy is done when :meth:`copy` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = device.type != "cpu"
        self._streams: Any = torch.get_device_module(device)
        self._side: Any = self._streams.Stream(device) if self.pins else None

    def device_buffer(self, nbytes: int) -> Tensor:
        """1-D [nbytes] of bytes on the device, not used for anything else while a copy may use it."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._side is not None:
            buffer.record_stream(self._side)
        return buffer

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D [numel] in host memory, pinned where there is a device."""
        return host_memory(numel, dtype, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> CopyMark:
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

    def wait(self, mark: CopyMark) -> None:
        """Let what is computed from here on come after the copy. The host does not wait."""
        if mark is not None:
            self._streams.current_stream(self.device).wait_event(mark)


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
