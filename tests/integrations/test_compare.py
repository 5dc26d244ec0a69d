"""Schemes that are compared on a user's model train alike and send the bytes of the formulas. No time is asserted."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import network
from benchmarks.compare import report
from benchmarks.crossing import counted_crossings
from layerzero.verification.training_runs import TrainingTask, loss_of_output
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUMEL = 3 * (64 * 128 + 128 + 128 * 64 + 64) + 64 * 64 + 64
MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.dropout(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.last = nn.Linear(64, 64)

    def forward(self, x, y):
        return (self.last(self.blocks(x)) - y).square().mean()

def make_batch(index, rank):
    x = torch.randn(8, 64)
    return x, x.roll(1, 1)
"""


def compare(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    (folder / "mine.py").write_text(MODULE)
    path = folder / "found.json"
    command = [sys.executable, "-m", "benchmarks.compare", "mine:Net", "--steps", "2", "--json", str(path), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done, json.loads(path.read_text()) if path.exists() else {}


def first_loss(folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int, micro_batches: int) -> float:
    """Return the mean loss of the first step, computed by a plain model in this process."""
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("mine")
    task = TrainingTask(mine.Net, mine.make_batch, loss_of_output, torch.optim.Adam, 1, micro_batches, 0)
    model, losses = task.build(), []
    for rank in range(ranks):
        batches = [task.batch(index, rank) for index in range(micro_batches)]
        torch.manual_seed(0)  # dropout in the first step
        losses += [task.loss_fn(model, batch).detach() for batch in batches]
    return float(torch.stack(losses).mean())


def test_schemes_train_alike_and_send_what_the_formulas_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, found = compare(tmp_path, "--unit", "Block", "--micro-batches", "3")
    assert done.returncode == 0, done.stderr
    assert found["parameters"] == NUMEL and (found["ranks"], found["ranks_per_node"]) == (4, 2)
    assert list(found["schemes"]) == ["ddp", "fsdp2-full", "fsdp2-hsdp", "layerzero"]
    ddp, full, hsdp, ours = found["schemes"].values()
    assert len(ddp["losses"]) == 4 and ddp["losses"][-1] < ddp["losses"][0]
    for scheme in (full, hsdp, ours):
        assert scheme["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert ddp["losses"][0] == pytest.approx(first_loss(tmp_path, monkeypatch, ranks=4, micro_batches=3), rel=1e-5)

    # Two nodes: each lacks half of the sums of gradients in fp32, and half of the updated weights in fp32.
    assert ddp["between_bytes_per_node"] == hsdp["between_bytes_per_node"] == 2 * 4 * NUMEL / 2
    control = ours["between_bytes_per_node"] - (4 + 4) * NUMEL / 2
    assert 0 <= control <= 0.03 * ours["formula_bytes_per_node"], "flags of a few bytes, and padding of small units"
    assert ours["formula_bytes_per_node"] == (4 + 4) * NUMEL / 2
    # In each micro-batch, the forward and the backward gather the weights, of which the root keeps its own.
    root = 64 * 64 + 64
    gathered = 2 * (NUMEL - root) + root
    assert full["between_bytes_per_node"] == 3 * 4 * (gathered + NUMEL) / 2 and full["formula_bytes_per_node"] is None
    for scheme in found["schemes"].values():
        times = scheme["step_seconds"]
        assert len(times["all"]) == 4 and times["min"] <= times["median"] <= times["max"]
        assert len(scheme["peak_bytes_by_rank"]) == 4 and min(scheme["peak_bytes_by_rank"]) > 0
        assert scheme["wire_bytes_per_node"] is None
    assert report(found) in done.stdout


def test_in_bf16_layerzero_sends_three_quarters_of_the_bytes_of_hsdp(tmp_path: Path) -> None:
    chosen = ["--only", "fsdp2-hsdp", "layerzero"]
    done, found = compare(tmp_path, "--unit", "Block", "--param-dtype", "bfloat16", *chosen)
    assert done.returncode == 0, done.stderr
    hsdp, ours = (scheme["between_bytes_per_node"] for scheme in found["schemes"].values())
    assert hsdp == (4 + 4) * NUMEL / 2
    assert 0 <= ours / ((4 + 2) * NUMEL / 2) - 1 <= 0.03, "flags of a few bytes, and padding of small units"


def test_an_emulated_link_carries_what_was_counted(tmp_path: Path) -> None:
    if reason := network.why_unavailable():
        pytest.skip(reason)
    done, found = compare(
        tmp_path, "--unit", "Block", "--only", "fsdp2-hsdp", "layerzero", "--emulate", "200mbit", "--ranks", "2"
    )
    assert done.returncode == 0, done.stderr
    assert not found["nodes_assumed"] and "wire" in done.stdout
    for scheme in found["schemes"].values():
        assert scheme["wire_bytes_per_node"] == pytest.approx(scheme["between_bytes_per_node"], rel=0.2)


def test_losses_that_differ_are_said(tmp_path: Path) -> None:
    _, found = compare(tmp_path, "--only", "layerzero", "--ranks", "2")
    assert "losses agree" in report(found) and found["units"] == []
    assert "losses DIFFER" in report({**found, "losses_agree": False})


def test_wrong_arguments_are_reported_before_ranks_start(tmp_path: Path) -> None:
    for arguments, said in (
        (["--unit", "Bloc"], "--unit Bloc: the model has no such submodule or class. Pass one of ['Block', "),
        (["--loss", "mine:nothing"], "--loss 'mine:nothing': 'mine' has no 'nothing'"),
    ):
        done, _ = compare(tmp_path, *arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_make_needs_a_model() -> None:
    done = subprocess.run(["make", "-n", "compare"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "make compare MODEL=module:function" in done.stderr
    command = ["make", "-n", "compare", "MODEL=mine:Net", "RANKS=2", "ARGS=--unit Block"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "-m benchmarks.compare mine:Net --ranks 2 --unit Block" in done.stdout


def test_the_command_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^make compare (.*)$", page, re.MULTILINE)
    given = dict(part.split("=", 1) for part in shlex.split(command))
    run = [sys.executable, "-m", "benchmarks.compare", given["MODEL"], "--ranks", "4", *shlex.split(given["ARGS"])]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 nodes of 2 ranks (assumed); gloo on cpu" in done.stdout and "losses agree" in done.stdout


# --- the counter ---


def _crossings(rank: int) -> dict[str, float]:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    flat, part = torch.ones(16), torch.ones(4)  # 64 and 16 bytes
    others = [4 * (other != rank) for other in range(4)]
    # Newer versions of torch have other names, and warn about the old ones.
    all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    uneven = [0, 1, 2, 4]
    own = uneven[rank]
    calls = {
        "all-reduce": lambda: dist.all_reduce(flat),
        "all-gather": lambda: all_gather_flat(flat, part),
        "all-gather of a list": lambda: dist.all_gather(list(flat.chunk(4)), part),
        "broadcast": lambda: dist.broadcast(flat, 0),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(16), flat),
        "all-to-all without the own piece": lambda: dist.all_to_all_single(torch.empty(12), flat[:12], others, others),
        "all-to-all of uneven pieces": lambda: dist.all_to_all_single(
            torch.empty(4 * own), flat[:7], [own] * 4, uneven
        ),
        "reduce-scatter": lambda: reduce_scatter_flat(part, flat),
        "inside": lambda: dist.all_reduce(flat, group=inside),
        "across": lambda: dist.all_reduce(flat, group=across, async_op=True).wait(),
    }
    found = {}
    for name, call in calls.items():
        with counted_crossings(2) as crossed, ThreadPoolExecutor(1) as thread:
            thread.submit(call).result()
        dist.all_reduce(flat)  # not counted
        found[name] = sum(crossed)
    return found


def test_the_counter_counts_the_fewest_bytes_between_nodes() -> None:
    ranks = run_ranks(_crossings)
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    whole = 64.0
    assert total == {
        "all-reduce": 2 * whole,
        "all-gather": whole,
        "all-gather of a list": whole,
        "broadcast": whole,
        "all-to-all": 4 * whole / 2,
        "all-to-all without the own piece": 4 * 2 * 16.0,
        "all-to-all of uneven pieces": 2 * (2 + 4) * 4.0 + 2 * (0 + 1) * 4.0,
        "reduce-scatter": whole,
        "inside": 0.0,
        "across": 2 * 2 * whole,
    }
