"""Wrap device-specific features: streams, events, copies to and from the host, and clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

StreamEvent = Any  # event of the device, or None on the CPU


def default_device_type() -> str:
    """Return the type of the accelerator if there is one, otherwise ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def device_module(device: torch.device) -> Any:
    """Return ``torch.cuda`` or the corresponding module of another device, or None for the CPU and meta devices."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def require_no_capture(device: torch.device, what: str) -> None:
    """Raise RuntimeError if the current stream of `device` is being captured into a CUDA graph.

    Args:
        what: name of the refused call, for the error message.
    """
    # Only modules of devices with graphs have this function.
    is_capturing = getattr(device_module(device), "is_current_stream_capturing", None)
    if is_capturing is None or not is_capturing():
        return
    raise RuntimeError(
        f"{what} was called during the capture of a CUDA graph. A replay repeats its kernels, but not the gathers, "
        "reductions and state changes that layerzero launches from the host. Capture modules inside a unit (for "
        "example torch.cuda.make_graphed_callables on an attention module), not the full step"
    )


def compute_device(device_type: str) -> torch.device:
    """Return this rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def host_memory(numel: int, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """Return an uninitialized 1-D tensor [numel] in host memory, pinned if `device` is not the CPU."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


def synchronize_current_stream(device: torch.device) -> None:
    """Wait until all work on the current stream of a device, including copies to the host, has completed."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class ConnectionCost:
    """Time that the host has spent on connecting ranks, and device memory that their connections use.

    Attributes:
        seconds: time.
        nbytes: used memory of the device outside of torch's allocator, or NaN if the device does not report it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = self.nbytes = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context manager whose body connects ranks."""
        start, before = time.monotonic(), self._used_outside_allocator()
        yield
        synchronize_current_stream(self._device)
        self.nbytes += self._used_outside_allocator() - before
        self.seconds += time.monotonic() - start

    def _used_outside_allocator(self) -> float:
        module = device_module(self._device)
        if not hasattr(module, "mem_get_info"):
            return math.nan
        free, total = module.mem_get_info(self._device)
        return float(total - free - module.memory_reserved(self._device))


def keep_until_done(tensor: Tensor, stream: Any) -> None:
    """Prevent reuse of a tensor's memory, even if it is freed, until `stream` has completed its work so far."""
    tensor.record_stream(stream)


class StreamUses:
    """Record of the streams that have read or written a buffer since it was last copied.

    Gradients of leaf tensors arrive on the stream that was current when their AccumulateGrad nodes were created. This
    stream may differ from the stream that is current when the buffer is copied.
    """

    def __init__(self, module: Any) -> None:
        self._module = module  # see `device_module`
        self._streams: list[Any] = []

    def record_use(self) -> None:
        """Record that the current stream is about to use the buffer."""
        if self._module is not None and (stream := self._module.current_stream()) not in self._streams:
            self._streams.append(stream)

    def record_events(self) -> list[StreamEvent]:
        """Return one event for each recorded stream, which completes after the stream's uses of the buffer so far.

        The record of streams is cleared.
        """
        streams, self._streams = self._streams, []
        return [stream.record_event() for stream in streams]


class HostDeviceCopies:
    """Copies between a device and host memory that overlap with the computation. Each direction has its own stream.

    On the CPU, a copy is complete when :meth:`copy` returns.

    Args:
        pin_memory: if True, pin the host memory. If the memory is not pinned, the host waits for each copy.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self.device = device
        self.module = device_module(device)
        self.pins = self.module is not None
        self._pin_memory = pin_memory
        self._copy_streams: Any = (
            {to_host: self.module.Stream(device) for to_host in (False, True)} if self.pins else None
        )
        self._last_to_host: StreamEvent = None  # event of the last copy to the host, until the host has waited for it

    def device_buffer(self, nbytes: int) -> Tensor:
        """Return a 1-D uint8 tensor [nbytes] on the device. Its memory is not reused while a copy may access it."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._copy_streams is not None:
            for stream in self._copy_streams.values():
                buffer.record_stream(stream)
        return buffer

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor [numel] in host memory, pinned if the device is not the CPU and `pin_memory` is True."""
        if not self._pin_memory:
            return torch.empty(numel, dtype=dtype)
        return host_memory(numel, dtype, device=self.device)

    def on_copy_stream(self, *, to_host: bool) -> AbstractContextManager[object]:
        """Return a context in which the copy stream of one direction is current."""
        stream: AbstractContextManager[object] = (
            nullcontext() if self._copy_streams is None else self.module.stream(self._copy_streams[to_host])
        )
        return stream

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Sequence[StreamEvent] = ()) -> StreamEvent:
        """Start a copy and return the event that marks its completion.

        The copy runs after the work enqueued so far on the current stream, after the events in `after`, and after
        earlier copies in the same direction. Until :meth:`wait` is called with the returned event, `target` must not be
        used and `source` must not be written. If `to_host` is True, `target` is in host memory, otherwise `source`.
        """
        if self._copy_streams is None:
            target.copy_(source)
            return None
        side = self._copy_streams[to_host]
        side.wait_stream(self.module.current_stream())
        for mark in after:
            if mark is not None:
                side.wait_event(mark)
        with self.module.stream(side):
            target.copy_(source, non_blocking=True)
        event = side.record_event()
        if to_host:
            self._last_to_host = event
        return event

    def finish(self, mark: StreamEvent) -> None:
        """Block the host until the copy to the host with the event `mark` is complete. It may then use both tensors.

        The host waits for all copies to the host that were started so far, so that it waits once for several copies.
        """
        if mark is not None and self._last_to_host is not None:
            self._last_to_host.synchronize()
            self._last_to_host = None

    def wait(self, mark: StreamEvent) -> None:
        """Make the current stream wait for the copy with the event `mark`. The host does not wait."""
        if mark is not None:
            self.module.current_stream().wait_event(mark)
