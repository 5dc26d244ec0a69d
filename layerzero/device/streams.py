"""Provide streams that run background work in an order fixed by the program.

[Note: Streams]
A stream runs its operations in the order in which they were enqueued. Operations on different streams are ordered only
by events: one stream waits for an event of another stream. All operations of a handle's reduction are enqueued at one
point in the program. Therefore the operations, and their order on each stream, depend only on the program. The speed of
a collective affects only when these operations run.

On a device, these streams are device streams, one for hop 1 and one for hop 2 of all meshes. They have a high priority,
so that the computation does not delay the launch of a collective. The streams of gathers belong to communicators; see
[Note: Collectives on streams of the engine] in comm/collectives.py. The host enqueues operations and does not wait.
gloo's `wait` blocks the calling thread. With gloo, worker threads therefore act as streams (:class:`ThreadStreams`),
and the host waits when it needs a result. Other CPU backends may require the same order of collectives across all of
their groups. With these backends, each operation therefore runs as soon as it is enqueued.

[Note: State shared by threads]
The buffers of a reduction belong to its handle, and the host does not use them until the last event has completed.
Therefore the threads and the host share only pools, slabs and records of operations. Each of these has a lock, or one
writer per entry. The host itself launches the first collective of a reduction, in program order, because two slabs
serve the accumulators in this order. If threads acquired slabs later, the accumulators of more handles could be on the
device. An error in a thread is stored, and dependent operations are skipped. The host raises the error at the end of
the backward pass. After a collective has failed, training cannot continue. The host therefore raises such an error as
soon as it enqueues more work or waits for a thread. If the host is waiting for a gather at that time, the gather also
fails. The error of the gather is more informative, because it names the ranks that are in another collective.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from layerzero.device.accelerator import device_module
from layerzero.device.profiling import profiler_range

Operation = Callable[[], object]

_PATIENCE = 5.0  # seconds to wait for in-flight collectives when a model is closed or the process exits


class Waitable(Protocol):
    """Collective or event that can be waited for."""

    def wait(self) -> None:
        """Make subsequent work wait until the collective or event has completed."""


@dataclass(frozen=True)
class PendingWait:
    """Work in flight that a function waits for."""

    wait: Callable[[], None]


_COMPLETED = PendingWait(lambda: None)  # event that has already completed


class Stream:
    """Queue of operations that run in order; see [Note: Streams]. This class runs each operation at once."""

    def run(self, operation: Operation) -> None:
        """Enqueue an operation."""
        operation()

    def wait_event(self, awaited: Waitable) -> None:
        """Make operations that are enqueued later wait for `awaited`."""
        if awaited is not _COMPLETED:
            self.run(awaited.wait)

    def record_event(self, *name: str) -> Waitable:
        """Return an event that completes after all operations enqueued so far.

        Args:
            name: words that name the event in torch's profiler if the host waits for it.
        """
        return _COMPLETED


class ReductionStreams:
    """Streams on which a model's reductions run: `zero3` for hop 1, and `replica` for hop 2.

    `replica` waits for events of `zero3`. If threads act as streams, they wait for collectives and add their results.
    The host launches the first collective of each reduction, and `zero3` launches each hop 2 that follows a hop 1.
    This class runs each operation at once in the calling thread, without overlap.
    """

    off_main_thread = False  # True if background threads wait for collectives instead of the main thread
    host_is_ahead = False  # True if operations have only been enqueued when `run` returns, as on a device

    def __init__(self, zero3: Stream, replica: Stream) -> None:
        self.zero3 = zero3
        self.replica = replica

    @property
    def failed(self) -> bool:
        """True if the thread that launches hop 2 has failed since the last :meth:`synchronize`."""
        return False

    def record_gradients_event(self) -> Waitable:
        """Record and return an event that completes after the program's work so far, which includes its gradients."""
        return _COMPLETED

    def joined_with_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which work on the current stream may read gradients of the program's work.

        Free these gradients after the context: the allocator records the streams that used them when they are freed.
        """
        return nullcontext()

    def limit_in_flight(self, marks: deque[Waitable], most: int) -> None:
        """Drop the oldest events in `marks` until at most `most` remain.

        If threads act as streams, wait for each dropped event.
        """
        while len(marks) > most:
            marks.popleft()

    def keep_until_done(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor, even after the tensor is freed, until all work enqueued so far has run."""

    def check(self) -> None:
        """Raise the stored error if a background thread has found that a collective failed."""

    def close(self) -> None:
        """End the stream threads once they have completed their pending work."""

    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        """Make subsequent work of the program run after all operations on all streams, and clear all `marks`."""
        for stream in (self.zero3, self.replica):
            stream.record_event().wait()
        for events in marks:
            events.clear()


