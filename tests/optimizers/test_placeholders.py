"""A parameter without rows has two elements while an optimizer updates it, and is restored afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero.optimizers.placeholders import Placeholders


def _shapes(values: dict[str, Any]) -> list[torch.Size]:
    return [value.shape for value in values.values() if isinstance(value, Tensor)]


def test_what_an_optimizer_keeps_lives_from_step_to_step_and_ends_with_a_load() -> None:
    parameter = nn.Parameter(torch.empty(0))
    state: dict[Tensor, Any] = {parameter: {}}
    placeholders = Placeholders()
    with torch.no_grad(), placeholders.replacing([parameter], lambda: state):
        state[parameter] = {"mean": torch.ones_like(parameter), "number": torch.ones(1), "scalar": torch.ones(())}
    assert _shapes(state[parameter]) == [(0,), (1,), ()], "one element is a number"
    with torch.no_grad(), placeholders.replacing([parameter], lambda: state):
        assert state[parameter]["mean"].tolist() == [1, 1] and state[parameter]["number"].tolist() == [1]
    state[parameter] = {"mean": torch.empty(0, dtype=torch.bfloat16)}
    with torch.no_grad(), placeholders.replacing([parameter], lambda: state):
        assert state[parameter]["mean"].tolist() == [0, 0] and state[parameter]["mean"].dtype == torch.bfloat16


def test_an_optimizer_that_raises_leaves_them_as_they_were() -> None:
    parameter = nn.Parameter(torch.empty(0, 2))
    state: dict[Tensor, Any] = {}
    with pytest.raises(KeyError), Placeholders().replacing([parameter], lambda: state):
        raise KeyError
    assert parameter.shape == (0, 2) and parameter.requires_grad and not state
