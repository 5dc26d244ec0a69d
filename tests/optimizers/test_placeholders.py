"""A parameter without rows has two elements while an optimizer updates it, and is restored afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero.optimizers.placeholders import Placeholders


def _shapes(values: dict[str, Any]) -> list[torch.Size]:
    return [value.shape for value in values.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("rest", [(), (3,), (3, 2)])
def test_parameters_gradients_and_state_have_two_elements_inside_and_none_outside(rest: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.empty(0, *rest, dtype=torch.float64))
    rows, whole = parameter.data_ptr(), (2, *(1 for _ in rest))
    kept = torch.empty(0, *rest)
    state: dict[Tensor, Any] = {parameter: {"kept": kept, "nested": [torch.empty(0, *rest)], "count": 1}}
    placeholders = Placeholders()
    for has_gradient in (True, False, True):
        parameter.grad = torch.empty_like(parameter) if has_gradient else None
        with torch.no_grad(), placeholders.replacing([parameter], lambda: state):
            assert parameter.shape == whole and parameter.dtype == torch.float64 and not parameter.any()
            assert (parameter.grad is not None) == has_gradient
            assert parameter.grad is None or (parameter.grad.shape == whole and not parameter.grad.any())
            assert state[parameter]["kept"] is kept and kept.shape == state[parameter]["nested"][0].shape == whole
            assert kept.dtype == torch.float32
        assert parameter.shape == kept.shape == state[parameter]["nested"][0].shape == (0, *rest)
        assert parameter.grad is None and parameter.data_ptr() == rows and state[parameter]["count"] == 1


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
