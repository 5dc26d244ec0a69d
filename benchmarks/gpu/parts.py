"""Parts of ``python -m benchmarks.gpu``; each runs in a process that prints one line of results."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.cuda import _sanitizer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import layerzero
from benchmarks.gpu.loopback import Loopback, ModeledNetwork
from benchmarks.simulation.simulator import SimMachine
from layerzero.comm.codecs import ParamRows, has_feedback
from layerzero.comm.collectives import _StreamGather
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.streams import DeviceStream, DeviceStreams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.gpt import GPT, Block, GPTConfig, next_token_loss
from examples.verify_gpt import loss, make_batch, make_model

_WORLD, _NODE = 64, 8  # ranks and ranks per node of the process groups in one process
# Eight accelerators share a port of 400 Gbit/s.
_MACHINE = SimMachine(
    node_size=_NODE,
    inside=300e9,
    between=400e9 / 8,
    inside_latency=5e-6,
    between_latency=10e-6,
    steps="log",
    launch=10e-6,
    zero3_size=_NODE,
)
_MODES = ("sharded", "full", "local")
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
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=_MODES, help="accumulations of loopback")
    parser.add_argument("--without-wait", choices=list(_WAITS), help="break the engine; a check must notice")
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
    """Compare plain and sharded training of a small GPT, in every zero3_size and accumulation, also with offload."""
    start(args, rank, args.ranks, folder)
    found = {}
    for accumulation, offload in itertools.product(_MODES, (False, True)):
        if offload and args.device == "cpu":
            continue
        report = layerzero.verify(
            make_model,
            make_batch,
            loss_fn=loss,
            units={Block},
            accumulation=accumulation,
            offload=layerzero.Offload(grads=offload),
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
    """Compare runs whose collectives are late with runs whose collectives are not, bit for bit, in many settings.

    With `--without-wait`, the engine does not wait for some work, and the results must differ.
    """
    Loopback.start(rank=1, world_size=4)
    on_cuda = args.device == "cuda"
    settings: list[dict[str, Any]] = [
        {"accumulation": mode, "mp_policy": policy, **more}
        for mode in (args.modes if on_cuda else ("sharded",))
        for policy in ((MixedPrecisionPolicy(), _BF16) if on_cuda else (MixedPrecisionPolicy(),))
        for more in (*_LOOPBACK, *(_OFFLOADS if on_cuda else ()))
    ]
    if args.without_wait:
        noticed = _noticed_by(args) if on_cuda else "nothing: a CPU has no streams"
        dist.destroy_process_group()
        return {"ok": noticed is not None, "noticed by": noticed}
    different = []
    for number, each in enumerate(settings):
        prompt, late = (_loopback_run(args, each, delays=delays) for delays in (False, True))
        if any(not torch.equal(a, b) for a, b in zip(prompt, late, strict=True)):
            different.append(f"{number}: {each}")
    dist.destroy_process_group()
    return {"ok": not different, "settings": len(settings), "different": different}


def _noticed_by(args: argparse.Namespace) -> str | None:
    """Return what shows that the engine does not wait, the results or a device error, or None if nothing does."""
    settings = {"offload": layerzero.Offload(grads=args.without_wait == "copies to the host")}
    with without_wait(args.without_wait):
        try:
            prompt, late = (_loopback_run(args, settings, delays=delays) for delays in (False, True))
            return "results" if any(not torch.equal(a, b) for a, b in zip(prompt, late, strict=True)) else None
        except RuntimeError as error:  # for example an index that was read from memory that is still being written
            if not str(error).startswith("CUDA error"):
                raise
            return f"error: {str(error).splitlines()[0]}"


class _Completed:
    """Event that has already completed."""

    def wait(self) -> None:
        pass


# Class and method that waits, or that returns an event to wait for, by the work that must have completed. The value is
# a method that does not wait.
_WAITS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "gradients": (DeviceStreams, "record_gradients_event", lambda streams: _Completed()),
    "earlier reduction streams": (DeviceStream, "wait_event", lambda stream, awaited: None),
    "gathers": (_StreamGather, "wait", lambda gather: None),
    "copies to the host": (HostDeviceCopies, "wait", lambda copies, mark: None),
}


def without_wait(what: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the engine does not wait for `what`."""
    owner, name, method = _WAITS[what]
    return mock.patch.object(owner, name, method)


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
                    lag(delays)
                    value = next_token_loss(model(ids), ids.roll(-1, 1))
                    lag(delays)
                    for again in (True, False) if retain else (False,):
                        value.backward(retain_graph=again)
            layerzero.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    (next_token_loss(model(data[0]), data[0].roll(-1, 1))).backward()
    found = [tensor for p in model.parameters() for tensor in (p.to_local(), p.grad.to_local())]
    layerzero.close(model)
    return found


