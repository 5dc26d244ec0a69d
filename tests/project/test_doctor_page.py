"""The output on docs/doctor.md is that of the command."""

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

PROMPT = "$ torchrun "


def _without_values(line: str) -> str:
    """Return a line with placeholders for numbers, their units and the name of the host."""
    line = re.sub(r"(?<=ranks 0-1 on )\S+", "HOST", line)
    return re.sub(r"\d[\d.]*( [kMG]?B/s| [mµ]?s\b| cores)?", "#", line)


def test_the_output_on_the_page_is_that_of_the_command(tmp_path: Path) -> None:
    (shown,) = [
        piece.text for piece in read_page(ROOT / "docs" / "doctor.md").snippets("text") if piece.text.startswith(PROMPT)
    ]
    command, *expected = [line for line in shown.splitlines() if line not in {"", "..."}]
    options, _, program = command.removeprefix(PROMPT).partition("-m ")
    one_differs = 'if [ "$RANK" = 1 ]; then export NCCL_ALGO=Ring; fi; exec "$@"'
    ranks = ["sh", "-c", one_differs, "-", sys.executable, "-m", *shlex.split(program)]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(options), "--no-python", *ranks],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    printed = {_without_values(line) for line in ran.stdout.splitlines()}
    assert [line for line in expected if _without_values(line) not in printed] == [], ran.stdout
    assert len(expected) >= 11
