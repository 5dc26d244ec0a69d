"""Model, data and loss that snippets of README and docs assume. Pages import them in comments, see pages.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, SAMPLES = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class MyModel(nn.Module):
    """Model that returns its output."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class MyTransformer(MyModel):
    """Model that returns its loss, like the model in the README."""

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(super().forward(x), x)


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(output.float(), x.float().sum(1, keepdim=True))


def batch(seed: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def batches(rank: int, steps: int = 4, micro_batches: int = 2) -> list[list[Tensor]]:
    """Return the micro-batches of each step; they differ between ranks."""
    return [[batch(1000 * rank + 10 * step + i) for i in range(micro_batches)] for step in range(steps)]
