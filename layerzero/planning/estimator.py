"""Estimate the cost of a combination of settings: memory by kind, bytes sent per axis, and the simulated step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import torch

from layerzero.comm.codecs import ParamRows
from layerzero.config import Codecs, LayerZeroConfig, Offload, PrecisionPolicy
from layerzero.estimates.memory_estimate import device_bytes, estimate_memory, optimizer_bytes
from layerzero.estimates.specs import UnitSpec
from layerzero.integrations.yaml_file import HOP2_CODECS, NAMED_REFRESH_CODECS
from layerzero.planning.cluster import Cluster
from layerzero.planning.compute_cost import ComputeCost
from layerzero.planning.meta_sharding import MetaSharding, traits_of
from layerzero.planning.sim_program import Operation, SimCompute, SimLaunch, StartReduction, collectives_in
from layerzero.planning.sim_schedules import FSDPSettings, ScheduleSettings, UnitCost, fsdp_program, layerzero_program
from layerzero.planning.simulator import SimMachine, SimResult, simulate
from layerzero.slow_links import Int4Difference

__all__ = [
    "ALIKE_TEXT",
    "DTYPE_TEXTS",
    "LAYERZERO",
    "OTHER_SCHEMES",
    "Candidate",
    "Estimate",
    "Estimator",
    "selection_reason",
    "simplest_fast_row",
]

LAYERZERO = "layerzero"
OTHER_SCHEMES = ("FSDP2", "HSDP", "HFSDP", "ZeRO-1")
_STATE = 2  # number of AdamW state elements per parameter element, in the dtype of the master
_UPDATED = 7  # memory accesses of AdamW per parameter element: 4 reads (master, gradient, state) and 3 writes
_ALIKE = 0.03  # if throughputs differ by at most this fraction, the simpler settings are chosen
ALIKE_TEXT = f"{100 * _ALIKE:.3g}%"
# Elements per second that one rank encodes and decodes. Rates of int4 include error feedback. The rates of "cuda" were
# measured on one GPU (docs/gpu.md, "Codecs of gradients"), those of "cpu" on one thread (docs/slow-links.md, "Time of
# the codecs").
_CODING = {
    ("int8_blocks", "cuda"): (45e9, 139e9),
    ("int4_blocks", "cuda"): (23e9, 61e9),
    ("int8_blocks", "cpu"): (0.48e9, 1.02e9),
    ("int4_blocks", "cpu"): (0.24e9, 0.64e9),
}
# Rates for refreshes, which are encoded only on CPUs. The rates of "lossless" were measured with zstd.
_REFRESH_CODING = {"int4_difference": (0.14e9, 0.39e9), "lossless": (0.13e9, 0.19e9)}
_LOSSLESS_BITS = 4.3  # per weight; measured in the middle of a training (docs/slow-links.md, "Lossless refresh")
_STEPS = 2  # number of simulated steps; only the last step counts


DTYPE_TEXTS = {None: "", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    replica_reduce_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = None
    hop2_codec: str | None = None  # name, as in a YAML file
    refresh_codec: str | None = None  # name, as in a YAML file
    micro_batches: int = 1

    @property
    def accumulation_text(self) -> str:
        """`accumulation`, or an empty string if ``"sharded"`` and ``"full"`` are equivalent (`zero3_size` is 1).

        If `accumulation_dtype` is set, it is appended: ``sharded bf16``.
        """
        mode = self.accumulation if self.zero3_size > 1 or self.accumulation == "local" else ""
        return " ".join(filter(None, (mode, DTYPE_TEXTS[self.accumulation_dtype])))

    @property
    def num_low_precision_dtypes(self) -> int:
        """Number of places in which gradients have a dtype other than fp32: hop 1, hop 2 and accumulators."""
        hop2 = None if self.hop2_codec is not None else self.replica_reduce_dtype or self.reduce_dtype
        dtypes = (self.reduce_dtype, hop2, self.accumulation_dtype)
        return sum(dtype not in (None, torch.float32) for dtype in dtypes)

    @property
    def offload(self) -> str:
        settings = {"grads": self.offload_grads, "optimizer": self.offload_optimizer, "params": self.offload_params}
        return "+".join(name for name, is_set in settings.items() if is_set) or "-"


@dataclass(frozen=True)
class StepCost:
    """Simulated time and traffic of one step; see the properties of the same names in :class:`Estimate`."""

    step: float
    parts: dict[str, float]
    sent: dict[str, float]
    between: float

    def plus(self, other: StepCost, times: float) -> StepCost:
        def add_scaled(terms: dict[str, float], added: dict[str, float]) -> dict[str, float]:
            return {name: terms.get(name, 0.0) + times * added.get(name, 0.0) for name in terms | added}

        return StepCost(
            self.step + times * other.step,
            add_scaled(self.parts, other.parts),
            add_scaled(self.sent, other.sent),
            self.between + times * other.between,
        )


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a combination of settings on a cluster. Bytes and seconds are per rank unless stated otherwise.

    Times and traffic are simulated when one of them is read for the first time.

    Attributes:
        choice: the combination of settings.
        memory: bytes by kind, as :func:`layerzero.memory` predicts them. The dict also contains ``optimizer`` (AdamW)
            and, if known, the estimated ``activations``.
        peak: largest number of bytes on the device during a step, over all kinds.
        host: number of bytes in host memory.
        tokens_per_step: number of tokens in a step on all ranks.
        cluster: cluster on which the model trains.
        simulated: function that simulates a step of `choice`.
    """

    choice: Candidate
    memory: dict[str, int]
    peak: int
    host: int
    tokens_per_step: int
    cluster: Cluster
    simulated: Callable[[], StepCost] = field(repr=False, compare=False)

    @property
    def room(self) -> float:
        """Memory of an accelerator that is available to the model, in bytes."""
        return self.cluster.room

    @property
    def excess(self) -> float:
        """Number of bytes by which `peak` exceeds `room`, or 0 if `peak` does not exceed `room`."""
        return max(0.0, self.peak - self.room)

    @property
    def host_excess(self) -> float:
        """Number of bytes by which all ranks on a node together exceed its host memory, or 0 if the memory suffices."""
        return max(0.0, self.host * self.cluster.accelerators - self.cluster.host_memory * 1e9)

    @property
    def price(self) -> float:
        """Price of the cluster per day, or 0 if the price is unknown."""
        return 24 * self.cluster.price * self.cluster.ranks

    @property
    def fits(self) -> bool:
        return not any(self.shortfalls)

    @property
    def shortfalls(self) -> tuple[float, float]:
        """`excess` and `host_excess` in bytes. Plans sort settings that do not fit by this, in ascending order."""
        return self.excess, self.host_excess

    @cached_property
    def _cost(self) -> StepCost:
        return self.simulated()

    @property
    def step(self) -> float:
        """Simulated duration of a step, in seconds."""
        return self._cost.step

    @property
    def parts(self) -> dict[str, float]:
        """Duration of each part of `step`, in seconds.

        The parts are ``forward``, ``backward``, ``update``, ``launch``, the time spent waiting for each kind of
        collective, and ``contention``. Contention is the time by which additions of received gradients and, on a CPU,
        collectives slow down the other parts.
        """
        return self._cost.parts

    @property
    def sent(self) -> dict[str, float]:
        """Number of bytes sent per step, by axis: ``zero3`` and ``replica``."""
        return self._cost.sent

    @property
    def between(self) -> float:
        """Number of bytes sent to other nodes per step."""
        return self._cost.between

    @property
    def tokens(self) -> float:
        """Number of tokens per second on all ranks."""
        return self.tokens_per_step / self.step


