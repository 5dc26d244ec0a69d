"""Model, optimizers and changes of weights for tests of encoded refreshes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero.engine.weight_storage import WeightStorage

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
WIDTH = 40


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 61, *, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 61, *, outputs: int = 7, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, inner, bias=bias) for _ in range(3))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float()


def make_adamw(model: nn.Module) -> list[Optimizer]:
    return [layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)]


def make_muon(model: nn.Module) -> list[Optimizer]:
    """Muon's owners have parts of different sizes, some of them empty."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [
        layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=1e-3), model),
        layerzero.shard_optimizer(torch.optim.AdamW(rest, lr=2e-3), model),
    ]


def load(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    state = layerzero.full_state_dict(model)
    layerzero.load_full_state_dict(model, {name: value * 0.5 for name, value in state.items()} if rank == 0 else {})


def refresh(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    layerzero.refresh(model)


def is_refreshing(weights: WeightStorage) -> bool:
    """Return whether a refresh of this rank's shard is in flight."""
    return weights._refreshing is not None and not weights._refreshing.done()
