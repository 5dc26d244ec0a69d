"""DeepSpeed on its CPU accelerator: ZeRO-1, ZeRO-3, and ZeRO-3 with a second copy of the weights in each node (hpZ)."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger
from torch import Tensor

from benchmarks.contestants.base import Contestant
from benchmarks.task import OPTIMIZER, Task, loss_of, make_model

__all__ = ["DeepSpeed"]

_BUCKET = 50_000_000  # elements: larger than the model, so that a step's gradients travel in as few pieces as can be


class DeepSpeed(Contestant):
    """The engine divides losses by A and reduces where its stage does: ZeRO-1 once per step, ZeRO-3 in each backward.

    Args:
        stage: of ZeRO.
        hpz: ZeRO-3 gathers weights for compute inside the node.
        accumulate: dtype of gradients between micro-batches; None: that of the reduction.
    """

    def __init__(self, task: Task, *, stage: int, hpz: bool = False, accumulate: str | None = None) -> None:
        super().__init__(task)
        logger.setLevel(logging.ERROR)
        model = make_model(task)
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
        if hpz:
            zero["zero_hpz_partition_size"] = task.node_size
        if stage == 3:
            zero |= {"stage3_prefetch_bucket_size": 5_000_000, "stage3_param_persistence_threshold": 10_000}
        config = {
            "train_micro_batch_size_per_gpu": task.batch_size,
            "gradient_accumulation_steps": task.micro_batches,
            "bf16": {"enabled": True},
            "communication_data_type": task.reduce,
            "data_types": {"grad_accum_dtype": accumulate or task.reduce},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), **OPTIMIZER), config=config
        )

    def backward(self, batch: Tensor, *, last: bool) -> Tensor:
        loss = loss_of(self.engine, batch)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch
        return loss.detach()

    def update(self) -> None:
        self.engine.step()
