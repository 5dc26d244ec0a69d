"""The simulator on schedules whose times can be computed by hand, and on the engine's schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import layerzero
from benchmarks.simulation.calibrate import Prediction
from benchmarks.simulation.measure import Case
from benchmarks.simulation.project import MODELS, SCHEMES, Assumptions, Model, _recorded, project
from benchmarks.simulation.record import Settings, record_blocks
from layerzero.planning.sim_program import (
    Operation,
    SimCollective,
    SimCompute,
    SimLaunch,
    SimWait,
    StartReduction,
    StepEnd,
    WaitReductions,
    mean_span_seconds,
    program_from_events,
    read_recording,
    replace_collectives,
    replace_times,
)
from layerzero.planning.simulator import SimMachine, simulate
from tests.support.models import TiedTransformer
from tests.support.ranks import BOTH, mesh_of, run_ranks

pytestmark = pytest.mark.slow

MACHINE = SimMachine(node_size=4, inside=100.0, between=10.0)  # bytes a second


def gather(number: int, sent: float, comm: str = "gather") -> SimLaunch:
    return SimLaunch(SimCollective("gather", f"unit {number}", "zero3", comm, 4, sent), number)


def across(number: int, sent: float, comm: str = "replica") -> SimLaunch:
    return SimLaunch(SimCollective("refresh", f"unit {number}", "replica", comm, 2, sent), number)


def seconds(*program: Operation, machine: SimMachine = MACHINE) -> float:
    return simulate(program, machine).seconds


def test_one_unit_waits_for_its_gather_and_then_computes() -> None:
    outcome = simulate([gather(0, 300.0), SimWait(0), SimCompute(2.0)], MACHINE)
    assert (outcome.seconds, outcome.computed, outcome.waited) == (5.0, 2.0, 3.0)
    assert outcome.busy == {"inside": 3.0, "processor": 2.0}


def test_a_prefetched_gather_hides_behind_the_unit_before() -> None:
    program = [gather(0, 200.0), SimWait(0), gather(1, 200.0), SimCompute(3.0), SimWait(1), SimCompute(3.0)]
    assert seconds(*program) == 2.0 + 3.0 + 3.0
    assert seconds(*program[:2], SimCompute(3.0), program[2], *program[4:]) == 10.0, "not without prefetch"


def test_collectives_of_one_communicator_run_one_after_the_other_and_two_communicators_share_the_link() -> None:
    assert seconds(gather(0, 100.0), gather(1, 100.0), SimWait(0)) == 1.0
    assert seconds(gather(0, 100.0), gather(1, 100.0), SimWait(1)) == 2.0
    assert seconds(gather(0, 100.0), gather(1, 100.0, comm="reduce"), SimWait(0)) == 2.0, "each has half of it"
    assert seconds(gather(0, 100.0), gather(1, 300.0, comm="reduce"), SimWait(1)) == 4.0, "the rest is faster"
    assert seconds(gather(0, 100.0), across(1, 10.0), SimWait(0)) == 1.0, "another link"


def test_latency_comes_before_the_bytes_and_counts_the_steps_of_a_collective() -> None:
    slow = SimMachine(node_size=4, inside=100.0, between=10.0, inside_latency=0.25, between_latency=2.0)
    for steps, expected in (("direct", 1), ("log", 2), ("ring", 3)):
        machine = SimMachine(**{**vars(slow), "steps": steps})
        assert seconds(gather(0, 100.0), SimWait(0), machine=machine) == 1.0 + 0.25 * expected
    assert seconds(across(0, 0.0), SimWait(0), machine=slow) == 2.0
    everywhere = SimLaunch(SimCollective("all-reduce", "", "replica", "replica", 2, 0.0), 0)
    assert seconds(everywhere, SimWait(0), machine=slow) == 4.0, "a reduce-scatter and an all-gather"
    assert seconds(gather(0, 100.0), gather(1, 100.0), SimWait(1), machine=slow) == 2.5, "one latency after the other"


def test_the_ranks_of_a_node_share_its_link_and_a_ring_over_all_ranks_enters_it_once() -> None:
    assert seconds(across(0, 10.0), SimWait(0)) == 4.0, "four ranks of a node send at once"
    ring = SimLaunch(SimCollective("gather", "unit", "zero3", "gather", 8, 10.0), 0)
    assert seconds(ring, SimWait(0)) == 1.0
    within = SimLaunch(SimCollective("gather", "unit", "zero3", "gather", 4, 10.0), 0)
    assert seconds(within, SimWait(0)) == 0.1


def test_bytes_may_cost_the_processor_that_computes() -> None:
    machine = SimMachine(node_size=4, inside=float("inf"), between=10.0, processor_per_byte=0.01)
    assert seconds(gather(0, 100.0), SimCompute(5.0), machine=machine) == 6.0, "half of it for a second of work each"
    assert seconds(gather(0, 100.0), SimWait(0), SimCompute(5.0), machine=machine) == 6.0


def test_a_launch_takes_the_hosts_time() -> None:
    machine = SimMachine(node_size=4, inside=100.0, between=10.0, launch=0.5)
    assert seconds(gather(0, 100.0), SimWait(0), machine=machine) == 1.5


def reduction(unit: int, inside: float, between: float = 0.0, addition: float = 0.0) -> StartReduction:
    chain = [SimCollective("hop1", f"unit {unit}", "zero3", "reduce", 4, inside)]
    if between:
        chain.append(SimCollective("hop2", f"unit {unit}", "replica", "replica", 2, between))
    return StartReduction(tuple(chain), tuple(SimCompute(addition, ("add", "")) for _ in chain))


def test_a_reduction_hides_behind_the_next_unit_and_only_one_hop_1_is_left_in_flight() -> None:
    assert seconds(SimCompute(2.0), reduction(0, 100.0), SimCompute(2.0), WaitReductions()) == 4.0
    assert seconds(SimCompute(2.0), reduction(0, 100.0), WaitReductions()) == 3.0
    # The second launch waits for the first, 3 s, then for itself, 3 s.
    assert seconds(reduction(0, 300.0), SimCompute(1.0), reduction(1, 300.0), WaitReductions()) == 6.0
    assert seconds(reduction(0, 300.0), SimCompute(1.0), reduction(1, 300.0)) == 3.0
    assert seconds(reduction(0, 100.0, addition=0.5), WaitReductions()) == 1.5


def test_hop_2_follows_hop_1_by_itself_and_additions_share_the_processor() -> None:
    chain = reduction(0, 100.0, 5.0)  # 1 s, then 4 x 5 bytes at 10 a second: 2 s
    assert seconds(chain, WaitReductions()) == 3.0
    assert seconds(chain, SimCompute(3.0), WaitReductions()) == 3.0, "behind what is computed"
    assert seconds(chain, SimCompute(1.5), WaitReductions()) == 3.0
    adding = reduction(0, 100.0, addition=1.0)
    assert seconds(adding, SimCompute(1.0), WaitReductions()) == 2.0
    assert seconds(adding, SimCompute(2.0), WaitReductions()) == 3.0, "half of it while the sum is made"
    assert seconds(adding, adding, SimCompute(1.0), WaitReductions()) == 4.0, (
        "the second launch waits for the first sum"
    )


def step(micro_batches: int) -> list[Operation]:
    """Return a step with a unit of 100 bytes inside and 10 between the nodes: gather, compute, reduce; one refresh."""
    program: list[Operation] = []
    for index in range(micro_batches):
        last = index + 1 == micro_batches
        program += [
            gather(index, 100.0),
            SimWait(index),
            SimCompute(2.0),
            reduction(0, 200.0, 10.0 * last),
            WaitReductions(),
        ]
    return [*program, StepEnd()]


@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_micro_batches_add_up_and_the_slow_link_is_paid_once(micro_batches: int) -> None:
    outcome = simulate(step(micro_batches), MACHINE)
    assert outcome.seconds == micro_batches * (1.0 + 2.0 + 2.0) + 4.0
    assert outcome.busy["between"] == 4.0
    assert outcome.bytes == {"gather": 100.0 * micro_batches, "hop1": 200.0 * micro_batches, "hop2": 10.0}
    assert simulate(step(micro_batches) * 3, MACHINE).step == outcome.seconds


# The engine's schedule


SETTINGS = [
    Settings(ranks=16, zero3_size=8, micro_batches=a, accumulation=m)
    for a in (1, 3)
    for m in ("sharded", "full", "local")
]


def settings_id(settings: Settings) -> str:
    return f"{settings.micro_batches}-{settings.accumulation}"


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_a_recorded_schedule_keeps_every_collective_and_every_second(settings: Settings) -> None:
    blocks, steps = 3, 2
    events = record_blocks(blocks, settings, steps=steps)
    program = program_from_events(events)
    units, a = blocks + 1, settings.micro_batches
    outcome = simulate(program, MACHINE)
    hop1 = 1 if settings.accumulation == "full" else a
    hop2 = a if settings.accumulation == "local" else 1
    assert outcome.calls == {
        "gather": 2 * a * units * steps,
        "hop1": hop1 * units * steps,
        "hop2": hop2 * units * steps,
        "refresh": units * steps,
        "metadata": 2 * steps,  # along both axes
    }
    for kind in outcome.calls:
        sent = sum(event.bytes for event in events if event.kind == "launch" and event.collective == kind)
        assert outcome.bytes[kind] == sent, kind
    chains = [operation for operation in program if isinstance(operation, StartReduction)]
    assert sum(len(chain.collectives) == 2 for chain in chains) == hop2 * units * steps, "hop 2 belongs to a hop 1"
    assert all(chain.collectives[0].unit == chain.collectives[-1].unit for chain in chains)
    assert len(outcome.step_ends) == steps
    computed = sum(each.seconds for each in program if isinstance(each, SimCompute))
    assert 0 < computed <= (events[-1].end - events[0].start) / 1e6


@pytest.mark.parametrize("settings", SETTINGS, ids=settings_id)
def test_no_simulation_beats_the_processor_or_a_link_and_all_repeat_exactly(settings: Settings) -> None:
    program = program_from_events(record_blocks(3, settings))
    program = replace_times(
        program, lambda what: 1.0 if what[0] in ("forward", "backward") else 0.0, lambda what: "first"
    )
    for inside, between in itertools.product((1e3, 1e5), (1e2, 1e6)):
        outcome = simulate(program, SimMachine(node_size=8, inside=inside, between=between, between_latency=0.01))
        busiest = max(outcome.computed, *outcome.busy.values())
        assert outcome.seconds >= busiest - outcome.busy["between"], "the last refresh may be in flight at the end"
        assert outcome.step >= (1 - 1e-9) * outcome.computed / 3
        serial = outcome.computed + sum(outcome.busy[link] for link in ("inside", "between")) + 0.01 * 60
        assert outcome.seconds <= serial
        again = simulate(program, SimMachine(node_size=8, inside=inside, between=between, between_latency=0.01))
        assert again == outcome


def test_times_and_bytes_can_be_replaced() -> None:
    program = program_from_events(record_blocks(2, SETTINGS[0], steps=2))
    told = replace_times(program, lambda what: {"forward": 1.0, "backward": 2.0, "add": 0.25}.get(what[0], 0.0))
    found = mean_span_seconds(told)
    assert found["forward", "blocks.1"] == pytest.approx(1.0)
    assert found["backward", "the root"] == pytest.approx(2.0)
    assert found["add", "hop2 blocks.0"] == 0.25 and found["update", "optimizer"] == 0.0
    doubled = replace_collectives(
        told, lambda collective: SimCollective(**{**vars(collective), "bytes": 2 * collective.bytes})
    )
    before, after = simulate(told, MACHINE), simulate(doubled, MACHINE)
    assert after.bytes == {kind: 2 * sent for kind, sent in before.bytes.items()}
    assert after.computed == before.computed


def _trace(rank: int, folder: str) -> dict[str, int]:
    model = layerzero.shard_model(TiedTransformer(), mesh=mesh_of(2), units=TiedTransformer.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for index in range(3):
        if index:
            layerzero.traffic(model, reset=True)
        with layerzero.trace(model, f"{folder}/rank{{rank}}.json"):
            for _ in range(2):
                TiedTransformer.loss(model, TiedTransformer.batch(step=index, rank=rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return layerzero.traffic(model).bytes


@BOTH
def test_the_file_of_a_trace_is_all_that_the_simulator_needs(tmp_path: Path, shared_memory: str | None) -> None:
    traffic = run_ranks(_trace, str(tmp_path), shared_memory=shared_memory)
    for rank, counted in enumerate(traffic):
        outcome = simulate(
            read_recording(tmp_path / f"rank{rank}.json").program(), SimMachine(node_size=2, inside=1e9, between=1e8)
        )
        if not counted["gather"]:  # with shared memory it sends nothing, so a trace does not show it
            del counted["gather"]
        assert outcome.bytes == counted, "the real engine on gloo"
        assert len(outcome.step_ends) == 2 and outcome.computed > 0
        assert outcome.seconds >= (1 - 1e-9) * outcome.computed


# Projections


TINY = Model("tiny", blocks=3, width=64, block_numel=6_000_000, root_numel=2_000_000)


def rows_of(micro_batches: int, gbit: float = 10.0, nodes: int = 16, model: Model = TINY) -> Sequence:
    return list(project(model, Assumptions(tokens=64), gbit, nodes, micro_batches))


def test_projected_bytes_between_nodes_are_the_formulas() -> None:
    for micro_batches, nodes in ((1, 2), (4, 16)):
        layerzero_row, hsdp, full = rows_of(micro_batches, nodes=nodes)
        shared = TINY.numel / 8 * (1 - 1 / nodes)
        assert layerzero_row.between == pytest.approx(shared * (4 + 2))
        assert hsdp.between == pytest.approx(shared * 2 * 4)
        # The root and the last block are gathered once per micro-batch, the other blocks twice.
        gathered = (2 * TINY.blocks - 1) * TINY.block_numel + TINY.root_numel
        sent = micro_batches * (gathered * 2 + TINY.numel * 4) / 8 * (1 - 1 / (8 * nodes))
        assert full.between == pytest.approx(sent)


def test_projected_steps_respect_the_slow_link_and_improve_with_accumulation_where_it_helps() -> None:
    for gbit in (1.0, 1000.0):
        by_scheme: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
        for micro_batches in (1, 4, 16):
            for row in rows_of(micro_batches, gbit):
                assert row.seconds >= (1 - 1e-9) * 8 * row.between / (gbit * 1e9 / 8), row
                assert 0 < row.efficiency <= 1 + 1e-9
                by_scheme[row.scheme].append(row.efficiency)
        for scheme in ("layerzero", "HSDP"):
            assert by_scheme[scheme] == sorted(by_scheme[scheme]), f"{scheme} at {gbit} Gbit/s"
        assert by_scheme["layerzero"][-1] > by_scheme["full"][-1]
    found = rows_of(4, 1.0)
    _recorded.cache_clear()
    assert rows_of(4, 1.0) == found, "a projection does not depend on the times of the recording"


def test_the_models_are_the_ones_they_are_named_for() -> None:
    assert MODELS["7b"].numel == pytest.approx(6.7e9, rel=0.02)
    assert MODELS["70b"].numel == pytest.approx(69e9, rel=0.02)


def test_an_error_is_relative_to_what_was_measured() -> None:
    assert Prediction(Case(1, "full"), False, measured=2.0, predicted=2.2).error == pytest.approx(0.1)
