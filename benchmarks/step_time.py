"""Step time and bytes of layerzero beside FSDP2, on the same model and batches.

    python benchmarks/step_time.py                     # 4 gloo ranks on this machine, bf16, 4 micro-batches

Every contestant lives in the same processes and they take steps in turn, so that a drift of the machine meets all of
them alike. The median of the slowest rank's times is printed, with its ratio to layerzero's, and the bytes that the
loopback interface carried per step (all ranks, headers included; Linux only). All start from the same weights and see
the same batches; the losses after the last step are printed, and must agree.

FSDP2 runs as full sharding over all ranks, and as HSDP with the same node size: reducing everything in each
micro-batch, as it does unless told otherwise, and with the all-reduce between replicas only in the last one, which is
its best setting for gradient accumulation.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import layerzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig, next_token_loss

LR = 1e-3


@dataclass
class Contestant:
    """One way to take a step: ``step(batches) -> loss``."""

    name: str
    step: Callable[[list[Tensor]], Tensor]
    seconds: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    loss: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--zero3-size", type=int, default=2, help="ranks of a node; the shard size of HSDP")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after 2 that are not")
    parser.add_argument("--reduce-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--accumulation", choices=["sharded", "full"], default="sharded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, f"{folder}/store"), nprocs=args.ranks)


def run(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    reduce_dtype = torch.float32 if args.reduce_dtype == "fp32" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    contestants = [
        layerzero_contestant(args, policy),
        fsdp2_contestant("FSDP2 HSDP, all-reduce last only", args, policy, replicas=True, all_reduce_last_only=True),
        fsdp2_contestant("FSDP2 HSDP", args, policy, replicas=True, all_reduce_last_only=False),
        fsdp2_contestant("FSDP2 full", args, policy, replicas=False, all_reduce_last_only=False),
    ]
    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps + 2):
        batches = [torch.randint(256, (1, args.seq_len), generator=generator) for _ in range(args.micro_batches)]
        for contestant in contestants:
            measure(contestant, batches, counts=step >= 2)
    if rank == 0:
        report(args, contestants)
    dist.destroy_process_group()


def measure(contestant: Contestant, batches: list[Tensor], *, counts: bool) -> None:
    dist.barrier()
    bytes_before, start = loopback_bytes(), time.perf_counter()
    loss = contestant.step(batches)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.barrier()
    wire_bytes = loopback_bytes() - bytes_before
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(loss)
    contestant.loss = float(loss) / dist.get_world_size()
    if counts:
        contestant.seconds.append(float(seconds))
        contestant.wire_bytes.append(wire_bytes)


def report(args: argparse.Namespace, contestants: list[Contestant]) -> None:
    numel = sum(p.numel() for p in make_model(args).parameters())
    print(
        f"torch {torch.__version__}, {args.ranks} gloo ranks, nodes of {args.zero3_size}, "
        f"{numel / 1e6:.1f} M parameters, {args.micro_batches} micro-batches of {args.seq_len} tokens, "
        f"bf16 compute, {args.reduce_dtype} reduction, "
        f"{args.accumulation} accumulation; median of {args.steps} steps"
    )
    print(f"{'':<34}{'step, s':>9}{'(min - max)':>16}{'ratio':>8}{'MB on the wire':>17}{'loss':>9}")
    ours = statistics.median(contestants[0].seconds)
    for each in contestants:
        median = statistics.median(each.seconds)
        spread = f"({min(each.seconds):.3f} - {max(each.seconds):.3f})"
        sent = statistics.median(each.wire_bytes) / 1e6
        print(f"{each.name:<34}{median:>9.3f}{spread:>16}{median / ours:>8.2f}{sent:>17.1f}{each.loss:>9.4f}")


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=args.layers, width=args.width, heads=args.width // 64, context=args.seq_len))


def layerzero_contestant(args: argparse.Namespace, policy: MixedPrecisionPolicy) -> Contestant:
    model = layerzero.shard_model(
        make_model(args), zero3_size=args.zero3_size, units=Block, mp_policy=policy, accumulation=args.accumulation
    )
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=LR, foreach=True), model)

    def step(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            with contextlib.nullcontext() if last else layerzero.no_sync(model):
                total += backward(model, batch, len(batches))
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contestant("layerzero", step)


def fsdp2_contestant(
    name: str, args: argparse.Namespace, policy: MixedPrecisionPolicy, *, replicas: bool, all_reduce_last_only: bool
) -> Contestant:
    shape = (args.ranks // args.zero3_size, args.zero3_size) if replicas else (args.ranks,)
    names = ("replicate", "shard") if replicas else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model(args)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)

    def step(batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index + 1 == len(batches)
            model.set_is_last_backward(last)
            if all_reduce_last_only:
                model.set_requires_all_reduce(last)
            total += backward(model, batch, len(batches))
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contestant(name, step)


def backward(model: nn.Module, batch: Tensor, micro_batches: int) -> Tensor:
    loss = next_token_loss(model(batch), batch.roll(-1, 1)) / micro_batches
    loss.backward()
    return loss.detach().float()


def loopback_bytes() -> int:
    path = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


if __name__ == "__main__":
    main()
