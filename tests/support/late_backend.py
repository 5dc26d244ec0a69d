"""A third-party backend: gloo, whose exchanges say late that they are done, on each rank at times of its own.

Registered like any backend that torch does not know. It stands in for a device's library in what matters here: it is
not called gloo, it has no `options`, and whether an exchange is done already differs between the ranks.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["NAME", "LateGroup", "register"]

NAME = "late"
_MOST_DENIALS = 4


def register() -> None:
    """Make the backend known to torch in this process, as often as is asked."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


class _LateWork(dist.Work):
    """Says that it is not done as often as was drawn, then that it is, when it is. By the clock, load would decide."""

    def __init__(self, inner: dist.Work, denials: int) -> None:
        super().__init__()
        self._inner = inner
        self._denials = denials

    def is_completed(self) -> bool:
        self._denials -= 1
        return self._denials < 0 and self._inner.wait()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._inner.wait()

    def get_future(self) -> Any:
        raise RuntimeError("this backend has no futures")


class LateGroup(dist.ProcessGroup):
    """Passes on to gloo. Of a wrapped group torch says ``cpu:late``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._random = random.Random(dist.get_rank())

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def options(self) -> Any:
        raise RuntimeError("this backend has no options")

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _late(self, work: dist.Work) -> _LateWork:
        return _LateWork(work, self._random.randrange(_MOST_DENIALS + 1))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._late(self._gloo.broadcast(tensors, opts))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._late(self._gloo.allreduce(tensors, opts))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._late(self._gloo._allgather_base(output, tensor, opts))

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._late(self._gloo._reduce_scatter_base(output, tensor, opts))

    # Of unequal parts, which gloo itself does not take.

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        outputs[0][self.rank()].copy_(tensors[0])
        works = [self._broadcast_from(rank, part) for rank, part in enumerate(outputs[0]) if part.numel()]
        return self._late_after(works)

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Any:
        for rank, part in enumerate(tensors[0]):
            options = dist.ReduceOptions()
            options.rootRank = rank
            summed = part.clone()
            self._gloo.reduce([summed], options).wait()
            if rank == self.rank():
                outputs[0].copy_(summed)
        return self._late_after([])

    def alltoall_base(self, output: Tensor, tensor: Tensor, outputs: list[int], inputs: list[int], opts: Any) -> Any:
        return self._late(self._gloo.alltoall_base(output, tensor, outputs, inputs, opts))

    def _broadcast_from(self, rank: int, part: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = rank
        return self._gloo.broadcast([part], options)

    def _late_after(self, works: list[Any]) -> _LateWork:
        for work in works:
            work.wait()
        return self._late(self._gloo.barrier(dist.BarrierOptions()))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._allgather_base(output, tensor, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self._reduce_scatter_base(output, tensor, opts)
