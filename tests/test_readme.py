"""The README's ten lines, run as they stand, for a model of the reader's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import layerzero
from tests.support.ranks import run_ranks

README = Path(__file__).resolve().parents[1] / "README.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class MyTransformer(nn.Module):
    """Returns its loss, as the README's model does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(batch).float(), torch.zeros(4, 8))


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def _ten_lines(rank: int, code: str) -> list[float]:
    torch.manual_seed(rank)
    batches = [[torch.randn(4, 8)] * 2] * 8
    names: dict[str, Any] = {
        "MyTransformer": MyTransformer,
        "Block": Block,
        "batches": batches,
        "contextlib": contextlib,
    }
    losses = []

    def seen(model: nn.Module, *args: Any) -> Tensor:
        loss = forward(model, *args)
        losses.append(loss.item())
        return loss

    forward = MyTransformer.forward
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(MyTransformer, "forward", seen):
        exec(code, names)
    assert isinstance(names["optimizer"], layerzero.ShardedOptimizer)
    assert layerzero.traffic(names["model"]).calls["refresh"] > 0 or layerzero.traffic(names["model"]).calls["hop1"] > 0
    return losses


def test_the_ten_lines_train_a_model_of_the_readers() -> None:
    (code,) = _blocks("python")
    code = code.replace("zero3_size=8", "zero3_size=2")
    for losses in run_ranks(_ten_lines, code, world_size=4):
        assert len(losses) == 16 and losses[-1] < losses[0], losses


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
