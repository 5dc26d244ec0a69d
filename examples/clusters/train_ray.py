"""Train inside Ray Train: each worker is a rank, and the loop shards the model with layerzero.

    python examples/clusters/train_ray.py --workers 16 --gpus

runs on the Ray cluster that the machine belongs to. If there is none, Ray starts on this machine. `--storage` is a
folder that all nodes share. Ray restarts failed workers, and the loop resumes from the latest checkpoint, also with
another number of workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import layerzero
from layerzero import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 1))


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.square().mean(1, keepdim=True)


def train(config: dict[str, Any]) -> None:
    """Train one rank. Ray has set the device, the process group and torchrun's environment variables."""
    device = ray.train.torch.get_device()
    rank = ray.train.get_context().get_world_rank()
    model = layerzero.shard_model(make_model().to(device), zero3_size=config["zero3_size"], units={Block})
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

    folder = f"{config['storage']}/checkpoints"
    found = checkpoint.load_latest(folder, model, optimizer)
    for step in range(found.extra["step"] if found else 0, config["steps"]):
        x, target = (tensor.to(device) for tensor in make_batch(step, rank))
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["save_every"] == 0:
            checkpoint.save(f"{folder}/step-{step + 1:06d}", model, optimizer, {"step": step + 1}, keep_last=2)
        ray.train.report({"step": step + 1, "loss": loss.item()})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpus", action="store_true", help="one per worker")
    parser.add_argument("--zero3-size", type=int, help="ranks in a ZeRO-3 group; default: all workers of a node")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--storage", default="runs/ray", help="a folder that all nodes share")
    args = parser.parse_args(argv)

    storage = str(Path(args.storage).absolute())
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "storage": storage},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(name="layerzero", storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    print("last report:", trainer.fit().metrics)


if __name__ == "__main__":
    main()
