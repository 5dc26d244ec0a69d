"""PyTorch's FSDP2 (fully_shard) and FSDP1 (FullyShardedDataParallel)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.contestants.base import Contestant
from benchmarks.task import COMPUTE_DTYPE, OPTIMIZER, Block, Task, loss_of, make_model

__all__ = ["FSDP1", "FSDP2"]


class FSDP2(Contestant):
    """FSDP2 with the units of the task, by default the blocks, and the root as units.

    Args:
        replicas: True: HSDP, which shards inside a node and all-reduces between nodes. False: full sharding over all
            ranks.
        accumulate: collectives that micro-batches before the last one skip: ``"all_reduce"`` (between nodes; gradients
            stay sharded), ``"everything"`` (each rank keeps full gradients), or None (no collectives are skipped).
        keep: weights stay gathered between forward and backward.
    """

    def __init__(self, task: Task, *, replicas: bool, accumulate: str | None = None, keep: bool = False) -> None:
        super().__init__(task)
        self.accumulate = accumulate
        shape = (task.replicas, task.node_size) if replicas else (task.ranks,)
        mesh = init_device_mesh(task.device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = task.build()
        units = [module for name, module in model.named_modules() if name and task.is_unit(name, module)]
        for unit in reversed(units):  # inner units first
            fully_shard(unit, mesh=mesh, mp_policy=task.policy, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, mp_policy=task.policy)
        assert isinstance(model, FSDPModule)
        self.model = model
        self.optimizer = task.optimizer(model.parameters())

    def backward(self, batch: Any, *, last: bool) -> Tensor:
        self.model.set_is_last_backward(last)
        if self.accumulate == "all_reduce":
            self.model.set_requires_all_reduce(last)
        elif self.accumulate == "everything":
            self.model.set_requires_gradient_sync(last)
        loss = self.task.loss(self.model, batch)
        (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class FSDP1(Contestant):
    """FSDP1 with blocks and root as units.

    All micro-batches except the last run in ``no_sync``, with full gradients.
    """

    def __init__(self, task: Task, *, strategy: str) -> None:
        super().__init__(task)
        mesh = init_device_mesh("cpu", (task.replicas, task.node_size), mesh_dim_names=("replicate", "shard"))
        self.model = FullyShardedDataParallel(
            make_model(task),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=COMPUTE_DTYPE, reduce_dtype=task.reduce_dtype),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIMIZER)

    def backward(self, batch: Tensor, *, last: bool) -> Tensor:
        with nullcontext() if last else self.model.no_sync():
            loss = loss_of(self.model, batch)
            (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
