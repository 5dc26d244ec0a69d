"""Parts of ``python -m benchmarks.gpu``; each runs in a process that prints one line of results."""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import layerzero
from benchmarks.gpu.loopback import Loopback
from layerzero.device.streams import DeviceStreams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.gpt import GPT, Block, GPTConfig, next_token_loss
from examples.verify_gpt import loss, make_batch, make_model

_WORLD, _NODE = 64, 8  # ranks and ranks per node of the fake process group
# Layers, width and vocabulary. "llama" has four layers of the width of Llama-3 8B, with its vocabulary.
_SHAPES = {"1.3b": (24, 2048, 256), "7b": (32, 4096, 256), "llama": (4, 4096, 128_256)}
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["verify", *_PARTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=["gloo", "default"], default="gloo", help="default: NCCL on CUDA")
    parser.add_argument("--model", choices=list(_SHAPES), default="1.3b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--by-storage", action="store_true", help="let the sanitizer regard a storage as one tensor")
    parser.add_argument("--scheme", default="layerzero")
    parser.add_argument("--offload", choices=["nothing", "grads", "optimizer"], default="nothing")
    parser.add_argument("--side-stream", action="store_true", help="train on another stream than the default one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.part == "verify":
            mp.spawn(verify, (args, folder), nprocs=args.ranks)
            found = json.loads(Path(folder, "result").read_text())
        else:
            found = _PARTS[args.part](args)
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
    for accumulation, offload in itertools.product(("sharded", "full", "local"), (False, True)):
        if offload and args.device == "cpu":
            continue
        report = layerzero.verify(
            make_model, make_batch, loss_fn=loss, units={Block}, accumulation=accumulation, offload_grads=offload
        )
        worst, case = report.worst, accumulation + ", offload_grads" * offload
        found[case] = {"alike": report.ok, "largest": None if worst is None else str(worst)}
        if not report.ok:
            found[case]["report"] = str(report)
    if rank == 0:
        ok = all(each["alike"] for each in found.values())
        Path(folder, "result").write_text(json.dumps({"ok": ok, **found}))
    dist.barrier()
    dist.destroy_process_group()


def loopback(args: argparse.Namespace) -> dict[str, Any]:
    """Compare runs whose collectives are late with runs whose collectives are not, bit for bit, in many settings."""
    Loopback.start(rank=1, world_size=4)
    on_cuda = args.device == "cuda"
    settings: list[dict[str, Any]] = [
        {"accumulation": mode, "mp_policy": policy, **more}
        for mode in (("sharded", "full", "local") if on_cuda else ("sharded",))
        for policy in ((MixedPrecisionPolicy(), _BF16) if on_cuda else (MixedPrecisionPolicy(),))
        for more in (*_LOOPBACK, *(_OFFLOADS if on_cuda else ()))
    ]
    different = []
    for number, each in enumerate(settings):
        prompt, late = (_loopback_run(args, each, delays=delays) for delays in (False, True))
        if any(not torch.equal(a, b) for a, b in zip(prompt, late, strict=True)):
            different.append(f"{number}: {each}")
    found = {"ok": not different, "settings": len(settings), "different": different}
    if on_cuda:  # without this wait, reductions read gradients too early
        ready, DeviceStreams.gradients_ready = DeviceStreams.gradients_ready, lambda streams: _Reached()
        prompt, late = (_loopback_run(args, settings[0], delays=delays) for delays in (False, True))
        DeviceStreams.gradients_ready = ready
        found["notices a missing wait"] = any(not torch.equal(a, b) for a, b in zip(prompt, late, strict=True))
    dist.destroy_process_group()
    return found


class _Reached:
    """Event that has already completed."""

    def wait(self) -> None:
        pass


def _loopback_run(args: argparse.Namespace, settings: dict[str, Any], *, delays: bool) -> list[Tensor]:
    """Train for three steps, and return the local tensors of the parameters and gradients."""
    Loopback.delays = delays
    settings = dict(settings)
    checkpoints, retain = settings.pop("checkpoints", False), settings.pop("retain_graph", False)
    args = argparse.Namespace(**{**vars(args), "tiny": True, "side_stream": settings.pop("side_stream", False)})
    model = build(args)
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    model = layerzero.shard_model(model, zero3_size=2, units={Block}, shared_memory="off", **settings)
    optimizer = layerzero.shard_optimizer(adamw(model), model)
    torch.manual_seed(1)
    for _ in range(3):
        data = batches(args, 3)
        with side_stream(args):
            for index, ids in enumerate(data):
                with contextlib.nullcontext() if index == 2 else layerzero.no_sync(model):
                    value = next_token_loss(model(ids), ids.roll(-1, 1))
                    for again in (True, False) if retain else (False,):
                        value.backward(retain_graph=again)
            layerzero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    (next_token_loss(model(data[0]), data[0].roll(-1, 1))).backward()
    found = [tensor for p in model.parameters() for tensor in (p.to_local(), p.grad.to_local())]
    layerzero.close(model)
    return found


_LOOPBACK: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"side_stream": True},
    {"checkpoints": True},
    {"retain_graph": True},
    {"reshard_after_forward": False},
    {"reduce_scatter_with_fp32_accumulation": True},
    {"hop2_codec": layerzero.Int4Blocks()},
)
_OFFLOADS = ({"offload_grads": True}, {"offload_optimizer": True}, {"offload_params": True})


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """Run steps under torch's sanitizer, which raises on data races between streams."""
    if args.device == "cuda":
        _sanitizer.enable_cuda_sanitizer()
        if args.by_storage:
            _regard_storages()
    return steps(args)


