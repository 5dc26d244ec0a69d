"""examples/train_gpt.py on real ranks: it learns, and a run that is stopped and started again is the same run."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pytest
import torch
import train_gpt

from tests.support.ranks import run_ranks

ARGS = ["--model", "tiny", "--steps", "6", "--save-every", "3", "--seq-len", "32", "--validation-windows", "32"]


def _run(rank: int, folder: str, zero3_size: int, optimizer: str) -> tuple[float, float]:
    argv = [*ARGS, "--device", "cpu", "--no-sample", "--checkpoints", folder, "--zero3-size", str(zero3_size)]
    argv += ["--optimizer", optimizer]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return tuple(train_gpt.main(argv))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"] if hasattr(torch.optim, "Muon") else ["adamw"])
def test_a_demo_that_is_stopped_and_started_again_ends_with_the_same_loss(tmp_path: Path, optimizer: str) -> None:
    folder = tmp_path / "run"
    first, last = run_ranks(_run, str(folder), 2, optimizer)[0]
    assert last < first - 0.1
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000006"]
    shutil.rmtree(folder / "step-000006")
    assert run_ranks(_run, str(folder), 2, optimizer)[0] == (first, last)
    _, again = run_ranks(_run, str(folder), 2, optimizer)[0]
    assert again == last, "nothing was left to do"
    shutil.rmtree(folder / "step-000006")
    _, other = run_ranks(_run, str(folder), 4, optimizer)[0]
    assert abs(other - last) < (1e-3 if optimizer == "adamw" else 1e-2)  # Muon's arithmetic is in bf16


def _log(rank: int, folder: str) -> list[tuple[str, int]]:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, logdir: str) -> None:
            assert logdir == folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert math.isfinite(value)
            written.append((name, step))

        def close(self) -> None:
            written.append(("closed", -1))

    argv = [*ARGS, "--steps", "2", "--device", "cpu", "--no-sample", "--logdir", folder]
    stand_in = mock.patch.dict(sys.modules, {"torch.utils.tensorboard": mock.Mock(SummaryWriter=Writer)})
    with stand_in, contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        train_gpt.main(argv)
    return written


def test_a_demo_writes_for_tensorboard_on_its_first_rank(tmp_path: Path) -> None:
    first, other = run_ranks(_log, str(tmp_path), world_size=2)
    assert not other
    assert first.pop() == ("closed", -1)
    assert {"loss", "grad_norm", "layerzero/memory/zero3_shard", "layerzero/steps/taken"} <= {name for name, _ in first}
    assert [step for name, step in first if name == "loss"] == [0, 1]


def test_a_demo_says_what_its_log_needs() -> None:
    missing = mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None})
    with missing, pytest.raises(SystemExit, match="--logdir needs TensorBoard: pip install tensorboard"):
        train_gpt.main(["--logdir", "somewhere"])
