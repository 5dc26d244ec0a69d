"""Projection of steps of large models on many nodes, for layerzero and for models of other schemes.

The schedules of all schemes are derived from settings (``schedules.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model_shapes import UNITS
from benchmarks.simulation.program import ComputeKey, Operation
from benchmarks.simulation.schedules import FSDPSettings, ScheduleSettings, UnitCost, fsdp_program
from benchmarks.simulation.schedules import layerzero_program as program_of_settings
from benchmarks.simulation.simulator import SimMachine, SimResult, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from scheme_costs import scheme_costs

__all__ = ["MODELS", "SCHEMES", "Assumptions", "Model", "Row", "project"]

_ROOT = "the root"
_COMPUTE, _REDUCE = 2, 4  # bytes per element: bf16 weights, fp32 gradients
_STEPS = 2  # simulated steps; the result is that of the last one


@dataclass(frozen=True)
class Model:
    """Decoder-only transformer; `root_numel` counts embedding, last norm and head."""

    name: str
    blocks: int
    width: int
    block_numel: int
    root_numel: int

    @property
    def numel(self) -> int:
        return self.blocks * self.block_numel + self.root_numel

    def numel_of(self, unit: str) -> int:
        return self.root_numel if unit == _ROOT else self.block_numel

    @classmethod
    def from_shapes(cls, name: str, width: int) -> Model:
        units = {shapes.unit: shapes for shapes in UNITS if shapes.model == name}
        return cls(name, units["block"].copies, width, units["block"].numel, units["root"].numel)


MODELS = {"7b": Model.from_shapes("Llama 7B", 4096), "70b": Model.from_shapes("Llama 70B", 8192)}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about machine and run. Bytes, seconds and FLOP are per GPU unless stated otherwise."""

    gpus: int = 8  # GPUs of a node
    flops: float = 400e12  # FLOP/s that a block reaches in bf16, not the peak
    memory: float = 80e9  # bytes
    memory_speed: float = 2.5e12  # bytes per second
    inside: float = 300e9  # bytes per second inside a node
    inside_latency: float = 5e-6
    between_latency: float = 10e-6
    launch: float = 10e-6
    steps: str = "log"
    tokens: int = 4096  # tokens of a GPU's micro-batch, which is one sequence

    def machine(self, gbit: float) -> SimMachine:
        """Return the simulated machine with `gbit` Gbit/s per node between the nodes."""
        return SimMachine(
            node_size=self.gpus,
            inside=self.inside,
            between=gbit * 1e9 / 8,
            inside_latency=self.inside_latency,
            between_latency=self.between_latency,
            steps=self.steps,
            launch=self.launch,
        )


@dataclass(frozen=True)
class _Times:
    """Compute times of a GPU, in seconds. Each GPU holds ``1 / states`` of the masters."""

    model: Model
    assumed: Assumptions
    states: int

    def __call__(self, what: ComputeKey) -> float:
        phase, unit = what
        if phase in ("forward", "backward"):
            return self.forward(unit) * (2 if phase == "backward" else 1)
        if phase == "update":  # reads master, gradient and two moments, writes all except the gradient: 28 bytes
            return 28 * self.model.numel / self.states / self.assumed.memory_speed
        return 0.0

    def forward(self, unit: str) -> float:
        model, tokens = self.model, self.assumed.tokens
        if unit == _ROOT:  # only the head; embedding lookups cost nothing
            return 2 * (model.root_numel / 2) * tokens / self.assumed.flops
        attention = 2 * tokens * model.width  # per token: scores and weighted sum over half of all pairs (causal)
        return (2 * model.block_numel + attention) * tokens / self.assumed.flops