def _regard_storages() -> None:
    """Make torch's sanitizer regard all views of a storage as one tensor. Accesses to disjoint views then conflict."""
    original = _sanitizer.ArgumentHandler._handle_argument

    def handle(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor) and value.is_cuda and value.untyped_storage().nbytes():
            value = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
        original(self, value, *args, **kwargs)

    _sanitizer.ArgumentHandler._handle_argument = handle


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Train for three steps of three micro-batches. A tool such as compute-sanitizer may observe the process."""
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
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers "fake"

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


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one of 64 ranks of a fake process group: host time, device time, kernels and memory of a step.

    The host time is the time until all work of a step is enqueued, without waiting for the device.
    """
    with fake_world():
        _, step = contestant(args, _WORLD, _NODE)
        data = batches(args, args.micro_batches)
        host, seconds = [], []
        for index in range(4 if args.tiny else 9):
            synchronize(args)
            began = time.perf_counter()
            step(data)
            enqueued = time.perf_counter()
            synchronize(args)
            if index >= 2:
                host.append(enqueued - began)
                seconds.append(time.perf_counter() - began)
        activity = ProfilerActivity.CUDA if args.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as observed:
            step(data)
            synchronize(args)
        found = {"host": statistics.median(host), "step": statistics.median(seconds)}
        found["kernels"] = sum(event.count for event in observed.key_averages())
        if args.device == "cuda":
            stats = torch.cuda.memory_stats()
            found["peak"] = stats["allocated_bytes.all.peak"]
            found["inactive_split"] = stats["inactive_split_bytes.all.peak"]
    return found


def capture(args: argparse.Namespace) -> dict[str, Any]:
    """Capture the MLP of a unit in a CUDA graph inside the unit's forward, and compare replays with eager results."""
    with fake_world():
        model = build(args).requires_grad_(False)
        model = layerzero.shard_model(model, zero3_size=_NODE, units={Block}, mp_policy=_BF16)
        ids = batches(args, 1)[0]
        block, alike = model.blocks[0], []

        def check(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            given = inputs[0].clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = module.mlp.out(module.mlp.up(given))
            graph.replay()
            alike.append(torch.equal(captured, module.mlp.out(module.mlp.up(given))))

        with torch.no_grad():
            for _ in range(3):
                model(ids)
            if args.device == "cuda":
                with_hook = block.register_forward_hook(check)
                model(ids)
                with_hook.remove()
    return {"ok": all(alike), "captured": len(alike)}


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


# Models


def build(args: argparse.Namespace) -> nn.Module:
    layers, width, vocabulary = _SHAPES[args.model]
    if args.tiny:
        layers, width, vocabulary = 2, 64, 256
    torch.manual_seed(0)
    with torch.device(args.device):
        return GPT(
            GPTConfig(
                layers=layers,
                width=width,
                heads=width // 64,
                context=tokens(args),
                vocab_size=vocabulary,
                tied_head=vocabulary == 256,
            )
        )


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


_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "loopback": loopback,
    "sanitizer": sanitizer,
    "steps": steps,
    "memory": memory,
    "step-time": step_time,
    "overhead": overhead,
    "capture": capture,
}

if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    main()