# Host threads


class _ThreadEvent:
    """Event that a thread sets. The host or another thread may wait for the event."""

    def __init__(self, failures: _Failures, name: Sequence[str]) -> None:
        self.passed = threading.Event()
        self._failures = failures
        self._name = name

    def wait(self) -> None:
        if not self.passed.is_set():
            with profiler_range("wait", *self._name):
                self.passed.wait()
        self._failures.check()


class DeferredCollectiveError(RuntimeError):
    """Error of a collective in a background thread. The host raises ``explain(error)`` instead.

    Args:
        error: error that the thread has caught.
        explain: function that returns the error to raise on the host.
    """

    def __init__(self, error: Exception, explain: Callable[[Exception], Exception]) -> None:
        super().__init__(str(error))
        self.error = error
        self.explain = explain


class _Failures:
    """Errors that threads have raised, oldest first."""

    def __init__(self) -> None:
        self._found: deque[BaseException] = deque()

    def add(self, error: BaseException) -> None:
        self._found.append(error)

    def check(self, *, settled: bool = False) -> None:
        """Raise the oldest error, if any, and discard the later errors, which are its consequences.

        If `settled` is False, raise the error only if a collective has failed. Any other error is raised when all
        operations have run, because a rank that stopped earlier would skip collectives that other ranks launch.
        """
        if self._found and (settled or isinstance(self._found[0], DeferredCollectiveError)):
            oldest = self._found.popleft()
            self._found.clear()
            if isinstance(oldest, DeferredCollectiveError):
                raise oldest.explain(oldest.error) from oldest.error
            raise oldest


class StreamThread(threading.Thread):
    """Thread that acts as a stream. The thread refers to a model only through its pending operations."""

    def __init__(self, name: str, failures: _Failures) -> None:
        super().__init__(name=f"layerzero {name}", daemon=True)
        self.given: SimpleQueue[Operation | None] = SimpleQueue()
        self.failed = False  # True if an operation has failed since the last synchronization
        self._failures = failures

    def run(self) -> None:
        with torch.no_grad():
            while (operation := self.given.get()) is not None:
                try:
                    operation()
                except BaseException as error:
                    self.failed = True
                    self._failures.add(error)
                del operation

    def stop(self) -> None:
        """End the thread after its pending operations have run.

        This method does not wait, because finalizers may call it at any time.
        """
        self.given.put(None)

    def end(self) -> None:
        """Stop the thread, and wait at most a few seconds for it to end."""
        if self.is_alive():
            self.stop()
            if self is not threading.current_thread():
                self.join(_PATIENCE)


