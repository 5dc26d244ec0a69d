"""Record the timeline of a sharded model as a Chrome trace, with :func:`trace`."""

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
TRACE_FORMAT = 2  # format version of the file's "layerzero" part
_PATIENCE = 5.0  # seconds to wait at process exit for in-flight collectives if the traced code raised an error


@dataclass(frozen=True)
class TraceEvent:
    """One event on this rank's host. Times are in microseconds since the trace began.

    Attributes:
        kind: ``"begin"`` or ``"end"`` of a span, ``"launch"`` of a collective, ``"wait"`` for a collective, or
            ``"add"`` for the addition of received gradients.
        name: name of the unit, ``"optimizer"``, or ``""`` if a collective does not belong to a unit.
        start, end: start and end of the event on the host. The two times are equal for the begin or end of a span.
        phase: phase that a span covers: ``"forward"``, ``"backward"`` or ``"update"``.
        number: number of a collective in launch order. The launch, wait and add of a collective have the same number.
        collective, axis: collective and axis, as in :func:`layerzero.traffic`.
        communicator: name of the communicator. Its collectives are launched in the same order on all of its ranks.
        ranks: number of ranks in the communicator.
        bytes: number of bytes that this rank sends, as in :func:`layerzero.traffic`.
        completed: for a launch, the time at which the collective completed. None if the traced code raised an error
            before completion.
        in_background: True if a background thread of layerzero ran the operation.
    """

    kind: str
    name: str
    start: float
    end: float
    phase: str = ""
    number: int = -1
    collective: str = ""
    axis: str = ""
    communicator: str = ""
    ranks: int = 0
    bytes: int = 0
    completed: float | None = None
    in_background: bool = False


