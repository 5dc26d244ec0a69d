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

_STAGE_3_BUCKET = 4_000_000  # elements, about one block; bucket buffers stay allocated


class DeepSpeed(Contestant):
    """DeepSpeed engine. It divides losses by A; ZeRO-1 reduces once per step, ZeRO-3 in each backward.

    Args:
        stage: ZeRO stage.
        hpz: ZeRO-3 gathers compute weights inside the node.
        accumulate: dtype of gradients between micro-batches. None: the reduce dtype.
    """

    def __init__(self, task: Task, *, stage: int, hpz: bool = False, accumulate: str | None = None) -> None:
        super().__init__(task)
        logger.setLevel(logging.ERROR)
        # Avoid the compilation of this op. Only DeepSpeed's inference uses it, for all-reduces in shared memory.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model = make_model(task)
        # ZeRO-1 reduces and gathers once per step, in one bucket.
        bucket = _STAGE_3_BUCKET if stage == 3 else sum(parameter.numel() for parameter in model.parameters())
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if hpz:
            zero["zero_hpz_partition_size"] = task.node_size
        if stage == 3:
            zero |= {"stage3_prefetch_bucket_size": _STAGE_3_BUCKET, "stage3_param_persistence_threshold": 10_000}
        config = {
            "train_micro_batch_size_per_gpu": task.batch_size,
            "gradient_accumulation_steps": task.micro_batches,
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
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
