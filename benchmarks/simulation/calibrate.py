"""The simulation fitted to one measured configuration, and compared with others that it has not seen.

Computations take what they took in a run that exchanges nothing, with all ranks at work; additions and the optimizer
what they took in the traced steps; the link between nodes carries what it was seen to carry. One number is fitted, so
that the first case takes as long as measured: the seconds for which a rank's processor works on each byte it sends.
Everything else is predicted.

All measured numbers are those of the quietest round: other work on the machine only makes them longer.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.simulation.machine import Machine, simulate
from benchmarks.simulation.measure import Block, Measured, Plan, gpt, losses_of
from benchmarks.simulation.program import Operation, What, from_events, read_trace, retimed, seconds_of
from benchmarks.simulation.record import record

__all__ = ["Prediction", "calibrate"]


@dataclass(frozen=True)
class Prediction:
    micro_batches: int
    accumulation: str
    fitted: bool
    measured: float  # seconds
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def calibrate(plan: Plan, measured: Measured, *, two_nodes: bool) -> tuple[Machine, list[Prediction]]:
    """The machine on which the first case takes as long as measured, and what it predicts for all."""
    seconds = _computations(measured.folder)
    programs = [_program(plan, micro_batches, accumulation, seconds) for micro_batches, accumulation in plan.cases]
    machine = Machine(
        node_size=plan.zero3_size,
        inside=math.inf,  # bytes inside a node cost the processor and nothing else
        between=_carried_between(measured.folder, plan.zero3_size) if two_nodes else math.inf,
        launch=_launch_seconds(measured.folder),
    )
    machine = _fitted(machine, programs[0], measured.quietest(0) * plan.steps)
    predictions = [
        Prediction(*case, index == 0, measured.quietest(index), simulate(programs[index], machine).seconds / plan.steps)
        for index, case in enumerate(plan.cases)
    ]
    return machine, predictions


def _program(plan: Plan, micro_batches: int, accumulation: str, seconds: Callable[[What], float]) -> list[Operation]:
    settings = plan.settings(micro_batches, accumulation)
    events = record(gpt(plan), Block, lambda model: losses_of(model, plan, micro_batches), settings, steps=plan.steps)
    return retimed(from_events(events), seconds)


def _fitted(machine: Machine, program: Sequence[Operation], seconds: float) -> Machine:
    """`machine` with the processor seconds for each byte with which the program takes so long."""
    low, high = 0.0, 1e-6
    for _ in range(50):
        machine = replace(machine, processor_per_byte=(low + high) / 2)
        if simulate(program, machine).seconds < seconds:
            low = machine.processor_per_byte
        else:
            high = machine.processor_per_byte
    return machine


def _schedules(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for path in sorted(folder.glob("steps-*.json")):
        yield json.loads(path.read_text())["layerzero"]["schedule"]


def _launch_seconds(folder: Path) -> float:
    """Median seconds of the host for an exchange."""
    launches = [event for schedule in _schedules(folder) for event in schedule if event["kind"] == "launch"]
    return statistics.median((event["end"] - event["start"]) / 1e6 for event in launches)


def _carried_between(folder: Path, node_size: int) -> float:
    """Median bytes a second that a node sent while its ranks reduced or refreshed one unit after the other."""
    rates = []
    for schedule in _schedules(folder):
        crossing = [event for event in schedule if event["kind"] == "launch" and event.get("axis") == "replica"]
        for _, series in groupby(crossing, key=lambda event: event["exchange"]):
            events = list(series)
            seconds = (max(event["completed"] for event in events) - events[0]["start"]) / 1e6
            rates.append(node_size * sum(event["bytes"] for event in events) / seconds)
    return statistics.median(rates)


def _computations(folder: Path) -> Callable[[What], float]:
    """Seconds by what is computed."""
    alone, in_steps = (_quietest(folder, pattern) for pattern in ("compute", "steps"))

    def seconds(what: What) -> float:
        from_alone = what[0] in ("forward", "backward", "after forward")
        return (alone if from_alone else in_steps).get(what, 0.0)

    return seconds


def _quietest(folder: Path, pattern: str) -> dict[What, float]:
    """Means over the ranks, of the round in which they are least."""
    found: defaultdict[What, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob(f"{pattern}-*.json")):
        this_round = path.stem.rpartition("-")[2]
        for what, seconds in seconds_of(read_trace(path)).items():
            found[what][this_round].append(seconds)
    return {what: min(statistics.mean(values) for values in rounds.values()) for what, rounds in found.items()}
