"""Mark work of the package in torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from layerzero.utils.torch_compat import is_profiling

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def profiler_range(*words: str) -> AbstractContextManager[Any]:
    """Return a range of torch's profiler with the name ``layerzero.`` and `words`.

    While the profiler is not active, return a context manager that does nothing, at the cost of reading one attribute.
    """
    if not is_profiling():
        return _NO_RANGE
    return torch.profiler.record_function(f"layerzero.{' '.join(filter(None, words))}")
