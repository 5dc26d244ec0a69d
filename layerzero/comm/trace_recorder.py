"""Report the collectives and the computations of units to traces and to torch's profiler.

The engine reports its operations to a :class:`TraceDispatcher`. While a trace (:func:`layerzero.trace`) or torch's
profiler is active, the dispatcher forwards the operations to the recorder of the trace, and to the profiler as named
ranges.

[Note: Nesting of spans]
The forward or backward pass of a unit begins in one hook and ends in another hook. The second hook does not run if the
inputs need no gradient or if the pass raises. An open span ends with its enclosing span, and no later than the end of
the pass. In a backward pass, the hook that begins a unit runs just before the hook that ends the previous unit, because
both hooks are on the same tensor. Therefore a new span first ends the previous span, so spans are always nested. If
autograd alternates between parallel units, the rest of the first unit is attributed to the enclosing span.
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

__all__ = ["CollectiveTrace", "TraceDispatcher", "TraceRecorder", "TraceSpan"]

_QUIET: AbstractContextManager[None] = nullcontext()
_NAP = 2e-4  # seconds


@dataclass(frozen=True)
class TraceSpan:
    """Operation that a host thread ran between the times `began` and `ended` of the recorder's clock."""

    kind: str  # "launch", "wait", "add", "begin" or "end"
    name: str  # name of the unit
    began: Any
    ended: Any
    phase: str = ""  # for "begin" and "end": "forward", "backward" or "update"
    trace: CollectiveTrace | None = None  # for "launch", "wait" and "add": the collective
    in_background: bool = False  # True if a background thread of the engine ran the operation


