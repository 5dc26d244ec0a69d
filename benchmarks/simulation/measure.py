"""Measured runs of a small GPT on gloo ranks, for comparison with the simulation.

:func:`measure` starts the ranks, on one machine or in two network namespaces, and collects their results. This module
is also the program of each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from benchmarks import network
from benchmarks.launch import meeting
from benchmarks.simulation.record import Settings, train_step

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Block, GPTConfig, next_token_loss

__all__ = ["Block", "Case", "Measured", "Plan", "gpt", "losses_of", "measure"]

_ROOT = Path(__file__).resolve().parents[2]
_WARM_UP = 2  # steps before the measured ones


class Case(NamedTuple):
    """Settings of one measurement."""

    micro_batches: int
    accumulation: str = "sharded"
    zero3_size: int = 2
    reduce: str = "float32"

    @property
    def trained(self) -> tuple[str, int, str]:
        """Settings of the sharded model; cases that differ only in micro-batches share one."""
        return self[1:]


@dataclass(frozen=True)
class Plan:
    """Measurements to make. The first case is traced, and the simulation is fitted to it."""

    cases: tuple[Case, ...]
    ranks: int = 4
    node_size: int = 2
    layers: int = 4
    width: int = 512
    tokens: int = 64
    rounds: int = 5
    steps: int = 3  # consecutive steps without a pause
    folder: str = ""

    def settings(self, case: Case) -> Settings:
        reduce_dtype = getattr(torch, case.reduce)
        return Settings(self.ranks, case.zero3_size, case.micro_batches, case.accumulation, reduce_dtype)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step on the slowest rank, by case and round, and the folder of the traces."""

    seconds: list[list[float]]
    folder: Path

    def quietest(self, case: int) -> float:
        """Return the minimum over the rounds, because other work on the machine only makes a step longer."""
        return min(self.seconds[case])


def gpt(plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=plan.layers, width=plan.width, heads=plan.width // 64, context=plan.tokens))


def losses_of(model: nn.Module, plan: Plan, micro_batches: int) -> list[Callable[[], Tensor]]:
    tokens = torch.randint(256, (1, plan.tokens))
    return [lambda: next_token_loss(model(tokens), tokens.roll(-1, 1))] * micro_batches


@contextlib.contextmanager
def measure(plan: Plan, *, two_nodes: bool) -> Iterator[Measured]:
    """Run a plan; the traces exist inside the context only.

    Raises:
        RuntimeError: a rank failed, or `two_nodes` is given and cannot be emulated here.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if two_nodes and (reason := network.why_unavailable()):
            raise RuntimeError(reason)
        nodes = stack.enter_context(network.two_nodes("1gbit") if two_nodes else network.one_machine())
        _run_ranks(replace(plan, folder=folder), nodes)
        yield Measured(json.loads(Path(folder, "seconds.json").read_text()), Path(folder))


def _run_ranks(plan: Plan, nodes: Sequence[network.Node]) -> None:
    with meeting(nodes) as store:
        _run_beside(store, plan, nodes)


def _run_beside(store: Mapping[str, str], plan: Plan, nodes: Sequence[network.Node]) -> None:
    ranks_of_node = plan.ranks // len(nodes)
    processes = []
    for rank in range(plan.ranks):
        node = nodes[rank // ranks_of_node]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.ranks),
            **store,
            "GLOO_SOCKET_IFNAME": node.interface,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
        }
        command = [*node.prefix, sys.executable, "-m", "benchmarks.simulation.measure", json.dumps(asdict(plan))]
        processes.append(subprocess.Popen(command, env=os.environ | environment, cwd=_ROOT))
    try:
        failed = [rank for rank, process in enumerate(processes) if process.wait()]
    finally:
        for process in processes:
            process.kill()
    if failed:
        raise RuntimeError(f"ranks {failed} failed; their output is above")


def _rank(plan: Plan) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trained = {}
    for case in plan.cases:
        if case.trained not in trained:
            trained[case.trained] = plan.settings(case).shard(gpt(plan), Block)
    silent, _ = plan.settings(Case(1, "full", 1)).shard(gpt(plan), Block)
    steps: list[Callable[[], None]] = []
    for case in plan.cases:
        model, optimizer = trained[case.trained]
        losses = losses_of(model, plan, case.micro_batches)
        steps.append(lambda model=model, optimizer=optimizer, losses=losses: train_step(model, optimizer, losses))
    for step in steps:
        for _ in range(_WARM_UP):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    for index in range(plan.rounds):
        for number, step in enumerate(steps):
            seconds[number].append(_timed(step, plan.steps))
        _trace_compute(silent, plan, index)
        dist.barrier()
        with layerzero.trace(trained[plan.cases[0].trained][0], f"{plan.folder}/steps-{{rank}}-{index}.json"):
            for _ in range(plan.steps):
                steps[0]()
    if dist.get_rank() == 0:
        Path(plan.folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Callable[[], None], times: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        step()
    longest = torch.tensor((time.perf_counter() - start) / times)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _trace_compute(model: nn.Module, plan: Plan, index: int) -> None:
    """Trace the compute times of units without communication: ZeRO-1 inside no_sync, on all ranks at once."""
    (loss,) = losses_of(model, plan, 1)
    with layerzero.no_sync(model):
        loss().backward()
        dist.barrier()
        with layerzero.trace(model, f"{plan.folder}/compute-{{rank}}-{index}.json"):
            for _ in range(plan.steps * 2):
                loss().backward()
    model.zero_grad()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _rank(Plan(**{**given, "cases": tuple(Case(*each) for each in given["cases"])}))