_STARTED: weakref.WeakSet[StreamThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End all threads at process exit, because no thread may be inside a backend when the process ends."""
    for thread in list(_STARTED):
        thread.end()


class ThreadStream(Stream):
    """Daemon thread that acts as a stream. The thread starts when the first operation is enqueued."""

    def __init__(self, name: str, failures: _Failures | None = None) -> None:
        self._failures = _Failures() if failures is None else failures
        self.thread = StreamThread(name, self._failures)

    def end_with(self, owner: object) -> None:
        """End the thread when `owner` is garbage collected."""
        weakref.finalize(owner, self.thread.stop).atexit = False

    def start(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
            _STARTED.add(self.thread)

    def run(self, operation: Operation) -> None:
        self.start()
        if self.thread.is_alive():
            self.thread.given.put(operation)
        else:  # the process is exiting, or it is a forked child, which does not have the thread
            operation()

    def wait_event(self, awaited: Waitable) -> None:
        if awaited is not _COMPLETED:
            self.run(awaited.passed.wait if isinstance(awaited, _ThreadEvent) else awaited.wait)

    def record_event(self, *name: str) -> Waitable:
        if self.thread.ident is None:  # no operation has been enqueued so far
            return _COMPLETED
        mark = _ThreadEvent(self._failures, name)
        self.run(mark.passed.set)
        return mark


class ThreadStreams(ReductionStreams):
    """Reduction streams that run in host threads; see [Note: State shared by threads]."""

    off_main_thread = True

    def __init__(self) -> None:
        self._failures = _Failures()
        zero3, replica = (ThreadStream(name, self._failures) for name in ("zero3", "replica"))
        super().__init__(zero3, replica)
        self._threads = (zero3, replica)
        self._launcher = zero3.thread  # thread that launches each hop 2 that follows a hop 1
        for stream in self._threads:
            stream.end_with(self)

    def close(self) -> None:
        for stream in self._threads:
            stream.thread.end()

    @property
    def failed(self) -> bool:
        return self._launcher.failed

    def record_gradients_event(self) -> Waitable:
        for stream in self._threads:  # start the threads before any collective is in flight
            stream.start()
        return _COMPLETED

    def limit_in_flight(self, marks: deque[Waitable], most: int) -> None:
        while len(marks) > most:
            marks.popleft().wait()

    def check(self) -> None:
        self._failures.check()

    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        try:
            for events in marks:
                self.limit_in_flight(events, 0)
            self._finish()
        except BaseException:
            with suppress(Exception):  # subsequent errors; after a second interrupt, events may remain incomplete
                self._finish()
            for events in marks:
                events.clear()
            raise

    def _finish(self) -> None:
        for mark in [stream.record_event() for stream in self._threads]:
            if isinstance(mark, _ThreadEvent):
                mark.passed.wait()
        self._launcher.failed = False
        self._failures.check(settled=True)


# Device streams


class _DeviceEvents:
    """Events of several streams, one per stream. :meth:`wait` makes the current stream wait for all of them."""

    def __init__(self, module: Any, streams: Sequence[Any]) -> None:
        self._module = module
        self._events = tuple((stream, stream.record_event()) for stream in streams)

    def wait(self) -> None:
        current = self._module.current_stream()
        for stream, event in self._events:
            if stream != current:
                current.wait_event(event)

    def query(self) -> bool:
        return all(event.query() for _, event in self._events)


class DeviceStream(Stream):
    """High-priority stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._module = device_module(device)
        self._stream = self._module.Stream(device, priority=-1)

    def run(self, operation: Operation) -> None:
        with self._module.stream(self._stream):
            operation()

    def wait_current(self) -> None:
        """Make later operations on this stream wait for all work that was enqueued on the current stream."""
        self._stream.wait_stream(self._module.current_stream())

    def record_event(self, *name: str) -> _DeviceEvents:
        return _DeviceEvents(self._module, (self._stream,))

    def keep_until_done(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


class DeviceStreams(ReductionStreams):
    """Streams of an accelerator, in addition to the compute stream.

    Autograd delivers gradients of leaf tensors on the stream that was current when their AccumulateGrad nodes were
    created. The same stream must be current when this object is constructed.
    """

    zero3: DeviceStream
    replica: DeviceStream
    host_is_ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(DeviceStream(device), DeviceStream(device))
        self._module = device_module(device)
        self._first_stream = self._module.current_stream()

    def record_gradients_event(self) -> Waitable:
        current = self._module.current_stream()
        streams = (current,) if current == self._first_stream else (current, self._first_stream)
        return _DeviceEvents(self._module, streams)

    @contextmanager
    def joined_with_gradients(self) -> Iterator[None]:
        current = self._module.current_stream()
        if current == self._first_stream:
            yield
            return
        current.wait_stream(self._first_stream)
        try:
            yield
        finally:
            self._first_stream.wait_stream(current)  # the memory of a gradient may be reused on either stream

    def keep_until_done(self, tensor: torch.Tensor) -> None:
        for stream in (self.zero3, self.replica):
            stream.keep_until_done(tensor)


def make_reduction_streams(device: torch.device, *, on_gloo: bool) -> ReductionStreams:
    """Return the streams for the reductions of a model; see [Note: Streams].

    Args:
        on_gloo: True if gloo reduces the gradients.
    """
    if device_module(device) is not None:
        return DeviceStreams(device)
    return ThreadStreams() if on_gloo else ReductionStreams(Stream(), Stream())
