"""PyTorch's DistributedDataParallel with ZeroRedundancyOptimizer: optimizer state sharded over all ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.base import Contestant
from benchmarks.task import COMPUTE_DTYPE, OPTIMIZER, Task, loss_of, make_model

__all__ = ["DDPZero"]


class DDPZero(Contestant):
    """DDP with fp32 parameters and gradients, bf16 autocast, and a reduction in the last micro-batch.

    Updated weights are sent in fp32. DDP's own hook for bf16 reductions does not support gloo, so this module has an
    equivalent hook for gloo.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model = DistributedDataParallel(make_model(task), gradient_as_bucket_view=True)
        if task.reduce_dtype == torch.bfloat16:
            # A lambda, because DDP rejects hooks with string annotations.
            self.model.register_comm_hook(None, lambda _, bucket: _reduce_in_bf16(bucket))
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **OPTIMIZER
        )

    def backward(self, batch: Tensor, *, last: bool) -> Tensor:
        with nullcontext() if last else self.model.no_sync():
            with torch.autocast("cpu", COMPUTE_DTYPE):
                loss = loss_of(self.model, batch)
            (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _reduce_in_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket's gradients in bf16 to their mean over all ranks."""
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))