# Text and value of each criterion for the simplest row, most important first. A smaller value is simpler.
_CRITERIA: tuple[tuple[str, Callable[[Estimate], float]], ...] = (
    ("the fewest micro-batches", lambda row: row.choice.micro_batches),
    (
        "the fewest kinds of offloading",
        lambda row: row.choice.offload_optimizer + row.choice.offload_grads + row.choice.offload_params,
    ),
    ("the fewest codecs", lambda row: (row.choice.hop2_codec is not None) + (row.choice.refresh_codec is not None)),
    ("the fewest low-precision gradient dtypes", lambda row: row.choice.num_low_precision_dtypes),
    ("weights sharded within a node", lambda row: row.choice.zero3_size > row.cluster.accelerators),
    (
        "gradients sent between nodes only once per step",
        lambda row: row.choice.accumulation == "local" and row.choice.micro_batches > 1,
    ),
    ("the least memory", lambda row: row.peak),
)


def simplest_fast_row(rows: Iterable[Estimate]) -> Estimate | None:
    """Return the row that the criteria prefer among the fastest rows that fit, or None if no row fits."""
    return min(_fast_rows(rows), key=lambda row: tuple(value(row) for _, value in _CRITERIA), default=None)


def selection_reason(rows: Iterable[Estimate]) -> str:
    """Return a sentence that tells why :func:`simplest_fast_row` returns its row. At least one row must fit.

    The sentence contains the criteria that distinguish the fastest rows from each other.
    """
    left = _fast_rows(rows)
    if len(left) == 1:
        return f"No other combination that fits is within {ALIKE_TEXT} of its throughput."
    fast, decisive = len(left), []
    for text, value in _CRITERIA:
        smallest = min(map(value, left))
        preferred = [row for row in left if value(row) == smallest]
        if len(preferred) < len(left):
            decisive.append(text)
        left = preferred
    return (
        f"Of the {fast} combinations that fit and are within {ALIKE_TEXT} of the highest throughput, the planner "
        f"prefers {'the one with ' if decisive else ''}{', then '.join(decisive) or 'the fastest'}."
    )


