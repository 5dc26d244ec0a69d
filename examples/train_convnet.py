"""Train a small residual network with batch norm on synthetic images, sharded with layerzero.

torchrun --standalone --nproc-per-node 4 examples/train_convnet.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import layerzero

CLASSES, SIZE = 4, 16


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def build() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(
        stem, *(Block(16) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def pictures(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of stripes in one of four directions with noise, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=random)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.stack([(a * x + b * y).float().mul(1.5).sin() for a, b in ((1, 0), (0, 1), (1, 1), (1, -1))])
    return stripes[labels].unsqueeze(1) + 0.5 * torch.randn(number, 3, SIZE, SIZE, generator=random), labels


def average_statistics(model: nn.Module) -> None:
    """Average the running statistics over ranks before an evaluation or a save."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()  # on all ranks, because a forward gathers weights
    images, labels = pictures(256, seed=1)
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main(steps: int = 40) -> tuple[list[float], float]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # Masters, gradients and moments are sharded over all ranks, weights over two. With weights in bf16, batch norm
    # would also need buffers in bf16: use buffer_dtype, or mp_policy=callable with fp32 for units with norms.
    model = layerzero.shard_model(build(), zero3_size=2, units={Block})
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    losses = []
    for step in range(steps):
        images, labels = pictures(16, seed=1000 * (step + 1) + dist.get_rank())
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    average_statistics(model)
    right = accuracy(model)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.0%} of 256 new pictures right")
    return losses, right


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
