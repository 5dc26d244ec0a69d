"""Build simulator programs from settings, for layerzero and for other schemes.

If units are called one after the other, layerzero's program launches and waits in the same order as the engine. The
programs of other schemes follow the papers and manuals of these schemes. They are models, not measurements, and make
favorable assumptions: one unit is prefetched, separate communicators overlap, and there is no padding. For HSDP, only
the last micro-batch has an all-reduce between nodes. For HFSDP (Megatron-FSDP with optimizer state sharded over all
ranks), only the last micro-batch reduces gradients between nodes, and only the first forward gathers weights between
nodes, as in ``megatron_fsdp.experimental`` on Megatron-LM's main branch at commit d98e8a6 (2026-08-22). Release 0.6.1
gathers them again in the first backward.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.simulation.program import (
    Operation,
    SimCollective,
    SimCompute,
    SimLaunch,
    SimWait,
    StartReduction,
    StepEnd,
    WaitReductions,
)
from layerzero.engine.reduction_spec import accumulates_full_gradients

__all__ = ["FSDPSettings", "ScheduleSettings", "UnitCost", "fsdp_program", "layerzero_program"]

_MASTER = 4  # number of bytes per element of masters, accumulators and final gradients
_PARTS = 8  # number of parts of an optimizer step; after each part, its units are refreshed; see pipelined_step.py


@dataclass(frozen=True)
class UnitCost:
    """Number of elements in a unit, and durations of its forward and backward passes per micro-batch, in seconds.

    In a list of units, the root is the first unit.
    """

    name: str
    numel: float  # number of elements in the unit's full buffer, including padding
    forward: float
    backward: float
    frozen: float = 0.0  # number of elements that are gathered, but neither reduced nor updated

    @property
    def trained_numel(self) -> float:
        return self.numel - self.frozen


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings that determine a schedule. Dtypes are given as the number of bytes per element."""

    ranks: int
    zero3_size: int
    micro_batches: int
    accumulation: str = "sharded"
    compute: int = 2
    reduce: int = 4
    replica_reduce: float = 4
    hop2_coding: float = 0.0  # time in seconds in which a rank encodes and decodes an element of hop 2
    refreshed: float | None = None  # bytes per element in an encoded refresh; None if refreshes are not encoded
    refresh_encoding: float = 0.0  # time in seconds in which a rank encodes an element of a refresh
    refresh_decoding: float = 0.0
    accumulator: int = 4  # bytes per element of the accumulators between micro-batches
    prefetch: int = 1
    offload_grads: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    ends_stay_gathered: bool = True  # whether the root and the last unit stay gathered for the backward, as on devices
    adds_hop1: bool = False  # ranks add the parts of hop 1, as with gloo; gradients are then sent in their own dtype
    update: float = 0.0  # time of the optimizer's update in seconds
    memory_speed: float = float("inf")  # memory bandwidth of additions in bytes per second

    @property
    def replicas(self) -> int:
        return self.ranks // self.zero3_size

    @property
    def hop1(self) -> int:
        """Number of bytes per element that hop 1 sends."""
        return min(self.compute, self.reduce) if self.adds_hop1 and not self.accumulates_full else self.reduce

    @property
    def hop2(self) -> float:
        """Number of bytes per element that hop 2 sends."""
        sends_incoming = self.zero3_size == 1 and not self.accumulates_full
        return min(self.compute, self.replica_reduce) if self.adds_hop1 and sends_incoming else self.replica_reduce

    @property
    def accumulates_full(self) -> bool:
        """True if full gradients are accumulated between micro-batches."""
        return accumulates_full_gradients(self.accumulation, self.zero3_size)


def layerzero_program(units: Sequence[UnitCost], sharding: ScheduleSettings, *, steps: int = 2) -> Iterator[Operation]:
    """Yield the operations of `steps` consecutive steps.

    Each step except the first waits for collectives of the previous step.
    """
    rank = _Rank(units, sharding)
    for _ in range(steps):
        yield from rank.step()