def lag(delays: bool) -> None:
    """With delays, keep the current stream busy, so that the host enqueues a pass before the device computes it."""
    if delays and torch.cuda.is_available():
        torch.cuda._sleep(50_000_000)  # about 25 milliseconds


_LOOPBACK: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"side_stream": True},
    {"checkpoints": True},
    {"retain_graph": True},
    {"reshard_after_forward": False},
    {"mp_policy": layerzero.PrecisionPolicy(fp32_accumulation=True)},
    {"codecs": layerzero.Codecs(hop2=layerzero.Int4Blocks())},
)
_OFFLOADS = (
    {"offload": layerzero.Offload(grads=True)},
    {"offload": layerzero.Offload(optimizer=True)},
    {"offload": layerzero.Offload(params=True)},
)


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """Run steps under torch's sanitizer, which raises on data races between streams.

    With `--without-wait`, the engine does not wait for some work, and the sanitizer must raise.
    """
    if args.device == "cuda":
        _sanitizer.enable_cuda_sanitizer()
        _regard_storages()
    if not args.without_wait:
        return {"ok": True, **steps(args)}
    try:
        with without_wait(args.without_wait):
            steps(args)
    except Exception as error:
        chain: list[BaseException] = [error]  # torch's logger of collectives raises another error in the meantime
        while chain[-1].__context__ is not None:
            chain.append(chain[-1].__context__)
        if not any(isinstance(each, _sanitizer.CUDASanitizerErrors) for each in chain):
            raise
        return {"ok": True}
    return {"ok": args.device == "cpu"}  # without streams, there are no races


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
    offload = {"offload": layerzero.Offload(grads=args.offload != "nothing", optimizer=args.offload == "optimizer")}
    with one_of_64(Loopback):
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
def one_of_64(groups: type[Loopback]) -> Iterator[None]:
    """Use process groups of a class, with this process as rank 0 of 64."""
    groups.start(rank=0, world_size=_WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes of one of 64 ranks with two micro-batches, between steps and at the peak."""
    with one_of_64(ModeledNetwork):
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
        found = timed_steps(args, step, data, 12)
        found["loss"] = float(step(data))
        dist.destroy_process_group()
    found["peak"] = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return found


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one of 64 ranks whose collectives take no time: host time, device time, kernels and memory of a step.

    The host time is the time until all work of a step is enqueued, without waiting for the device.
    """
    found = {}
    with one_of_64(ModeledNetwork):
        _, step = contestant(args, _WORLD, _NODE)
        for micro_batches in (1, 4):
            data = batches(args, micro_batches)
            case: dict[str, Any] = timed_steps(args, step, data)
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step(data)
            if args.device == "cuda":
                torch.cuda.synchronize()
                stats = torch.cuda.memory_stats()
                case["peak"] = stats["allocated_bytes.all.peak"]
                case["reserved"] = stats["reserved_bytes.all.peak"]
                case["inactive_split"] = stats["inactive_split_bytes.all.peak"]
            case["kernels"] = kernels(args, lambda data=data: step(data))
            found[f"A={micro_batches}"] = case
    return found


def timed_steps(
    args: argparse.Namespace, step: Callable[[list[Tensor]], Tensor], data: list[Tensor], count: int = 9
) -> dict[str, Any]:
    """Return times of a step in seconds: medians of the host's part and of the whole step, and the fastest step.

    The host's part ends when all work is enqueued.
    """
    host, seconds = [], []
    for index in range(4 if args.tiny else count):
        synchronize(args)
        began = time.perf_counter()
        step(data)
        enqueued = time.perf_counter()
        synchronize(args)
        if index >= 2:
            host.append(enqueued - began)
            seconds.append(time.perf_counter() - began)
    return {"host": statistics.median(host), "step": statistics.median(seconds), "least": min(seconds)}


def kernels(args: argparse.Namespace, run: Callable[[], object]) -> int:
    """Return the number of kernels and copies on the device in a run, or of operators on a CPU."""
    on_cuda = args.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as observed:
        run()
        synchronize(args)
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    return sum(event.count for event in observed.key_averages() if event.device_type == wanted)


def network(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of one of 64 ranks over a modeled network, and the same step if collectives take no time.

    The computation is real. A collective occupies its stream as long as the simulator (benchmarks/simulation/README.md)
    expects it to take if no other collective uses the same links.
    """
    with one_of_64(ModeledNetwork):
        _, step = contestant(args, _WORLD, _NODE)
        data = batches(args, 4)
        found = {"without": timed_steps(args, step, data, 6)}
        if args.device == "cuda":
            ModeledNetwork.calibrate()
        ModeledNetwork.machine = _MACHINE
        found["with"] = timed_steps(args, step, data, 6)
        ModeledNetwork.machine = None
    return found


def codecs(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the codecs of gradients between nodes, in elements per second."""
    count = 2**14 if args.tiny else 2**27
    values = torch.randn(count, device=args.device)
    decoded, residual = torch.empty_like(values), torch.zeros(count, dtype=torch.bfloat16, device=args.device)
    blocks = [ParamRows(start=0, rows=1, length=count)]
    found = {}
    for name, codec in (("int8", layerzero.Int8Blocks()), ("int4", layerzero.Int4Blocks(feedback=True))):
        message = torch.empty(codec.nbytes(blocks, values.dtype), dtype=torch.uint8, device=args.device)
        runs = {"encode": partial(codec.encode, values, blocks, message)}
        if has_feedback(codec):
            runs["encode with feedback"] = partial(codec.encode_with_feedback, values, blocks, message, residual)
        runs["decode"] = partial(codec.decode, message, blocks, decoded)
        for what, run in runs.items():
            seconds = [elapsed(args, run) for _ in range(10)][3:]
            found[f"{name}, {what}"] = count / statistics.median(seconds)
    return found


def elapsed(args: argparse.Namespace, run: Callable[[], object]) -> float:
    synchronize(args)
    began = time.perf_counter()
    run()
    synchronize(args)
    return time.perf_counter() - began


def capture(args: argparse.Namespace) -> dict[str, Any]:
    """Capture the MLP of a unit in a CUDA graph inside the unit's forward, and compare its replay with eager results.

    On a CPU, which has no graphs, the results of two calls are compared.
    """
    alike = []

    def check(mlp: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values = inputs[0].clone()
        if args.device == "cpu":
            captured = mlp.forward(values)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = mlp.forward(values)
            graph.replay()
        alike.append(torch.equal(captured, output))

    with one_of_64(Loopback):
        model = build(args).requires_grad_(False)
        model = layerzero.shard_model(model, zero3_size=_NODE, units={Block}, mp_policy=_BF16)
        ids = batches(args, 1)[0]
        with torch.no_grad():
            for _ in range(3):
                model(ids)
            with model.blocks[0].mlp.register_forward_hook(check):
                model(ids)
    return {"ok": alike == [True]}


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
        settings = _SETTINGS[args.scheme]
        model = layerzero.shard_model(model, zero3_size=node, units={Block}, mp_policy=_BF16, **settings)
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


_SETTINGS: dict[str, dict[str, Any]] = {
    "layerzero": {},
    "layerzero-full": {"accumulation": "full"},
    "layerzero-local": {"accumulation": "local"},
    "layerzero-offload-grads": {"offload": layerzero.Offload(grads=True)},
    "layerzero-offload-optimizer": {"offload": layerzero.Offload(optimizer=True)},
}
_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "loopback": loopback,
    "sanitizer": sanitizer,
    "steps": steps,
    "memory": memory,
    "step-time": step_time,
    "overhead": overhead,
    "network": network,
    "codecs": codecs,
    "capture": capture,
}

if __name__ == "__main__":
    main()
