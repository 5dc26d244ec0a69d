"""The examples that need only torch, on real ranks: the loss falls."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(rank: int, example: str, steps: int) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()):
        return import_module(example).main(steps)


def test_the_convolutional_net_learns_and_its_statistics_are_one() -> None:
    results = run_ranks(_run, "train_convnet", 12)
    for losses, right in results:
        assert losses[-1] < 0.5 * losses[0]
        assert right > 0.9
    assert len({right for _, right in results}) == 1  # of one model, on all ranks


def test_the_pipeline_learns() -> None:
    results = run_ranks(_run, "train_pipeline", 10)
    assert [len(losses) for losses in results] == [0, 10, 0, 10]  # the last stage has them
    for losses in results[1::2]:
        assert losses[-1] < losses[0] - 1
