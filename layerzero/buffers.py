"""Flat scratch buffers that are taken, given back and taken again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["BufferPool"]


class BufferPool:
    """Reuses flat buffers of equal size and dtype, so that a steady state allocates nothing.

    A buffer handed to an exchange is given back only after the exchange was waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self.allocated_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D buffer ``[numel]`` with unspecified contents."""
        idle = self._idle[numel, dtype]
        if idle:
            return idle.pop()
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self.allocated_bytes += buffer.untyped_storage().nbytes()
        return buffer

    def give(self, buffer: Tensor) -> None:
        self._idle[buffer.numel(), buffer.dtype].append(buffer)
