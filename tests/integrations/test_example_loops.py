"""The examples for other people's loops on real ranks: they learn, and their checkpoints are there."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.loops import launched
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(rank: int, example: str, folder: str) -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    with launched(TORCHELASTIC_RUN_ID="1"), contextlib.redirect_stdout(io.StringIO()):
        losses: list[float] = import_module(example).main(folder=folder)
    return losses


@pytest.mark.parametrize("package", ["accelerate", "transformers", "lightning", "trl"])
def test_it_learns_and_saves(package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install --no-deps -r requirements-loops.txt")
    for losses in run_ranks(_run, f"train_{package}", str(tmp_path / "run"), timeout=300):
        assert losses[-1] < losses[0] - 0.5
    assert any(path.name == "manifest.json" for path in tmp_path.rglob("*"))
    assert len((EXAMPLES / f"train_{package}.py").read_text().splitlines()) <= 40
