"""The program in docs/start.md runs, started by the command on the page."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from tests.support.loops import launched_program
from tests.support.pages import ROOT, read_page
from tests.support.ranks import run_ranks

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
    said = _run(tmp_path, rest, ["--device", "cpu", "--steps", "20"])
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", said, re.MULTILINE)]
    assert len(losses) == 2 and losses[-1] < losses[0] - 0.3, said
    said = run_ranks(_program, tmp_path, 30, "--zero3-size", "2", shared_memory=None)[0]
    assert re.findall(r"^step (\d+)", said, re.MULTILINE) == ["30"], said
    assert [path.name for path in sorted((tmp_path / "runs" / "first").iterdir())] == ["step-000020", "step-000030"]


def _program(rank: int, folder: Path, steps: int, *further: str) -> str:
    """Run train.py on a rank of the tests, since starting processes takes most of the time; return what it prints."""
    printed, arguments = io.StringIO(), ["train.py", "--device", "cpu", "--steps", str(steps), *further]
    with ExitStack() as stack:
        stack.enter_context(launched_program())
        stack.enter_context(mock.patch.object(sys, "argv", arguments))
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(printed))
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


def _refused(rank: int, folder: Path, steps: int) -> str:
    with pytest.raises(ValueError, match="does not match the model") as refused:
        _program(rank, folder, steps)
    return str(refused.value)


def _on_two_ranks(function: Callable[[int, Path, int], str], folder: Path, steps: int) -> str:
    return run_ranks(function, folder, steps, world_size=2, shared_memory=None)[0]


@pytest.mark.exhaustive
def test_a_run_that_is_prolonged_is_the_longer_run(tmp_path: Path) -> None:
    (program,) = PAGE.snippets("file train.py")
    text = program.text.replace("width=64, layers=4", "width=16, layers=1")  # the same program in less time
    for folder in ("at once", "prolonged"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(text, encoding="utf-8")
    prolonged = tmp_path / "prolonged"
    expected = _steps(_on_two_ranks(_program, tmp_path / "at once", 120))
    first = _on_two_ranks(_program, prolonged, 60)
    then = _on_two_ranks(_program, prolonged, 120)
    assert "resumed from" not in first and "resumed from step 60\n" in then, then
    rates = [float(line.rpartition(" ")[2]) for line in expected]
    assert len(rates) == 12 and rates[1] == max(rates) and rates[1:] == sorted(rates[1:], reverse=True), rates
    assert _steps(first) + _steps(then) == expected, "losses, norms and learning rates"

    again = _on_two_ranks(_program, prolonged, 120)
    assert "resumed from step 120, nothing to do" in again and not _steps(again), again
    checkpoints = prolonged / "runs" / "first"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000060", "step-000120"]

    (prolonged / "train.py").write_text(text.replace("width=16", "width=32"), encoding="utf-8")
    error = _on_two_ranks(_refused, prolonged, 150)
    assert "Use a separate folder" in error, error


def _steps(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("step ")]


def _run(folder: Path, arguments: list[str], further: list[str]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, *further]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::UserWarning:layerzero",
    }
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
