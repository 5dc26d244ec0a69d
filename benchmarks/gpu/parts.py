"""Parts of ``python -m benchmarks.gpu``; each runs in a process that prints one line of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.cuda import _sanitizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import layerzero

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.gpt import GPT, Block, GPTConfig, next_token_loss
from examples.verify_gpt import loss, make_batch, make_model

_WORLD, _NODE = 64, 8  # ranks and ranks per node of the fake process group
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["verify", "sanitizer", "memory", "step-time"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=["gloo", "default"], default="gloo", help="default: NCCL on CUDA")
    parser.add_argument("--model", choices=["1.3b", "7b"], default="1.3b")
    parser.add_argument("--scheme", default="layerzero")
    parser.add_argument("--offload", choices=["nothing", "grads", "optimizer"], default="nothing")
    parser.add_argument("--side-stream", action="store_true", help="train on another stream than the default one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.part == "verify":
            mp.spawn(verify, (args, folder), nprocs=args.ranks)
            found = json.loads(Path(folder, "result").read_text())
        else:
            found = {"sanitizer": sanitizer, "memory": memory, "step-time": step_time}[args.part](args)
    print("result: " + json.dumps(found))


# Correctness


def start(args: argparse.Namespace, rank: int, ranks: int, folder: str) -> None:
    """Initialize a process group whose ranks all use the first device."""
    if args.device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if args.backend == "default" and args.device == "cuda" else "gloo"
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def verify(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Compare plain and sharded training of a small GPT, for every zero3_size and both accumulations."""
    start(args, rank, args.ranks, folder)
    found = {}
    for accumulation in ("sharded", "full"):
        report = layerzero.verify(make_model, make_batch, loss_fn=loss, units={Block}, accumulation=accumulation)
        worst = report.worst
        found[accumulation] = "alike" if report.ok else str(report)
        found[f"{accumulation}, largest"] = None if worst is None else str(worst)
    if rank == 0:
        Path(folder, "result").write_text(
            json.dumps({"ok": all(found[a] == "alike" for a in ("sharded", "full")), **found})
        )
    dist.barrier()
    dist.destroy_process_group()


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """Run steps under torch's sanitizer, which raises on data races between streams."""
    if args.device == "cuda":
        _sanitizer.enable_cuda_sanitizer()
    losses = []
    offload = {"offload_grads": args.offload != "nothing", "offload_optimizer": args.offload == "optimizer"}
    with fake_world():
        model = build(args)
        model = layerzero.shard_model(
            model, zero3_size=_NODE, units={Block}, mp_policy=_BF16, accumulation="full", **offload
        )
        step = stepper(model, layerzero.shard_optimizer(adamw(model), model), lambda: layerzero.no_sync(model))
        for _ in range(3):
            data = batches(args, 3)
            with side_stream(args):
                losses.append(float(step(data)))
    return {"steps": len(losses)}


@contextlib.contextmanager
def side_stream(args: argparse.Namespace) -> Iterator[None]:
    if args.device != "cuda" or not args.side_stream:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


# Memory


@contextlib.contextmanager
def fake_world():
    """Use a fake process group in which this process is rank 0; collectives return immediately with undefined data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes of one of 64 ranks with two micro-batches, between steps and at the peak."""
    with fake_world():
        model, step = contestant(args, _WORLD, _NODE)
        for _ in range(2):
            step(batches(args, 2))
        found: dict[str, Any] = {"elements": sum(p.numel() for p in model.parameters())}
        if args.scheme.startswith("layerzero"):
            report = layerzero.memory(model)
            found |= {"predicted": report.predicted, "measured": report.measured}
        if args.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found["between_steps"] = torch.cuda.memory_allocated()
            step(batches(args, 2))
            torch.cuda.synchronize()
            found["peak"] = torch.cuda.max_memory_allocated()
    return found


# Time


def step_time(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of four micro-batches on one device without communication: the overhead of the library."""
    with tempfile.TemporaryDirectory() as folder:
        args.backend = "default"
        start(args, 0, 1, folder)
        _, step = contestant(args, 1, 1)
        data = batches(args, 4)
        seconds = []
        for index in range(4 if args.tiny else 13):
            synchronize(args)
            began = time.perf_counter()
            loss_value = step(data)
            synchronize(args)
            if index >= 3:
                seconds.append(time.perf_counter() - began)
        dist.destroy_process_group()
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return {"median": statistics.median(seconds), "least": min(seconds), "loss": float(loss_value), "peak": peak}


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


# Models


def build(args: argparse.Namespace) -> nn.Module:
    layers, width = {"1.3b": (24, 2048), "7b": (32, 4096)}[args.model]
    if args.tiny:
        layers, width = 2, 64
    torch.manual_seed(0)
    with torch.device(args.device):
        return GPT(GPTConfig(layers=layers, width=width, heads=width // 64, context=tokens(args)))


def tokens(args: argparse.Namespace) -> int:
    return 32 if args.tiny else 1024


def batches(args: argparse.Namespace, count: int) -> list[Tensor]:
    size = 1 if args.tiny else 4
    return [torch.randint(256, (size, tokens(args)), device=args.device) for _ in range(count)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def contestant(args: argparse.Namespace, world: int, node: int) -> tuple[nn.Module, Callable[[list[Tensor]], Tensor]]:
    model = build(args)
    if args.scheme.startswith("layerzero"):
        accumulation = "full" if args.scheme.endswith("full") else "sharded"
        model = layerzero.shard_model(model, zero3_size=node, units={Block}, mp_policy=_BF16, accumulation=accumulation)
        return model, stepper(model, layerzero.shard_optimizer(adamw(model), model), lambda: layerzero.no_sync(model))
    if args.scheme == "plain":
        model = model.to(torch.bfloat16)
        return model, stepper(model, adamw(model), contextlib.nullcontext)
    hsdp = args.scheme == "fsdp2-hsdp"
    shape = (world // node, node) if hsdp else (world,)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("replicate", "shard") if hsdp else ("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=_BF16)
    fully_shard(model, mesh=mesh, mp_policy=_BF16)

    @contextlib.contextmanager
    def accumulate():
        if hsdp:
            model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        yield
        if hsdp:
            model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)

    return model, stepper(model, adamw(model), accumulate)


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[[list[Tensor]], Tensor]:
    def step(data: list[Tensor]) -> Tensor:
        for index, ids in enumerate(data):
            with contextlib.nullcontext() if index + 1 == len(data) else accumulate():
                value = next_token_loss(model(ids), ids.roll(-1, 1)) / len(data)
                value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    main()
