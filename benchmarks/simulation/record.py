"""Recording of the engine's schedule in one process, on a fake process group of many ranks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import layerzero
from layerzero import TraceEvent

__all__ = ["Settings", "StandIn", "one_of_many", "record", "record_blocks", "train_step"]


@dataclass(frozen=True)
class Settings:
    """Settings of a simulated run."""

    ranks: int
    zero3_size: int
    micro_batches: int
    accumulation: str = "sharded"
    reduce_dtype: torch.dtype = torch.float32

    @property
    def replicas(self) -> int:
        return self.ranks // self.zero3_size

    def shard(self, model: nn.Module, units: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layerzero.shard_model(
            model,
            zero3_size=self.zero3_size,
            units=units,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=self.reduce_dtype),
            accumulation=self.accumulation,  # type: ignore[arg-type]
            shared_memory="off",  # the schedule is used for devices
        )
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        return model, layerzero.shard_optimizer(adamw, model)


class StandIn(nn.Module):
    """Tiny model with the same number of blocks, and therefore the same schedule, as the real model."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@contextlib.contextmanager
def one_of_many(ranks: int) -> Iterator[None]:
    """Use a fake process group in which this process is rank 0; collectives return immediately with undefined data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Run one optimizer step; each function in `losses` returns the loss of one micro-batch."""
    for index, loss in enumerate(losses):
        with contextlib.nullcontext() if index + 1 == len(losses) else layerzero.no_sync(model):
            (loss() / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()


def record(
    model: nn.Module,
    units: Any,
    losses_of: Callable[[nn.Module], Sequence[Callable[[], Tensor]]],
    settings: Settings,
    *,
    steps: int,
    warm_up: int = 2,
) -> tuple[TraceEvent, ...]:
    """Record and return the schedule of `steps` steps, after `warm_up` steps that are not recorded."""
    with one_of_many(settings.ranks), tempfile.TemporaryDirectory() as folder:
        model, optimizer = settings.shard(model, units)
        losses = losses_of(model)
        for _ in range(warm_up):
            train_step(model, optimizer, losses)
        with layerzero.trace(model, Path(folder, "trace.json")) as trace:
            for _ in range(steps):
                train_step(model, optimizer, losses)
        return trace.events


def record_blocks(blocks: int, settings: Settings, *, steps: int = 3) -> tuple[TraceEvent, ...]:
    """Record the schedule of a model with `blocks` blocks; units are ``blocks.0``, ... and the root."""
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    return record(
        StandIn(blocks),
        [f"blocks.{index}" for index in range(blocks)],
        lambda model: [lambda: model(tokens).float().square().mean()] * settings.micro_batches,
        settings,
        steps=steps,
    )
