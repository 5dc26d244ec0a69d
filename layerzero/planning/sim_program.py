"""What the host of one rank does in a run, as a list of operations that a simulated machine can carry out.

A program comes from the schedule that the engine recorded (:func:`layerzero.trace`), from a formula, or by hand.

[Note: What a recording leaves open]
When an exchange is added up and the next one launched, and for how long the host waits for it, depends on the machine
where a recording was made. So the waits for hop 1 and hop 2, and the launches of hop 2, are taken out of it, and the
simulated machine decides anew, by the rules of ``engine/reduction_queue.py``: :class:`StartReduction` starts a
reduction, which goes on by itself, and :class:`WaitReductions` waits for all.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from layerzero.reports.trace_file import TraceEvent

__all__ = [
    "Operation",
    "Recording",
    "SimCollective",
    "SimCompute",
    "SimLaunch",
    "SimWait",
    "StartReduction",
    "StepEnd",
    "WaitReductions",
    "What",
    "computations_in",
    "exchanges_in",
    "from_events",
    "read_recording",
    "resized",
    "retimed",
    "seconds_of",
]


What = tuple[str, str]  # a phase and a unit

_FIRST = ("hop1", "node_sum")  # inside a node, by exchanges or in its memory


@dataclass(frozen=True)
class SimCollective:
    kind: str  # "gather", "hop1", "hop2", "refresh", "agree", ...
    unit: str
    axis: str  # "zero3", "replica" or "control"
    lane: str  # exchanges of one lane run one after the other
    ranks: int
    bytes: float  # that this rank sends


@dataclass(frozen=True)
class SimCompute:
    """The host's rank computes."""

    seconds: float
    what: What = ("", "")  # phase and unit, such as ("forward", "blocks.0")
    span: int = 0  # which forward, backward, ... of the program


@dataclass(frozen=True)
class SimLaunch:
    exchange: SimCollective
    number: int


@dataclass(frozen=True)
class SimWait:
    number: int


@dataclass(frozen=True)
class StartReduction:
    """Start a reduction; see [Note: What a recording leaves open]. Each exchange is followed by additions."""

    exchanges: tuple[SimCollective, ...]
    additions: tuple[SimCompute, ...]


@dataclass(frozen=True)
class WaitReductions:
    pass


@dataclass(frozen=True)
class StepEnd:
    """The optimizer's update is done."""


Operation = SimCompute | SimLaunch | SimWait | StartReduction | WaitReductions | StepEnd


@dataclass(frozen=True)
class Recording:
    """What is in a file that :func:`layerzero.trace` wrote."""

    zero3_size: int
    replicas: int
    events: tuple[TraceEvent, ...]

    def program(self) -> list[Operation]:
        return from_events(self.events)


