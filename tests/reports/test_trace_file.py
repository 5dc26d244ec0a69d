"""`layerzero.trace` and the ranges of torch's profiler: complete, named, in order, and absent when off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.graphs import IN_FLIGHT, Block, Chain, batch, blocks, loss_of, one_pass, sgd, shard
from tests.support.late_threads import late_threads
from tests.support.models import TiedTransformer
from tests.support.ranks import mesh_of, run_ranks

UNITS = {"the root", *TiedTransformer.UNITS}


def transformer(**settings: Any) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Return a sharded TiedTransformer after two steps; the first one has more agreements."""
    model = layerzero.shard_model(TiedTransformer(), mesh=mesh_of(2), units=TiedTransformer.UNITS, **settings)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(2):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, micro_batches: int = 2) -> None:
    for micro_batch in range(micro_batches - 1):
        with layerzero.no_sync(model):
            TiedTransformer.loss(model, TiedTransformer.batch(step=step, micro_batch=micro_batch)).backward()
    TiedTransformer.loss(model, TiedTransformer.batch(step=step, micro_batch=micro_batches)).backward()
    layerzero.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def of_kind(events: Sequence[layerzero.TraceEvent], *kinds: str) -> list[layerzero.TraceEvent]:
    return [event for event in events if event.kind in kinds]


def nesting(events: Sequence[layerzero.TraceEvent]) -> list[str]:
    """Return every span of a unit with its parents: ``forward the root/forward blocks.0``. Spans must be nested."""
    path: list[str] = []
    found = []
    for event in of_kind(events, "begin", "end"):
        if event.kind == "begin":
            path.append(f"{event.phase} {event.name}")
            found.append("/".join(path))
        else:
            assert path.pop() == f"{event.phase} {event.name}"
    assert not path
    return found


