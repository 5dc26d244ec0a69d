"""What a model did, and when: :func:`trace`."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.trace_recorder import CollectiveTrace, TraceRecorder
from layerzero.device.accelerator import Clock
from layerzero.engine.hooks import get_state

__all__ = ["Trace", "TraceEvent", "trace"]

_COMPUTE_ROW = "units"
_SUMS_ROW = "sums, {} axis"
_FORMAT = 1  # of the file's "layerzero" part
_PATIENCE = 5.0  # seconds for exchanges in flight when a process ends whose trace ended with an exception


@dataclass(frozen=True)
class TraceEvent:
    """One thing that this rank's host did, by its start. Times are microseconds since the trace began.

    Attributes:
        kind: ``"begin"`` and ``"end"`` of a span, ``"launch"`` of an exchange, ``"wait"`` for one, ``"add"`` of what
            one has brought.
        name: the unit, ``"optimizer"``, or ``""`` where an exchange serves no unit.
        start, end: of what the host did; of a span's begin and end they are equal.
        phase: of a span: ``"forward"``, ``"backward"`` or ``"update"``.
        number: of an exchange, in the order of launches: its launch, its wait and its add have the same one.
        exchange, axis: as in :func:`layerzero.traffic`.
        lane: the communicator; exchanges of a lane are issued in the same order on all of its ranks.
        ranks: on the lane.
        bytes: that this rank sends, as in :func:`layerzero.traffic`.
        completed: of a launch: when the exchange was done; None if it was not when the body of the trace raised.
        beside: done by a thread of layerzero's, while the program went on.
    """

    kind: str
    name: str
    start: float
    end: float
    phase: str = ""
    number: int = -1
    exchange: str = ""
    axis: str = ""
    lane: str = ""
    ranks: int = 0
    bytes: int = 0
    completed: float | None = None
    beside: bool = False


class Trace:
    """What :func:`trace` yields.

    Attributes:
        path: of this rank's file.
        events: in the order in which they began, which is that of the program, but for what was done beside it; empty
            until the context is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: tuple[TraceEvent, ...] = ()


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str] = "trace-rank{rank}.json") -> Iterator[Trace]:
    """Record what a sharded model does inside the context, and write it as a Chrome trace when the context is left.

    Open the file in chrome://tracing or ui.perfetto.dev. Each rank is a process; its rows are the forwards and
    backwards of units, nested as they call each other, the optimizer's update, one row for each communicator, and on
    gloo one for what is added up on each axis. Exchanges are named for what they do and for whom: ``gather blocks.0``.
    Times are absolute, so that the ``traceEvents`` of several ranks' files may be joined into one list.

    On the CPU a bar of an exchange ends when its data have arrived, and begins when it was launched or the one before
    it on its row has ended. On an accelerator all times are those at which the stream that computes gets there: an
    exchange ends where that stream no longer waits for it. When the context is left, exchanges that were launched
    inside are waited for. Recording costs some tens of microseconds and a few hundred bytes an event: trace a few
    steps, not a run.

    The same file holds the schedule, under the key ``"layerzero"``: every event by its start, for
    ``layerzero simulate`` or a script of yours.

    Args:
        model: from :func:`layerzero.shard_model`.
        path: where to write; ``{rank}`` in it stands for the global rank. Ranks need not all trace, but those that do
            need a file each.

    Yields:
        A :class:`Trace`, whose `events` are there when the context is left.

    Raises:
        FileNotFoundError: the folder of `path` does not exist.
        RuntimeError: the model is being traced already.

    Example::

        with layerzero.trace(model, "traces/rank{rank}.json") as trace:
            train_step(model)
        print([(event.name, event.bytes) for event in trace.events if event.exchange == "gather"])
    """
    runtime = get_state(model)
    rank = dist.get_rank()
    result = Trace(Path(str(os.fspath(path)).replace("{rank}", str(rank))))
    if not result.path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(result.path.parent)!r} to write the trace into")
    observer = runtime.observer
    if observer.recorder is not None:
        raise RuntimeError("layerzero.trace is already active for this model")
    observer.end_all()  # ranges of torch's profiler that this recorder has not seen begin
    recorder = observer.recorder = TraceRecorder(Clock.of(runtime.mesh_info.device))
    completed = False
    try:
        yield result
        completed = True
    finally:
        observer.end_all()
        observer.recorder = None
        if completed:
            recorder.drain()
        else:  # other ranks may never come
            atexit.register(recorder.drain, _PATIENCE)
        result.events = _events(recorder)
        _write(result, runtime.mesh_info, rank, recorder.clock.epoch)


