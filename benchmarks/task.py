"""Task of all contestants: the same model, weights, batches and optimizer settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig, next_token_loss

__all__ = ["COMPUTE_DTYPE", "OPTIMIZER", "REDUCE_DTYPES", "Block", "Task", "loss_of", "make_batches", "make_model"]

COMPUTE_DTYPE = torch.bfloat16
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# The fastest AdamW of torch on a CPU. All contestants use it, on their own tensors.
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}

_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work of one optimizer step. The defaults are the model of the published tables: 25.3 M parameters.

    :mod:`benchmarks.compare` has a subclass for models of users.
    """

    micro_batches: int  # A, on each rank
    reduce: str  # dtype of reduced gradients, a key of REDUCE_DTYPES
    ranks: int = 4
    node_size: int = 2  # ranks of a node; S of the hybrids
    layers: int = 8
    width: int = 512
    seq_len: int = 64
    batch_size: int = 1  # sequences per micro-batch

    @property
    def reduce_dtype(self) -> torch.dtype:
        return REDUCE_DTYPES[self.reduce]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Compute dtype of a model in fp32; None if the model computes in its own dtype."""
        return COMPUTE_DTYPE

    @property
    def device_type(self) -> str:
        return "cpu"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=self.reduce_dtype)

    def build(self) -> nn.Module:
        """Return the model, with the same weights on every rank and for every contestant."""
        return make_model(self)

    def is_unit(self, name: str, module: nn.Module) -> bool:
        """Return whether a submodule is a unit that is gathered at once."""
        return isinstance(module, Block)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **OPTIMIZER)

    @property
    def replicas(self) -> int:
        return self.ranks // self.node_size

    @property
    def settings(self) -> dict[str, int]:
        """Settings without A and the reduce dtype, which the tables vary."""
        return {key: value for key, value in asdict(self).items() if key not in ("micro_batches", "reduce")}


def make_model(task: Task) -> nn.Module:
    """Return the model in fp32, with the same weights on every rank and for every contestant."""
    torch.manual_seed(0)
    heads = max(1, task.width // 64)
    return GPT(GPTConfig(layers=task.layers, width=task.width, heads=heads, context=task.seq_len))


def make_batches(task: Task, *, rank: int, step: int) -> list[Tensor]:
    """Return A micro-batches of token ids [batch, length] for one rank and step, the same for every contestant.

    Each sequence counts up with its own stride. A model learns such sequences from the first steps on. A contestant
    with wrong gradients therefore has a different loss, which random tokens would not show.
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    shape = (task.micro_batches, task.batch_size, 1)
    start = torch.randint(_VOCABULARY, shape, generator=generator)
    stride = torch.randint(1, 5, shape, generator=generator)
    return list((start + stride * torch.arange(task.seq_len)) % _VOCABULARY)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean next-token loss of a micro-batch; the last position has no next token."""
    return next_token_loss(model(batch)[:, :-1], batch[:, 1:])
