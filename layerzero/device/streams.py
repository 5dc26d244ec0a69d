"""Work that is done beside the program, in an order that the program fixes.

[Note: Streams]
A stream does what it was given, one after the other. What lies in different streams is ordered by marks alone: one
stream waits for a mark of another. Everything that a handle's reduction needs is given to the streams at one point of
the program, so what is done, and in which order on each stream, is a function of the program; how fast an exchange is
decides nothing but when.

On a device the streams are the device's own: the host hands over and waits for nothing. gloo's `wait` blocks whoever
calls it, so there worker threads play the streams (:class:`ThreadStreams`), and the host waits where it needs a result.
Backends that run on the CPU and are not gloo may want one order over all their groups: for them everything is done at
once, where it is handed over.

[Note: Threads and what they share]
What a reduction sums up is its handle's own, and the host leaves it alone until the last mark has passed. So threads
and host share nothing but pools, slabs and records of what happened, each of which has a lock or one writer an entry.
The first exchange of a reduction is launched by the host, in the order of the program: sums that wait in slabs are
brought in for it, and a thread that did so later might take the slab in which the next gradients are being written.
A failure in a thread is kept, what depends on it does nothing, and the host raises it at the end of the backward; that
of an exchange, which is the end anyway, where it next hands over or waits for a thread. If it waits for a gather
meanwhile, that one fails, too, and tells more: who does what elsewhere.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from layerzero.device.accelerator import device_module

__all__ = [
    "DeferredCollectiveError",
    "DeviceStreams",
    "ImmediateStreams",
    "ReductionStreams",
    "Stream",
    "StreamThread",
    "ThreadStream",
    "ThreadStreams",
    "Waitable",
    "streams_of",
]

Operation = Callable[[], object]
Waiting = Callable[[], AbstractContextManager[None]]

_PATIENCE = 5.0  # seconds to wait for collectives in flight when a model is closed or the process ends


class Waitable(Protocol):
    """Something that ends: an exchange, a mark."""

    def wait(self) -> None:
        """What is done from here on comes after it."""


class Stream(ABC):
    """See [Note: Streams]."""

    @abstractmethod
    def run(self, operation: Operation) -> None:
        """Do this after all that was given before."""

    @abstractmethod
    def wait_event(self, awaited: Waitable) -> None:
        """What is given from here on is done after `awaited`."""

    @abstractmethod
    def record_event(self, waiting: Waiting = nullcontext) -> Waitable:
        """Ends when all is done that was given so far; `waiting` is around the time that the host waits for it."""


class ReductionStreams(ABC):
    """The streams of a model's reductions: launches, what arrives from the node, and from the replicas.

    A stream waits for marks of those before it, and `launches` for those of `node`.
    """

    launches: Stream
    node: Stream
    replica: Stream
    off_main_thread = False  # what waits on them is not the program

    @property
    def failed(self) -> bool:
        """What was to launch a hop 2 has, and that is not settled yet."""
        return False

    @abstractmethod
    def gradients_ready(self) -> Waitable:
        """All that the program has computed so far: the gradients that have arrived."""

    def limit_in_flight(self, marks: deque[Waitable], most: int) -> None:
        """Forget the oldest of `marks` until `most` are left, where the host runs ahead of them: waiting for each."""
        while len(marks) > most:
            marks.popleft()

    def check(self) -> None:  # noqa: B027 - most fail where they are handed over
        """Raise the failure of an exchange that somebody else than the program has waited for."""

    def close(self) -> None:  # noqa: B027 - most have no threads
        """End the threads that act as streams, after their pending work."""

    @abstractmethod
    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        """What the program does from here on comes after all that was given to any stream; forget all `marks`."""


class _Nothing:
    """What has ended before it is asked for."""

    def wait(self) -> None:
        pass


_NOTHING = _Nothing()


# Threads of the host


class _ThreadEvent:
    """A place in what a thread does. Waited for by the host, or by another thread."""

    def __init__(self, failures: _Failures, waiting: Waiting) -> None:
        self.passed = threading.Event()
        self._failures = failures
        self._waiting = waiting

    def wait(self) -> None:
        if not self.passed.is_set():
            with self._waiting():
                self.passed.wait()
        self._failures.check()


class DeferredCollectiveError(RuntimeError):
    """An error of a thread, of which the host is to find out more where it comes to it: it may know better by then."""

    def __init__(self, error: Exception, explain: Callable[[Exception], Exception]) -> None:
        super().__init__(str(error))
        self.error = error
        self.explain = explain


class _Failures:
    """What threads have raised, oldest first."""

    def __init__(self) -> None:
        self._found: deque[BaseException] = deque()

    def add(self, error: BaseException) -> None:
        self._found.append(error)

    def check(self, *, settled: bool = False) -> None:
        """Raise the first one, once; the others followed from it.

        Before all is `settled`, only if it is of an exchange. Others come to all ranks at another place of the program,
        and a rank that stopped there would leave its lanes out of step.
        """
        if self._found and (settled or isinstance(self._found[0], DeferredCollectiveError)):
            first = self._found.popleft()
            self._found.clear()
            if isinstance(first, DeferredCollectiveError):
                raise first.explain(first.error) from first.error
            raise first


class StreamThread(threading.Thread):
    """Plays a stream. It holds nothing of a model but what it was given."""

    def __init__(self, name: str, failures: _Failures) -> None:
        super().__init__(name=f"layerzero {name}", daemon=True)
        self.given: SimpleQueue[Operation | None] = SimpleQueue()
        self.failed = False  # since all was settled last
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
        """End after the pending work. Never waits, since finalizers call this in any thread at any point."""
        self.given.put(None)

    def end(self) -> None:
        """Stop, and wait at most a few seconds for the end of the thread."""
        if self.is_alive():
            self.stop()
            if self is not threading.current_thread():
                self.join(_PATIENCE)


_STARTED: weakref.WeakSet[StreamThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End all threads at the end of the process, when no thread may be inside a backend."""
    for thread in list(_STARTED):
        thread.end()


