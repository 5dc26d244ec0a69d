"""Train a sharded GPT with Lightning's Trainer. Comments mark the differences from plain Lightning.

torchrun --nproc-per-node 4 examples/train_lightning.py
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig, next_token_loss
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from layerzero.integrations.lightning import LayerZeroStrategy  # or strategy="layerzero" after this import


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=2, width=64, heads=2, context=32))
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = next_token_loss(self.gpt(ids[:, :-1]), ids[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(steps: int = 12, folder: str | None = None) -> list[float]:
    text = torch.tensor(list(b"to be or not to be, that is the question: " * 200)).unfold(0, 33, 7)
    strategy = LayerZeroStrategy(zero3_size=2, units="Block")  # instead of strategy="ddp"
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, max_steps=steps, default_root_dir=folder)
    trainer.fit(model := Model(), DataLoader(text, batch_size=8, shuffle=True))  # ModelCheckpoint writes a folder
    return model.losses


if __name__ == "__main__":
    main()
