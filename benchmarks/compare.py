"""Train a user's model with DDP, FSDP2, HSDP and layerzero from the same seed on the same data, and compare them.

    python -m benchmarks.compare examples.verify_gpt:make_model --loss examples.verify_gpt:loss --unit Block
    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.compare mine:make_model --unit Block --param-dtype bfloat16

The functions are those of ``layerzero verify``: a function that builds the model, ``make_batch(index, rank)`` in the
same module, and optionally a loss and an optimizer. Under torchrun, the ranks of a node are those that torchrun starts
on it. Otherwise this command starts `--ranks` ranks on this machine, and half of them count as one node.

The parameters of the model must be fp32. All schemes run one after the other in the same processes. Each is timed in
two rounds, the second in reverse order, so that a drift of the machine affects all of them. A further run of each
scheme, which is not timed, measures memory and counts bytes; see [Note: Bytes between nodes] in crossing.py.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_map_only

from benchmarks import measure, network
from benchmarks.contestants import ENTRIES, Contestant
from benchmarks.contestants.ddp import DDP
from benchmarks.crossing import counted_crossings
from benchmarks.tables import LOSS_TOLERANCE
from benchmarks.task import OPTIMIZER, Task
from benchmarks.worker import PEAK_STEPS, WARM_UP, settled
from layerzero.device.accelerator import compute_device, default_device_type
from layerzero.integrations.yaml_file import dtype_named
from layerzero.planning.plan_report import seconds_text
from layerzero.sharding.unit_selection import block_classes
from layerzero.utils.import_path import load_named
from layerzero.utils.text_tables import size_text, table
from layerzero.verification.training_runs import TrainingTask, default_loss

__all__ = ["COMPARED", "backend_of", "compare", "largest_difference", "main", "report", "schemes_of"]

COMPARED = ("ddp", "fsdp2-full", "fsdp2-hsdp", "layerzero")
_CHOICES = [name for name, entry in ENTRIES.items() if entry.target in ("ddp:DDP", "fsdp:FSDP2", "ours:LayerZero")]
_ROUNDS = 2
_SHARES_MEMORY = (
    "layerzero: the ranks of a node share memory, unless the scheme's name says that it is off. Other schemes copy",
    "through gloo. Ranks on devices do not share memory; layerzero-exchanges is layerzero without it.",
)
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class UserTask(Task):
    """Task with a user's functions."""

    training: TrainingTask
    units: frozenset[str]  # names of submodules or classes
    param_dtype: torch.dtype | None
    device: str

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self.param_dtype

    @property
    def device_type(self) -> str:
        return self.device

    def build(self) -> nn.Module:
        return self.training.build_model()

    def is_unit(self, name: str, module: nn.Module) -> bool:
        return bool(name) and not self.units.isdisjoint((name, type(module).__name__))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.training.loss_fn(model, batch)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.training.optimizer(parameters)

    def batches(self, step: int, rank: int) -> list[Any]:
        """Return the micro-batches of a step on this rank's device."""
        first = step * self.micro_batches
        device = compute_device(self.device)
        found = [self.training.batch(first + index, rank) for index in range(self.micro_batches)]
        return [tree_map_only(Tensor, lambda tensor: tensor.to(device), batch) for batch in found]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = _parse(given)
    is_rank = "RANK" in os.environ
    try:
        task = _task(args, is_rank=is_rank)
    except (OSError, TypeError, ValueError) as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return 2
    if not is_rank:
        return _start(args, given)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    if task.device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend_of(task.device))
    try:
        found = compare(task, args)
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(report(found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["losses_agree"] else 1


def backend_of(device: str) -> str:
    """Return the backend of the process group. Next to an accelerator, CPU tensors need gloo."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def schemes_of(device: str) -> list[str]:
    """Return the schemes that are compared by default.

    On a CPU, layerzero also runs without shared memory, because the other schemes use none, and devices do not share
    memory.
    """
    return [*COMPARED, "layerzero-exchanges"] if device == "cpu" else list(COMPARED)


def compare(task: UserTask, args: argparse.Namespace) -> dict[str, Any]:
    """Run all schemes and return the result as plain data, the same on all ranks. All ranks must call this function."""
    names = list(dict.fromkeys(args.only or schemes_of(task.device)))
    parameters = list(task.build().parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    del parameters
    timed: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(_ROUNDS):
        for name in names if turn % 2 == 0 else reversed(names):
            with _naming(name):
                timed[name].append(_timed(task, name, args.steps))
    schemes = {}
    for name in names:
        with _naming(name):
            measured = _measured(task, name, args.interface)
        each = [ranks for run in timed[name] for ranks in zip(*run["seconds"], strict=True)]
        durations = [max(ranks) for ranks in each]
        schemes[name] = {
            "label": ENTRIES[name].label,
            "losses": [statistics.mean(ranks) for ranks in zip(*timed[name][0]["losses"], strict=True)],
            "step_seconds": {
                "median": statistics.median(durations),
                "min": min(durations),
                "max": max(durations),
                "all": durations,
            },
            **measured,
            "formula_bytes_per_node": _formula(task, name, trained),
        }
    apart = largest_difference([scheme["losses"] for scheme in schemes.values()])
    low = task.param_dtype is not None and torch.finfo(task.param_dtype).eps > torch.finfo(torch.float32).eps
    tolerance = LOSS_TOLERANCE if low else math.sqrt(torch.finfo(torch.float32).eps)
    return {
        "model": args.model,
        "parameters": numel,
        "units": sorted(task.units),
        "ranks": task.ranks,
        "ranks_per_node": task.node_size,
        "nodes_assumed": task.node_size != int(os.environ["LOCAL_WORLD_SIZE"]),
        "micro_batches": task.micro_batches,
        "steps": args.steps,
        "dtype": str(task.param_dtype or torch.float32).removeprefix("torch."),
        "device": task.device if task.device == "cpu" else torch.get_device_module(task.device).get_device_name(),
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "schemes": schemes,
        "largest_loss_difference": apart,
        "loss_tolerance": tolerance,
        "losses_agree": apart <= tolerance,
    }


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context manager that names the scheme and the rank in an error."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"scheme {name!r} failed on rank {dist.get_rank()}: {type(error).__name__}: {error}. Pass the schemes that "
            "support this model as --only"
        ) from error


def largest_difference(losses: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference between losses and those of the first scheme, for the same steps.

    It is infinite if a loss is NaN or infinite.

    Args:
        losses: losses by scheme and step.
    """
    if not all(math.isfinite(loss) for each in losses for loss in each):
        return math.inf
    return max(
        abs(loss - expected) / max(abs(expected), 1e-12)
        for each in losses
        for loss, expected in zip(each, losses[0], strict=True)
    )


def report(found: dict[str, Any]) -> str:
    """Return the result of :func:`compare` as text."""
    schemes = list(found["schemes"].values())
    nodes = found["ranks"] // found["ranks_per_node"]
    has_wire = schemes[0]["wire_bytes_per_node"] is not None
    header = ["scheme", "step", "min - max", "between nodes", "formula", *(["wire"] if has_wire else []), "peak memory"]
    rows = []
    for each in schemes:
        times, formula = each["step_seconds"], each["formula_bytes_per_node"]
        spread = f"{seconds_text(times['min'])} - {seconds_text(times['max'])}"
        row = [each["label"], seconds_text(times["median"]), spread, size_text(each["between_bytes_per_node"])]
        row.append("" if formula is None else size_text(formula))
        if has_wire:
            row.append(size_text(each["wire_bytes_per_node"]))
        rows.append([*row, size_text(max(each["peak_bytes_by_rank"]))])
    losses = [
        [str(step), *(f"{loss:.6f}" for loss in several)]
        for step, several in enumerate(zip(*(each["losses"] for each in schemes), strict=True))
    ]
    units = ", ".join(found["units"]) or "none but the root"
    agree = "agree" if found["losses_agree"] else "DIFFER"
    return "\n".join(
        [
            f"{found['model']}: {found['parameters']:,} parameters, units: {units}; {found['dtype']}, "
            f"{found['micro_batches']} micro-batches",
            f"{nodes} nodes of {found['ranks_per_node']} ranks"
            + (" (assumed)" if found["nodes_assumed"] else "")
            + f"; {found['backend']} on {found['device']}, torch {found['torch']}",
            "",
            table(header, rows),
            "",
            table(("loss of step", *(each["label"] for each in schemes)), losses),
            "",
            f"losses {agree}: largest relative difference {found['largest_loss_difference']:.1e}, "
            f"tolerance {found['loss_tolerance']:.1e}",
            "between nodes: bytes per step and node, counted by groups that cross nodes; peak memory: of the rank that",
            "needs most, above its memory before the model was built.",
            *(_SHARES_MEMORY if found["device"] == "cpu" and _shares_memory(found["schemes"]) else ()),
        ]
    )


def _shares_memory(names: Iterable[str]) -> bool:
    """Return whether the ranks of a node share memory in one of the schemes."""
    return any(ENTRIES[name].settings.get("shared_memory") == "auto" for name in names)


def _timed(task: UserTask, name: str, steps: int) -> dict[str, Any]:
    """Train with one scheme. Return the losses of all steps, and the seconds of those after the warm-up, by rank."""
    rank, device = dist.get_rank(), compute_device(task.device)
    batches = [task.batches(step, rank) for step in range(WARM_UP + steps)]
    contestant = ENTRIES[name].load()(task)
    losses, marks = [], []
    dist.barrier()
    for step, each in enumerate(batches):
        if step >= WARM_UP:
            marks.append(_time_stamp(device))
        losses.append(_step(contestant, each, seed=step))
    marks.append(_time_stamp(device))
    durations = [_seconds(before, after) for before, after in itertools.pairwise(marks)]
    own = {"losses": torch.stack(losses).tolist(), "seconds": durations}
    contestant.close()
    ranks: list[Any] = [None] * task.ranks
    dist.all_gather_object(ranks, own)
    return {what: [each[what] for each in ranks] for what in own}


def _time_stamp(device: torch.device) -> float | torch.Event:
    """Return the time of the host for a CPU, otherwise an event that the current stream reaches."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _seconds(before: float | torch.Event, after: float | torch.Event) -> float:
    if isinstance(before, torch.Event) and isinstance(after, torch.Event):
        after.synchronize()
        return before.elapsed_time(after) / 1e3
    assert isinstance(before, float) and isinstance(after, float)
    return after - before


def _measured(task: UserTask, name: str, interface: str | None) -> dict[str, Any]:
    """Train with one scheme for a few steps. Return peak memory by rank, and bytes between nodes per node and step."""
    rank, device = dist.get_rank(), compute_device(task.device)
    batches = [task.batches(step, rank) for step in range(1 + PEAK_STEPS)]
    memory = None if device.type == "cpu" else torch.get_device_module(device)
    if memory is None:
        measure.return_freed_memory()
    gc.collect()
    before = measure.resident_bytes() if memory is None else memory.memory_allocated(device)
    contestant = ENTRIES[name].load()(task)
    if isinstance(contestant, DDP):  # the same all-reduce, but launched where it can be counted
        contestant.model.register_comm_hook(None, allreduce_hook)
    _step(contestant, batches[0], seed=0)
    wire = None if interface is None else settled(interface)
    if memory is None:
        measure.reset_peak()
    else:
        memory.reset_peak_memory_stats(device)
    with counted_crossings(task.node_size) as crossed:
        for step, each in enumerate(batches[1:], 1):
            _step(contestant, each, seed=step)
    peak = measure.peak_bytes(sharers=task.node_size) if memory is None else memory.max_memory_allocated(device)
    sent = None if interface is None or wire is None else settled(interface).sent - wire.sent
    contestant.close()
    ranks: list[Any] = [None] * task.ranks
    dist.all_gather_object(ranks, (peak - before, sum(crossed), sent))
    nodes, steps = task.replicas, PEAK_STEPS
    wires = [sent / steps for _, _, sent in ranks[:: task.node_size] if sent is not None]
    return {
        "peak_bytes_by_rank": [peak for peak, _, _ in ranks],
        "between_bytes_per_node": sum(crossed for _, crossed, _ in ranks) / nodes / steps,
        "wire_bytes_per_node": statistics.mean(wires) if wires else None,
    }


def _formula(task: UserTask, name: str, numel: int) -> float | None:
    """Return the bytes that a node must send per step: of N elements, each node lacks the sums of (1 - 1/R) N.

    DDP and HSDP all-reduce gradients, and layerzero reduces gradients and gathers weights, once per step each. The
    formula ignores padding. It is None for schemes whose traffic depends on prefetching or on units.

    Args:
        numel: number of elements of the parameters that are trained.
    """
    reduce, weight = task.reduce_dtype.itemsize, (task.param_dtype or torch.float32).itemsize
    widths = dict.fromkeys(("ddp", "fsdp2-hsdp"), 2 * reduce)
    widths |= dict.fromkeys(("layerzero", "layerzero-exchanges"), reduce + weight)
    width = widths.get(name)
    return None if width is None else width * numel * (1 - 1 / task.replicas)


def _step(contestant: Contestant, batches: Sequence[Any], *, seed: int) -> Tensor:
    """Run an optimizer step and return the mean loss, without waiting for the device."""
    torch.manual_seed(seed)  # for dropout
    losses = [contestant.backward(batch, last=index + 1 == len(batches)) for index, batch in enumerate(batches)]
    contestant.update()
    return torch.stack(losses).float().mean()


def _task(args: argparse.Namespace, *, is_rank: bool) -> UserTask:
    """Check all arguments and return the task. No process group is needed.

    Args:
        is_rank: whether torchrun has started this process. Otherwise this process will start the ranks.
    """
    for name in ("ranks", "steps", "micro_batches", "node_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not supported. Use at least 1")
    ranks, local = args.ranks, args.ranks
    if is_rank:
        ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif args.emulate:
        network.bits_per_second(args.emulate)  # raises if the rate is malformed
        if ranks % 2:
            raise ValueError(f"--emulate divides the ranks between two nodes. Pass an even --ranks instead of {ranks}")
        local = ranks // 2
    node_size = args.node_size or (local if local < ranks else max(1, ranks // 2))
    if ranks % node_size:
        raise ValueError(f"--node-size {node_size} does not divide the {ranks} ranks. Use a divisor")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder does not exist. Create it")
    if args.interface:
        network.carried(args.interface)  # raises if there is none
    device = args.device or default_device_type()
    if device not in ("cpu", default_device_type()):
        raise ValueError(f"--device {device}: torch finds no such device. Use {default_device_type()}")
    param_dtype = dtype_named("--param-dtype", args.param_dtype) if args.param_dtype else None
    training = _training(args)
    model = training.build_model()
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise ValueError(
                f"parameter {name!r} of the model is {parameter.dtype}. The schemes are compared with fp32 masters, "
                "and would reduce gradients in different dtypes. Return fp32 parameters, and pass --param-dtype"
            )
    return UserTask(
        micro_batches=args.micro_batches,
        reduce="fp32",
        ranks=ranks,
        node_size=node_size,
        training=training,
        units=_units(args, model),
        param_dtype=param_dtype,
        device=device,
    )


def _training(args: argparse.Namespace) -> TrainingTask:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = args.model.partition(":")[0]
    return TrainingTask(
        model_fn=load_named(args.model, "the model"),
        batch_fn=load_named(args.batches or f"{module}:make_batch", "--batches"),
        loss_fn=load_named(args.loss, "--loss") if args.loss else default_loss,
        optimizer_fn=load_named(args.optimizer, "--optimizer") if args.optimizer else _adamw,
        steps=args.steps,
        micro_batches=args.micro_batches,
        seed=args.seed,
    )


def _units(args: argparse.Namespace, model: nn.Module) -> frozenset[str]:
    known = {name for name, _ in model.named_modules() if name} | {type(each).__name__ for each in model.modules()}
    units = [unit.rpartition(":")[2] for unit in args.unit or sorted(block_classes(model))]
    if unknown := [unit for unit in units if unit not in known]:
        raise ValueError(f"--unit {unknown[0]}: the model has no such submodule or class. Pass one of {sorted(known)}")
    return frozenset(units)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **OPTIMIZER)


def _start(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Start the ranks with torchrun, on this machine or in two emulated nodes, and return their exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    program = ["-m", "benchmarks.compare", *given]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not args.emulate:
        command = [*torchrun, "--standalone", "--nproc-per-node", str(args.ranks), *program]
        return subprocess.run(command, env=environment, check=False).returncode
    if reason := network.why_unavailable():
        print(f"--emulate: {reason}", file=sys.stderr)
        return 2
    with network.two_nodes(args.emulate) as nodes:
        processes = []
        for index, node in enumerate(nodes):
            where = ["--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", str(args.ranks // 2)]
            where += ["--master-addr", nodes[0].address, "--master-port", "29500"]
            own = {**environment, "GLOO_SOCKET_IFNAME": node.interface}
            command = [*node.prefix, *torchrun, *where, *program, "--interface", node.interface]
            processes.append(subprocess.Popen(command, env=own))
        try:
            return max(process.wait() for process in processes)
        finally:
            for process in processes:
                process.kill()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODULE:MODEL_FN", help="builds the model: a function or a class")
    parser.add_argument("--batches", help="MODULE:BATCH_FN, (index, rank) -> batch; default: make_batch of the module")
    parser.add_argument("--loss", help="MODULE:LOSS_FN, (model, batch) -> loss; default: the output of the model")
    parser.add_argument("--optimizer", help="MODULE:OPTIMIZER_FN, (parameters) -> optimizer; default: AdamW, lr 1e-3")
    parser.add_argument(
        "--unit", action="append", help="name or class name of a submodule; may be repeated; default: declared blocks"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes to start without torchrun")
    parser.add_argument(
        "--node-size", type=int, help="ranks per node; default: those of torchrun, or half of the ranks of one machine"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each of two rounds")
    parser.add_argument("--micro-batches", type=int, default=2, help="batches per step and rank")
    parser.add_argument("--param-dtype", help="compute dtype: bf16, fp16 or fp32; default: fp32")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_CHOICES,
        metavar="SCHEME",
        help=f"schemes to compare, of {', '.join(_CHOICES)}; default: {' '.join(COMPARED)}, and layerzero-exchanges "
        "(without shared memory) on a CPU. The losses of the first are the reference",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--device", help="device type; default: the accelerator if there is one, otherwise cpu")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--interface", help="network interface whose sent bytes are counted as well (Linux)")
    parser.add_argument(
        "--emulate", metavar="RATE", help="put half of the ranks behind a link of e.g. 1gbit (Linux, as root)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
