"""Parts that check one process: late collectives, torch's sanitizer, waits that are left out, and a captured graph."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda import _sanitizer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from benchmarks.gpu.loopback import Loopback
from benchmarks.gpu.models import (
    BF16,
    NODE,
    adamw,
    batches,
    build,
    one_of_64,
    side_stream,
    stepper,
    synchronize,
)
from benchmarks.gpu.report import last_report, report
from benchmarks.gpu.waits import observed_waits
from examples.gpt import Block, next_token_loss

MODES = ("sharded", "full", "local")
_CODES: dict[str, Any] = {"codecs": layerzero.Codecs(hop2=layerzero.Int4Blocks())}
_LOOPBACK: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"side_stream": True},
    {"checkpoints": True},
    {"retain_graph": True},
    {"reshard_after_forward": False},
    {"mp_policy": layerzero.PrecisionPolicy(fp32_accumulation=True)},
    _CODES,
)
_OFFLOADS: tuple[dict[str, Any], ...] = (
    {"offload": layerzero.Offload(grads=True)},
    {"offload": layerzero.Offload(optimizer=True)},
    {"offload": layerzero.Offload(params=True)},
)
# Together, these settings reach every wait. A wait is left out in the first setting that reaches it.
_WAITING: tuple[dict[str, Any], ...] = (
    *({"accumulation": mode} for mode in MODES),
    {"side_stream": True},
    _CODES,
    {"codecs": layerzero.Codecs(gather=layerzero.Float8Rows()), "mp_policy": BF16},
    *({"accumulation": "full", **each} for each in _OFFLOADS),
)


def loopback(args: argparse.Namespace) -> dict[str, Any]:
    """Compare runs whose collectives are late with runs whose collectives are not, bit for bit, in many settings."""
    Loopback.start(rank=1, world_size=4)
    on_cuda = args.device == "cuda"
    settings: list[dict[str, Any]] = [
        {"accumulation": mode, "mp_policy": policy, **more}
        for mode in (args.modes if on_cuda else ("sharded",))
        for policy in ((MixedPrecisionPolicy(), BF16) if on_cuda else (MixedPrecisionPolicy(),))
        for more in (*_LOOPBACK, *(_OFFLOADS if on_cuda else ()))
    ]
    different = [f"{number}: {each}" for number, each in enumerate(settings) if _late_differs(args, each)]
    dist.destroy_process_group()
    return {"ok": not different, "settings": len(settings), "different": different}


def _late_differs(args: argparse.Namespace, settings: dict[str, Any]) -> bool:
    """Return True if late collectives change a bit of the weights or gradients."""
    prompt, late = (_loopback_run(args, settings, delays=delays) for delays in (False, True))
    return any(not torch.equal(a, b) for a, b in zip(prompt, late, strict=True))


def _loopback_run(args: argparse.Namespace, settings: dict[str, Any], *, delays: bool) -> list[Tensor]:
    """Train for three steps, and return the local tensors of the parameters and gradients."""
    Loopback.delays = delays
    settings = dict(settings)
    checkpoints, retain = settings.pop("checkpoints", False), settings.pop("retain_graph", False)
    args = argparse.Namespace(**{**vars(args), "tiny": True, "side_stream": settings.pop("side_stream", False)})
    model: Any = build(args)
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


# Waits


def waits(args: argparse.Namespace) -> dict[str, Any]:
    """Find all waits of the engine, and leave out each of them once, in a process of its own.

    A wait that no check notices is reported by its place: other waits may make it superfluous, or the checks miss it.
    """
    Loopback.start(rank=1, world_size=4)
    settings: dict[str, int] = {}  # by place: index of the first setting that reaches it
    for index, each in enumerate(_WAITING):
        if args.device == "cpu" and "offload" in each:
            continue
        with observed_waits() as found:
            _loopback_run(args, each, delays=False)
        for where in found:
            settings.setdefault(where, index)
    dist.destroy_process_group()
    noticed: dict[str, str] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        started = {pool.submit(_without, args, where, settings[where]): where for where in settings}
        for done in as_completed(started):
            noticed[started[done]] = done.result()
            report({"ok": False, "error": "not finished", "places": len(settings), "noticed": noticed})
    unnoticed = sorted(where for where, how in noticed.items() if how == "no")
    return {"ok": True, "places": len(settings), "noticed": noticed, "unnoticed": unnoticed}


def _without(args: argparse.Namespace, where: str, setting: int) -> str:
    """Return how the checks notice a missing wait, in another process: a CUDA error ends the use of a device."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", "without-wait", "--place", where]
    command += ["--setting", str(setting), "--device", args.device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return "does not end"
    found = last_report(done.stdout)
    return f"process failed: {(done.stdout + done.stderr)[-300:]}" if found is None else str(found["noticed"])


def without_wait(args: argparse.Namespace) -> dict[str, Any]:
    """Leave out the waits of one place, first with late collectives and then under torch's sanitizer."""
    Loopback.start(rank=1, world_size=4)
    settings = _WAITING[args.setting]
    with observed_waits(without=args.place):
        try:
            if _late_differs(args, settings):
                return {"noticed": "late collectives change the results"}
            sanitize(args)
            _loopback_run(args, settings, delays=False)
        except Exception as error:
            return {"noticed": _name_of(error)}
    return {"noticed": "no"}


def _name_of(error: BaseException) -> str:
    """Return what has noticed a missing wait: the sanitizer, or the first line of another error."""
    chain = [error]  # torch's logger of collectives raises another error in the meantime
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    if any(isinstance(each, _sanitizer.CUDASanitizerErrors) for each in chain):
        return "sanitizer"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def sanitize(args: argparse.Namespace) -> None:
    """Make torch's sanitizer raise on data races. It regards all views of a storage as one tensor.

    Accesses to disjoint views then conflict.
    """
    if args.device == "cpu":
        return
    original = _sanitizer.ArgumentHandler._handle_argument

    def handle(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor) and value.is_cuda and value.untyped_storage().nbytes():
            value = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
        original(self, value, *args, **kwargs)

    _sanitizer.ArgumentHandler._handle_argument = handle
    _sanitizer.enable_cuda_sanitizer()


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """Run steps under torch's sanitizer, which raises on data races between streams."""
    sanitize(args)
    return {"ok": True, **steps(args)}


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Train for three steps of three micro-batches. A tool such as compute-sanitizer may observe the process."""
    losses = []
    offload = layerzero.Offload(grads=args.offload != "nothing", optimizer=args.offload == "optimizer")
    with one_of_64(Loopback):
        model = layerzero.shard_model(
            build(args), zero3_size=NODE, units={Block}, mp_policy=BF16, accumulation="full", offload=offload
        )
        step = stepper(model, layerzero.shard_optimizer(adamw(model), model), lambda: layerzero.no_sync(model))
        for _ in range(3):
            data = batches(args, 3)
            with side_stream(args):
                losses.append(float(step(data)))
    return {"steps": len(losses)}


# Graphs


class _Replay:
    """Captured forward of a module, from an input and to an output that stay in place. A CPU computes it again."""

    def __init__(self, module: nn.Module, values: Tensor) -> None:
        self._module = module
        self.values = values.clone()
        self.weights = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        self._graph = torch.cuda.CUDAGraph() if values.is_cuda else None
        if self._graph is None:
            self.output = module.forward(self.values).clone()
        else:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.output = module.forward(self.values)

    def __call__(self, values: Tensor) -> Tensor:
        self.values.copy_(values)
        if self._graph is None:
            self.output.copy_(self._module.forward(self.values))
        else:
            self._graph.replay()
        return self.output


def graph(args: argparse.Namespace) -> dict[str, Any]:
    """Capture the MLP of a unit in the third step, replay it in the next three, and compare it with eager results.

    Each setting reports in which steps the weights had the addresses of the capture, and in which of these the results
    were equal. A replay with other addresses would read freed memory, so there is none.
    """
    found: dict[str, Any] = {}
    for name, settings in {
        "resharded": {},
        "kept to the backward": {"reshard_after_forward": False},
        "kept to the step": {"reshard_after_forward": "step"},
    }.items():
        with one_of_64(Loopback):
            found[name] = _captured_steps(args, settings)
    ok = all(case["equal"] == case["same_addresses"] and 3 in case["equal"] for case in found.values())
    return {"ok": ok, **found}


def _captured_steps(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    replay: _Replay | None = None
    same: list[int] = []
    equal: list[int] = []
    number = 0

    def check(mlp: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal replay
        with torch.no_grad():
            if number == 3:
                replay = _Replay(mlp, inputs[0])
            if replay is None or {name: p.data_ptr() for name, p in mlp.named_parameters()} != replay.weights:
                return
            same.append(number)
            if torch.equal(replay(inputs[0]), output):
                equal.append(number)

    model = layerzero.shard_model(build(args), zero3_size=NODE, units={Block}, mp_policy=BF16, **settings)
    step = stepper(model, layerzero.shard_optimizer(adamw(model), model), lambda: layerzero.no_sync(model))
    with model.blocks[0].mlp.register_forward_hook(check):
        for current in range(1, 7):
            number = current
            step(batches(args, 1))
    synchronize(args)
    layerzero.close(model)
    return {"same_addresses": same, "equal": equal}
