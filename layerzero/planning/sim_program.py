"""Define programs for the simulator. A program lists the operations that one rank's host executes in a run.

A program can be built from a recorded schedule (:func:`layerzero.trace`), from a formula, or by hand.

[Note: Machine-dependent times]
Some times in a recording depend on the machine: when the parts of a reduction are added, when hop 2 is launched, and
how long the host waits for either hop. Therefore the waits for hop 1 and hop 2, and the launches of hop 2, are removed
from a program. The simulator recomputes these times by the rules in ``engine/reduction_queue.py``.
:class:`StartReduction` starts a reduction, which then proceeds without the host. :class:`WaitReductions` waits for all
reductions.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from layerzero.reports.trace_file import TRACE_FORMAT, TraceEvent

__all__ = [
    "ComputeKey",
    "Operation",
    "Recording",
    "SimCollective",
    "SimCompute",
    "SimLaunch",
    "SimWait",
    "StartReduction",
    "StepEnd",
    "WaitReductions",
    "collectives_in",
    "computations_in",
    "mean_span_seconds",
    "program_from_events",
    "read_recording",
    "replace_collectives",
    "replace_times",
]


ComputeKey = tuple[str, str]  # phase and unit


@dataclass(frozen=True)
class SimCollective:
    kind: str  # "gather", "hop1", "hop2", "refresh", "metadata", ...
    unit: str
    axis: str  # "zero3", "replica" or "control"
    comm: str  # name of the communicator; its collectives run one after the other
    ranks: int
    bytes: float  # number of bytes that this rank sends
    coding: float = 0.0  # processor time in seconds in which this rank encodes and decodes messages


@dataclass(frozen=True)
class SimCompute:
    """Computation that the rank performs."""

    seconds: float
    what: ComputeKey = ("", "")  # phase and unit, such as ("forward", "blocks.0")
    span: int = 0  # index of the forward pass, backward pass, ... in the program


@dataclass(frozen=True)
class SimLaunch:
    collective: SimCollective
    number: int


@dataclass(frozen=True)
class SimWait:
    number: int


@dataclass(frozen=True)
class StartReduction:
    """Start of a reduction. In the reduction, an addition follows each collective.

    See [Note: Machine-dependent times].
    """

    collectives: tuple[SimCollective, ...]
    additions: tuple[SimCompute, ...]


@dataclass(frozen=True)
class WaitReductions:
    pass


@dataclass(frozen=True)
class StepEnd:
    """End of the optimizer's update."""


Operation = SimCompute | SimLaunch | SimWait | StartReduction | WaitReductions | StepEnd


@dataclass(frozen=True)
class Recording:
    """Contents of a trace file that :func:`layerzero.trace` wrote."""

    zero3_size: int
    replicas: int
    events: tuple[TraceEvent, ...]

    def program(self) -> list[Operation]:
        return program_from_events(self.events)