def _fast_rows(rows: Iterable[Estimate]) -> list[Estimate]:
    fitting = [row for row in rows if row.fits]
    fastest = max((row.tokens for row in fitting), default=0.0)
    return [row for row in fitting if row.tokens >= (1 - _ALIKE) * fastest]


@dataclass
class Estimator:
    """Estimator of memory, traffic and step time for many combinations of settings of one model on one cluster.

    `on_estimate` is called after each estimate of memory and after each simulation.
    """

    sharding: MetaSharding
    compute_cost: ComputeCost
    cluster: Cluster
    param_dtype: torch.dtype
    units: object = None
    unit_text: str = ""  # text for `units` in the recommended settings if the model's classes are unavailable
    on_estimate: Callable[[], None] = lambda: None
    # Specs and memory are the same for any number of micro-batches; the number in these keys is 1.
    _units: dict[Candidate, list[UnitSpec]] = field(default_factory=dict)
    _memories: dict[Candidate, tuple[dict[str, int], int]] = field(default_factory=dict)
    _step_costs: dict[tuple[Candidate, int], StepCost] = field(default_factory=dict)

    def with_cluster(self, cluster: Cluster) -> Estimator:
        """Return an estimator for the same model on another cluster.

        If the clusters differ only in the speed of the link between nodes, both share the estimates of memory.
        """
        if replace(cluster, between=self.cluster.between) == self.cluster:
            return replace(self, cluster=cluster, _step_costs={})
        return replace(self, cluster=cluster, _units={}, _memories={}, _step_costs={})

    def config(self, choice: Candidate) -> LayerZeroConfig:
        """Return the settings in `choice` as a :class:`LayerZeroConfig`."""
        return LayerZeroConfig(
            zero3_size=choice.zero3_size,
            units=self.units,  # type: ignore[arg-type]
            mp_policy=PrecisionPolicy(
                param_dtype=self.param_dtype,
                reduce_dtype=choice.reduce_dtype,
                replica_reduce_dtype=choice.replica_reduce_dtype,
                accumulation_dtype=choice.accumulation_dtype,
            ),
            accumulation=choice.accumulation,
            offload=Offload(choice.offload_grads, choice.offload_optimizer, choice.offload_params),
            codecs=Codecs(
                hop2=None if choice.hop2_codec is None else HOP2_CODECS[choice.hop2_codec],
                refresh=None if choice.refresh_codec is None else NAMED_REFRESH_CODECS[choice.refresh_codec],
            ),
            shared_memory="off" if self.cluster.device == "cpu" else "auto",
        )

    def estimate(self, choice: Candidate) -> Estimate:
        cluster = self.cluster
        memory, peak = self._memory(replace(choice, micro_batches=1))
        activations = round(self.compute_cost.activation_bytes)
        if activations:
            memory = {**memory, "activations": activations}
        host = sum(memory.values()) - device_bytes(memory)
        return Estimate(
            choice=choice,
            memory=memory,
            peak=peak + activations,
            host=host,
            tokens_per_step=self.compute_cost.tokens * choice.micro_batches * cluster.ranks,
            cluster=cluster,
            simulated=partial(self.step_cost, choice),
        )

    def _memory(self, choice: Candidate) -> tuple[dict[str, int], int]:
        if choice not in self._memories:
            of_layerzero = choice.scheme == LAYERZERO
            self._memories[choice] = (
                self._memory_of_units(choice) if of_layerzero else self._memory_of_other_scheme(choice)
            )
            self.on_estimate()
        return self._memories[choice]

    def _memory_of_units(self, choice: Candidate) -> tuple[dict[str, int], int]:
        config, units = self.config(choice), self.unit_specs(choice)
        estimate = estimate_memory(units, config)
        optimizer_kind = "host_optimizer" if config.offload.optimizer else "optimizer"
        memory = {**estimate.kinds, optimizer_kind: optimizer_bytes(units, _STATE)}
        return memory, estimate.peak + memory.get("optimizer", 0)

    def _memory_of_other_scheme(self, choice: Candidate) -> tuple[dict[str, int], int]:
        """Return the number of bytes by kind, and their sum, for a scheme other than layerzero.

        The numbers come from formulas that ignore padding. At the peak of a sharded scheme, the root and two units are
        gathered while the gradients of the root and one unit are reduced.
        """
        num_shards = self._num_shards(choice)
        states = num_shards if choice.scheme == "HSDP" else self.cluster.ranks
        root, *others = self.unit_costs()
        numel, trained = root.numel + sum(cost.numel for cost in others), self.trained_numel
        two_units = max(
            (a.numel + b.numel for a, b in pairwise(others)), default=sum(cost.numel for cost in others)
        )  # the current and the prefetched unit
        largest = max((cost.trained_numel for cost in others), default=0.0)
        element, reduce = self.param_dtype.itemsize, choice.reduce_dtype.itemsize
        frozen_bytes = sum(p.numel() * p.itemsize for p in self._parameters() if not p.requires_grad)
        memory = {
            "masters": (4 * trained + frozen_bytes) / states,  # of frozen parameters, the only copy, in its own dtype
            "gradients": 4 * trained / num_shards,
            "optimizer": 8 * trained / states,
        }
        if choice.scheme in ("HFSDP", "ZeRO-1"):
            memory["masters"] = 4 * trained / states
            memory["weights"] = element * numel / num_shards
            memory["gradients"] = reduce * trained / num_shards  # Megatron accumulates in the reduce dtype
        if num_shards > 1:
            memory["gathered"] = (root.numel + two_units) * element
            memory["reduce_buffer"] = (root.trained_numel + largest) * reduce
        rounded = {kind: round(nbytes) for kind, nbytes in memory.items()}
        return rounded, sum(rounded.values())

    def _num_shards(self, choice: Candidate) -> int:
        """Return the number of ranks over which a scheme other than layerzero shards gradients."""
        return self.cluster.ranks if choice.scheme == "FSDP2" else choice.zero3_size

    def unit_specs(self, choice: Candidate) -> list[UnitSpec]:
        key = replace(choice, micro_batches=1)
        if key not in self._units:
            traits = traits_of(
                self.cluster.ranks,
                choice.zero3_size,
                on_device=self.cluster.device != "cpu",
                offload_params=choice.offload_params,
            )
            self._units[key] = self.sharding.unit_specs(self.config(choice), traits)
        return self._units[key]

    def _parameters(self) -> list[torch.Tensor]:
        return [planned.parameter for plan in self.sharding.plans for planned in plan.parameters]

    @property
    def trained_numel(self) -> int:
        """Number of elements of trainable parameters, without padding."""
        return sum(parameter.numel() for parameter in self._parameters() if parameter.requires_grad)

    def unit_costs(self, units: Sequence[UnitSpec] | None = None) -> list[UnitCost]:
        """Return the number of elements and the compute times of each unit.

        The numbers of elements include padding if `units` is given.
        """
        if units is None:
            parts = {
                plan.name: [(f.parameter.numel(), f.parameter.requires_grad) for f in plan.parameters]
                for plan in self.sharding.plans
            }
        else:
            parts = {unit.name: [(handle.layout.numel, handle.trainable) for handle in unit.handles] for unit in units}
        speed = self.cluster.tflops * 1e12
        return [
            UnitCost(
                name or "the root",
                float(sum(numel for numel, _ in parts_of_unit)),
                self.compute_cost.flops(name) / speed,
                self.compute_cost.backward_flops(name) / speed,
                float(sum(numel for numel, trainable in parts_of_unit if not trainable)),
            )
            for name, parts_of_unit in parts.items()
        ]

    def step_cost(self, choice: Candidate) -> StepCost:
        """Return the time and traffic of a simulated step.

        At most 3 micro-batches are simulated, and the others are extrapolated. From the third micro-batch on, each
        micro-batch takes as long as the previous one, because the simulation waits for the reductions of each
        micro-batch. A device waits only for the reductions of the last micro-batch, so the estimate is slightly too
        long.
        """
        simulated_count = min(choice.micro_batches, 3)
        simulated = self._simulate_step(choice, simulated_count)
        if choice.micro_batches <= simulated_count:
            return simulated
        difference = simulated.plus(self._simulate_step(choice, simulated_count - 1), -1.0)
        return simulated.plus(difference, choice.micro_batches - simulated_count)

    def _simulate_step(self, choice: Candidate, micro_batches: int) -> StepCost:
        key = replace(choice, micro_batches=1), micro_batches
        if key not in self._step_costs:
            machine, program = self.program(replace(choice, micro_batches=micro_batches))
            self._step_costs[key] = _step_cost(program, simulate(program, machine), machine)
            self.on_estimate()
        return self._step_costs[key]

    def program(self, choice: Candidate) -> tuple[SimMachine, list[Operation]]:
        """Return the simulated machine, and a program with ``_STEPS`` steps that runs on this machine."""
        cluster = self.cluster
        if choice.scheme in ("FSDP2", "HSDP", "HFSDP"):
            num_shards = self._num_shards(choice)
            shards_states = choice.scheme == "HFSDP"
            settings = FSDPSettings(
                num_shards=num_shards,
                replicas=cluster.ranks // num_shards,
                micro_batches=choice.micro_batches,
                compute=self.param_dtype.itemsize,
                reduce=choice.reduce_dtype.itemsize,
                shards_states=shards_states,
                update=self._update_seconds(
                    self.trained_numel / (cluster.ranks if shards_states else num_shards), in_host=False
                ),
            )
            return cluster.machine(num_shards), list(fsdp_program(self.unit_costs(), settings, steps=_STEPS))
        unit_costs = self.unit_costs(self.unit_specs(choice)) if choice.scheme == LAYERZERO else self.unit_costs()
        own_numel = sum(cost.trained_numel for cost in unit_costs) / cluster.ranks
        encoding, decoding = _REFRESH_CODING[choice.refresh_codec] if choice.refresh_codec else (math.inf, math.inf)
        schedule = ScheduleSettings(
            ranks=cluster.ranks,
            zero3_size=choice.zero3_size,
            micro_batches=choice.micro_batches,
            accumulation=choice.accumulation,
            compute=self.param_dtype.itemsize,
            reduce=choice.reduce_dtype.itemsize,
            replica_reduce=self._hop2_bytes_per_element(choice),
            hop2_coding=self._hop2_coding(choice),
            refreshed=self._refresh_bytes_per_element(choice),
            accumulator=(choice.accumulation_dtype or torch.float32).itemsize,
            refresh_encoding=1 / encoding,
            refresh_decoding=1 / decoding,
            offload_grads=choice.offload_grads,
            offload_optimizer=choice.offload_optimizer,
            offload_params=choice.offload_params,
            ends_stay_gathered=cluster.device != "cpu",
            adds_hop1=cluster.device == "cpu",
            update=self._update_seconds(own_numel, in_host=choice.offload_optimizer),
            memory_speed=cluster.memory_speed * 1e9,
        )
        return cluster.machine(choice.zero3_size), list(layerzero_program(unit_costs, schedule, steps=_STEPS))

    def _hop2_bytes_per_element(self, choice: Candidate) -> float:
        """Return the number of bytes per element that hop 2 sends."""
        if choice.hop2_codec is None:
            return (choice.replica_reduce_dtype or choice.reduce_dtype).itemsize
        block = ParamRows(start=0, rows=1, length=2**20)
        return HOP2_CODECS[choice.hop2_codec].nbytes([block], choice.reduce_dtype) / block.numel

    def _hop2_coding(self, choice: Candidate) -> float:
        """Return the time that a rank needs to encode and decode one element in hop 2, in seconds."""
        if choice.hop2_codec is None:
            return 0.0
        encoding, decoding = _CODING[choice.hop2_codec, self.cluster.device]
        return 1 / encoding + 1 / decoding

    def _refresh_bytes_per_element(self, choice: Candidate) -> float | None:
        """Return the number of bytes per element that an encoded refresh sends, or None without a refresh codec."""
        if choice.refresh_codec is None:
            return None
        codec = NAMED_REFRESH_CODECS[choice.refresh_codec]
        return codec.message_bytes(2**20) / 2**20 if isinstance(codec, Int4Difference) else _LOSSLESS_BITS / 8

    def _update_seconds(self, numel: float, *, in_host: bool) -> float:
        """Return the time in seconds that AdamW needs to update `numel` elements."""
        speed = self.cluster.host_memory_speed / self.cluster.accelerators if in_host else self.cluster.memory_speed
        return 4 * _UPDATED * numel / (speed * 1e9)


def _step_cost(program: Iterable[Operation], outcome: SimResult, machine: SimMachine) -> StepCost:
    parts: defaultdict[str, float] = defaultdict(float)
    sent_bytes = {"zero3": 0.0, "replica": 0.0}
    between = 0.0
    for operation in program:
        if isinstance(operation, SimCompute):
            parts[operation.what[0]] += operation.seconds / _STEPS
        elif isinstance(operation, SimLaunch | StartReduction):
            parts["launch"] += machine.launch / _STEPS
        for collective in collectives_in(operation):
            if collective.axis in sent_bytes:
                sent_bytes[collective.axis] += collective.bytes / _STEPS
            between += machine.sent_between(collective) / machine.node_size / _STEPS
    for kind, seconds in outcome.waits[-1].items():
        parts[kind] += seconds
    parts["contention"] = outcome.step - sum(parts.values())
    return StepCost(outcome.step, dict(parts), sent_bytes, between)
