"""The program in docs/start.md runs, started by the command on the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, read_page

pytestmark = pytest.mark.slow

PAGE = read_page(ROOT / "docs" / "start.md")


def command_of(page_text: str) -> list[str]:
    (line,) = [line for line in page_text.splitlines() if line.startswith("torchrun --standalone")]
    return shlex.split(line)


def test_the_first_program_trains_saves_and_goes_on(tmp_path: Path) -> None:
    (program,) = PAGE.snippets("file train.py")
    (tmp_path / "train.py").write_text(program.text, encoding="utf-8")
    rest = command_of((ROOT / "docs" / "start.md").read_text(encoding="utf-8"))[1:]
    assert rest == ["--standalone", "--nproc-per-node", "4", "train.py"]
    said = _run(tmp_path, rest, ["--device", "cpu", "--steps", "40"])
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", said, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5, said
    said = _run(tmp_path, rest, ["--device", "cpu", "--steps", "50", "--zero3-size", "2"])
    assert re.findall(r"^step (\d+)", said, re.MULTILINE) == ["50"], said
    assert [path.name for path in sorted((tmp_path / "runs" / "first").iterdir())] == ["step-000040", "step-000050"]


def test_a_run_that_is_prolonged_is_the_longer_run(tmp_path: Path) -> None:
    (program,) = PAGE.snippets("file train.py")
    text = program.text.replace("width=64, layers=4", "width=16, layers=1")  # the same program in less time
    on_two = ["--standalone", "--nproc-per-node", "2", "train.py"]
    for folder in ("at once", "prolonged"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(text, encoding="utf-8")
    prolonged = tmp_path / "prolonged"
    expected = _steps(_run(tmp_path / "at once", on_two, ["--device", "cpu", "--steps", "120"]))
    first = _run(prolonged, on_two, ["--device", "cpu", "--steps", "60"])
    then = _run(prolonged, on_two, ["--device", "cpu", "--steps", "120"])
    assert "resumed from" not in first and "resumed from step 60\n" in then, then
    rates = [float(line.rpartition(" ")[2]) for line in expected]
    assert len(rates) == 12 and rates[1] == max(rates) and rates[1:] == sorted(rates[1:], reverse=True), rates
    assert _steps(first) + _steps(then) == expected, "losses, norms and learning rates"

    again = _run(prolonged, on_two, ["--device", "cpu", "--steps", "120"])
    assert "resumed from step 120, nothing to do" in again and not _steps(again), again
    checkpoints = prolonged / "runs" / "first"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000060", "step-000120"]

    (prolonged / "train.py").write_text(text.replace("width=16", "width=32"), encoding="utf-8")
    failed = _start(prolonged, on_two, ["--device", "cpu", "--steps", "150"])
    assert failed.returncode != 0
    assert "does not match the model" in failed.stderr and "Use a separate folder" in failed.stderr, failed.stderr


def _steps(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("step ")]


def _run(folder: Path, arguments: list[str], further: list[str]) -> str:
    ran = _start(folder, arguments, further)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _start(folder: Path, arguments: list[str], further: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, *further]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::UserWarning:layerzero",
    }
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