class ThreadStream(Stream):
    """A thread that plays a stream: daemonic, begun when it is given something."""

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
        else:  # ended with the process, or left behind by a fork
            operation()

    def wait_event(self, awaited: Waitable) -> None:
        if awaited is not _NOTHING:
            self.run(awaited.passed.wait if isinstance(awaited, _ThreadEvent) else awaited.wait)

    def record_event(self, waiting: Waiting = nullcontext) -> Waitable:
        if self.thread.ident is None:  # nothing was given
            return _NOTHING
        mark = _ThreadEvent(self._failures, waiting)
        self.run(mark.passed.set)
        return mark


class ThreadStreams(ReductionStreams):
    """Streams that threads play; see [Note: Threads and what they share]."""

    off_main_thread = True

    def __init__(self) -> None:
        self._failures = _Failures()
        node, replica = (ThreadStream(name, self._failures) for name in ("node", "replica"))
        self.launches, self.node, self.replica = _ImmediateStream(), node, replica
        self._threads = (node, replica)
        self._launcher = node.thread  # of every hop 2 that follows a hop 1
        for stream in self._threads:
            stream.end_with(self)

    def close(self) -> None:
        for stream in self._threads:
            stream.thread.end()

    @property
    def failed(self) -> bool:
        return self._launcher.failed

    def gradients_ready(self) -> Waitable:
        for stream in self._threads:  # before anything is in flight
            stream.start()
        return _NOTHING

    def limit_in_flight(self, marks: deque[Waitable], most: int) -> None:
        while len(marks) > most:
            marks.popleft().wait()

    def check(self) -> None:
        self._failures.check()

    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        try:
            for each in marks:
                self.limit_in_flight(each, 0)
            self._finish()
        except BaseException:
            with suppress(Exception):  # what follows from it; a second interruption leaves marks that have not passed
                self._finish()
            for each in marks:
                each.clear()
            raise

    def _finish(self) -> None:
        for mark in [stream.record_event() for stream in self._threads]:
            if isinstance(mark, _ThreadEvent):
                mark.passed.wait()
        self._launcher.failed = False
        self._failures.check(settled=True)


# Done where it is handed over


class _ImmediateStream(Stream):
    def run(self, operation: Operation) -> None:
        operation()

    def wait_event(self, awaited: Waitable) -> None:
        awaited.wait()

    def record_event(self, waiting: Waiting = nullcontext) -> Waitable:
        return _NOTHING


class ImmediateStreams(ReductionStreams):
    """One order for all: nothing runs beside anything."""

    def __init__(self) -> None:
        self.launches = self.node = self.replica = _ImmediateStream()

    def gradients_ready(self) -> Waitable:
        return _NOTHING

    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        for each in marks:
            each.clear()


# The device's own


class _DeviceEvents:
    def __init__(self, module: Any, events: tuple[Any, ...]) -> None:
        self._module = module
        self._events = events

    def wait(self) -> None:
        current = self._module.current_stream()
        for event in self._events:
            current.wait_event(event)


class _DeviceStream(Stream):
    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._stream = module.Stream(device)

    def run(self, operation: Operation) -> None:
        with self._module.stream(self._stream):
            operation()

    def wait_event(self, awaited: Waitable) -> None:
        with self._module.stream(self._stream):
            awaited.wait()

    def record_event(self, waiting: Waiting = nullcontext) -> _DeviceEvents:
        return _DeviceEvents(self._module, (self._stream.record_event(),))


class DeviceStreams(ReductionStreams):
    """Streams of an accelerator, beside the one that computes.

    Autograd delivers gradients of leaves on the stream under which their nodes were made: the one that is current now.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = device_module(device)
        self._birth = self._module.current_stream()
        self.launches = _DeviceStream(self._module, device)
        self.node = _DeviceStream(self._module, device)
        self.replica = _DeviceStream(self._module, device)

    def gradients_ready(self) -> Waitable:
        current = self._module.current_stream()
        streams = (current,) if current == self._birth else (current, self._birth)
        return _DeviceEvents(self._module, tuple(stream.record_event() for stream in streams))

    def synchronize(self, marks: Sequence[deque[Waitable]]) -> None:
        for stream in (self.launches, self.node, self.replica):
            stream.record_event().wait()
        for each in marks:
            each.clear()


def streams_of(device: torch.device, *, on_gloo: bool) -> ReductionStreams:
    """On what the reductions of a model run; see [Note: Streams]."""
    if device_module(device) is not None:
        return DeviceStreams(device)
    return ThreadStreams() if on_gloo else ImmediateStreams()