class TraceRecorder:
    """Recorder of the spans of one trace, in the order in which the recorded operations ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[TraceSpan] = []
        self.flying: list[CollectiveTrace] = []  # collectives whose completion a thread of the backend reports

    def record_span(self, kind: str, name: str, began: Any, *, trace: CollectiveTrace) -> None:
        """Record an operation that began at `began` and ends now.

        Args:
            trace: collective to which the operation belongs.
        """
        in_background = isinstance(threading.current_thread(), StreamThread)
        self.spans.append(TraceSpan(kind, name, began, self.clock.now(), trace=trace, in_background=in_background))

    def drain(self, seconds: float = math.inf) -> None:
        """Wait, for at most `seconds`, until the threads of the backend have reported all completions.

        A report during interpreter shutdown would abort the process. A collective that hangs ends when the timeout of
        its process group expires.
        """
        deadline = time.monotonic() + seconds
        while any(trace.completion_time is None for trace in self.flying) and time.monotonic() < deadline:
            time.sleep(_NAP)


class CollectiveTrace:
    """In-flight collective that is recorded in a trace or in torch's profiler."""

    def __init__(
        self, observer: TraceDispatcher, *, collective: str, comm: str, axis: str, ranks: int, name: str, sent: int
    ) -> None:
        self.collective = collective
        self.communicator = comm
        self.axis = axis
        self.ranks = ranks
        self.name = name
        self.bytes = sent
        self._works = 0  # number of works whose completion is reported
        self._completions: list[Any] = []  # completion times of these works
        self._observer = observer
        self._recorder = observer.recorder

    @property
    def completion_time(self) -> Any:
        """Completion time, or None if the collective is not known to be complete."""
        done = self._works and len(self._completions) == self._works
        return (max(self._completions) if self._works > 1 else self._completions[0]) if done else None

    @contextmanager
    def launching(self) -> Iterator[None]:
        with self._record_span("launch", "layerzero."):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self._record_span("wait", "layerzero.wait "):
            yield

    def record_arrival(self) -> None:
        """Record the current time as the completion time, unless the backend reports completion times."""
        if self._recorder is not None and not self._works:
            self._works = 1
            self._completions.append(self._recorder.clock.now())

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Context manager that records the addition of the received parts."""
        with self._record_span("add", "layerzero.add "):
            yield

    def record_background_wait(self, began: Any) -> None:
        """Record that the calling thread has waited since `began` for the thread that handles this collective."""
        if self._recorder is not None:
            self._recorder.record_span("wait", self.name, began, trace=self)

    def record_completions(self, works: Sequence[Any]) -> None:
        """Record the completion times of `works`, if the clock and the backend support this."""
        if self._recorder is None or not self._recorder.clock.sees_other_threads:
            return
        try:
            futures = [work.get_future() for work in works]
        except RuntimeError:  # a backend without futures
            return
        self._works = len(futures)
        self._recorder.flying.append(self)
        now, completions = self._recorder.clock.now, self._completions
        for future in futures:
            future.add_done_callback(lambda _: completions.append(now()))  # in threads of the backend

    @contextmanager
    def _record_span(self, kind: str, prefix: str) -> Iterator[None]:
        recorder = self._recorder
        began = None if recorder is None else recorder.clock.now()
        try:
            with _profiler_range(f"{prefix}{self.collective} {self.name}".rstrip()):
                yield
        finally:
            if recorder is not None:
                recorder.record_span(kind, self.name, began, trace=self)


@dataclass(frozen=True)
class _OpenSpan:
    phase: str
    name: str
    key: object  # a UnitCall, or another object that identifies the call
    task: int  # autograd's graph task id of the backward pass in which the span began, or -1
    range: AbstractContextManager[Any]  # range in torch's profiler


class TraceDispatcher:
    """Object that reports the engine's operations to a trace and to torch's profiler.

    While neither a trace nor the profiler is active, the only overhead is reading two attributes.
    """

    def __init__(self, observers: Any) -> None:
        self.recorder: TraceRecorder | None = None
        self._observers = observers  # of the model; see `begun` and `ended` of StepObserver
        self._open: list[_OpenSpan] = []  # see [Note: Nesting of spans]

    @property
    def is_recording(self) -> bool:
        return self.recorder is not None or profiler._is_profiler_enabled or self._observers.hear_parts

    def trace_collective(
        self, *, collective: str, comm: str, axis: str, ranks: int, name: str, sent: int
    ) -> CollectiveTrace | None:
        if not self.is_recording:
            return None
        return CollectiveTrace(self, collective=collective, comm=comm, axis=axis, ranks=ranks, name=name, sent=sent)

    def begin(self, phase: str, name: str, key: object) -> None:
        """Begin a span nested in the open spans, unless the span of `key` is already open."""
        if not self.is_recording or any(span.key is key for span in self._open):
            return
        profiled = _profiler_range(f"layerzero.{phase} {name}")
        profiled.__enter__()
        self._open.append(_OpenSpan(phase, name, key, torch._C._current_graph_task_id(), profiled))
        self._append_instant("begin", phase, name)
        for observer in self._observers:
            observer.begun(phase, name)

    def reach(self, key: object, around: Sequence[object]) -> None:
        """End the spans of other units when the current backward pass reaches the call `key`.

        Args:
            around: calls that enclose `key`. The spans of these calls stay open.
        """
        task = torch._C._current_graph_task_id() if self._open else -1
        while self._open:
            span = self._open[-1]
            if span.phase != "backward" or span.task != task or span.key is key or span.key in around:
                return
            self._close()

    def end(self, key: object) -> None:
        """End the span of `key` and all open spans inside it."""
        if any(span.key is key for span in self._open):
            while self._close() is not key:
                pass

    def end_backward(self) -> None:
        """End the spans of a backward pass."""
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
    def awaiting(self, collective: str, name: str, trace_of: Callable[[], CollectiveTrace | None]) -> Iterator[None]:
        """Context manager that records the calling thread's wait for a collective that another thread handles.

        Args:
            trace_of: function that is called after the wait. It returns the trace of the collective, or None if the
                trace is not known.
        """
        recorder = self.recorder
        began = None if recorder is None else recorder.clock.now()
        with _profiler_range(f"layerzero.wait {collective} {name}".rstrip()):
            yield
        if began is not None and (trace := trace_of()) is not None:
            trace.record_background_wait(began)

    def _close(self) -> object:
        span = self._open.pop()
        span.range.__exit__(None, None, None)
        self._append_instant("end", span.phase, span.name)
        for observer in self._observers:
            observer.ended(span.phase, span.name)
        return span.key

    def _append_instant(self, kind: str, phase: str, name: str) -> None:
        if self.recorder is not None:
            now = self.recorder.clock.now()
            self.recorder.spans.append(TraceSpan(kind, name, now, now, phase=phase))


def _profiler_range(name: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _QUIET
