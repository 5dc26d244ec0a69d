"""No order of launches on several meshes lets ranks wait for each other, whichever experts the ranks call.

The model of the order needs no processes. The engine runs each rank's program on a fake backend, which records the
launches. A simulation then runs the launches of all ranks together. It is stricter than any backend: a rank runs one
collective at a time, in the order of its launches, and each collective waits for all ranks of its communicator. If all
ranks finish, no backend can deadlock on these launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import layerzero
from layerzero.comm.collectives import PendingCollective
from layerzero.comm.observers import StepObserver
from layerzero.engine.gather_order import GatherOrderCheck
from layerzero.engine.hooks import get_state
from layerzero.engine.scheduler import Scheduler
from layerzero.engine.used_params import UsedParamMap
from tests.support.expert_programs import KINDS, ExpertNet, expert_mesh_of, expert_units, experts_mesh
from tests.support.models import exact_sgd, update

WORLD = 4
END = "end of a backward"
# Experts that each layer calls in four passes. The second and the last pass are inside no_sync, and steps follow on the
# first, the third and the last pass.
PROGRAMS = (
    ("all", "all", "all", "all"),
    ("none", "none", "none", "none"),
    ("none", "all", "none", "last"),
    ("all", "none", "last", "none"),
    ("reversed", "first", "all", "reversed"),
)
Program = tuple[str, ...]
Launch = tuple[object, tuple[int, ...], str]  # communicator, its ranks, and a label


class Grid(NamedTuple):
    ep: int  # ranks over which the experts are split
    size: int  # S of the root's mesh
    expert_size: int  # S of the experts


class _Launches(StepObserver):
    """Observer that records the launches of one rank, in order."""

    def __init__(self, mesh_infos: Sequence[Any]) -> None:
        self.log: list[Launch] = []
        self._meshes = {
            id(comm): f"mesh {index} {comm.name}"
            for index, mesh in enumerate(mesh_infos)
            for comm in (
                mesh.zero3_gather_comm,
                mesh.zero3_reduce_comm,
                mesh.replica_comm,
                *mesh.subgroup_comms.values(),
            )
        }

    def launched(self, works: PendingCollective) -> None:
        comm = works.launched.communicator
        if comm.axis != "control":  # on gloo, from threads, and never inside a pass
            ranks = tuple(dist.get_process_group_ranks(comm.group))
            self.log.append((self._meshes[id(comm)], ranks, f"{works.launched.collective.value} {works.launched.name}"))


@contextmanager
def _alone(rank: int) -> Iterator[None]:
    """Run as one of the ranks on a fake backend, without the comparisons between ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        with mock.patch("layerzero.sharding.unit_meshes._require_consistent_meshes"):
            yield
    finally:
        dist.destroy_process_group()


def _launches_of(
    rank: int,
    grid: Grid,
    program: Program,
    first: dict[str, int] | None,
    *,
    kind: str,
    recompute: str,
    forwards: int,
    **settings: Any,
) -> tuple[list[Launch], dict[str, int]]:
    """Return the launches of one rank, and the order of arrival that it found in the first backward.

    Args:
        first: order of arrival on the first rank, which all ranks adopt, or None on the first rank.
    """
    found: dict[str, int] = {}

    def from_first_rank(table: UsedParamMap, numbers: Mapping[str, int]) -> dict[str, int]:
        found.update(numbers)
        return dict(numbers) if first is None else first

    with _alone(rank), ExitStack() as stack:
        stack.enter_context(mock.patch.object(UsedParamMap, "from_first_rank", from_first_rank))
        own, ep = experts_mesh(grid.expert_size, grid.ep)
        root, ranks = layerzero.init_mesh(grid.size), tuple(ep.mesh.tolist())
        log: list[Launch] = []
        net = ExpertNet(kind, recompute, meet=lambda: log.append(("user", ranks, "all-to-all")))
        model = layerzero.shard_model(net, mesh=expert_mesh_of(root, own), units=expert_units(kind), **settings)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        state = get_state(model)
        state.attach(_Launches([*dict.fromkeys(unit.mesh_info for unit in state.units)])).log = log

        def compare(check: GatherOrderCheck, unit: int) -> None:
            log.append(("order of gathers", check._ranks, check._names[unit]))

        def finalize(scheduler: Scheduler, finalize: Any = Scheduler.finalize_backward) -> None:
            log.append((END, (rank,), ""))
            finalize(scheduler)

        stack.enter_context(mock.patch.object(GatherOrderCheck, "_compare", compare))
        stack.enter_context(mock.patch.object(Scheduler, "finalize_backward", finalize))
        for check in state.scheduler._orders.values():
            check._compares = len(check._ranks) > 1
        x = torch.ones(1, 4)
        for number, choice in enumerate(program):
            with layerzero.no_sync(model) if number % 2 else nullcontext():
                choices = [choice, program[number - 1]][:forwards]
                torch.stack([model(x, each).sum() for each in choices]).sum().backward()
            if number != 1:
                update(optimizer)
    return log, found


