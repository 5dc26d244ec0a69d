"""layerzero.metrics: flat numbers that agree with the reports, and the log of a plain job."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import layerzero
from layerzero.reports.metrics_log import rank_delays
from tests.support.late_threads import late_threads
from tests.support.models import IntegerNet, integer_net
from tests.support.ranks import BOTH, mesh_of, run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def _count(rank: int) -> None:
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    layerzero.metrics(model)
    for step in range(4):
        loss = model(torch.ones(2, 5)).sum() * (float("inf") if step == 1 and rank == 3 else 1.0)
        with late_threads(0.02):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.zero_grad()
    traffic, memory = layerzero.traffic(model), layerzero.memory(model)
    found = layerzero.metrics(model, reset=False)
    assert found == layerzero.metrics(model), "not reset"
    assert all(type(value) is float for value in found.values())
    assert (found["layerzero/steps/taken"], found["layerzero/steps/skipped"]) == (3.0, 1.0)
    assert _under(found, "layerzero/memory/") == memory.measured
    assert _under(found, "layerzero/bytes/") == {"zero3": 0, "replica": 0, "control": 0} | traffic.bytes_by_axis
    waited = _under(found, "layerzero/wait_seconds/")
    assert {"hop2", "refresh"} <= waited.keys() <= traffic.calls.keys()
    assert all(seconds >= 0 for seconds in waited.values())
    assert 0 < sum(waited.values()) < 60
    assert waited["gather"] > 0
    again = layerzero.metrics(model)
    assert again["layerzero/bytes/replica"] == again["layerzero/steps/taken"] == 0
    assert not _under(again, "layerzero/wait_seconds/")
    assert _under(again, "layerzero/memory/") == memory.measured


def _straggles(rank: int, victim: int) -> dict[str, float]:
    """Let one rank compute longer in each step; the others wait for it inside the ZeRO-3 group and across replicas."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2**-4), model)
    for step in range(12):
        if step == 2:
            layerzero.metrics(model)
        loss = model(torch.ones(2, 5)).sum()
        if rank == victim:
            time.sleep(0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = layerzero.metrics(model, reset=False)
    found = layerzero.metrics(model, compare=True)
    assert {name: value for name, value in found.items() if name in alone} == alone
    return {name: value for name, value in found.items() if name not in alone}


@pytest.mark.sample(2)
@pytest.mark.parametrize("victim", [0, 3])
@BOTH
def test_a_rank_that_is_late_again_and_again_is_named(victim: int, shared_memory: str | None) -> None:
    told = run_ranks(_straggles, victim, world_size=4, shared_memory=shared_memory)
    assert all(found == told[0] for found in told)
    late = {name: value for name, value in told[0].items() if "/waited_for/" in name}
    assert next(iter(late)) == f"layerzero/waited_for/rank_{victim}", told[0]
    first, *others = late.values()
    assert first > 0.5 and all(value < first / 2 for value in others), told[0]
    links = {name.rsplit("/", 1)[0]: value for name, value in told[0].items() if "/transfer_seconds/" in name}
    assert set(links) == {"layerzero/transfer_seconds/zero3", "layerzero/transfer_seconds/replica"}
    assert all(0 <= seconds < first / 2 for seconds in links.values()), "the links are not what they wait for"


def test_who_is_waited_for_waits_least() -> None:
    assert rank_delays({0: 5.0, 1: 1.0, 2: 6.0, 3: 5.0}) == {"layerzero/waited_for/rank_1": 4.0}
    assert rank_delays({0: 2.0}) == {} and rank_delays({0: 2.0, 1: 2.0}) == {}
    assert len(rank_delays(dict(enumerate([9.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0])))) == 3


def _emptied(rank: int) -> list[tuple[float, float]]:
    """Keep gradients as zeros."""
    model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2**-4), model)
    counted = []

    def count() -> None:
        found = layerzero.metrics(model, reset=False)
        counted.append((found["layerzero/steps/taken"], found["layerzero/steps/skipped"]))

    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    count()
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    count()
    for waits in (False, True):  # these steps are skipped
        optimizer.zero_grad(set_to_none=False)
        model.set_requires_gradient_sync(not waits)
        model(torch.ones(2, 5)).sum().backward()
        model.set_requires_gradient_sync(True)
        optimizer.zero_grad(set_to_none=False)
        count()
    return counted


def test_zeroed_gradients_are_no_skipped_steps() -> None:
    assert run_ranks(_emptied, world_size=4) == [[(2, 0), (2, 0), (2, 1), (2, 2)]] * 4


def _under(found: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


@BOTH
def test_the_numbers_are_those_of_the_reports_since_the_last_call(shared_memory: str | None) -> None:
    run_ranks(_count, world_size=4, shared_memory=shared_memory)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def _log(rank: int) -> tuple[list[str], int]:
    logger, lines = logging.getLogger("layerzero"), Lines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=IntegerNet.UNITS)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters()), model)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted = layerzero.memory(model).predicted
    kinds = ("zero1_shard", "zero3_shard", "gradient_shard", "accumulator")
    return lines.told, sum(predicted[kind] for kind in kinds)


def test_one_line_says_what_was_sharded() -> None:
    told = run_ranks(_log, world_size=4)
    (line,) = told[0][0]
    units = 1 + len(IntegerNet.UNITS)
    size = f"{told[0][1] / 2**20:.1f} MiB per rank without the optimizer state"
    assert line == f"IntegerNet: {units} units (including the root), D=4, S=2, {size}"
    assert not any(lines for lines, _ in told[1:])


PLAIN = """
import torch, layerzero
from torch import nn

torch.distributed.init_process_group("gloo")
model = layerzero.shard_model(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), units=["1"])
optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
for _ in range(2):
    tokens = torch.arange(4)
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
[parameter.norm().full_tensor() for parameter in model.parameters()]
model.load_state_dict(model.state_dict())
layerzero.full_state_dict(model)
torch.distributed.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_a_plain_job_prints_nothing(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == ("", "")
