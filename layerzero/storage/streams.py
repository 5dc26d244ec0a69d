"""Work that is done beside the program, in an order that the program fixes.

[Note: Streams]
A stream does what it was given, one after the other. What lies in different streams is ordered by marks alone: one
stream waits for a mark of another. Everything that a handle's reduction needs is given to the streams at one point of
the program, so what is done, and in which order on each stream, is a function of the program; how fast an exchange is
decides nothing but when.

On a device the streams are the device's own: the host hands over and waits for nothing. gloo's `wait` blocks the host,
so there the streams are played: the program does what is due whenever it comes by (:meth:`Streams.play`), at the latest
when somebody needs the result. Worker threads as streams were at most a few percent faster in a trial
(docs/notes/tried.md); pools and sums would need locks, and traces and plans another idea of the host.
Backends that run on the CPU and are not gloo may want one order over all their groups: for them everything is done at
once, where it is handed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from layerzero.storage.device import streams_module

__all__ = ["Awaited", "DeviceStreams", "ImmediateStreams", "PlayedStreams", "Stream", "Streams"]

Operation = Callable[[], None]


class Awaited(Protocol):
    """Something that ends: an exchange, a mark."""

    def done(self) -> bool:
        """It has ended. Asked by played streams only."""

    def wait(self) -> None:
        """What is done from here on comes after it."""


class Stream(ABC):
    """See [Note: Streams]."""

    @abstractmethod
    def run(self, operation: Operation) -> None:
        """Do this after all that was given before."""

    @abstractmethod
    def wait(self, awaited: Awaited) -> None:
        """What is given from here on is done after `awaited`."""

    @abstractmethod
    def mark(self) -> Awaited:
        """Ends when all is done that was given so far."""


class Streams(ABC):
    """The streams of a model's reductions: launches, what arrives from the node, and from the replicas.

    A stream waits for marks of those before it only.
    """

    launches: Stream
    node: Stream
    replica: Stream

    @abstractmethod
    def landed(self) -> Awaited:
        """All that the program has computed so far: the gradients that have arrived."""

    def play(self) -> None:  # noqa: B027 - a device needs no help
        """Do what is due, and wait for nothing."""

    def step(self) -> bool:
        """Do one thing more, waiting for what it needs; False if nothing is left to do."""
        return False

    def bound(self, marks: deque[Awaited], most: int) -> None:
        """Forget the oldest of `marks` until `most` are left, where the host runs ahead of them: waiting for each."""
        while len(marks) > most:
            marks.popleft()

    @abstractmethod
    def settle(self) -> None:
        """What the program does from here on comes after all that was given to any stream."""


# Played by the host


class _PlayedMark:
    def __init__(self, stream: _PlayedStream) -> None:
        self._stream = stream
        self._passed = False

    def done(self) -> bool:
        return self._passed

    def wait(self) -> None:
        while not self._passed:
            self._stream.step()

    def pass_by(self) -> None:
        self._passed = True


class _PlayedStream(Stream):
    def __init__(self) -> None:
        self._due: deque[tuple[Awaited | None, Operation | None]] = deque()  # what is awaited, or what is done

    def run(self, operation: Operation) -> None:
        self._due.append((None, operation))

    def wait(self, awaited: Awaited) -> None:
        self._due.append((awaited, None))

    def mark(self) -> _PlayedMark:
        mark = _PlayedMark(self)
        self._due.append((None, mark.pass_by))
        return mark

    @property
    def idle(self) -> bool:
        return not self._due

    def play(self) -> None:
        due = self._due
        while due:
            awaited, operation = due[0]
            if awaited is not None and not awaited.done():
                return
            due.popleft()  # first: a failure ends it, too
            if awaited is not None:
                awaited.wait()
            elif operation is not None:
                operation()

    def step(self) -> None:
        awaited, operation = self._due.popleft()
        if awaited is not None:
            awaited.wait()
        elif operation is not None:
            operation()


class _Nothing:
    """What has ended before it is asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_NOTHING = _Nothing()


class PlayedStreams(Streams):
    """Streams that the program itself plays."""

    def __init__(self) -> None:
        self.launches = _PlayedStream()
        self.node = _PlayedStream()
        self.replica = _PlayedStream()
        self._all = (self.launches, self.node, self.replica)

    def landed(self) -> Awaited:
        return _NOTHING

    def play(self) -> None:
        for stream in self._all:
            stream.play()

    def step(self) -> bool:
        for stream in self._all:  # the next hop 2 is on its way before an earlier one is waited for
            if not stream.idle:
                stream.step()
                return True
        return False

    def bound(self, marks: deque[Awaited], most: int) -> None:
        while marks and (len(marks) > most or marks[0].done()):
            marks.popleft().wait()

    def settle(self) -> None:
        while self.step():
            pass


# Done where it is handed over


class _ImmediateStream(Stream):
    def run(self, operation: Operation) -> None:
        operation()

    def wait(self, awaited: Awaited) -> None:
        awaited.wait()

    def mark(self) -> Awaited:
        return _NOTHING


class ImmediateStreams(Streams):
    """One order for all: nothing runs beside anything."""

    def __init__(self) -> None:
        self.launches = self.node = self.replica = _ImmediateStream()

    def landed(self) -> Awaited:
        return _NOTHING

    def settle(self) -> None:
        pass


# The device's own


class _DeviceMark:
    def __init__(self, module: Any, events: tuple[Any, ...]) -> None:
        self._module = module
        self._events = events

    def done(self) -> bool:
        raise AssertionError("nothing asks a device how far it is")

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

    def wait(self, awaited: Awaited) -> None:
        with self._module.stream(self._stream):
            awaited.wait()

    def mark(self) -> _DeviceMark:
        return _DeviceMark(self._module, (self._stream.record_event(),))


class DeviceStreams(Streams):
    """Streams of an accelerator, beside the one that computes.

    Autograd delivers gradients of leaves on the stream under which their nodes were made: the one that is current now.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = streams_module(device)
        self._birth = self._module.current_stream()
        self.launches = _DeviceStream(self._module, device)
        self.node = _DeviceStream(self._module, device)
        self.replica = _DeviceStream(self._module, device)

    def landed(self) -> Awaited:
        current = self._module.current_stream()
        streams = (current,) if current == self._birth else (current, self._birth)
        return _DeviceMark(self._module, tuple(stream.record_event() for stream in streams))

    def settle(self) -> None:
        for stream in (self.launches, self.node, self.replica):
            stream.mark().wait()