def _events(recorder: TraceRecorder) -> tuple[TraceEvent, ...]:
    time = recorder.clock.microseconds
    marks = recorder.marks
    if recorder.clock.sees_other_threads:  # each thread's marks are in its order
        marks = sorted(marks, key=lambda mark: time(mark.began))
    launched = (mark.trace for mark in marks if mark.kind == "launch" and mark.trace is not None)
    number = {flight: place for place, flight in enumerate(launched)}
    waited: dict[CollectiveTrace, float] = {}  # when each was first waited for
    for mark in marks:
        if mark.kind == "wait" and mark.trace is not None:
            waited.setdefault(mark.trace, time(mark.ended))
    events = []
    for mark in marks:
        flight, start, end = mark.trace, time(mark.began), time(mark.ended)
        if flight is None:
            events.append(TraceEvent(mark.kind, mark.name, start, end, phase=mark.phase))
            continue
        completed = waited.get(flight)
        if flight.landed is not None:
            landed = time(flight.landed)
            completed = landed if completed is None else min(landed, completed)
        events.append(
            TraceEvent(
                mark.kind,
                mark.name,
                start,
                end,
                number=number.get(flight, -1),
                exchange=flight.collective,
                axis=flight.axis,
                lane=flight.communicator,
                ranks=flight.ranks,
                bytes=flight.bytes,
                completed=completed if mark.kind == "launch" else None,
                beside=mark.in_background,
            )
        )
    return tuple(events)


def _write(result: Trace, topology: MeshInfo, rank: int, epoch: float) -> None:
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": _chrome_events(result.events, topology, rank, epoch),
        "layerzero": {
            "format": _FORMAT,
            "rank": rank,
            "replicas": topology.replicas,
            "zero3_size": topology.zero3_size,
            "epoch": epoch,
            "schedule": [_sparse(event) for event in result.events],
        },
    }
    whole = result.path.with_name(f"{result.path.name}.{os.getpid()}.part")  # nobody reads half a file
    whole.write_text(json.dumps(content))
    whole.replace(result.path)


def _sparse(event: TraceEvent) -> dict[str, Any]:
    """Without what has its default value."""
    told = ((field, getattr(event, field.name)) for field in fields(event))
    return {field.name: value for field, value in told if value != field.default}


def _chrome_events(events: Sequence[TraceEvent], topology: MeshInfo, rank: int, epoch: float) -> list[dict[str, Any]]:
    lanes = (topology.zero3_gather_comm, topology.zero3_reduce_comm, topology.replica_comm, *topology.control_comms)
    bars = [*_span_bars(events), *_exchange_bars(events)]
    names = dict.fromkeys([_COMPUTE_ROW, *(lane.name for lane in lanes), *(bar[0] for bar in bars)])
    rows = {name: number for number, name in enumerate(names)}
    node = f"node {topology.grid.replica_rank}, {topology.grid.zero3_rank} of {topology.zero3_size} in it"
    shown = [_metadata("process_name", rank, 0, name=f"rank {rank} ({node})")]
    shown.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for name, row in rows.items():
        shown.append(_metadata("thread_name", rank, row, name=name))
        shown.append(_metadata("thread_sort_index", rank, row, sort_index=row))
    for row_name, name, start, end, args in bars:
        bar = {"ph": "X", "pid": rank, "tid": rows[row_name], "name": name, "ts": epoch * 1e6 + start}
        shown.append({**bar, "dur": max(0.0, end - start), "args": args})
    return shown


_Bar = tuple[str, str, float, float, dict[str, Any]]  # row, name, start, end, args


def _span_bars(events: Sequence[TraceEvent]) -> Iterator[_Bar]:
    opened: list[TraceEvent] = []
    for event in events:
        if event.kind == "begin":
            opened.append(event)
        elif event.kind == "end":
            begin = opened.pop()
            yield _COMPUTE_ROW, f"{begin.phase} {begin.name}", begin.start, event.start, {"unit": begin.name}
        elif event.kind == "add":
            what = f"add {event.exchange} {event.name}"
            yield _SUMS_ROW.format(event.axis), what, event.start, event.end, {"unit": event.name}


def _exchange_bars(events: Sequence[TraceEvent]) -> Iterator[_Bar]:
    """Bars that do not overlap on a row, which viewers would take for nested ones."""
    trace_end = max((max(event.end, event.completed or 0.0) for event in events), default=0.0)
    launches = [event for event in events if event.kind == "launch"]
    free: dict[str, float] = {}  # by lane: when the bar before ends
    for event in sorted(launches, key=lambda event: trace_end if event.completed is None else event.completed):
        end = trace_end if event.completed is None else event.completed
        start = min(end, max(event.start, free.get(event.lane, 0.0)))
        free[event.lane] = end
        args = {
            "exchange": event.exchange,
            "axis": event.axis,
            "unit": event.name,
            "bytes": event.bytes,
            "number": event.number,
            "queued_us": start - event.start,
            "complete": event.completed is not None,
        }
        yield event.lane, f"{event.exchange} {event.name}".rstrip(), start, end, args


def _metadata(kind: str, rank: int, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": args}