def _schedule(rank: int, folder: str) -> list[tuple[str, str, str, int]]:
    model, optimizer = transformer(mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layerzero.traffic(model, reset=True)
    with layerzero.trace(model, f"{folder}/rank{{rank}}.json") as trace:
        train(model, optimizer, 2)
    assert trace.path == Path(folder, f"rank{rank}.json")
    counted, events = layerzero.traffic(model), trace.events
    launches, waits = of_kind(events, "launch"), of_kind(events, "wait")

    assert Counter(event.collective for event in launches) == counted.calls
    for key, expected in (("collective", counted.bytes), ("axis", counted.bytes_by_axis)):
        found: Counter[str] = Counter()
        for event in launches:
            found[getattr(event, key)] += event.bytes
        assert found == expected, key
    assert all(event.name in UNITS for event in launches if event.collective in ("gather", "hop1", "hop2", "refresh"))
    assert {event.name for event in launches if event.collective == "refresh"} == UNITS

    assert [event.number for event in launches] == list(range(len(launches))), "launches are in program order"
    begun = 0.0
    for event in events:
        assert begun <= event.start <= event.end
        begun = event.start
    assert all(event.completed is not None for event in launches)
    launched = {event.number: event for event in launches}
    for wait in waits:
        launch = launched[wait.number]
        assert (launch.collective, launch.name, launch.communicator) == (wait.collective, wait.name, wait.communicator)
        assert wait.collective in ("hop1", "hop2") or launch.end <= wait.start  # a thread launches and adds those
        assert launch.start <= launch.completed <= wait.end
    unwaited = launched.keys() - {wait.number for wait in waits}
    # The next step's gathers wait for refreshes. A rank that used every parameter does not wait for an agreement. Sums
    # that are complete when they are needed need no wait.
    never = {launched[number].collective for number in unwaited}
    assert {"refresh", "metadata"} <= never <= {"refresh", "metadata", "hop1", "hop2"}
    assert {event.collective for event in waits} >= {"gather", "scalar_reduce"}
    assert not any(wait.in_background for wait in waits)

    inner = [f"blocks.{index}" for index in range(2)]
    forward = ["forward the root", *(f"forward the root/forward {name}" for name in inner)]
    backward = ["backward the root", *(f"backward the root/backward {name}" for name in reversed(inner))]
    assert nesting(events) == [*forward, *backward] * 2 + ["update optimizer"]

    begin, end = (next(e for e in of_kind(events, kind) if e.phase == "update") for kind in ("begin", "end"))
    ahead = [e.name for e in launches if e.collective == "refresh" and begin.start <= e.start and e.end <= end.end]
    assert set(ahead) == UNITS, "launched while others are updated"

    adds = of_kind(events, "add")
    assert all(add.in_background and launched[add.number].completed <= add.start for add in adds)
    assert {event.collective for event in launches if event.in_background} == {"hop2"}
    additions = Counter(f"{add.collective} {add.name}" for add in adds)
    assert additions == {f"{hop} {name}": times for name in UNITS for hop, times in (("hop1", 2), ("hop2", 1))}

    train(model, optimizer, 3)
    assert trace.events == events, "nothing is recorded outside"
    _check_file(trace, rank)
    return [(event.communicator, event.collective, event.name, event.ranks) for event in launches]


def _check_file(trace: layerzero.Trace, rank: int) -> None:
    content = json.loads(trace.path.read_text())
    assert not list(trace.path.parent.glob(f"rank{rank}.json.*")), "nothing is left beside it"
    assert [layerzero.TraceEvent(**event) for event in content["layerzero"]["schedule"]] == list(trace.events)
    rows: dict[int, str] = {}
    bars: dict[str, list[dict[str, Any]]] = {}
    for event in content["traceEvents"]:
        assert event["pid"] == rank and isinstance(event["tid"], int) and event["ph"] in ("M", "X")
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                rows[event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] > 0 and event["dur"] >= 0
        bars.setdefault(rows[event["tid"]], []).append(event)
    units = bars.pop("units")
    assert sum(bar["name"] == "forward blocks.1" for bar in units) == 2
    assert sum(bar["name"] == "backward blocks.1" for bar in units) == 2
    sums = bars.pop("sums, zero3 axis") + bars.pop("sums, replica axis")
    assert sorted(bar["name"] for bar in sums if bar["name"].startswith("add hop2")) == [
        f"add hop2 {name}" for name in sorted(UNITS)
    ]
    assert set(bars) <= {"zero3 gather", "zero3 reduce", "replica", "zero3 control", "replica control"}
    assert sum(map(len, bars.values())) == len(of_kind(trace.events, "launch"))
    for row, on_comm in bars.items():
        ordered = sorted(on_comm, key=lambda bar: (bar["ts"], bar["dur"]))
        for before, after in pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"] + 1, f"bars on {row} overlap"  # doubles near 1e15
    assert any(bar["name"] == "gather blocks.0" for bar in bars["zero3 gather"])


def test_a_trace_holds_every_collective_and_span_of_a_step_in_the_order_of_the_program(tmp_path: Path) -> None:
    by_rank = run_ranks(_schedule, str(tmp_path), shared_memory="off")
    for comm in ("zero3 gather", "zero3 reduce", "replica", "zero3 control", "replica control"):
        sequences = [[event for event in events if event[0] == comm] for events in by_rank]
        assert sequences[0] and all(sequence == sequences[0] for sequence in sequences), f"ranks differ on {comm}"


class _Raises(nn.Module):
    UNIT = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.raises:
            raise LookupError("no")
        return x


def _errors(rank: int, folder: str) -> None:
    model = shard(Chain(_Raises(), Block()))
    path = f"{folder}/rank{rank}.json"
    observer = get_state(model).observer
    with pytest.raises(LookupError), layerzero.trace(model, path) as trace:
        one_pass(model, rank, 0)
        with pytest.raises(RuntimeError, match="already active"), layerzero.trace(model, path):
            pass
        model.units[0].raises = True
        model(batch(rank, 1))
    assert observer.recorder is None and not observer._open
    forward = ["forward the root", "forward the root/forward units.0"]
    assert nesting(trace.events)[-3:] == [*forward, f"{forward[-1]}/forward units.0.inner"]
    assert json.loads(Path(path).read_text())["layerzero"]["schedule"]

    model.units[0].raises = False
    with (
        pytest.raises(FileNotFoundError, match=r"the folder .*none' of the trace file does not exist"),
        layerzero.trace(model, f"{folder}/none/trace.json"),
    ):
        raise AssertionError("it is too late to say so at the end")
    assert observer.recorder is None
    with pytest.raises(ValueError, match="not sharded"), layerzero.trace(nn.Linear(2, 2)):
        pass
    with layerzero.trace(model, path) as trace:
        one_pass(model, rank, 2)
    assert len(nesting(trace.events)) == 8


def test_a_trace_ends_with_its_context_also_where_the_body_raises(tmp_path: Path) -> None:
    run_ranks(_errors, str(tmp_path))


def _graphs(rank: int, folder: str) -> None:
    for name, net, passes in (
        ("checkpoints", Chain(Block(reentrant=False), Block(), reentrant=False), one_pass),
        ("reentrant", Chain(Block(), Block(), reentrant=True), one_pass),
        ("in flight", blocks(), IN_FLIGHT),
        ("twice", Chain(Block(), Block(), order=[0, 1, 0]), one_pass),
        ("nested", Chain(Chain(Block(), Block()), Block()), one_pass),
    ):
        model = shard(net)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        with layerzero.trace(model, f"{folder}/rank{rank}.json") as trace:
            for step in range(2):
                passes(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        found = nesting(trace.events)
        units = {unit.label for unit in get_state(model).units}
        for phase in ("forward", "backward"):
            seen = {path.rpartition("/")[2].removeprefix(f"{phase} ") for path in found if f"{phase} " in path}
            assert units <= seen, f"{name}: {phase}"
        if name == "nested":
            assert "backward the root/backward units.0/backward units.0.units.1" in found
        if name == "reentrant":
            assert "backward the root/forward units.1" in found and "backward the root/backward units.1" in found


@pytest.mark.slow
def test_spans_are_nested_for_every_kind_of_graph(tmp_path: Path) -> None:
    run_ranks(_graphs, str(tmp_path))


def _around(event: Any) -> list[str]:
    """Return the names of the ranges around an event of the profiler."""
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


def _profiled(rank: int) -> None:
    model, optimizer = transformer()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, late_threads(0.02):
            train(model, optimizer, 2)
        # On a busy machine torch's profiler sometimes records no event at all, not even torch's own operators.
        recorded = torch.tensor(int(any(event.name.startswith("aten::") for event in profiler.events())))
        dist.all_reduce(recorded, dist.ReduceOp.MIN)
        if recorded:
            break
    found = Counter(event.name for event in profiler.events() if event.name.startswith("layerzero."))
    for unit in UNITS:
        for name in ("gather", "wait gather", "forward", "backward", "hop1"):
            assert found[f"layerzero.{name} {unit}"] >= 2, f"{name} {unit}: {found}"
        assert found[f"layerzero.refresh {unit}"] == 1, f"{unit}: {found}"
    # Threads, which the profiler does not see, launch hop 2; the program waits for unfinished ones.
    assert any(name.startswith("layerzero.wait hop") for name in found), found
    assert found["layerzero.update optimizer"] == 1
    norms = [event for event in profiler.events() if event.name == "aten::native_layer_norm"]
    assert norms
    for norm in norms:
        assert "layerzero.forward the root" in _around(norm), "what a unit computes lies inside its range"
    assert sum("layerzero.forward blocks.1" in _around(norm) for norm in norms) == 4, "two norms, two micro-batches"

    failing = shard(Chain(_Raises(), Block()))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        failing.units[0].raises = True
        with pytest.raises(LookupError):
            failing(batch(rank, 0))
        failing.units[0].raises = False
        output = failing(batch(rank, 1).requires_grad_())
    loss_of(output).backward()
    assert not get_state(failing).observer._open, "ranges that began under the profiler end without it"


@pytest.mark.slow
def test_torchs_profiler_shows_ranges_with_the_names_of_units() -> None:
    run_ranks(_profiled, shared_memory="off")