def read_recording(path: str | PathLike[str]) -> Recording:
    """Read a trace file that :func:`layerzero.trace` wrote.

    Raises:
        ValueError: `path` is not a trace file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise _not_a_trace_error(path, "it does not contain JSON") from None
    content = content.get("layerzero") if isinstance(content, dict) else None
    if not isinstance(content, dict) or "format" not in content:
        raise _not_a_trace_error(path, "it has no recorded schedule")
    version = content["format"]
    if version != TRACE_FORMAT:
        raise ValueError(
            f"{path} has trace format {version}, but this version reads format {TRACE_FORMAT}. Record the trace again"
        )
    try:
        events = tuple(TraceEvent(**event) for event in content["schedule"])
        return Recording(int(content["zero3_size"]), int(content["replicas"]), events)
    except (KeyError, TypeError, ValueError):
        raise _not_a_trace_error(path, "its recorded schedule is incomplete or damaged") from None


def _not_a_trace_error(path: str | PathLike[str], reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a trace file written by layerzero.trace: {reason}. Pass a file that layerzero.trace wrote"
    )


def program_from_events(events: Sequence[TraceEvent]) -> list[Operation]:
    """Return the program that the recorded events describe, with the recorded computation times."""
    reductions = _reductions(events)
    in_reduction = {event.number for event in events if event.collective in ("hop1", "hop2")}
    launched = {event.number for event in events if event.kind == "launch"}
    program: list[Operation] = []
    spans: list[tuple[str, str, int]] = []  # phase, name, number
    last = ("", "", -1)  # the span that ended last
    num_spans = 0
    in_flight = False  # whether reductions for which the program has not waited may be in flight
    cursor = events[0].start if events else 0.0
    for event in events:
        if not event.in_background:
            if event.start > cursor:
                phase, name, number = spans[-1] if spans else (f"after {last[0]}", last[1], last[2])
                program.append(SimCompute((event.start - cursor) / 1e6, (phase, name), number))
            cursor = max(cursor, event.end)
        backward = any(span[0] == "backward" for span in spans)
        if in_flight and event.kind in ("wait", "begin") and not event.in_background and not backward:
            program.append(WaitReductions())
            in_flight = False
        if event.kind == "begin":
            spans.append((event.phase, event.name, num_spans))
            num_spans += 1
        elif event.kind == "end":
            last = spans.pop()
            if last[0] == "update":
                program.append(StepEnd())
        elif event.number in in_reduction:
            if event.kind == "launch" and event.number in reductions:
                program.append(reductions[event.number])
                in_flight = True
        elif event.kind == "launch":
            program.append(SimLaunch(_collective_of_event(event), event.number))
        elif event.number in launched and event.kind == "wait":
            program.append(SimWait(event.number))
    return program


def _reductions(events: Sequence[TraceEvent]) -> dict[int, StartReduction]:
    """Return the reductions, keyed by the number of their first collective.

    A hop 2 belongs to the same reduction as the hop 1 of the same unit whose addition precedes it.
    """
    additions = {event.number: (event.end - event.start) / 1e6 for event in events if event.kind == "add"}
    reductions: dict[int, StartReduction] = {}
    added = -1  # number of the last hop 1 whose addition has finished and whose hop 2 is not launched yet
    for event in events:
        if event.collective == "hop1" and event.kind == "add":
            added = event.number
        elif event.collective in ("hop1", "hop2") and event.kind == "launch":
            collective, compute_key = _collective_of_event(event), ("add", f"{event.collective} {event.name}")
            addition = SimCompute(additions.get(event.number, 0.0), compute_key, event.number)
            preceding = reductions.get(added)
            if preceding is not None and event.collective == "hop2" and preceding.collectives[0].unit == event.name:
                reductions[added] = StartReduction(
                    (*preceding.collectives, collective), (*preceding.additions, addition)
                )
                added = -1
            else:
                reductions[event.number] = StartReduction((collective,), (addition,))
    return reductions


def _collective_of_event(event: TraceEvent) -> SimCollective:
    return SimCollective(event.collective, event.name, event.axis, event.communicator, event.ranks, event.bytes)


def mean_span_seconds(program: Iterable[Operation]) -> dict[ComputeKey, float]:
    """Return the mean time per span (:attr:`SimCompute.span`) of each phase and unit, in seconds."""
    total: Counter[ComputeKey] = Counter()
    spans: defaultdict[ComputeKey, set[int]] = defaultdict(set)
    for operation in program:
        for computation in computations_in(operation):
            total[computation.what] += computation.seconds  # type: ignore[assignment]
            spans[computation.what].add(computation.span)
    return {compute_key: seconds / len(spans[compute_key]) for compute_key, seconds in total.items()}


def replace_times(
    program: Sequence[Operation],
    seconds: Callable[[ComputeKey], float],
    place: Callable[[ComputeKey], str] = lambda what: "spread",
) -> list[Operation]:
    """Return the program with new computation times.

    Args:
        program: operations of the program.
        seconds: function that returns the duration, in seconds, of one span (a forward pass, a backward pass, ...) of a
            phase and unit.
        place: function that returns how the time of a phase and unit is distributed if collectives split a span. The
            value ``"spread"`` distributes the time in the proportions of `program`. The values ``"first"`` and
            ``"last"`` assign all of the time to that part of the span, so that the result does not depend on recorded
            times.
    """
    parts: defaultdict[tuple[ComputeKey, int], list[float]] = defaultdict(list)
    for operation in program:
        if isinstance(operation, SimCompute):
            parts[operation.what, operation.span].append(operation.seconds)
    done: Counter[tuple[ComputeKey, int]] = Counter()

    def share(operation: SimCompute) -> float:
        key = operation.what, operation.span
        index, done[key] = done[key], done[key] + 1
        position = place(operation.what)
        if position == "spread" and sum(parts[key]) > 0:
            return operation.seconds / sum(parts[key])
        return float(index == (len(parts[key]) - 1 if position == "last" else 0))

    result: list[Operation] = []
    for operation in program:
        if isinstance(operation, SimCompute):
            result.append(replace(operation, seconds=seconds(operation.what) * share(operation)))
        elif isinstance(operation, StartReduction):
            additions = tuple(replace(addition, seconds=seconds(addition.what)) for addition in operation.additions)
            result.append(replace(operation, additions=additions))
        else:
            result.append(operation)
    return result


def replace_collectives(
    program: Iterable[Operation], bytes_of: Callable[[SimCollective], SimCollective]
) -> list[Operation]:
    """Return the program, with each collective replaced by the result of `bytes_of` for that collective."""
    result: list[Operation] = []
    for operation in program:
        if isinstance(operation, SimLaunch):
            result.append(replace(operation, collective=bytes_of(operation.collective)))
        elif isinstance(operation, StartReduction):
            result.append(
                replace(operation, collectives=tuple(bytes_of(collective) for collective in operation.collectives))
            )
        else:
            result.append(operation)
    return result


def computations_in(operation: Operation) -> tuple[SimCompute, ...]:
    if isinstance(operation, SimCompute):
        return (operation,)
    return operation.additions if isinstance(operation, StartReduction) else ()


def collectives_in(operation: Operation) -> tuple[SimCollective, ...]:
    if isinstance(operation, SimLaunch):
        return (operation.collective,)
    return operation.collectives if isinstance(operation, StartReduction) else ()
