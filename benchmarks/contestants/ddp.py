"""PyTorch's DistributedDataParallel, alone and with ZeroRedundancyOptimizer, which shards its state over all ranks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.base import Contestant
from benchmarks.task import OPTIMIZER, Task

__all__ = ["DDP", "DDPZero"]


class DDP(Contestant):
    """DDP with fp32 parameters and gradients, autocast, and a reduction in the last micro-batch.

    DDP's own hook for bf16 reductions does not support gloo, so this module has an equivalent hook for gloo. Buffers
    are not broadcast, as with the other contestants.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for broadcast_buffers
            self.model = DistributedDataParallel(
                task.build().to(task.device_type), gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if task.reduce_dtype == torch.bfloat16:
            # A lambda, because DDP rejects hooks with string annotations.
            self.model.register_comm_hook(None, lambda _, bucket: _reduce_in_bf16(bucket))
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.task.optimizer(self.model.parameters())

    def backward(self, batch: Any, *, last: bool) -> Tensor:
        dtype = self.task.compute_dtype
        with nullcontext() if last else self.model.no_sync():
            with nullcontext() if dtype is None else torch.autocast(self.task.device_type, dtype):
                loss = self.task.loss(self.model, batch)
            (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DDPZero(DDP):
    """DDP whose optimizer state is sharded. Updated weights are sent in fp32."""

    def _optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - its import emits a warning

        return ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIMIZER
        )


def _reduce_in_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket's gradients in bf16 to their mean over all ranks."""
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))
