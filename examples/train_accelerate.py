"""Train a sharded GPT with Hugging Face Accelerate. Comments mark the differences from plain Accelerate.

torchrun --nproc-per-node 4 examples/train_accelerate.py
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig, next_token_loss
from torch.utils.data import DataLoader

from layerzero.integrations.accelerate import LayerZeroAccelerator, LayerZeroPlugin  # not accelerate's Accelerator


def main(steps: int = 20, folder: str | None = None) -> list[float]:
    plugin = LayerZeroPlugin(zero3_size=2, units="Block")  # or set ACCELERATE_LAYERZERO_CONFIG and pass no plugin
    accelerator = LayerZeroAccelerator(layerzero_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=2, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(b"to be or not to be, that is the question: " * 200)).unfold(0, 33, 7)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(text, batch_size=8, shuffle=True))
    losses: list[float] = []
    while len(losses) < steps:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
            losses += [loss.item()] if accelerator.sync_gradients else []
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    if folder is not None:
        accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    main()
