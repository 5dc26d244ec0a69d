"""Who computes and what is exchanged, as a trace and torch's profiler see it.

The engine tells an :class:`TraceDispatcher` what it does. The observer passes it on to the recorder of a trace
(:func:`layerzero.trace`) and to torch's profiler, as ranges with the names of units, where one of them listens.

[Note: Spans are a stack]
A forward or backward begins in one hook and ends in another, and the second may never come: of inputs without gradients
nothing is heard, and a pass may raise. What is left open ends with the span around it, at the latest with the pass.
A backward of one unit begins just before that of the unit after it ends, as both hang on the same tensor; the first
ends the second, so that spans are nested always. Where autograd goes back and forth between units side by side, all
that is left of the first then counts for what is around it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

from layerzero.device.accelerator import Clock
from layerzero.device.streams import StreamThread

__all__ = ["CollectiveTrace", "TraceDispatcher", "TraceMark", "TraceRecorder"]

_QUIET: AbstractContextManager[None] = nullcontext()
_NAP = 2e-4  # seconds


@dataclass(frozen=True)
class TraceMark:
    """Something that a thread of the host did from `began` to `ended`, which are stamps of the recorder's clock."""

    kind: str  # "launch", "wait", "add", "begin" or "end"
    name: str  # of a unit
    began: Any
    ended: Any
    phase: str = ""  # of "begin" and "end": "forward", "backward" or "update"
    trace: CollectiveTrace | None = None  # of "launch", "wait" and "add"
    in_background: bool = False  # a thread of the engine's did it


class TraceRecorder:
    """The marks of one trace, in the order in which they ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[TraceMark] = []
        self.flying: list[CollectiveTrace] = []  # those that threads of the backend report on

    def mark(self, kind: str, name: str, began: Any, *, flight: CollectiveTrace) -> None:
        """Something of an exchange ends now."""
        beside = isinstance(threading.current_thread(), StreamThread)
        self.marks.append(TraceMark(kind, name, began, self.clock.now(), trace=flight, in_background=beside))

    def drain(self, seconds: float = math.inf) -> None:
        """Wait, so long at most, until no thread of a backend has anything to report.

        A thread that wants to do so while the interpreter shuts down would abort the process. An exchange that hangs
        ends with the timeout of its process group.
        """
        deadline = time.monotonic() + seconds
        while any(flight.landed is None for flight in self.flying) and time.monotonic() < deadline:
            time.sleep(_NAP)


class CollectiveTrace:
    """One exchange in flight that is recorded, or that torch's profiler sees."""

    def __init__(
        self, observer: TraceDispatcher, *, exchange: str, lane: str, axis: str, ranks: int, name: str, sent: int
    ) -> None:
        self.collective = exchange
        self.communicator = lane
        self.axis = axis
        self.ranks = ranks
        self.name = name
        self.bytes = sent
        self._works = 0  # whose ends are heard of
        self._landings: list[Any] = []  # when they ended
        self._observer = observer
        self._recorder = observer.recorder

    @property
    def landed(self) -> Any:
        """When it was complete; None if it is not, or not known to be."""
        done = self._works and len(self._landings) == self._works
        return (max(self._landings) if self._works > 1 else self._landings[0]) if done else None

    @contextmanager
    def launching(self) -> Iterator[None]:
        with self._seen("launch", "layerzero."):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self._seen("wait", "layerzero.wait "):
            yield

    def arrived(self) -> None:
        """Somebody has waited for it."""
        if self._recorder is not None and not self._works:
            self._works = 1
            self._landings.append(self._recorder.clock.now())

    @contextmanager
    def adding(self) -> Iterator[None]:
        """While what has been received is added up."""
        with self._seen("add", "layerzero.add "):
            yield

    def was_awaited(self, began: Any) -> None:
        """The program has waited, since then, for what another thread did with it."""
        if self._recorder is not None:
            self._recorder.mark("wait", self.name, began, flight=self)

    def follow(self, works: Sequence[Any]) -> None:
        """Note when the last of the works ends; where the clock or the backend cannot tell, when it was waited for."""
        if self._recorder is None or not self._recorder.clock.sees_other_threads:
            return
        try:
            futures = [work.get_future() for work in works]
        except RuntimeError:  # a backend without futures
            return
        self._works = len(futures)
        self._recorder.flying.append(self)
        now, landings = self._recorder.clock.now, self._landings
        for future in futures:
            future.add_done_callback(lambda _: landings.append(now()))  # in threads of the backend

    @contextmanager
    def _seen(self, kind: str, prefix: str) -> Iterator[None]:
        recorder = self._recorder
        began = None if recorder is None else recorder.clock.now()
        try:
            with _profiled(f"{prefix}{self.collective} {self.name}".rstrip()):
                yield
        finally:
            if recorder is not None:
                recorder.mark(kind, self.name, began, flight=self)


