"""The log of a job: one line says what was sharded, and nothing else is printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerzero
from tests.support.models import IntegerNet, integer_net, update
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


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
        update(optimizer)
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
