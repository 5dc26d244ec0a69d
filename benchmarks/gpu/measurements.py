"""Parts that measure time and memory."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import layerzero
from benchmarks.gpu.loopback import ModeledNetwork
from benchmarks.gpu.models import NODE, WORLD, Step, batches, contestant, one_of_64, one_rank, synchronize
from benchmarks.gpu.report import report
from benchmarks.gpu.waits import CUDA_WAITS, observed_waits, place
from benchmarks.simulation.simulator import SimMachine
from layerzero.comm.codecs import ParamRows, has_feedback

# Eight accelerators share a port of 400 Gbit/s.
_MACHINE = SimMachine(
    node_size=NODE,
    inside=300e9,
    between=400e9 / 8,
    inside_latency=5e-6,
    between_latency=10e-6,
    steps="log",
    launch=10e-6,
    zero3_size=NODE,
)
_OVERHEAD = ("plain", "layerzero", "layerzero-full", "fsdp2-full", "fsdp2-hsdp")
_OFFLOADS = ("layerzero", "layerzero-offload-grads", "layerzero-offload-optimizer", "fsdp2-full")


# The machine


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what launches, events, streams and threads cost, in microseconds: medians of five rounds."""
    module: Any = torch.get_device_module(args.device)
    small, side, event = torch.zeros(1, device=args.device), module.Stream(), module.Event()
    event.record()
    host = torch.zeros(1, pin_memory=args.device == "cuda")

    def on_side() -> None:
        with module.stream(side):
            small.add_(1)

    def switch() -> None:
        with module.stream(side):
            pass

    def alternate() -> None:
        """Launch a kernel on each of two streams, of which each waits for the other."""
        small.add_(1)
        side.wait_stream(module.current_stream())
        on_side()
        module.current_stream().wait_stream(side)

    def free_across() -> None:
        memory = torch.empty(2**20, device=args.device)
        if args.device == "cuda":
            memory.record_stream(side)

    runs: dict[str, Callable[[], object]] = {
        "launch": lambda: small.add_(1),
        "launch on another stream": on_side,
        "switch of the stream": switch,
        "record of an event": lambda: module.current_stream().record_event(),
        "wait for an event": lambda: side.wait_event(event),
        "two launches on alternating streams": alternate,
        "allocation and free": lambda: torch.empty(2**20, device=args.device),
        "allocation, record_stream and free": free_across,
        "copy to the host": lambda: host.copy_(small, non_blocking=True),
    }
    found: dict[str, Any] = {}
    for name, run in runs.items():
        count = 20 if args.tiny else 500  # below the number of launches that a stream can hold
        rounds = [_cost(args, run, count) for _ in range(6)][1:]
        enqueued, ended = (statistics.median(each) for each in zip(*rounds, strict=True))
        found[name] = {"host": enqueued, "until done": ended}
    found["launch and wait of the host"] = {"host": _per_call(args, lambda: small.add_(1).item())}
    found["switch of threads"] = {"host": _thread_switch(20 if args.tiny else 2000)}
    return {"ok": True, **found}


def _cost(args: argparse.Namespace, run: Callable[[], object], count: int) -> tuple[float, float]:
    """Return microseconds per call until all calls are enqueued, and until the device has finished."""
    synchronize(args)
    began = time.perf_counter()
    for _ in range(count):
        run()
    enqueued = time.perf_counter()
    synchronize(args)
    return (enqueued - began) / count * 1e6, (time.perf_counter() - began) / count * 1e6


def _per_call(args: argparse.Namespace, run: Callable[[], object]) -> float:
    return _cost(args, run, 20 if args.tiny else 200)[0]


def _thread_switch(count: int) -> float:
    """Return microseconds of handing work to another thread, half of the time there and back."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(count):
            asked.acquire()
            answered.release()

    thread = threading.Thread(target=answer)
    thread.start()
    began = time.perf_counter()
    for _ in range(count):
        asked.release()
        answered.acquire()
    seconds = time.perf_counter() - began
    thread.join()
    return seconds / count / 2 * 1e6


# The host


def blocking(args: argparse.Namespace) -> dict[str, Any]:
    """Find what makes the host wait for the device in a step, with one NCCL rank and with one of 64 ranks.

    The device is busy when the step begins. A step whose host part takes longer than that has waited for the device.
    """
    found: dict[str, Any] = {}
    for where, groups in (("one rank", one_rank), ("one of 64", lambda args: one_of_64(ModeledNetwork))):
        for scheme in ("layerzero", "layerzero-full", "layerzero-local", *_OFFLOADS[1:]):
            with groups(args):
                ranks = (1, 1) if where == "one rank" else (WORLD, NODE)
                found[f"{where}, {scheme}"] = _waits_of_host(args, scheme, ranks)
                report({"ok": False, "error": "not finished", **found})
    return {"ok": True, **found}


def _waits_of_host(args: argparse.Namespace, scheme: str, ranks: tuple[int, int]) -> dict[str, Any]:
    model, step = contestant(args, scheme, *ranks)
    data = batches(args, 2)
    for _ in range(3):
        step(data)
    places: Counter[str] = Counter()
    methods = [(torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize")]
    synchronize(args)
    busy = 0.0
    with (
        _reported_synchronizations(args, places),
        observed_waits(methods) as host,
        observed_waits(CUDA_WAITS[:1]) as queued,
    ):
        if args.device == "cuda":
            ModeledNetwork.calibrate()
            busy = 0.3
            torch.cuda._sleep(int(busy * ModeledNetwork.cycles_per_second))
        began = time.perf_counter()
        step(data)
        seconds = time.perf_counter() - began
        synchronize(args)
    calls = _runtime_calls(args, lambda: step(data))
    if scheme.startswith("layerzero"):
        layerzero.close(model)
    return {
        "host": seconds,
        "waits for the device": args.device == "cuda" and seconds > busy,
        "places": dict(places + host),
        "waits between streams": queued.total(),
        "calls": calls,
    }


@contextlib.contextmanager
def _reported_synchronizations(args: argparse.Namespace, places: Counter[str]) -> Iterator[None]:
    """Count operations of torch that wait for the device, by the place in layerzero that calls them."""
    if args.device == "cpu":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: places.update([place() or str(message)[:80]])
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _runtime_calls(args: argparse.Namespace, run: Callable[[], object]) -> dict[str, Any]:
    """Return the number and the milliseconds of the ten kinds of calls of CUDA's runtime that took longest."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    with profile(activities=activities) as observed:
        run()
        synchronize(args)
    prefix = "cu" if args.device == "cuda" else "aten"
    calls = [event for event in observed.key_averages() if event.key.startswith(prefix)]
    calls.sort(key=lambda event: -event.self_cpu_time_total)
    return {event.key: [event.count, event.self_cpu_time_total / 1e3] for event in calls[:10]}


