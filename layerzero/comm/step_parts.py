"""Announce the parts of a step to observers, and mark them in torch's profiler.

The parts are the forward and backward passes of units, and the update of an optimizer.

[Note: Nesting of spans]
The forward or backward pass of a unit begins in one hook and ends in another hook. The second hook does not run if the
inputs need no gradient or if the pass raises. An open span ends with its enclosing span, and no later than the end of
the pass. In a backward pass, the hook that begins a unit runs just before the hook that ends the previous unit, because
both hooks are on the same tensor. Therefore a new span first ends the previous span, so spans are always nested. If
autograd alternates between parallel units, the rest of the first unit is attributed to the enclosing span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from layerzero.device.profiling import profiler_range
from layerzero.utils.torch_compat import current_graph_task, is_profiling


@dataclass(frozen=True)
class _OpenSpan:
    phase: str
    name: str
    key: object  # a UnitCall, or another object that identifies the call
    task: int  # autograd's graph task id of the backward pass in which the span began, or -1
    range: AbstractContextManager[Any]  # range in torch's profiler


class StepParts:
    """Spans of the parts of a step, which observers and torch's profiler are told of.

    While no observer listens and the profiler is not active, the only overhead is reading two attributes.
    """

    def __init__(self, observers: Any) -> None:
        self._observers = observers  # of the model; see `begun` and `ended` of StepObserver
        self._open: list[_OpenSpan] = []  # see [Note: Nesting of spans]

    def begin(self, phase: str, name: str, key: object) -> None:
        """Begin a span nested in the open spans, unless the span of `key` is already open."""
        if not (self._observers.hear_parts or is_profiling()) or any(span.key is key for span in self._open):
            return
        profiled = profiler_range(phase, name)
        profiled.__enter__()
        self._open.append(_OpenSpan(phase, name, key, current_graph_task(), profiled))
        for observer in self._observers:
            observer.begun(phase, name)

    def reach(self, key: object, around: Sequence[object]) -> None:
        """End the spans of other units when the current backward pass reaches the call `key`.

        Args:
            around: calls that enclose `key`. The spans of these calls stay open.
        """
        task = current_graph_task() if self._open else -1
        while self._open:
            span = self._open[-1]
            if span.phase != "backward" or span.task != task or span.key is key or span.key in around:
                return
            self._close()

    def end(self, key: object) -> None:
        """End the span of `key` and all open spans inside it."""
        if self._open and any(span.key is key for span in self._open):
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

    def _close(self) -> object:
        span = self._open.pop()
        span.range.__exit__(None, None, None)
        for observer in self._observers:
            observer.ended(span.phase, span.name)
        return span.key