def layerzero_program(model: Model, assumed: Assumptions, nodes: int, micro_batches: int) -> list[Operation]:
    """Return layerzero's program, with weights sharded inside nodes and ``"sharded"`` accumulation."""
    ranks = assumed.gpus * nodes
    times = _Times(model, assumed, ranks)
    settings = ScheduleSettings(
        ranks=ranks,
        zero3_size=assumed.gpus,
        micro_batches=micro_batches,
        compute=_COMPUTE,
        reduce=_REDUCE,
        replica_reduce=_REDUCE,
        update=times(("update", "optimizer")),
        memory_speed=assumed.memory_speed,
    )
    return list(program_of_settings(_units(model, times), settings, steps=_STEPS))


def full_sharding_program(model: Model, assumed: Assumptions, nodes: int, micro_batches: int) -> list[Operation]:
    """Return the program of FSDP or ZeRO-3, with all gathers and reductions over all ranks."""
    ranks = assumed.gpus * nodes
    return list(_fsdp(model, _Times(model, assumed, ranks), micro_batches, num_shards=ranks, replicas=1))


def hsdp_program(model: Model, assumed: Assumptions, nodes: int, micro_batches: int) -> list[Operation]:
    """Return the program of HSDP or MiCS: sharding inside nodes, all-reduce between nodes in the last micro-batch."""
    times = _Times(model, assumed, assumed.gpus)
    return list(_fsdp(model, times, micro_batches, num_shards=assumed.gpus, replicas=nodes))


SCHEMES = {"layerzero": layerzero_program, "HSDP": hsdp_program, "full": full_sharding_program}


def _units(model: Model, times: _Times) -> list[UnitCost]:
    names = [_ROOT, *(f"blocks.{index}" for index in range(model.blocks))]
    return [UnitCost(name, model.numel_of(name), times(("forward", name)), times(("backward", name))) for name in names]


def _fsdp(model: Model, times: _Times, micro_batches: int, *, num_shards: int, replicas: int) -> Iterator[Operation]:
    settings = FSDPSettings(
        num_shards=num_shards,
        replicas=replicas,
        micro_batches=micro_batches,
        compute=_COMPUTE,
        reduce=_REDUCE,
        update=times(("update", "optimizer")),
    )
    return fsdp_program(_units(model, times), settings, steps=_STEPS)


@dataclass(frozen=True)
class Row:
    """Projected step of one scheme."""

    model: str
    gbit: float  # Gbit/s of a node's link
    nodes: int
    micro_batches: int
    scheme: str
    seconds: float
    efficiency: float  # time of forward and backward, divided by the time of the step
    between: float  # bytes that a GPU sends to other nodes
    state: float  # bytes of weights, gradients and optimizer state of a GPU
    fits: bool  # whether the state fits, without activations and gathered weights


def project(model: Model, assumed: Assumptions, gbit: float, nodes: int, micro_batches: int) -> Iterator[Row]:
    """Yield the rows of all schemes."""
    costs = scheme_costs(model.numel, ranks=nodes * assumed.gpus, zero3_size=assumed.gpus, micro_batches=micro_batches)
    compute = (
        3
        * micro_batches
        * sum(
            _Times(model, assumed, 1).forward(unit) * copies
            for unit, copies in ((_ROOT, 1), ("blocks.0", model.blocks))
        )
    )
    for scheme, make in SCHEMES.items():
        outcome = simulate(make(model, assumed, nodes, micro_batches), assumed.machine(gbit))
        state = next(cost.state_bytes for cost in costs if cost.scheme in (scheme, _IN_COSTS.get(scheme)))
        yield Row(
            model=model.name,
            gbit=gbit,
            nodes=nodes,
            micro_batches=micro_batches,
            scheme=scheme,
            seconds=outcome.step,
            efficiency=compute / outcome.step,
            between=_sent_between(outcome, scheme, assumed.gpus),
            state=state,
            fits=state <= assumed.memory,
        )


_IN_COSTS = {"full": "FSDP2"}


def _sent_between(outcome: SimResult, scheme: str, gpus: int) -> float:
    if scheme == "full":
        return (outcome.bytes["gather"] + outcome.bytes["reduce"]) / _STEPS / gpus
    return (outcome.bytes["hop2"] + outcome.bytes["refresh"] + outcome.bytes["all-reduce"]) / _STEPS
