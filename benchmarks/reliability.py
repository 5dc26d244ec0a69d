"""Measure the costs of guard_steps, guard_corruption, the watchdog and in-memory snapshots per step.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.reliability

The model is a transformer of 12.6 M parameters in bf16, with four micro-batches of four sequences of 64 tokens per step
and S = 2. Steps with each guard alternate with steps without guards. The output has the fastest and the median step in
seconds, and the time that the guard adds to the fastest step. guard_corruption checks every step here; with a check at
every hundredth step it costs a hundredth of that. Snapshots are taken every fourth step, with two ranks per node.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.checkpoint import Buddies


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = layerzero.shard_model(model, zero3_size=2, units={Block}, mp_policy=policy)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), model)
    batch = torch.randn(4, 64, args.width)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        for micro_batch in range(4):
            with contextlib.nullcontext() if micro_batch == 3 else layerzero.no_sync(model):
                model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    guards: dict[str, Callable[[], Any]] = {
        "nothing": lambda: contextlib.closing(contextlib.ExitStack()),
        "guard_steps": lambda: contextlib.closing(layerzero.guard_steps(model, optimizer)),
        "guard_steps, locate=False": lambda: contextlib.closing(layerzero.guard_steps(model, optimizer, locate=False)),
        "guard_corruption, every=1": lambda: contextlib.closing(layerzero.guard_corruption(model, optimizer, every=1)),
        "watchdog": lambda: contextlib.closing(layerzero.watchdog(model, 600)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in guards}
    for turn in range(args.rounds + 1):
        for name, guard in guards.items():
            with guard():
                step()  # warm-up, after which the guard has its reference values
                taken = [step(), step()]
            seconds[name] += taken if turn else []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"node{dist.get_rank() // 2}-") as own:
        nodes = [own] * dist.get_world_size()
        dist.all_gather_object(nodes, own)
        buddies = Buddies(model, optimizer, name="benchmark", memory=nodes[dist.get_rank() // 2 * 2])
        for turn in range(args.rounds + 1):
            began = time.perf_counter()
            buddies.snapshot()
            call = time.perf_counter() - began
            taken = [step() for _ in range(4)]
            if turn:
                seconds.setdefault("Buddies: the call, every 4 steps", []).append(call)
                seconds.setdefault("Buddies: the step after it", []).append(taken[0])
                seconds.setdefault("Buddies: other steps", []).extend(taken[1:])
        buddies.close()
        dist.barrier()
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, {args.rounds} rounds")
        least = min(seconds["nothing"])
        for name, taken in seconds.items():
            added = 100 * (min(taken) / least - 1)
            print(f"{name:32} fastest {min(taken):.3f}  median {statistics.median(taken):.3f}  adds {added:+.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
