"""docs/start.md: its program is copied out of the page and run by the page's own command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, read_page

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