def _stuck(logs: Sequence[Sequence[Launch]]) -> str:
    """Run the launches of all ranks together. Return what the ranks wait for if they do not finish, otherwise ""."""
    at = [0] * len(logs)
    while True:
        waiting = [log[place] if place < len(log) else None for log, place in zip(logs, at, strict=True)]
        ready = next((each for each in waiting if each and all(waiting[rank] == each for rank in each[1])), None)
        if ready is None:
            return "" if not any(waiting) else "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(waiting))
        for rank in ready[1]:
            at[rank] += 1


class _Ranks:
    """Launches of each rank for each program, in one setting of the model."""

    def __init__(self, grid: Grid, **settings: Any) -> None:
        self.grid, self._settings = grid, settings
        self._logs: dict[tuple[int, Program, tuple[Any, ...] | None], list[Launch]] = {}
        self._first: dict[Program, dict[str, int]] = {}
        for program in PROGRAMS:
            log, order = _launches_of(0, grid, program, None, **settings)
            self._first[program] = order
            self._logs[0, program, None] = log

    def log(self, rank: int, program: Program, first: Program) -> list[Launch]:
        order = self._first[first]
        key = (rank, program, None if rank == 0 else tuple(order.items()))
        if key not in self._logs:
            self._logs[key], _ = _launches_of(rank, self.grid, program, order, **self._settings)
        return self._logs[key]

    def combinations(self) -> Iterator[tuple[Program, ...]]:
        """Yield one program for each rank. The ranks of a ZeRO-3 group of the experts call the same ones."""
        ep, size = self.grid.ep, self.grid.expert_size
        group_of = [(rank // (ep * size), rank % ep) for rank in range(WORLD)]
        groups = sorted(set(group_of))
        for chosen in itertools.product(PROGRAMS, repeat=len(groups)):
            yield tuple(chosen[groups.index(group)] for group in group_of)


GRIDS = [
    Grid(*sizes) for sizes in ((1, 2, 1), (1, 4, 2), (1, 1, 2), (1, 2, 4), (2, 2, 1), (2, 4, 2), (2, 1, 2), (2, 2, 2))
]
SETTINGS = [
    {"prefetch": prefetch, "accumulation": accumulation, "recompute": recompute, "forwards": forwards}
    for prefetch, accumulation, recompute, forwards in (
        (1, "sharded", "none", 1),
        (0, "full", "reentrant", 1),
        (2, "local", "other", 2),
        (1, "full", "other", 1),
        (2, "sharded", "reentrant", 1),
        (0, "local", "none", 2),
    )
]
CASES = [
    (kind, grid, SETTINGS[(number + 2 * place) % len(SETTINGS)])
    for number, kind in enumerate(KINDS)
    for place, grid in enumerate(GRIDS)
]


@pytest.mark.default_sample(2)
@pytest.mark.sample(10)
@pytest.mark.parametrize(("kind", "grid", "settings"), CASES)
def test_no_launches_of_ranks_wait_for_each_other(kind: str, grid: Grid, settings: dict[str, Any]) -> None:
    ranks = _Ranks(grid, kind=kind, **settings)
    for programs in ranks.combinations():
        logs = [ranks.log(rank, program, programs[0]) for rank, program in enumerate(programs)]
        waits = _stuck(logs)
        assert not waits, f"{programs}: {waits}"


ONE_REPLICA, REPLICAS = Grid(2, 2, 2), Grid(1, 2, 1)


@pytest.mark.parametrize(
    ("kind", "grid", "count"),
    [
        ("nested", REPLICAS, 9),
        ("inner", REPLICAS, 9),
        ("twice", REPLICAS, 9),
        ("flat", REPLICAS, 0),
        ("flat", ONE_REPLICA, 9),
    ],
)
def test_reductions_of_experts_are_launched_before_the_backward_ends(kind: str, grid: Grid, count: int) -> None:
    """With several replicas, at the end of the layer that contains the experts, whether it calls them or not."""
    for program in (("all", "all"), ("all", "none")) if grid is REPLICAS else (("all", "all"),):
        log, _ = _launches_of(0, grid, (*program, program[1]), None, kind=kind, recompute="none", forwards=1)
        labels = [label for _, _, label in log]
        start, end = [place for place, (comm, *_) in enumerate(log) if comm == END][1:]
        reduced = {label for label in labels[start:end] if label.startswith("hop") and "expert" in label}
        assert len(reduced) == count, program
