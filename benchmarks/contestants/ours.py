"""layerzero with any zero3_size, and the model's computation without communication."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from benchmarks.contestants.base import Contestant
from benchmarks.task import COMPUTE_DTYPE, Task, loss_of, make_model

__all__ = ["ComputeAlone", "LayerZero", "Sites"]


class _Ours(Contestant):
    """Training loop of layerzero. A subclass sets `model` and `optimizer`."""

    model: nn.Module
    optimizer: layerzero.ShardedOptimizer

    def backward(self, batch: Any, *, last: bool) -> Tensor:
        with nullcontext() if last else layerzero.no_sync(self.model):
            loss = self.task.loss(self.model, batch)
            (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ledger(self) -> dict[str, int]:
        return layerzero.traffic(self.model, reset=True).bytes_by_axis

    def kinds(self) -> dict[str, int]:
        return layerzero.memory(self.model).measured

    def close(self) -> None:
        layerzero.close(self.model)
        super().close()


class LayerZero(_Ours):
    def __init__(
        self,
        task: Task,
        *,
        zero3_size: int,
        accumulation: str,
        shared_memory: str,
        hop2: str | None,
        refresh_codec: str | None,
        reshard_after_forward: bool | Literal["step"],
        accumulate_in_bf16: bool,
    ) -> None:
        super().__init__(task)
        self.model = layerzero.shard_model(
            task.build(),
            mesh=layerzero.init_mesh(zero3_size, task.device_type),
            units=task.is_unit,
            mp_policy=layerzero.PrecisionPolicy.of(
                task.policy, accumulation_dtype=torch.bfloat16 if accumulate_in_bf16 else None
            ),
            accumulation=accumulation,
            codecs=layerzero.Codecs(
                hop2=None if hop2 is None else {"int8": layerzero.Int8Blocks(), "int4": layerzero.Int4Blocks()}[hop2],
                refresh=layerzero.Int4Difference() if refresh_codec == "int4" else refresh_codec,
            ),
            shared_memory=shared_memory,
            reshard_after_forward=reshard_after_forward,
        )
        self.optimizer = layerzero.shard_optimizer(task.optimizer(self.model.parameters()), self.model)


class Sites(_Ours):
    """layerzero with one site per node, and outer steps between sites. This is not synchronous training.

    Each site trains on its own batches, so the loss differs from that of other contestants.
    """

    def __init__(self, task: Task, *, every: int, fragments: int, delay: int) -> None:
        super().__init__(task)
        shape = (task.ranks // task.node_size, 1, task.node_size)
        mesh = init_device_mesh(task.device_type, shape, mesh_dim_names=("site", "replica", "zero3"))
        self.model = layerzero.shard_model(
            task.build(), mesh=mesh["replica", "zero3"], units=task.is_unit, mp_policy=task.policy
        )
        self.optimizer = layerzero.shard_optimizer(task.optimizer(self.model.parameters()), self.model)
        self._outer = layerzero.outer(
            self.model,
            self.optimizer,
            sites=mesh["site"],
            every=every,
            warmup=0,
            fragments=fragments,
            delay=delay,
            codec=layerzero.Int4Blocks(),
        )

    def update(self) -> None:
        super().update()
        self._outer.step()


class ComputeAlone(Contestant):
    """Forward and backward of the bf16 model on all ranks at once, without communication or an optimizer.

    Step times are compared with the time of this contestant, which is not a strict bound. Each rank has its own weights
    and accumulates gradients in bf16, which costs more than reading weights that the ranks of a node share. The model
    is not trained, so its loss does not change.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model = make_model(task).to(COMPUTE_DTYPE)

    def backward(self, batch: Tensor, *, last: bool) -> Tensor:
        loss = loss_of(self.model, batch)
        (loss / self.task.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        self.model.zero_grad()
