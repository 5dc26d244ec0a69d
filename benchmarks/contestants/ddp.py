"""PyTorch's DistributedDataParallel with ZeroRedundancyOptimizer: optimizer state sharded over all ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.base import Contestant
from benchmarks.task import COMPUTE_DTYPE, OPTIMIZER, Task, loss_of, make_model

__all__ = ["DDPZero"]


class DDPZero(Contestant):
    """fp32 parameters and gradients on every rank, bf16 compute by autocast, gradients reduced in the last micro-batch.

    With a reduce dtype of bf16, DDP's own hook compresses what it sends. Updated weights travel in fp32.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model = DistributedDataParallel(make_model(task), gradient_as_bucket_view=True)
        if task.reduce_dtype == torch.bfloat16:
            self.model.register_comm_hook(None, bf16_compress_hook)
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