class _Rank:
    def __init__(self, units: Sequence[UnitCost], sharding: ScheduleSettings) -> None:
        self.units = list(units)
        self.settings = sharding
        self._number = 0
        self._span = 0
        self._gathers: dict[str, int] = {}
        self._refreshes: dict[str, int] = {}
        self._stores: list[int] = []  # numbers of the copies of accumulators between device and host, oldest first
        self._agreement: list[int] = []  # numbers of the collectives about used parameters, one per axis
        self._has_pending_reductions = False

    def step(self) -> Iterator[Operation]:
        settings = self.settings
        for index in range(settings.micro_batches):
            last = index + 1 == settings.micro_batches
            yield from self._forward()
            yield from self._backward(first=index == 0, last=last)
        yield from self._wait_for_reductions()
        for number in self._agreement:
            yield SimWait(number)
        self._agreement = []
        for axis, ranks in (("zero3", settings.zero3_size), ("replica", settings.replicas)):
            if ranks > 1:
                self._agreement.append(self._next_number())
                yield SimLaunch(
                    SimCollective("metadata", "", "control", f"{axis} control", ranks, 0.0), self._agreement[-1]
                )
        yield from self._update()
        yield StepEnd()

    def _forward(self) -> Iterator[Operation]:
        num_launched = 0
        for index, unit in enumerate(self.units):
            num_launched = yield from self._gather_ahead(self.units, num_launched, index)
            if not index:
                yield from self._wait_for_reductions()
            yield from self._wait_for(unit)
            if index:
                yield self._compute("forward", unit, unit.forward)
        yield self._compute("forward", self.units[0], self.units[0].forward)
        if self.settings.ends_stay_gathered and self._needs_gather:
            self._gathers |= {self.units[0].name: -1, self.units[-1].name: -1}

    def _backward(self, *, first: bool, last: bool) -> Iterator[Operation]:
        order = [self.units[0], *self.units[:0:-1]]
        num_launched = 0
        for index, unit in enumerate(order):
            num_launched = yield from self._gather_ahead(order, num_launched, index)
            yield from self._wait_for(unit)
            yield self._compute("backward", unit, unit.backward)
            if index:
                yield from self._reduce(unit, first=first, last=last)
        yield from self._reduce(self.units[0], first=first, last=last)

    @property
    def _needs_gather(self) -> bool:
        return self.settings.zero3_size > 1 or self.settings.offload_params

    def _gather_ahead(
        self, order: Sequence[UnitCost], num_launched: int, index: int
    ) -> Generator[Operation, None, int]:
        """Launch the gathers of the units in `order` up to `index`, and the gathers of the units to prefetch.

        Args:
            order: units in the order in which they are called.
            num_launched: number of units in `order` whose gather has already been launched.
            index: index in `order` of the unit that is called next.

        Returns:
            The new value of `num_launched`.
        """
        settings = self.settings
        until = min(index + 1 + (settings.prefetch if self._needs_gather else 0), len(order))
        for unit in order[num_launched:until]:
            if unit.name in self._refreshes:
                yield SimWait(self._refreshes.pop(unit.name))
            if self._needs_gather and unit.name not in self._gathers:
                self._gathers[unit.name] = self._next_number()
                if settings.offload_params:  # on the gather's communicator, so that the gather follows the copy
                    fetch = SimCollective(
                        "fetch",
                        unit.name,
                        "host",
                        "zero3 gather",
                        1,
                        unit.numel / settings.zero3_size * settings.compute,
                    )
                    yield SimLaunch(fetch, self._gathers[unit.name])
                    if settings.zero3_size == 1:
                        continue
                    self._gathers[unit.name] = self._next_number()
                nbytes = unit.numel * settings.compute * _share(settings.zero3_size)
                collective = SimCollective("gather", unit.name, "zero3", "zero3 gather", settings.zero3_size, nbytes)
                yield SimLaunch(collective, self._gathers[unit.name])
        return max(num_launched, until)

    def _wait_for(self, unit: UnitCost) -> Iterator[Operation]:
        number = self._gathers.pop(unit.name, -1)
        if number >= 0:
            yield SimWait(number)

    def _reduce(self, unit: UnitCost, *, first: bool, last: bool) -> Iterator[Operation]:
        settings = self.settings
        if not unit.trained_numel:
            return
        if last or not settings.accumulates_full:
            chain, additions = self._hops(unit, last=last, crosses=last or settings.accumulation == "local")
            if chain:
                yield StartReduction(tuple(chain), tuple(additions))
                self._has_pending_reductions = True
        if (
            settings.offload_grads
            and settings.accumulation != "local"
            and (settings.accumulates_full or settings.replicas > 1)
        ):
            # Accumulators are fetched before an addition and stored before the next micro-batch. At most two copies are
            # in flight, because there are two slabs.
            nbytes = (
                unit.trained_numel / (1 if settings.accumulates_full else settings.zero3_size) * settings.accumulator
            )
            if not first:
                yield from self._copy("fetch", unit, nbytes, "from host")
            if not last:
                yield from self._copy("store", unit, nbytes, "to host")

    def _copy(self, kind: str, unit: UnitCost, nbytes: float, comm: str) -> Iterator[Operation]:
        if len(self._stores) == 2:
            yield SimWait(self._stores.pop(0))
        self._stores.append(self._next_number())
        yield SimLaunch(SimCollective(kind, unit.name, "host", comm, 1, nbytes), self._stores[-1])

    def _hops(self, unit: UnitCost, *, last: bool, crosses: bool) -> tuple[list[SimCollective], list[SimCompute]]:
        settings = self.settings
        chain: list[SimCollective] = []
        shard_numel = unit.trained_numel / settings.zero3_size
        if settings.zero3_size > 1:
            nbytes = unit.trained_numel * settings.hop1 * _share(settings.zero3_size)
            chain.append(SimCollective("hop1", unit.name, "zero3", "zero3 reduce", settings.zero3_size, nbytes))
        if crosses and settings.replicas > 1:
            nbytes = shard_numel * settings.hop2 * _share(settings.replicas)
            chain.append(SimCollective("hop2", unit.name, "replica", "replica", settings.replicas, nbytes))
        additions = [
            self._addition(collective, shard_numel if collective.kind == "hop1" else shard_numel / settings.replicas)
            for collective in chain
        ]
        if last and settings.offload_optimizer and chain:
            own_numel = unit.trained_numel / settings.ranks
            chain.append(SimCollective("down", unit.name, "host", "to host", 1, own_numel * _MASTER))
            additions.append(SimCompute(0.0, ("add", f"down {unit.name}"), self._next_span()))
        return chain, additions

    def _addition(self, collective: SimCollective, numel: float) -> SimCompute:
        """Return the addition that follows a collective.

        The addition reads the received part and the sum, and writes the sum. After hop 2, the time includes encoding
        and decoding of messages.
        """
        seconds = 3 * _MASTER * numel / self.settings.memory_speed
        if collective.kind == "hop2":
            seconds += self.settings.hop2_coding * numel * (self.settings.replicas - 1)
        return SimCompute(seconds, ("add", f"{collective.kind} {collective.unit}"), self._next_span())

    def _wait_for_reductions(self) -> Iterator[Operation]:
        if self._has_pending_reductions:
            yield WaitReductions()
        self._has_pending_reductions = False

    def _update(self) -> Iterator[Operation]:
        settings, units = self.settings, [unit for unit in self.units if unit.trained_numel]
        total = sum(unit.trained_numel for unit in units)
        span = self._next_span()
        part, waiting = 0.0, []
        for index, unit in enumerate(units):
            part += unit.trained_numel
            waiting.append(unit)
            if part < total / _PARTS and index + 1 < len(units):
                continue
            yield SimCompute(settings.update * part / total, ("update", "optimizer"), span)
            for waiting_unit in waiting:
                yield from self._refresh(waiting_unit)
            part, waiting = 0.0, []

    def _refresh(self, unit: UnitCost) -> Iterator[Operation]:
        settings = self.settings
        others = unit.trained_numel / settings.zero3_size * _share(settings.replicas)  # elements that other ranks own
        if settings.refreshed is not None:  # on a communicator of its own; weights and masters are in host memory
            self._refreshes[unit.name] = self._next_number()
            coding = (
                unit.trained_numel / settings.ranks * settings.refresh_encoding + others * settings.refresh_decoding
            )
            refresh = SimCollective(
                "refresh",
                unit.name,
                "replica",
                "encoded refresh",
                settings.replicas,
                others * settings.refreshed,
                coding,
            )
            yield SimLaunch(refresh, self._refreshes[unit.name])
            return
        if settings.offload_optimizer:  # on the refresh's communicator, so that the refresh follows the copy
            self._refreshes[unit.name] = self._next_number()
            fetch = SimCollective("up", unit.name, "host", "replica", 1, unit.trained_numel / settings.ranks * _MASTER)
            yield SimLaunch(fetch, self._refreshes[unit.name])
        if settings.replicas > 1:
            self._refreshes[unit.name] = self._next_number()
            nbytes = others * settings.compute
            refresh = SimCollective("refresh", unit.name, "replica", "replica", settings.replicas, nbytes)
            yield SimLaunch(refresh, self._refreshes[unit.name])
        if settings.offload_params:
            self._refreshes[unit.name] = self._next_number()
            store = SimCollective(
                "store", unit.name, "host", "replica", 1, unit.trained_numel / settings.zero3_size * settings.compute
            )
            yield SimLaunch(store, self._refreshes[unit.name])

    def _compute(self, phase: str, unit: UnitCost, seconds: float) -> SimCompute:
        return SimCompute(seconds, (phase, unit.name), self._next_span())

    def _next_span(self) -> int:
        self._span += 1
        return self._span

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _share(ranks: int) -> float:
    """Return the fraction of a buffer that each rank sends in a gather or reduction over `ranks` ranks."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class FSDPSettings:
    """Settings of FSDP over all ranks, or of HSDP or HFSDP with sharding inside nodes."""

    num_shards: int  # number of ranks over which weights and gradients are sharded
    replicas: int
    micro_batches: int
    compute: int = 2
    reduce: int = 4
    shards_states: bool = False  # whether masters and optimizer state are sharded over the replicas, too, as in HFSDP
    update: float = 0.0


def fsdp_program(units: Sequence[UnitCost], settings: FSDPSettings, *, steps: int = 2) -> Iterator[Operation]:
    root = units[0]
    number = span = 0

    def gather(unit: UnitCost) -> SimLaunch:
        nbytes = settings.compute * unit.numel * _share(settings.num_shards)
        return SimLaunch(SimCollective("gather", unit.name, "zero3", "gather", settings.num_shards, nbytes), number)

    def outer_gather(unit: UnitCost) -> SimLaunch:
        nbytes = settings.compute * unit.trained_numel / settings.num_shards * _share(settings.replicas)
        return SimLaunch(
            SimCollective("outer gather", unit.name, "replica", "outer gather", settings.replicas, nbytes), number
        )

    def reduction(unit: UnitCost, *, last: bool) -> StartReduction:
        nbytes = settings.reduce * unit.trained_numel * _share(settings.num_shards)
        chain = [SimCollective("reduce", unit.name, "zero3", "reduce", settings.num_shards, nbytes)]
        if last and settings.replicas > 1:
            kind, passes = ("outer reduce", 1) if settings.shards_states else ("all-reduce", 2)
            outer_nbytes = (
                passes * settings.reduce * unit.trained_numel / settings.num_shards * _share(settings.replicas)
            )
            chain.append(SimCollective(kind, unit.name, "replica", "replica", settings.replicas, outer_nbytes))
        return StartReduction(tuple(chain), tuple(SimCompute(0.0) for _ in chain))

    for _ in range(steps):
        for micro_batch in range(settings.micro_batches):
            last = micro_batch + 1 == settings.micro_batches
            for phase, order in (("forward", units), ("backward", units[:0:-1])):
                stays = int(phase == "backward")
                outer: dict[str, int] = {}  # numbers of the gathers between nodes, all launched before the forward
                if settings.shards_states and settings.replicas > 1 and not micro_batch and phase == "forward":
                    for unit in order:
                        if not unit.trained_numel:
                            continue
                        yield outer_gather(unit)
                        outer[unit.name] = number
                        number += 1
                first = number
                for index, unit in enumerate(order):
                    # Prefetch one unit. The root and the last unit stay gathered from forward to backward.
                    for ahead in range(number - first + stays, min(index + 2, len(order))):
                        if order[ahead].name in outer:
                            yield SimWait(outer.pop(order[ahead].name))
                        yield gather(order[ahead])
                        number += 1
                    if index >= stays:
                        yield SimWait(first + index - stays)
                    if phase == "backward" and not index:
                        yield SimCompute(root.backward, ("backward", root.name), span)
                    if unit is not root:
                        seconds = unit.forward if phase == "forward" else unit.backward
                        yield SimCompute(seconds, (phase, unit.name), span)
                    span += 1
                    if phase == "backward" and unit.trained_numel:
                        yield reduction(unit, last=last)
                if phase == "forward":
                    yield SimCompute(root.forward, ("forward", root.name), span)
            if root.trained_numel:
                yield reduction(root, last=last)
            yield WaitReductions()
        yield SimCompute(settings.update, ("update", "optimizer"), span)
        yield StepEnd()
