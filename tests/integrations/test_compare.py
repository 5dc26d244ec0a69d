"""Schemes that are compared on a user's model train alike and send the bytes of the formulas. No time is asserted."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.compare import COMPARED, backend_of, largest_difference, main, report, schemes_of
from benchmarks.crossing import counted_crossings
from layerzero.config import LayerZeroConfig
from layerzero.sharding.plan_units import plan_unit_specs, plan_units
from layerzero.verification.training_runs import TrainingTask, default_loss
from tests.support.loops import launched_program
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONTROL = 200  # bytes of metadata per node and step
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

class Low(Net):
    def __init__(self):
        super().__init__()
        self.last.bfloat16()

def make_batch(index, rank):
    x = torch.randn(8, 64)
    return x, x.roll(1, 1)

def biased(model, batch):
    return model(*batch) * (1.01 if isinstance(model, nn.parallel.DistributedDataParallel) else 1)

def broken(model, batch):
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("no loss here")
    return model(*batch)
"""


def compare(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the command, which starts ranks; return its result and the content of the file that it writes."""
    (folder / "mine.py").write_text(MODULE)
    path = folder / "found.json"
    command = [sys.executable, "-m", "benchmarks.compare", "mine:Net", "--steps", "2", "--json", str(path), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done, json.loads(path.read_text()) if path.exists() else {}


def _compare(rank: int, folder: Path, arguments: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(launched_program())
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        stack.enter_context(redirect_stdout(printed))
        return main(["mine:Net", "--steps", "2", *arguments]), printed.getvalue()


def compare_on_ranks(folder: Path, *arguments: str, world_size: int = 4) -> tuple[int, str, dict[str, Any]]:
    """Run the command's part on ranks of the tests, which exist already; return its exit code, text and data."""
    (folder / "mine.py").write_text(MODULE)
    path = folder / "found.json"
    given = [*arguments, "--json", str(path)]
    (code, _), *_ = ranks = run_ranks(_compare, folder, given, world_size=world_size, shared_memory=None)
    assert {each for each, _ in ranks} == {code} and not any(text for _, text in ranks[1:])
    return code, ranks[0][1], json.loads(path.read_text())


def padded_numel(folder: Path, monkeypatch: pytest.MonkeyPatch, param_dtype: torch.dtype | None = None) -> int:
    """Return the number of elements of the model with the padding of layerzero on two nodes of two ranks."""
    monkeypatch.syspath_prepend(str(folder))
    with torch.device("meta"):
        model = importlib.import_module("mine").Net()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    config = LayerZeroConfig(zero3_size=2, units=["Block"], mp_policy=policy)
    units = plan_unit_specs(plan_units(model, config), config, 4, on_device=False)
    return sum(handle.layout.numel for unit in units for handle in unit.handles)


def first_loss(folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int, micro_batches: int) -> float:
    """Return the mean loss of the first step, computed by a plain model in this process."""
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("mine")
    task = TrainingTask(mine.Net, mine.make_batch, default_loss, torch.optim.Adam, 1, micro_batches, 0)
    model, losses = task.build_model(), []
    for rank in range(ranks):
        batches = [task.batch(index, rank) for index in range(micro_batches)]
        torch.manual_seed(0)  # dropout in the first step
        losses += [task.loss_fn(model, batch).detach() for batch in batches]
    return float(torch.stack(losses).mean())


def test_schemes_train_alike_and_send_what_the_formulas_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, found = compare_on_ranks(tmp_path, "--unit", "Block", "--micro-batches", "3")
    assert code == 0
    assert found["parameters"] == NUMEL and (found["ranks"], found["ranks_per_node"]) == (4, 2)
    assert list(found["schemes"]) == ["ddp", "fsdp2-full", "fsdp2-hsdp", "layerzero", "layerzero-exchanges"]
    ddp, full, hsdp, *ours = found["schemes"].values()
    assert len(ddp["losses"]) == 4 and ddp["losses"][-1] < ddp["losses"][0]
    for scheme in (full, hsdp, *ours):
        assert scheme["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert ddp["losses"][0] == pytest.approx(first_loss(tmp_path, monkeypatch, ranks=4, micro_batches=3), rel=1e-5)

    # Two nodes: each lacks half of the sums of gradients in fp32, and half of the updated weights in fp32.
    assert ddp["between_bytes_per_node"] == hsdp["between_bytes_per_node"] == 2 * 4 * NUMEL / 2
    padded = padded_numel(tmp_path, monkeypatch)
    assert NUMEL < padded <= 1.01 * NUMEL
    for scheme in ours:
        assert 0 <= scheme["between_bytes_per_node"] - (4 + 4) * padded / 2 <= CONTROL
        assert scheme["formula_bytes_per_node"] == (4 + 4) * NUMEL / 2
    # In each micro-batch, the forward and the backward gather the weights, of which the root keeps its own.
    root = 64 * 64 + 64
    gathered = 2 * (NUMEL - root) + root
    assert full["between_bytes_per_node"] == 3 * 4 * (gathered + NUMEL) / 2 and full["formula_bytes_per_node"] is None
    for scheme in found["schemes"].values():
        times = scheme["step_seconds"]
        assert len(times["all"]) == 4 and min(times["all"]) > 0, "two steps in each of two rounds"
        assert len(scheme["peak_bytes_by_rank"]) == 4 and min(scheme["peak_bytes_by_rank"]) > 0
        assert scheme["wire_bytes_per_node"] is None
    assert report(found) in text and "layerzero: the ranks of a node share memory, unless" in text
    assert "share memory" not in report({**found, "device": "cuda"})
    apart = {name: scheme for name, scheme in found["schemes"].items() if name != "layerzero"}
    assert "share memory" not in report({**found, "schemes": apart})


def test_in_bf16_layerzero_sends_three_quarters_of_the_bytes_of_hsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["--only", "fsdp2-hsdp", "layerzero"]
    code, _, found = compare_on_ranks(tmp_path, "--unit", "Block", "--param-dtype", "bf16", *chosen)
    assert code == 0
    hsdp, ours = (scheme["between_bytes_per_node"] for scheme in found["schemes"].values())
    assert hsdp == (4 + 4) * NUMEL / 2
    padded = padded_numel(tmp_path, monkeypatch, torch.bfloat16)
    assert NUMEL < padded <= 1.01 * NUMEL and 0 <= ours - (4 + 2) * padded / 2 <= CONTROL
    assert found["dtype"] == "bfloat16"


def test_losses_that_differ_are_said(tmp_path: Path) -> None:
    chosen = ["--only", "layerzero", "ddp", "--loss", "mine:biased"]
    code, text, found = compare_on_ranks(tmp_path, *chosen, world_size=2)
    assert code == 1 and "losses DIFFER" in text
    assert found["units"] == [] and found["losses_agree"] is False
    assert list(found["schemes"]) == ["layerzero", "ddp"]
    assert found["largest_loss_difference"] == pytest.approx(0.01, rel=0.1)


def test_losses_that_are_not_finite_do_not_agree() -> None:
    assert largest_difference([[2.0, 1.0], [2.0, 1.5], [1.0, 1.0]]) == 0.5
    for wrong in (math.nan, math.inf):
        for losses in ([[wrong], [1.0]], [[1.0], [wrong]], [[wrong], [wrong]], [[1.0, wrong], [1.0, 1.0]]):
            assert largest_difference(losses) == math.inf, losses


@pytest.mark.exhaustive
def test_an_error_names_the_scheme(tmp_path: Path) -> None:
    done, found = compare(tmp_path, "--only", "fsdp2-full", "ddp", "--ranks", "1", "--loss", "mine:broken")
    assert done.returncode == 1 and found == {}
    assert "scheme 'ddp' failed on rank 0: ValueError: no loss here. Pass the schemes that" in done.stderr
    assert "scheme 'fsdp2-full'" not in done.stderr


def test_a_device_decides_on_the_backend_and_on_schemes_without_shared_memory() -> None:
    assert backend_of("cpu") == "gloo" and backend_of("cuda") == "cpu:gloo,cuda:nccl"
    assert schemes_of("cpu") == [*COMPARED, "layerzero-exchanges"] and schemes_of("cuda") == list(COMPARED)


def test_wrong_arguments_are_reported_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("benchmarks.compare._start", lambda *_: pytest.fail("ranks are started"))
    for arguments, said in (
        (["--unit", "Bloc"], "--unit Bloc: the model has no such submodule or class. Pass one of ['Block', "),
        (
            ["--loss", "mine:nothing"],
            "--loss 'mine:nothing' cannot be imported: AttributeError: module 'mine' has no attribute 'nothing'",
        ),
        (["--node-size", "3"], "--node-size 3 does not divide the 4 ranks. Use a divisor"),
        (["--steps", "0"], "--steps 0 is not supported. Use at least 1"),
        (["--micro-batches", "0"], "--micro-batches 0 is not supported. Use at least 1"),
        (["--ranks", "0"], "--ranks 0 is not supported. Use at least 1"),
        (["--ranks", "3", "--emulate", "1gbit"], "Pass an even --ranks instead of 3"),
        (["--emulate", "fast"], "rate 'fast' is not like 1gbit or 100mbit"),
        (["--interface", "nowhere0"], "no interface 'nowhere0'"),
        (["--param-dtype", "int8"], "--param-dtype is 'int8', which is not a supported dtype. Use one of fp32"),
        (["--device", "toaster"], "--device toaster: torch finds no such device. Use "),
        (["--json", "nowhere/found.json"], "--json nowhere/found.json: the folder does not exist. Create it"),
    ):
        assert main(["mine:Net", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, (arguments, error)
    assert main(["mine:Low"]) == 2
    assert "parameter 'last.weight' of the model is torch.bfloat16. The schemes are" in capsys.readouterr().err


def test_make_needs_a_model() -> None:
    done = subprocess.run(["make", "-n", "compare"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "make compare MODEL=module:function" in done.stderr
    command = ["make", "-n", "compare", "MODEL=mine:Net", "RANKS=2", "ARGS=--unit Block"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "-m benchmarks.compare mine:Net --ranks 2 --unit Block" in done.stdout


@pytest.mark.exhaustive
def test_the_command_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").replace("\\\n", "")
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