# Time


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one of 64 ranks whose collectives take no time: host time, device time and kernels of a step.

    The schemes take turns. The host time is the time until all work of a step is enqueued.
    """
    found: dict[str, Any] = {}
    with one_of_64(ModeledNetwork):
        steps = {scheme: contestant(args, scheme, WORLD, NODE)[1] for scheme in _OVERHEAD}
        for count in (1, 4):
            data = batches(args, count)
            for scheme, case in taken_in_turn(args, steps, data, 9).items():
                case["kernels"] = kernels(args, partial(steps[scheme], data))
                found.setdefault(scheme, {})[f"A={count}"] = case
            report({"ok": False, "error": "not finished", **found})
    return {"ok": True, **found}


def offloads(args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of four micro-batches with offloads on one rank. The schemes take turns."""
    with one_rank(args):
        steps = {scheme: contestant(args, scheme, 1, 1)[1] for scheme in _OFFLOADS}
        return {"ok": True, **taken_in_turn(args, steps, batches(args, 4), 7)}


def network(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of one of 64 ranks over a modeled network, and the same step if collectives take no time.

    The computation is real. A collective occupies its stream as long as the simulator (benchmarks/simulation/README.md)
    expects it to take if no other collective uses the same links.
    """
    with one_of_64(ModeledNetwork):
        _, step = contestant(args, args.scheme, WORLD, NODE)
        data = batches(args, 4)
        found = {"without": timed_steps(args, step, data, 6)}
        if args.device == "cuda":
            ModeledNetwork.calibrate()
        ModeledNetwork.machine = _MACHINE
        found["with"] = timed_steps(args, step, data, 6)
        ModeledNetwork.machine = None
    return found


def timed_steps(args: argparse.Namespace, step: Step, data: list[Tensor], count: int) -> dict[str, Any]:
    """Return the times of a step; see :func:`taken_in_turn`."""
    return taken_in_turn(args, {"": step}, data, count)[""]


def taken_in_turn(
    args: argparse.Namespace, steps: dict[str, Step], data: list[Tensor], count: int
) -> dict[str, dict[str, Any]]:
    """Take the step of each scheme `count` times, turn about, and return its times in seconds.

    These are the medians of the host's part and of the whole step, and the fastest step. The first two rounds do not
    count. The host's part ends when all work is enqueued.
    """
    host: dict[str, list[float]] = {scheme: [] for scheme in steps}
    seconds: dict[str, list[float]] = {scheme: [] for scheme in steps}
    for index in range(3 if args.tiny else count):
        for scheme, step in steps.items():
            synchronize(args)
            began = time.perf_counter()
            step(data)
            enqueued = time.perf_counter()
            synchronize(args)
            if index >= 2:
                host[scheme].append(enqueued - began)
                seconds[scheme].append(time.perf_counter() - began)
    return {
        scheme: {"host": statistics.median(host[scheme]), "step": statistics.median(each), "least": min(each)}
        for scheme, each in seconds.items()
    }


def kernels(args: argparse.Namespace, run: Callable[[], object]) -> int:
    """Return the number of kernels and copies on the device in a run, or of operators on a CPU."""
    on_cuda = args.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as observed:
        run()
        synchronize(args)
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    return sum(event.count for event in observed.key_averages() if event.device_type == wanted)


# Memory


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes of one of 64 ranks by kind, between steps, at the peak, and reserved by torch's allocator."""
    with one_of_64(ModeledNetwork):
        model, step = contestant(args, args.scheme, WORLD, NODE)
        data = batches(args, args.micro_batches)
        for _ in range(2):
            step(data)
        found: dict[str, Any] = {"elements": sum(p.numel() for p in model.parameters())}
        if args.scheme.startswith("layerzero"):
            kinds = layerzero.memory(model)
            found |= {"predicted": kinds.predicted, "measured": kinds.measured}
        if args.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            found["between_steps"] = torch.cuda.memory_allocated()
            step(data)
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            found["peak"] = stats["allocated_bytes.all.peak"]
            found["reserved"] = stats["reserved_bytes.all.peak"]
            found["inactive_split"] = stats["inactive_split_bytes.all.peak"]
            torch.cuda.empty_cache()  # without what sharding the full model has left behind
            torch.cuda.reset_peak_memory_stats()
            step(data)
            torch.cuda.synchronize()
            found["reserved_afresh"] = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    return found


# Codecs


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
            seconds = [_cost(args, run, 1)[1] / 1e6 for _ in range(10)][3:]
            found[f"{name}, {what}"] = count / statistics.median(seconds)
    return found
