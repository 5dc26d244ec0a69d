"""Estimate the cost of a combination of settings: memory by kind, bytes sent per axis, and the simulated step time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.config import LayerZeroConfig
from layerzero.estimates.memory_estimate import on_device
from layerzero.estimates.specs import UnitSpec
from layerzero.planning.cluster import Cluster
from layerzero.planning.compute_cost import ComputeCost
from layerzero.planning.meta_sharding import MetaSharding, optimizer_bytes, predicted_memory, where_of
from layerzero.planning.sim_program import Operation, collectives_in, computations_in
from layerzero.planning.sim_schedules import Peer, ScheduleSettings, UnitCost, layerzero_program, peer_program
from layerzero.planning.simulator import SimMachine, SimResult, simulate

__all__ = ["LAYERZERO", "PEERS", "Candidate", "Estimate", "Estimator"]

LAYERZERO = "layerzero"
PEERS = ("FSDP2", "HSDP", "ZeRO-1")
_STATE = 2  # number of AdamW state elements per parameter element, in the dtype of the master
_UPDATED = 7  # memory accesses of AdamW per parameter element: 4 reads (master, gradient, state) and 3 writes
_STEPS = 2  # number of simulated steps; the result is that of the last step


@dataclass(frozen=True)
class Candidate:
    """Combination of settings that a plan evaluates."""

    scheme: str
    zero3_size: int
    accumulation: str = "sharded"
    offload_grads: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    reduce_dtype: torch.dtype = torch.float32
    micro_batches: int = 1

    @property
    def accumulation_text(self) -> str:
        """Value of `accumulation`, or an empty text where ``"sharded"`` and ``"full"`` are the same."""
        return self.accumulation if self.zero3_size > 1 or self.accumulation == "local" else ""

    @property
    def offload(self) -> str:
        chosen = {"grads": self.offload_grads, "optimizer": self.offload_optimizer, "params": self.offload_params}
        return "+".join(name for name, on in chosen.items() if on) or "-"


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a combination of settings on a cluster. Bytes and seconds are per rank unless stated otherwise.

    Attributes:
        choice: the combination of settings.
        memory: bytes by kind, as :func:`layerzero.memory` predicts them. The dict also contains ``optimizer`` (AdamW)
            and, if known, the estimated ``activations``.
        peak: largest number of bytes on the device during a step, over all kinds.
        host: number of bytes in host memory.
        room: memory of an accelerator that is available to the model, in bytes.
        excess: number of bytes by which `peak` exceeds `room`, or 0 if `peak` does not exceed `room`.
        host_excess: number of bytes by which the ranks on a node together exceed the node's host memory, or 0 if the
            memory suffices.
        sent: number of bytes sent per step, by axis: ``zero3`` and ``replica``.
        between: number of bytes sent to other nodes per step.
        step: simulated duration of a step, in seconds.
        parts: duration of each part of `step`, in seconds: ``forward``, ``backward``, ``update``, ``add``, ``launch``,
            and the time spent waiting for each kind of collective.
        tokens: number of tokens per second on all ranks, or 0 if the number of tokens in a micro-batch is unknown.
        price: price of the cluster per day, or 0 if the price is unknown.
    """

    choice: Candidate
    memory: dict[str, int]
    peak: int
    host: int
    room: float
    excess: float
    host_excess: float
    sent: dict[str, float]
    between: float
    step: float
    parts: dict[str, float]
    tokens: float
    price: float

    @property
    def fits(self) -> bool:
        return not self.excess and not self.host_excess


@dataclass(frozen=True)
class _StepCost:
    """Simulated time and traffic of one step; see the attributes of the same names in :class:`Estimate`."""

    step: float
    parts: dict[str, float]
    sent: dict[str, float]
    between: float

    def plus(self, other: _StepCost, times: float) -> _StepCost:
        def add_scaled(mine: dict[str, float], its: dict[str, float]) -> dict[str, float]:
            return {name: mine.get(name, 0.0) + times * its.get(name, 0.0) for name in [*mine, *(its.keys() - mine)]}

        return _StepCost(
            self.step + times * other.step,
            add_scaled(self.parts, other.parts),
            add_scaled(self.sent, other.sent),
            self.between + times * other.between,
        )