@dataclass(frozen=True)
class _OpenSpan:
    phase: str
    name: str
    key: object  # a Use, or whatever else tells calls apart
    task: int  # autograd's number of the backward in which it began; -1: in none
    range: AbstractContextManager[Any]  # of torch's profiler


class TraceDispatcher:
    """Passes on what the engine does; costs the look at two attributes while nobody listens."""

    def __init__(self) -> None:
        self.recorder: TraceRecorder | None = None
        self._open: list[_OpenSpan] = []  # see [Note: Spans are a stack]

    @property
    def listens(self) -> bool:
        return self.recorder is not None or profiler._is_profiler_enabled

    def flight(
        self, *, exchange: str, lane: str, axis: str, ranks: int, name: str, sent: int
    ) -> CollectiveTrace | None:
        if not self.listens:
            return None
        return CollectiveTrace(self, exchange=exchange, lane=lane, axis=axis, ranks=ranks, name=name, sent=sent)

    def begin(self, phase: str, name: str, key: object) -> None:
        """A span begins inside those that are open, unless it has begun before."""
        if not self.listens or any(span.key is key for span in self._open):
            return
        profiled = _profiled(f"layerzero.{phase} {name}")
        profiled.__enter__()
        self._open.append(_OpenSpan(phase, name, key, torch._C._current_graph_task_id(), profiled))
        self._mark("begin", phase, name)

    def reach(self, key: object, around: Sequence[object]) -> None:
        """A backward has reached `key`, which was called by `around`: those of other units of the same pass end."""
        task = torch._C._current_graph_task_id() if self._open else -1
        while self._open:
            span = self._open[-1]
            if span.phase != "backward" or span.task != task or span.key is key or span.key in around:
                return
            self._close()

    def end(self, key: object) -> None:
        """The span of `key` ends, with what is open inside it."""
        if any(span.key is key for span in self._open):
            while self._close() is not key:
                pass

    def end_backward(self) -> None:
        """A backward pass ends."""
        while self._open and self._open[-1].phase == "backward":
            self._close()

    def end_all(self) -> None:
        while self._open:
            self._close()

    @contextmanager
    def during(self, phase: str, name: str) -> Iterator[None]:
        key = object()
        self.begin(phase, name, key)
        try:
            yield
        finally:
            self.end(key)

    @contextmanager
    def awaiting(self, exchange: str, name: str, flight: Callable[[], CollectiveTrace | None]) -> Iterator[None]:
        """The program waits for an exchange that another thread launches and adds up; `flight`: when it is known."""
        recorder = self.recorder
        began = None if recorder is None else recorder.clock.now()
        with _profiled(f"layerzero.wait {exchange} {name}".rstrip()):
            yield
        if began is not None and (found := flight()) is not None:
            found.was_awaited(began)

    def _close(self) -> object:
        span = self._open.pop()
        span.range.__exit__(None, None, None)
        self._mark("end", span.phase, span.name)
        return span.key

    def _mark(self, kind: str, phase: str, name: str) -> None:
        if self.recorder is not None:
            now = self.recorder.clock.now()
            self.recorder.marks.append(TraceMark(kind, name, now, now, phase=phase))


def _profiled(name: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _QUIET
