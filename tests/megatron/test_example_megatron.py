"""examples/train_megatron.py on real ranks: the loss falls."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_megatron

from tests.support.ranks import run_ranks

ARGS = ["--steps", "8", "--seq-len", "16", "--width", "32", "--layers", "2", "--batch-size", "2"]


def _run(rank: int, folder: str) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        return train_megatron.main([*ARGS, "--checkpoint", folder])


def test_the_demo_learns_and_saves_every_stage(tmp_path: Path) -> None:
    losses = run_ranks(_run, str(tmp_path / "run"), world_size=4)
    assert losses[0] == losses[1] == [], "the first stage sees no loss"
    for replica in losses[2:]:
        assert replica[-1] < replica[0] - 0.2
    assert len(list((tmp_path / "run").glob("layout-1-2-*"))) == 2
