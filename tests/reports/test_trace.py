"""`layerzero.trace` and the ranges of torch's profiler: named, nested, and absent when off."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.graphs import IN_FLIGHT, Block, Chain, batch, blocks, boom, loss_of, one_pass, sgd, shard
from tests.support.late_threads import late_threads
from tests.support.launches import Launches, launches_of
from tests.support.models import TiedTransformer, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

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
    update(optimizer)


def nesting(launches: Launches) -> list[str]:
    """Return every span of a unit with its parents: ``forward the root/forward blocks.0``. Spans must be nested."""
    path: list[str] = []
    found = []
    for event in launches.events:
        if event.kind == "begun":
            path.append(f"{event.phase} {event.name}")
            found.append("/".join(path))
        elif event.kind == "ended":
            assert path.pop() == f"{event.phase} {event.name}"
    assert not path
    return found


def _ranges(file: Path) -> Counter[str] | None:
    names = Counter(str(event.get("name", "")) for event in json.loads(file.read_text())["traceEvents"])
    # On a busy machine torch's profiler sometimes records no event at all, not even torch's own operators.
    return names if any(name.startswith("aten::") for name in names) else None


def _writes_files(rank: int, folder: str) -> None:
    model = shard(Chain(Chain(Block()), Block()))
    path, file = f"{folder}/rank{{rank}}.json", Path(folder, f"rank{rank}.json")
    with pytest.raises(LookupError), layerzero.trace(model, path):
        one_pass(model, rank, 0)
        model.units[0].units[0].register_forward_hook(boom)
        model(batch(rank, 1))
    found = _ranges(file)
    assert found is None or found["layerzero.gather units.1"] >= 1, "also where the body raises"
    with (
        pytest.raises(FileNotFoundError, match=r"the folder .*none' of the trace file does not exist"),
        layerzero.trace(model, f"{folder}/none/trace.json"),
    ):
        raise AssertionError("it is too late to say so at the end")
    with pytest.raises(ValueError, match="not sharded"), layerzero.trace(nn.Linear(2, 2)):
        pass


def test_each_rank_writes_a_file_with_names_of_units(tmp_path: Path) -> None:
    run_ranks(_writes_files, str(tmp_path), shared_memory="off")


@pytest.mark.slow
@on_ranks()
def test_spans_are_nested_for_every_kind_of_graph(rank: int) -> None:
    for name, net, passes in (
        ("checkpoints", Chain(Block(reentrant=False), Block(), reentrant=False), one_pass),
        ("reentrant", Chain(Block(), Block(), reentrant=True), one_pass),
        ("in flight", blocks(), IN_FLIGHT),
        ("twice", Chain(Block(), Block(), order=[0, 1, 0]), one_pass),
        ("nested", Chain(Chain(Block(), Block()), Block()), one_pass),
    ):
        model = shard(net)
        optimizer = layerzero.shard_optimizer(sgd(model), model)
        launches = launches_of(model)
        for step in range(2):
            passes(model, rank, step)
            update(optimizer)
        found = nesting(launches)
        units = {unit.label for unit in get_state(model).units}
        for phase in ("forward", "backward"):
            seen = {path.rpartition("/")[2].removeprefix(f"{phase} ") for path in found if f"{phase} " in path}
            assert units <= seen, f"{name}: {phase}"
        if name == "nested":
            assert "backward the root/backward units.0/backward units.0.units.1" in found
        if name == "reentrant":
            assert "backward the root/forward units.1" in found and "backward the root/backward units.1" in found


def _around(event: Any) -> list[str]:
    """Return the names of the ranges around an event of the profiler."""
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


@pytest.mark.slow
@on_ranks(shared_memory="off")
def test_torchs_profiler_shows_ranges_with_the_names_of_units(rank: int) -> None:
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

    failing = shard(Chain(Chain(Block()), Block()))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        hook = failing.units[0].units[0].register_forward_hook(boom)
        with pytest.raises(LookupError):
            failing(batch(rank, 0))
        hook.remove()
        output = failing(batch(rank, 1).requires_grad_())
    loss_of(output).backward()
    assert not get_state(failing).parts._open, "ranges that began under the profiler end without it"
