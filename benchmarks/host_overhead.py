"""Measure the host overhead of sharding: microseconds per unit and pass, compared with FSDP2, without communication.

    python benchmarks/host_overhead.py

One process is rank 0 of 64 on torch's fake process group, whose collectives return immediately and move no data. The
model has 32 small units, so that the difference to a pass of the plain model is the cost of hooks, views, buffer
handling and launches. On a GPU, the host needs this time to run ahead of the device.

The plain model and the contestants alternate. The output is the CPU time of this thread, as median and quartiles.
Without communication, the values of the tensors have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed import fake_pg

import layerzero


class Block(nn.Module):
    """Small block with the same number of parameter tensors as a transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(self.norm1(x)))
        return x + self.down(self.up(self.norm2(x)))


@dataclass
class Contestant:
    """Model, function that switches gradient reduction on or off, and times in seconds by pass."""

    name: str
    model: nn.Module
    synchronize: Callable[[bool], None]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "accumulate": [], "reduce": []})

    def take_step(self, x: Tensor, *, counts: bool) -> None:
        for kind in ("accumulate", "reduce"):
            self.synchronize(kind == "reduce")
            start = time.thread_time()
            loss = self.model(x).sum()
            middle = time.thread_time()
            loss.backward()
            end = time.thread_time()
            if counts:
                self.seconds["forward"].append(middle - start)
                self.seconds[kind].append(end - middle)
        self.model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--zero3-size", type=int, default=8)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of two passes, after 5 that are not")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=args.world_size)
    contestants = [
        plain(args),
        ours(args, "sharded"),
        ours(args, "full"),
        fsdp2("FSDP2 full", args),
        fsdp2("FSDP2 full, no_sync", args, accumulates_whole=True),
        fsdp2("FSDP2 HSDP, all-reduce last only", args, replicas=True),
    ]
    x = torch.randn(4, args.width, dtype=torch.bfloat16)
    for step in range(args.steps + 5):
        for contestant in contestants:
            contestant.take_step(x, counts=step >= 5)
    report(contestants, args)
    dist.destroy_process_group()


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(args.width) for _ in range(args.units)))


def plain(args: argparse.Namespace) -> Contestant:
    return Contestant("plain", make_model(args).to(torch.bfloat16), lambda synchronize: None)


def ours(args: argparse.Namespace, accumulation: str) -> Contestant:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = layerzero.shard_model(
        make_model(args),
        zero3_size=args.zero3_size,
        units=Block,
        mp_policy=policy,
        accumulation=accumulation,
        shared_memory="off",  # as on a device
    )
    inside = contextlib.ExitStack()

    def synchronize(reduces: bool) -> None:
        inside.close()
        if not reduces:
            inside.enter_context(layerzero.no_sync(model))

    return Contestant(f"layerzero, {accumulation}", model, synchronize)


def fsdp2(
    name: str, args: argparse.Namespace, *, replicas: bool = False, accumulates_whole: bool = False
) -> Contestant:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = (args.world_size // args.zero3_size, args.zero3_size) if replicas else (args.world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard") if replicas else ("shard",))
    model = make_model(args)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)

    def synchronize(reduces: bool) -> None:
        model.set_is_last_backward(reduces)
        if replicas:
            model.set_requires_all_reduce(reduces)
        if accumulates_whole:
            model.set_requires_gradient_sync(reduces)

    return Contestant(name, model, synchronize)


def report(contestants: list[Contestant], args: argparse.Namespace) -> None:
    print(
        f"torch {torch.__version__}, rank 0 of {args.world_size} on the fake process group, {args.units} units; "
        "us of CPU time per unit and pass beyond the plain model's"
    )
    print(f"{'':<34}{'forward':>20}{'backward, accumulating':>26}{'backward, reducing':>22}")
    base = {kind: statistics.median(times) for kind, times in contestants[0].seconds.items()}
    for each in contestants:
        shown = {}
        for kind, times in each.seconds.items():
            quarters = statistics.quantiles(times, n=4)
            low, middle, high = (
                (seconds - (base[kind] if each is not contestants[0] else 0)) / args.units * 1e6 for seconds in quarters
            )
            shown[kind] = f"{middle:.0f} ({low:.0f} - {high:.0f})"
        print(f"{each.name:<34}{shown['forward']:>20}{shown['accumulate']:>26}{shown['reduce']:>22}")


if __name__ == "__main__":
    main()
