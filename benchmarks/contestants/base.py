"""Interface of contestants, which the worker calls."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from benchmarks.task import Task

__all__ = ["Contestant"]


class Contestant(ABC):
    """Model and optimizer of one framework. The constructor builds and shards them; all ranks must call it."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def backward(self, batch: Any, *, last: bool) -> Tensor:
        """Run forward and backward of one micro-batch with weight 1/A; return its unweighted loss, detached.

        Args:
            last: whether this is the last micro-batch of the step.
        """

    @abstractmethod
    def update(self) -> None:
        """Run the optimizer's step and clear the gradients."""

    def ledger(self) -> dict[str, int]:
        """Return the bytes that this rank has sent since the last call, by axis; empty if not counted."""
        return {}

    def close(self) -> None:
        """Free the model and the optimizer. Call this method on all ranks, and do not use the contestant afterwards."""
        self.__dict__.clear()
        gc.collect()

    def kinds(self) -> dict[str, int]:
        """Return the bytes of model state on this rank, by kind; empty if the framework does not report them."""
        return {}