def read_recording(path: str | PathLike[str]) -> Recording:
    """What :func:`layerzero.trace` wrote.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))["layerzero"]
        events = tuple(TraceEvent(**event) for event in content["schedule"])
        return Recording(int(content["zero3_size"]), int(content["replicas"]), events)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of layerzero.trace: {type(error).__name__}: {error}") from None


def from_events(events: Sequence[TraceEvent]) -> list[Operation]:
    """The program that a recording shows, with the recorded times of what was computed."""
    reductions = _reductions(events)
    in_reduction = {event.number for event in events if event.exchange in (*_FIRST, "hop2")}
    launched = {event.number for event in events if event.kind == "launch"}
    program: list[Operation] = []
    spans: list[tuple[str, str, int]] = []  # phase, name, number
    last = ("", "", -1)  # the span that ended last
    begun = 0
    owed = False  # reductions may be under way that nobody has settled
    cursor = events[0].start if events else 0.0
    for event in events:
        if not event.beside:
            if event.start > cursor:
                phase, name, number = spans[-1] if spans else (f"after {last[0]}", last[1], last[2])
                program.append(SimCompute((event.start - cursor) / 1e6, (phase, name), number))
            cursor = max(cursor, event.end)
        backward = any(span[0] == "backward" for span in spans)
        if owed and event.kind in ("wait", "begin") and not event.beside and not backward:
            program.append(WaitReductions())
            owed = False
        if event.kind == "begin":
            spans.append((event.phase, event.name, begun))
            begun += 1
        elif event.kind == "end":
            last = spans.pop()
            if last[0] == "update":
                program.append(StepEnd())
        elif event.number in in_reduction:
            if event.kind == "launch" and event.number in reductions:
                program.append(reductions[event.number])
                owed = True
        elif event.kind == "launch":
            program.append(SimLaunch(_exchange(event), event.number))
        elif event.number in launched and event.kind == "wait":
            program.append(SimWait(event.number))
    return program


def _reductions(events: Sequence[TraceEvent]) -> dict[int, StartReduction]:
    """By the number of their first exchange. A hop 2 belongs to the hop 1 that was added up just before it."""
    additions = {event.number: (event.end - event.start) / 1e6 for event in events if event.kind == "add"}
    found: dict[int, StartReduction] = {}
    added = -1  # the last hop 1 that was added up, until its hop 2 is launched
    for event in events:
        if event.exchange in _FIRST and event.kind == "add":
            added = event.number
        elif event.exchange in (*_FIRST, "hop2") and event.kind == "launch":
            exchange, what = _exchange(event), ("add", f"{event.exchange} {event.name}")
            addition = SimCompute(additions.get(event.number, 0.0), what, event.number)
            before = found.get(added)
            if before is not None and event.exchange == "hop2" and before.exchanges[0].unit == event.name:
                found[added] = StartReduction((*before.exchanges, exchange), (*before.additions, addition))
                added = -1
            else:
                found[event.number] = StartReduction((exchange,), (addition,))
    return found


def _exchange(event: TraceEvent) -> SimCollective:
    return SimCollective(event.exchange, event.name, event.axis, event.lane, event.ranks, event.bytes)


def seconds_of(program: Iterable[Operation]) -> dict[What, float]:
    """Mean seconds of each kind of computation, by forward, backward, ..., that is, by :attr:`SimCompute.span`."""
    total: Counter[What] = Counter()
    spans: defaultdict[What, set[int]] = defaultdict(set)
    for operation in program:
        for each in computations_in(operation):
            total[each.what] += each.seconds  # type: ignore[assignment]
            spans[each.what].add(each.span)
    return {what: seconds / len(spans[what]) for what, seconds in total.items()}


def retimed(
    program: Sequence[Operation], seconds: Callable[[What], float], place: Callable[[What], str] = lambda what: "spread"
) -> list[Operation]:
    """The same program with other times.

    Args:
        seconds: of each forward, backward, ..., by what is computed.
        place: where exchanges split a computation: ``"spread"`` as in the program, all of it ``"first"``, or all of it
            ``"last"``. The last two make the result independent of recorded times.
    """
    parts: defaultdict[tuple[What, int], list[float]] = defaultdict(list)
    for operation in program:
        if isinstance(operation, SimCompute):
            parts[operation.what, operation.span].append(operation.seconds)
    done: Counter[tuple[What, int]] = Counter()

    def share(operation: SimCompute) -> float:
        key = operation.what, operation.span
        mine, done[key] = done[key], done[key] + 1
        where = place(operation.what)
        if where == "spread" and sum(parts[key]) > 0:
            return operation.seconds / sum(parts[key])
        return float(mine == (len(parts[key]) - 1 if where == "last" else 0))

    result: list[Operation] = []
    for operation in program:
        if isinstance(operation, SimCompute):
            result.append(replace(operation, seconds=seconds(operation.what) * share(operation)))
        elif isinstance(operation, StartReduction):
            additions = tuple(replace(each, seconds=seconds(each.what)) for each in operation.additions)
            result.append(replace(operation, additions=additions))
        else:
            result.append(operation)
    return result


def resized(program: Iterable[Operation], bytes_of: Callable[[SimCollective], SimCollective]) -> list[Operation]:
    """The same program with other exchanges."""
    result: list[Operation] = []
    for operation in program:
        if isinstance(operation, SimLaunch):
            result.append(replace(operation, exchange=bytes_of(operation.exchange)))
        elif isinstance(operation, StartReduction):
            result.append(replace(operation, exchanges=tuple(bytes_of(each) for each in operation.exchanges)))
        else:
            result.append(operation)
    return result


def computations_in(operation: Operation) -> tuple[SimCompute, ...]:
    if isinstance(operation, SimCompute):
        return (operation,)
    return operation.additions if isinstance(operation, StartReduction) else ()


def exchanges_in(operation: Operation) -> tuple[SimCollective, ...]:
    if isinstance(operation, SimLaunch):
        return (operation.exchange,)
    return operation.exchanges if isinstance(operation, StartReduction) else ()