class Trace:
    """Timeline that :func:`trace` has recorded on this rank.

    Attributes:
        path: path of this rank's file.
        events: events sorted by start time, which is program order except for background threads. The sequence is empty
            until the context exits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: tuple[TraceEvent, ...] = ()


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str] = "trace-rank{rank}.json") -> Iterator[Trace]:
    """Record the timeline of a sharded model inside the context and write a Chrome trace when the context exits.

    Open the file in chrome://tracing or ui.perfetto.dev. Each rank is shown as a process. The first row shows the
    forward and backward passes of units, nested by calls, and the optimizer's update. Each communicator has a row. On
    gloo, the additions on each axis also have a row. Collectives are named by kind and unit, such as ``gather
    blocks.0``. Times are absolute, so you can concatenate the ``traceEvents`` lists from several ranks' files.

    On the CPU, the bar of a collective ends when the collective's data have arrived. The bar begins when the collective
    is launched or when the previous bar on the same row ends, whichever is later. On an accelerator, the times of an
    operation refer to the stream on which it was enqueued. A collective ends when the first stream that waits for it
    can continue. When the context exits, the host waits for collectives that were launched inside the context.
    Recording an event takes tens of microseconds and a few hundred bytes, so trace a few steps, not an entire run.

    The file also contains the schedule under the key ``"layerzero"``: all events, sorted by start time, for your
    own script.

    Args:
        model: a sharded model.
        path: path of the file. ``{rank}`` in the path is replaced with the global rank. Not all ranks need to record a
            trace, but each rank that does needs its own file.

    Yields:
        A :class:`Trace`, whose `events` are set when the context exits.

    Raises:
        FileNotFoundError: the folder of `path` does not exist.
        RuntimeError: the model is already being traced.

    Example::

        with layerzero.trace(model, "traces/rank{rank}.json") as trace:
            train_step(model)
        print([(event.name, event.bytes) for event in trace.events if event.collective == "gather"])
    """
    lz_state = get_state(model)
    rank = dist.get_rank()
    result = Trace(Path(str(os.fspath(path)).replace("{rank}", str(rank))))
    if not result.path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder {str(result.path.parent)!r} of the trace file does not exist. Create it first"
        )
    observer = lz_state.observer
    if observer.recorder is not None:
        raise RuntimeError("layerzero.trace is already active for this model. Leave that context first")
    observer.end_all()  # end profiler ranges that began before this recorder
    recorder = observer.recorder = TraceRecorder(Clock.of(lz_state.mesh_info.device))
    completed = False
    try:
        yield result
        completed = True
    finally:
        observer.end_all()
        observer.recorder = None
        if completed:
            recorder.drain()
        else:  # other ranks may never arrive
            atexit.register(recorder.drain, _PATIENCE)
        result.events = _events(recorder)
        _write(result, lz_state.mesh_info, rank, recorder.clock.epoch)


def _events(recorder: TraceRecorder) -> tuple[TraceEvent, ...]:
    time = recorder.clock.microseconds
    spans = recorder.spans
    if recorder.clock.sees_other_threads:  # spans are ordered only within each thread
        spans = sorted(spans, key=lambda span: time(span.began))
    launched = (span.trace for span in spans if span.kind == "launch" and span.trace is not None)
    numbers = {collective_trace: index for index, collective_trace in enumerate(launched)}
    waited: dict[CollectiveTrace, float] = {}  # end of the first wait for each collective
    for span in spans:
        if span.kind == "wait" and span.trace is not None:
            waited.setdefault(span.trace, time(span.ended))
    events = []
    for span in spans:
        collective_trace, start, end = span.trace, time(span.began), time(span.ended)
        if collective_trace is None:
            events.append(TraceEvent(span.kind, span.name, start, end, phase=span.phase))
            continue
        completed = waited.get(collective_trace)
        if collective_trace.completion_time is not None:
            recorded = time(collective_trace.completion_time)
            completed = recorded if completed is None else min(recorded, completed)
        events.append(
            TraceEvent(
                span.kind,
                span.name,
                start,
                end,
                number=numbers.get(collective_trace, -1),
                collective=collective_trace.collective,
                axis=collective_trace.axis,
                communicator=collective_trace.communicator,
                ranks=collective_trace.ranks,
                bytes=collective_trace.bytes,
                completed=completed if span.kind == "launch" else None,
                in_background=span.in_background,
            )
        )
    return tuple(events)


def _write(result: Trace, mesh_info: MeshInfo, rank: int, epoch: float) -> None:
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": _chrome_events(result.events, mesh_info, rank, epoch),
        "layerzero": {
            "format": TRACE_FORMAT,
            "rank": rank,
            "replicas": mesh_info.replicas,
            "zero3_size": mesh_info.zero3_size,
            "epoch": epoch,
            "schedule": [_non_default_fields(event) for event in result.events],
        },
    }
    partial = result.path.with_name(
        f"{result.path.name}.{os.getpid()}.part"
    )  # so that readers never see a partial file
    partial.write_text(json.dumps(content))
    partial.replace(result.path)


def _non_default_fields(event: TraceEvent) -> dict[str, Any]:
    """Return the fields of an event that differ from their defaults."""
    values = ((field, getattr(event, field.name)) for field in fields(event))
    return {field.name: value for field, value in values if value != field.default}


def _chrome_events(events: Sequence[TraceEvent], mesh_info: MeshInfo, rank: int, epoch: float) -> list[dict[str, Any]]:
    comms = (mesh_info.zero3_gather_comm, mesh_info.zero3_reduce_comm, mesh_info.replica_comm, *mesh_info.control_comms)
    bars = [*_span_bars(events), *_collective_bars(events)]
    names = dict.fromkeys([_COMPUTE_ROW, *(comm.name for comm in comms), *(bar[0] for bar in bars)])
    rows = {name: index for index, name in enumerate(names)}
    node = f"replica {mesh_info.grid.replica_rank}, ZeRO-3 rank {mesh_info.grid.zero3_rank} of {mesh_info.zero3_size}"
    trace_events = [_metadata("process_name", rank, 0, name=f"rank {rank} ({node})")]
    trace_events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for name, row in rows.items():
        trace_events.append(_metadata("thread_name", rank, row, name=name))
        trace_events.append(_metadata("thread_sort_index", rank, row, sort_index=row))
    for row_name, name, start, end, args in bars:
        bar = {"ph": "X", "pid": rank, "tid": rows[row_name], "name": name, "ts": epoch * 1e6 + start}
        trace_events.append({**bar, "dur": max(0.0, end - start), "args": args})
    return trace_events


_Bar = tuple[str, str, float, float, dict[str, Any]]  # (row, name, start, end, args)


def _span_bars(events: Sequence[TraceEvent]) -> Iterator[_Bar]:
    opened: list[TraceEvent] = []
    for event in events:
        if event.kind == "begin":
            opened.append(event)
        elif event.kind == "end":
            begin = opened.pop()
            yield _COMPUTE_ROW, f"{begin.phase} {begin.name}", begin.start, event.start, {"unit": begin.name}
        elif event.kind == "add":
            label = f"add {event.collective} {event.name}"
            yield _SUMS_ROW.format(event.axis), label, event.start, event.end, {"unit": event.name}


def _collective_bars(events: Sequence[TraceEvent]) -> Iterator[_Bar]:
    """Yield bars that do not overlap within a row. Viewers would show overlapping bars as nested."""
    trace_end = max((max(event.end, event.completed or 0.0) for event in events), default=0.0)
    launches = [event for event in events if event.kind == "launch"]
    free: dict[str, float] = {}  # by communicator: end of its previous bar
    for event in sorted(launches, key=lambda event: trace_end if event.completed is None else event.completed):
        end = trace_end if event.completed is None else event.completed
        start = min(end, max(event.start, free.get(event.communicator, 0.0)))
        free[event.communicator] = end
        args = {
            "collective": event.collective,
            "axis": event.axis,
            "unit": event.name,
            "bytes": event.bytes,
            "number": event.number,
            "queued_us": start - event.start,
            "complete": event.completed is not None,
        }
        yield event.communicator, f"{event.collective} {event.name}".rstrip(), start, end, args


def _metadata(kind: str, rank: int, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": args}
