"""Small trained models with all kinds of checkpoint contents, and helpers that read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from tests.support.models import (
    IntegerNet,
    TiedTransformer,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_net,
    whole,
)
from tests.support.ranks import mesh_of

GLOBAL_BATCHES = 4  # batches of a step, for any number of ranks


def sharded_net(
    zero3_size: int,
    *,
    units: Any = IntegerNet.UNITS,
    seed: int = 0,
    adam: bool = False,
    steps: int = 0,
    **settings: Any,
) -> tuple[nn.Module, Optimizer]:
    """Return a sharded model and its optimizer after `steps` steps of :func:`train`."""
    model = layerzero.shard_model(integer_net(seed), mesh=mesh_of(zero3_size), units=units, **settings)
    inner = torch.optim.AdamW(model.parameters(), lr=2**-4) if adam else exact_sgd(model.parameters())
    optimizer = layerzero.shard_optimizer(inner, model)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Train on the same global batches for any number of ranks; every gradient is exact."""
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def backward(model: nn.Module, step: int) -> None:
    """Run all passes of this rank in a step of :func:`train`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for batch in range(rank, GLOBAL_BATCHES, world):
        inputs, targets = integer_batch(step=step, rank=batch)
        (8 * (model(inputs) * targets).sum(1).mean() / (GLOBAL_BATCHES // world)).backward()


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state as full tensors."""
    found = {f"model.{name}": value for name, value in full_parameters(model).items()}
    found |= {f"buffer.{name}": value.clone() for name, value in model.named_buffers()}
    for name, values in optimizer.state_dict_by_name()["state"].items():
        for key, value in values.items():
            found[f"optimizer.{name}.{key}"] = whole(value)
    return found


def on_first_rank(change: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call the function on the first rank, while the others wait before and after it."""
    dist.barrier()
    if dist.get_rank() == 0:
        change(*args, **options)
    dist.barrier()


def state_digest(model: nn.Module, optimizer: Optimizer) -> str:
    """Return a digest of :func:`everything`, which does not depend on the number of ranks."""
    digest = hashlib.sha256()
    for name, value in sorted(everything(model, optimizer).items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class WithBuffers(TiedTransformer):
    """Tied transformer with a persistent and a non-persistent buffer, and a module with an extra state."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.counting = self.Counting()
        self.register_buffer("seen", torch.full((3,), seed))
        self.register_buffer("scratch", torch.full((2,), seed), persistent=False)
