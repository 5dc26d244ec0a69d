"""The one place that knows about devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Clock",
    "CurrentStream",
    "DeviceClock",
    "HostDeviceCopies",
    "StreamEvent",
    "TouchedBy",
    "compute_device",
    "default_device_type",
    "device_module",
    "finish_copies",
    "host_memory",
    "refuse_capture",
]

StreamEvent = Any  # a place in what a stream does: the device's event, None on the CPU


def default_device_type() -> str:
    """The accelerator's type where there is one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def device_module(device: torch.device) -> Any:
    """``torch.cuda``, or what has the streams of another device; None where the host itself computes."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise if the current stream is being captured into a CUDA graph.

    Raises:
        RuntimeError: names `what`, which was called, and modules that can be captured.
    """
    module = device_module(device)
    if module is None or not module.is_current_stream_capturing():
        return
    raise RuntimeError(
        f"{what} was called while a CUDA graph is being captured. A replay repeats its kernels, but not the gathers, "
        "reductions and state changes that layerzero launches from the host. Capture modules inside a unit (for "
        "example torch.cuda.make_graphed_callables on an attention module), not the whole step"
    )


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


class CurrentStream:
    """Orders what the current stream of a device does after what another one, or itself, has done before."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def of(cls, device: torch.device) -> CurrentStream | None:
        """None on the CPU, which has no streams: what the host has done is done."""
        module = device_module(device)
        return None if module is None else cls(module)

    def current(self) -> Any:
        """The current stream."""
        return self._module.current_stream()

    def record_event(self) -> StreamEvent:
        """What the current stream was given so far."""
        return self._module.current_stream().record_event()

    def wait_event(self, mark: StreamEvent) -> None:
        """What the current stream does from here on comes after `mark`. The host does not wait."""
        if mark is not None:
            self._module.current_stream().wait_event(mark)


class TouchedBy:
    """Streams that have read or written a buffer since its last copy.

    Gradients of leaves arrive on the stream that was current when their AccumulateGrad nodes were created. It may
    differ from the stream that is current at a copy.
    """

    def __init__(self, order: CurrentStream | None) -> None:
        self._order = order
        self._streams: list[Any] = []

    def note(self) -> None:
        """Record that the current stream is about to use the buffer."""
        if self._order is not None and (stream := self._order.current()) not in self._streams:
            self._streams.append(stream)

    def marks(self) -> list[StreamEvent]:
        """Return one event per stream, after its uses so far, and clear the streams."""
        streams, self._streams = self._streams, []
        return [stream.record_event() for stream in streams]


class HostDeviceCopies:
    """Copies between a device and host memory that run beside the computation, one after the other each way.

    On the CPU, where there is nothing to run beside, a copy is done when :meth:`copy` returns.

    Args:
        pin_memory: pin the host memory. The host waits for copies of memory that is not pinned.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self.device = device
        self.order = CurrentStream.of(device)
        self.pins = self.order is not None
        self._pin_memory = pin_memory
        self._module: Any = device_module(device)
        self._side: Any = {to_host: self._module.Stream(device) for to_host in (False, True)} if self.pins else None

    def device_buffer(self, nbytes: int) -> Tensor:
        """1-D [nbytes] of bytes on the device, not used for anything else while a copy may use it."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._side is not None:
            for stream in self._side.values():
                buffer.record_stream(stream)
        return buffer

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D [numel] in host memory, pinned where there is a device, unless the user has chosen otherwise."""
        if not self._pin_memory:
            return torch.empty(numel, dtype=dtype)
        return host_memory(numel, dtype, device=self.device)

    def beside(self, *, to_host: bool) -> AbstractContextManager[object]:
        """Make the stream of copies in one direction the current one."""
        stream: AbstractContextManager[object] = (
            nullcontext() if self._side is None else self._module.stream(self._side[to_host])
        )
        return stream

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Sequence[StreamEvent] = ()) -> StreamEvent:
        """Start a copy that sees all that the current stream has computed so far, and what `after` marks.

        Neither tensor may be touched, nor `source` be written, before :meth:`wait` for the mark that this returns.
        Later copies the same way come after it by themselves.
        """
        if self._side is None:
            target.copy_(source)
            return None
        side = self._side[to_host]
        side.wait_stream(self._module.current_stream())
        for mark in after:
            if mark is not None:
                side.wait_event(mark)
        with self._module.stream(side):
            target.copy_(source, non_blocking=True)
        return side.record_event()

    def finish(self, mark: StreamEvent) -> None:
        """Return when the copy is done: the host may use both tensors then."""
        if mark is not None:
            mark.synchronize()

    def wait(self, mark: StreamEvent) -> None:
        """Let what the current stream computes from here on come after the copy. The host does not wait."""
        if self.order is not None:
            self.order.wait_event(mark)


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
