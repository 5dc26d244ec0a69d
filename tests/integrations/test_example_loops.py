"""The examples for third-party training loops run on real ranks: the loss falls, and checkpoints exist."""

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


def _adapters(rank: int) -> tuple[list[float], list[str]]:
    sys.path.insert(0, str(EXAMPLES))
    with launched(), contextlib.redirect_stdout(io.StringIO()):
        losses, saved = import_module("train_lora").main()
    return losses, sorted(saved)


def test_adapters_learn_and_are_saved_alone() -> None:
    if find_spec("peft") is None:
        pytest.skip("needs peft: pip install --no-deps -r requirements-loops.txt")
    results = run_ranks(_adapters, timeout=300)
    for losses, _ in results:
        assert losses[-1] < losses[0] - 0.5
    (_, first), *others = results
    assert len(first) == 2 * (2 * 4 + 1) and all("lora_" in name for name in first)
    assert all(names == [] for _, names in others)
