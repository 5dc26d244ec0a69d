"""What the worker asks of a contestant."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from benchmarks.task import Task

__all__ = ["Contestant"]


class Contestant(ABC):
    """One way of taking optimizer steps. The constructor builds and shards; all ranks call it at once."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def backward(self, batch: Tensor, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch, weighted 1/A; returns its unweighted loss, detached.

        Args:
            last: the step's last micro-batch.
        """

    @abstractmethod
    def update(self) -> None:
        """The optimizer's step; no gradients are left afterwards."""

    def ledger(self) -> dict[str, int]:
        """Bytes that this rank has sent by axis since the last call, where the framework counts them."""
        return {}

    def kinds(self) -> dict[str, int]:
        """Bytes of model state by kind on this rank, where the framework tells them apart."""
        return {}
