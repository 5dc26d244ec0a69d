"""Comparison of two training runs with Megatron."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support.megatron_ranks import HIDDEN, Case, Run


def assert_same(ours: Run, theirs: Run, case: Case, *, close: dict[str, Any] | None = None) -> None:
    if close is None:
        close = {"rtol": 2e-4, "atol": 2e-5} if case.dtype == "float32" else {"rtol": 5e-3, "atol": 2e-3}
    torch.testing.assert_close(ours.losses, theirs.losses, **close, msg=lambda m: f"losses of {case}: {m}")
    assert ours.scales == theirs.scales
    for step, (mine, reference) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        assert mine[0] == reference[0], (step, case)
        assert (mine[1] is None) == (reference[1] is None), (step, case)
        if mine[1] is not None:
            assert math.isclose(mine[1], reference[1], rel_tol=close["rtol"]), (step, mine, reference, case)
            # The gradients of key biases are zero except for rounding.
            assert abs(mine[2] - reference[2]) <= case.layers * HIDDEN, (step, mine, reference, case)
    for mine, reference in zip(ours.weights, theirs.weights, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(mine[name], value, **close, msg=lambda m, n=name: f"{n} of {case}: {m}")
