"""Replace parameters that have no rows on this rank with placeholders during a step.

[Note: Parameters without rows]
A rank may have no rows of a parameter. torch's own optimizers accept such empty tensors, but kernels from other
packages might not. NVIDIA Apex packs tensors into launches and starts the last launch at the last chunk of the last
tensor. An empty tensor has no chunk, so the tensors that are packed before it are never updated. Therefore only torch's
own optimizers step empty tensors. During a step of any other optimizer, a parameter without rows has two zero elements
and a gradient of zeros. State tensors with the parameter's shape also have two elements. All ranks then step the same
parameters in the same order, and all ranks have the same step count for a parameter. Placeholders have two elements
because some code treats a single element as a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.utils.torch_compat import tree_leaves


def placeholder(rows: Tensor) -> Tensor:
    """Return zeros of shape [2, 1, ...] with the same number of dims, dtype and device as the empty tensor `rows`."""
    return torch.zeros((2, *(1 for _ in rows.shape[1:])), dtype=rows.dtype, device=rows.device)


@dataclass(eq=False)
class _Placeholder:
    """Two-element tensors that replace one parameter. They are reused, so that later steps do not allocate memory."""

    elements: Tensor
    gradient: Tensor
    state: dict[Tensor, Tensor] = field(default_factory=dict)  # keyed by the state tensor that is replaced


class Placeholders:
    """Placeholders of one optimizer's parameters; see [Note: Parameters without rows]."""

    def __init__(self) -> None:
        self._by_param: dict[Tensor, _Placeholder] = {}

    @contextmanager
    def replacing(self, empty: Iterable[Tensor], get_state: Callable[[], Mapping[Any, Any]]) -> Iterator[None]:
        """Context manager that replaces empty parameters, their gradients and their state with two-element tensors.

        Parameters and state tensors remain the same objects. Only their ``data`` changes.

        Args:
            empty: parameters without elements. Their gradients are None after the context.
            get_state: function that returns the state of the optimizer, by parameter. A step may replace the state.
        """
        rows, state = {parameter: parameter.data for parameter in empty}, get_state()
        try:
            for parameter in rows:
                self._insert(parameter, state.get(parameter))
            yield
        finally:
            state = get_state()
            for parameter, before in rows.items():
                self._remove(parameter, before, state.get(parameter))

    def _insert(self, parameter: Tensor, values: Any) -> None:
        if parameter not in self._by_param:
            self._by_param[parameter] = _Placeholder(placeholder(parameter), placeholder(parameter))
        replacement, has_gradient = self._by_param[parameter], parameter.grad is not None
        for tensor in _tensors_of_shape(values, parameter.shape):
            tensor.data = replacement.state[tensor] if tensor in replacement.state else placeholder(tensor)
        parameter.grad = None
        parameter.data = replacement.elements
        if has_gradient:
            parameter.grad = replacement.gradient

    def _remove(self, parameter: Tensor, rows: Tensor, values: Any) -> None:
        replacement = self._by_param[parameter]
        replacement.state = {}
        for tensor in _tensors_of_shape(values, replacement.elements.shape):
            replacement.state[tensor] = tensor.data
            tensor.data = tensor.new_empty(rows.shape)
        parameter.grad = None
        parameter.data = rows


def _tensors_of_shape(values: Any, shape: torch.Size) -> Iterator[Tensor]:
    """Yield the plain tensors of shape `shape` in a parameter's state."""
    for value in tree_leaves(values):
        if type(value) in (Tensor, nn.Parameter) and value.shape == shape:
            yield value