@dataclass
class Estimator:
    """Estimator of the cost of combinations of settings, for one model on one cluster."""

    paper: MetaSharding
    load: ComputeCost
    cluster: Cluster
    param_dtype: torch.dtype
    units: object = None
    called: str = ""  # text for `units` in the recommended settings if the model's classes are unavailable
    _step_costs: dict[tuple[Candidate, int], _StepCost] = field(default_factory=dict)

    def config(self, choice: Candidate) -> LayerZeroConfig:
        """Return the settings in `choice` in the form that ``shard_model`` takes."""
        return LayerZeroConfig(
            zero3_size=choice.zero3_size,
            units=self.units,  # type: ignore[arg-type]
            mp_policy=MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=choice.reduce_dtype),
            accumulation=choice.accumulation,
            offload_grads=choice.offload_grads,
            offload_optimizer=choice.offload_optimizer,
            offload_params=choice.offload_params,
            shared_memory="off" if self.cluster.device == "cpu" else "auto",
        )

    def row(self, choice: Candidate) -> Estimate:
        cluster = self.cluster
        memory, peak = self._memory(choice)
        activations = round(self.load.activation_bytes)
        if activations:
            memory["activations"] = activations
        host = sum(memory.values()) - on_device(memory)
        step_cost = self.step_cost(choice)
        tokens = self.load.tokens * choice.micro_batches * cluster.ranks
        return Estimate(
            choice=choice,
            memory=memory,
            peak=peak + activations,
            host=host,
            room=cluster.room,
            excess=max(0.0, peak + activations - cluster.room),
            host_excess=max(0.0, host * cluster.accelerators - cluster.host_memory * 1e9),
            sent=step_cost.sent,
            between=step_cost.between,
            step=step_cost.step,
            parts=step_cost.parts,
            tokens=tokens / step_cost.step,
            price=24 * cluster.price * cluster.ranks,
        )

    def _memory(self, choice: Candidate) -> tuple[dict[str, int], int]:
        if choice.scheme != LAYERZERO:
            return self._memory_of_peer(choice)
        config, units = self.config(choice), self.planned(choice)
        found = predicted_memory(units, config)
        where = "host_optimizer" if config.offload_optimizer else "optimizer"
        memory = {**found.kinds, where: optimizer_bytes(units, _STATE)}
        return memory, found.peak + memory.get("optimizer", 0)

    def _memory_of_peer(self, choice: Candidate) -> tuple[dict[str, int], int]:
        """Return the number of bytes by kind, and their sum, for a scheme other than layerzero.

        The numbers come from formulas that ignore padding. At the peak of a sharded scheme, the root and two units are
        gathered while the gradients of the root and one unit are reduced.
        """
        over = self._shared_over(choice)
        numel = sum(cost.numel for cost in self.unit_costs())
        root, *others = (cost.numel for cost in self.unit_costs())
        two = max((a + b for a, b in pairwise(others)), default=sum(others))  # the current and the prefetched unit
        largest = max(others, default=0.0)
        element = self.param_dtype.itemsize
        memory = {"masters": 4 * numel / over, "gradients": 4 * numel / over, "optimizer": 8 * numel / over}
        if choice.scheme == "ZeRO-1":
            memory = {"weights": element * numel, "gradients": 4 * numel, "masters": memory["masters"]}
            memory["optimizer"] = 8 * numel / over
            gathered = 0.0
        else:
            gathered = (root + two) * element + (root + largest) * choice.reduce_dtype.itemsize
        memory["gathered"] = gathered
        whole = {kind: round(nbytes) for kind, nbytes in memory.items()}
        return whole, sum(whole.values())

    def _shared_over(self, choice: Candidate) -> int:
        return self.cluster.accelerators if choice.scheme == "HSDP" else self.cluster.ranks

    def planned(self, choice: Candidate) -> list[UnitSpec]:
        where = where_of(
            self.cluster.ranks,
            choice.zero3_size,
            on_device=self.cluster.device != "cpu",
            offload_params=choice.offload_params,
        )
        return self.paper.units(self.config(choice), where)

    def unit_costs(self, units: Sequence[UnitSpec] | None = None) -> list[UnitCost]:
        """Return the number of elements and the compute times of each unit.

        The numbers of elements include padding if `units` is given.
        """
        if units is None:
            numels = {plan.name: float(sum(f.parameter.numel() for f in plan.parameters)) for plan in self.paper.plans}
        else:
            numels = {unit.name: float(sum(handle.layout.numel for handle in unit.handles)) for unit in units}
        speed = self.cluster.tflops * 1e12
        return [
            UnitCost(
                name or "the root",
                numel,
                self.load.flops(name) / speed,
                self.load.backward_flops(name) / speed,
            )
            for name, numel in numels.items()
        ]

    def step_cost(self, choice: Candidate) -> _StepCost:
        """Return the time and traffic of a simulated step.

        At most 3 micro-batches are simulated, and the others are extrapolated. From the third micro-batch on, each
        micro-batch takes as long as the previous one, because the simulation waits for the reductions of each
        micro-batch. A device waits only for the reductions of the last one, so the estimate is slightly too long.
        """
        most = min(choice.micro_batches, 3)
        simulated = self._simulated(choice, most)
        if choice.micro_batches <= most:
            return simulated
        difference = simulated.plus(self._simulated(choice, most - 1), -1.0)
        return simulated.plus(difference, choice.micro_batches - most)

    def _simulated(self, choice: Candidate, micro_batches: int) -> _StepCost:
        key = replace(choice, micro_batches=1), micro_batches
        if key not in self._step_costs:
            machine, program = self.program(replace(choice, micro_batches=micro_batches))
            self._step_costs[key] = _step_cost(program, simulate(program, machine), machine)
        return self._step_costs[key]

    def program(self, choice: Candidate) -> tuple[SimMachine, list[Operation]]:
        """Return the simulated machine, and a program with ``_STEPS`` steps that runs on this machine."""
        cluster = self.cluster
        if choice.scheme in ("FSDP2", "HSDP"):
            over = self._shared_over(choice)
            peer = Peer(
                over=over,
                replicas=cluster.ranks // over,
                micro_batches=choice.micro_batches,
                compute=self.param_dtype.itemsize,
                reduce=choice.reduce_dtype.itemsize,
                update=self._update(sum(cost.numel for cost in self.unit_costs()) / over, in_host=False),
            )
            return cluster.machine(over), list(peer_program(self.unit_costs(), peer, steps=_STEPS))
        unit_costs = self.unit_costs(self.planned(choice)) if choice.scheme == LAYERZERO else self.unit_costs()
        own = sum(cost.numel for cost in unit_costs) / cluster.ranks
        sharding = ScheduleSettings(
            ranks=cluster.ranks,
            zero3_size=choice.zero3_size,
            micro_batches=choice.micro_batches,
            accumulation=choice.accumulation,
            compute=self.param_dtype.itemsize,
            reduce=choice.reduce_dtype.itemsize,
            replica_reduce=choice.reduce_dtype.itemsize,
            offload_grads=choice.offload_grads,
            offload_optimizer=choice.offload_optimizer,
            offload_params=choice.offload_params,
            ends_stay_gathered=cluster.device != "cpu",
            adds_hop1=cluster.device == "cpu",
            update=self._update(own, in_host=choice.offload_optimizer),
            memory_speed=cluster.memory_speed * 1e9,
        )
        return cluster.machine(choice.zero3_size), list(layerzero_program(unit_costs, sharding, steps=_STEPS))

    def _update(self, numel: float, *, in_host: bool) -> float:
        """Return the time in seconds that AdamW needs to update `numel` elements."""
        speed = self.cluster.host_memory_speed / self.cluster.accelerators if in_host else self.cluster.memory_speed
        return 4 * _UPDATED * numel / (speed * 1e9)


def _step_cost(program: Iterable[Operation], outcome: SimResult, machine: SimMachine) -> _StepCost:
    parts: defaultdict[str, float] = defaultdict(float)
    sent = {"zero3": 0.0, "replica": 0.0}
    between = 0.0
    for operation in program:
        for computation in computations_in(operation):
            parts[computation.what[0] or "add"] += computation.seconds / _STEPS
        for collective in collectives_in(operation):
            if collective.axis in sent:
                sent[collective.axis] += collective.bytes / _STEPS
            between += machine.sent_between(collective) / machine.node_size / _STEPS
    for kind, seconds in outcome.waits[-1].items():
        parts[kind] += seconds
    parts["launch"] = outcome.step - sum(parts.values())
    return _StepCost(outcome.step, dict(parts), sent, between)
