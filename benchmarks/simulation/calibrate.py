"""Calibration of the simulation to one measured case, and comparison with other cases.

Times of computations come from a run without communication on all ranks. Times of additions and of the optimizer, and
the speed of the link between nodes, come from traced steps. One number is fitted, so that the first case takes the
measured time: the processor seconds of a rank for each byte that it sends. All other results are predictions.

All measured numbers are those of the fastest round, because other work on the machine only increases them.
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

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.simulation.measure import Block, Case, Measured, Plan, gpt
from layerzero.config import LayerZeroConfig
from layerzero.planning.meta_sharding import MetaSharding, traits_of
from layerzero.planning.sim_program import ComputeKey, Operation, StartReduction, mean_span_seconds, read_recording
from layerzero.planning.sim_schedules import ScheduleSettings, UnitCost, layerzero_program
from layerzero.planning.simulator import SimMachine, simulate

__all__ = ["Prediction", "calibrate"]


@dataclass(frozen=True)
class Prediction:
    case: Case
    fitted: bool
    measured: float  # seconds
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def calibrate(plan: Plan, measured: Measured, *, two_nodes: bool) -> tuple[SimMachine, list[Prediction]]:
    """Return the machine on which the first case takes the measured time, and its predictions for all cases."""
    computations = _computations(measured.folder)
    programs = [_program(plan, case, computations) for case in plan.cases]
    machine = SimMachine(
        node_size=plan.node_size if two_nodes else plan.ranks,
        inside=math.inf,  # inside a node, bytes cost only processor time
        between=_carried_between(measured.folder, plan.node_size) if two_nodes else math.inf,
        launch=_launch_seconds(measured.folder),
        zero3_size=plan.cases[0].zero3_size,
    )
    machine = _fitted(machine, programs[0], measured.quietest(0) * plan.steps)
    predictions = []
    for index, (case, program) in enumerate(zip(plan.cases, programs, strict=True)):
        on = replace(machine, zero3_size=case.zero3_size)
        seconds = simulate(program, on).seconds / plan.steps
        predictions.append(Prediction(case, index == 0, measured.quietest(index), seconds))
    return machine, predictions


def _program(plan: Plan, case: Case, computations: Callable[[ComputeKey], float]) -> list[Operation]:
    """Return the program of ``layerzero plan`` for a case, with measured times."""
    settings = plan.settings(case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=settings.reduce_dtype)
    config = LayerZeroConfig(units=Block, mp_policy=policy, accumulation=case.accumulation)
    with torch.device("meta"):
        model = gpt(plan)
    units = MetaSharding(model, config).unit_specs(config, traits_of(plan.ranks, case.zero3_size, on_device=False))

    def seconds(phase: str, name: str) -> float:
        return computations((phase, name)) + computations((f"after {phase}", name))

    works = [
        UnitCost(
            name,
            sum(handle.layout.numel for handle in unit.handles),
            seconds("forward", name),
            seconds("backward", name),
        )
        for unit in units
        for name in (unit.name or "the root",)
    ]
    sharding = ScheduleSettings(
        plan.ranks,
        case.zero3_size,
        case.micro_batches,
        case.accumulation,
        reduce=settings.reduce_dtype.itemsize,
        replica_reduce=settings.reduce_dtype.itemsize,
        ends_stay_gathered=False,
        adds_hop1=True,
        update=seconds("update", "optimizer"),
    )
    traced = plan.cases[0].zero3_size

    def told(what: ComputeKey) -> float:
        if what[0] != "add":
            return computations(what)
        # On gloo each rank adds the parts of all ranks of the axis: N elements in hop 1, N / S in hop 2.
        hop, _, unit = what[1].partition(" ")
        if hop == "hop2" and case.zero3_size == 1:
            return computations(("add", f"hop1 {unit}"))
        return computations(what) * (traced / case.zero3_size if hop == "hop2" else 1.0)

    program = []
    for operation in layerzero_program(works, sharding, steps=plan.steps):
        if isinstance(operation, StartReduction):
            additions = tuple(replace(each, seconds=told(each.what)) for each in operation.additions)
            program.append(replace(operation, additions=additions))
        else:
            program.append(operation)
    return program


def _fitted(machine: SimMachine, program: Sequence[Operation], seconds: float) -> SimMachine:
    """Return `machine` with processor seconds per byte fitted so that the program takes `seconds`."""
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
    """Return the median seconds that the host needs to launch a collective."""
    launches = [event for schedule in _schedules(folder) for event in schedule if event["kind"] == "launch"]
    return statistics.median((event["end"] - event["start"]) / 1e6 for event in launches)


def _carried_between(folder: Path, node_size: int) -> float:
    """Return the median bytes per second that a node sent while its ranks reduced or refreshed successive units."""
    rates = []
    for schedule in _schedules(folder):
        crossing = [event for event in schedule if event["kind"] == "launch" and event.get("axis") == "replica"]
        for _, series in groupby(crossing, key=lambda event: event["collective"]):
            events = list(series)
            seconds = (max(event["completed"] for event in events) - events[0]["start"]) / 1e6
            rates.append(node_size * sum(event.get("bytes", 0) for event in events) / seconds)
    return statistics.median(rates)


def _computations(folder: Path) -> Callable[[ComputeKey], float]:
    """Return a function that gives the measured seconds of a computation."""
    alone, in_steps = (_quietest(folder, pattern) for pattern in ("compute", "steps"))

    def seconds(what: ComputeKey) -> float:
        from_alone = what[0] in ("forward", "backward", "after forward")
        return (alone if from_alone else in_steps).get(what, 0.0)

    return seconds


def _quietest(folder: Path, pattern: str) -> dict[ComputeKey, float]:
    """Return the mean seconds over the ranks of each computation, in the round with the smallest mean."""
    found: defaultdict[ComputeKey, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob(f"{pattern}-*.json")):
        this_round = path.stem.rpartition("-")[2]
        for what, seconds in mean_span_seconds(read_recording(path).program()).items():
            found[what][this_round].append(seconds)
    return {what: min(statistics.mean(values) for values in rounds.values()) for what, rounds in found.items()}
