"""Several ranks with NCCL on one device: training beside a plain model, and what only NCCL can show.

NCCL 2.30 or newer accepts several ranks on one device if NCCL_MULTI_RANK_GPU_ENABLE=1. Each case runs in all ranks. If
a case fails or does not end, the ranks are killed, and new ranks run the other cases.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import layerzero
from benchmarks.gpu.models import BF16
from benchmarks.gpu.report import report
from examples.verify_gpt import Block, loss, make_model
from layerzero.engine.hooks import get_state
from tests.support.expert_programs import Expert, ExpertNet, expert_mesh_of, expert_units, experts_mesh

_OLDEST = 23000  # NCCL 2.30, as NCCL writes versions
_STEPS, _MICRO_BATCHES = 3, 2
_START = 30.0  # seconds for the start of ranks, in addition to those of a case

Cases = Mapping[str, Callable[[argparse.Namespace, str], dict[str, Any]]]
Optimizers = Callable[[nn.Module], list[Optimizer]]


def nccl_version() -> int:
    """Return the version of the loaded NCCL, or 0 if it is unknown. torch reports the one it was compiled with."""
    found = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    return found.value


def supervise(args: argparse.Namespace, cases: Cases | None = None) -> dict[str, Any]:
    """Run cases, by default :data:`CASES`, and report the results after each."""
    cases = {name: case for name, case in (cases or CASES).items() if args.only in name}
    version = nccl_version() if args.device == "cuda" else 0
    if args.device == "cuda" and args.ranks > 1 and 0 < version < _OLDEST:
        return {"ok": True, "skipped": f"NCCL {version} does not run several ranks on one device; {_OLDEST} does"}
    found: dict[str, Any] = {"nccl": version}
    while waiting := {name: case for name, case in cases.items() if name not in found}:
        with tempfile.TemporaryDirectory() as folder:
            error = _attempt(args, waiting, Path(folder), found)
        failed = next((name for name in waiting if name not in found), None)
        if failed is not None:
            found[failed] = {"ok": False, "error": error[-3000:]}
        report({"ok": False, "error": "not finished", **found})
    return {**found, "ok": all(found[name]["ok"] for name in cases)}


def _attempt(args: argparse.Namespace, cases: Cases, folder: Path, found: dict[str, Any]) -> str:
    """Run cases in new ranks, and add their results. Return the error that ended the ranks, or an empty string."""

    def add_finished() -> bool:
        fresh = [name for name in cases if name not in found and (folder / name).exists()]
        found.update((name, json.loads((folder / name).read_text())) for name in fresh)
        return bool(fresh)

    ranks = mp.spawn(_run, (args, cases, str(folder)), nprocs=args.ranks, join=False)
    deadline = time.monotonic() + args.case_seconds + _START
    error = ""
    try:
        while not ranks.join(timeout=0.1):
            if add_finished():
                report({"ok": False, "error": "not finished", **found})
                deadline = time.monotonic() + args.case_seconds
            if time.monotonic() > deadline:
                error = f"not finished after {args.case_seconds:.0f} s"
                break
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        error = str(failure)
    for process in ranks.processes:
        process.kill()
        process.join()
    add_finished()
    return error


def _run(rank: int, args: argparse.Namespace, cases: Cases, folder: str) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    for name, case in cases.items():
        began = time.monotonic()
        found = case(args, folder)
        by_rank: list[Any] = [None] * args.ranks
        dist.all_gather_object(by_rank, found)
        if rank == 0:
            text = json.dumps({**found, "ok": all(each["ok"] for each in by_rank), "seconds": time.monotonic() - began})
            written = Path(folder, f".{name}")
            written.write_text(text)
            written.rename(Path(folder, name))
    dist.barrier()
    dist.destroy_process_group()


# Programs


def _batch(args: argparse.Namespace, step: int, micro_batch: int, rank: int) -> Tensor:
    """Return random bytes [4, 33], the same for equal arguments."""
    generator = torch.Generator().manual_seed(1 + rank + 100 * micro_batch + 1000 * step)
    return torch.randint(0, 256, (4, 33), generator=generator).to(args.device)


def _model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return make_model().to(args.device)


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)]


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]


def _plain(
    args: argparse.Namespace, optimizers: Optimizers = _sgd, *, clip: bool = False
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Train a plain model with the batches of all ranks. Return its weights before and after, and the norms."""
    model = _model(args)
    start = [p.detach().clone() for p in model.parameters()]
    made, norms = optimizers(model), []
    for step in range(_STEPS):
        for micro_batch in range(_MICRO_BATCHES):
            for rank in range(args.ranks):
                (loss(model, _batch(args, step, micro_batch, rank)) / args.ranks / _MICRO_BATCHES).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return start, [p.detach() for p in model.parameters()], norms


def _compare(
    args: argparse.Namespace, found: Iterable[Tensor], plain: tuple[list[Tensor], list[Tensor], Any], tolerance: float
) -> dict[str, Any]:
    """Compare weights with those of the plain model: the largest difference, divided by the movement of the weight.

    If a hundredth of the largest movement is larger, it is the divisor: smaller movements consist of rounding errors.
    """
    moved = [float((end - start).abs().max()) for start, end in zip(*plain[:2], strict=True)]
    least = max(moved) / 100
    worst = 0.0
    for value, expected, movement in zip(found, plain[1], moved, strict=True):
        difference = float((value.to(expected.device) - expected).abs().max())
        worst = max(worst, difference / max(movement, least))
    return {"ok": worst < tolerance, "difference": worst}


def _size(args: argparse.Namespace) -> int:
    """Return S: two nodes of two ranks, or two nodes of one rank if there are only two."""
    return 2 if args.ranks > 2 else 1


def _sharded(args: argparse.Namespace, zero3_size: int | None = None, **settings: Any) -> nn.Module:
    mesh = layerzero.init_mesh(zero3_size or _size(args), args.device)
    return layerzero.shard_model(_model(args), mesh=mesh, units={Block}, shared_memory="off", **settings)


def _train(
    args: argparse.Namespace, model: nn.Module, optimizers: Sequence[Any], steps: Iterable[int], *, clip: bool = False
) -> list[float]:
    norms = []
    for step in steps:
        for micro_batch in range(_MICRO_BATCHES):
            with layerzero.no_sync(model) if micro_batch + 1 < _MICRO_BATCHES else contextlib.nullcontext():
                ids = _batch(args, step, micro_batch, dist.get_rank())
                (loss(model, ids) / _MICRO_BATCHES).backward()
        if clip:
            norms.append(float(layerzero.clip_grad_norm_(model, 0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def _full(model: nn.Module) -> list[Tensor]:
    """Return the full weights on all ranks, in the order of the parameters."""
    state = layerzero.full_state_dict(model, rank0_only=False)
    return [state[name] for name, _ in model.named_parameters()]


# Cases


def _control(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train with FSDP2. If this fails, too, the cause is not layerzero."""
    model: Any = _model(args)
    mesh = init_device_mesh(args.device, (args.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    (optimizer,) = _sgd(model)
    for step in range(_STEPS):
        for micro_batch in range(_MICRO_BATCHES):
            (loss(model, _batch(args, step, micro_batch, dist.get_rank())) / _MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _compare(args, [p.full_tensor() for p in model.parameters()], _plain(args), 1e-3)


def _parity(
    args: argparse.Namespace,
    folder: str,
    *,
    optimizers: Optimizers = _sgd,
    clip: bool = False,
    tolerance: float = 1e-3,
    **settings: Any,
) -> dict[str, Any]:
    plain = _plain(args, optimizers, clip=clip)
    found: dict[str, Any] = {"ok": True}
    for size in sorted({_size(args), args.ranks}):
        model = _sharded(args, size, **settings)
        made = [layerzero.shard_optimizer(each, model) for each in optimizers(model)]
        norms = _train(args, model, made, range(_STEPS), clip=clip)
        case = _compare(args, _full(model), plain, tolerance)
        if clip:
            case["ok"] &= all(abs(a / b - 1) < 1e-4 for a, b in zip(norms, plain[2], strict=True))
        found |= {f"S={size}": case, "ok": found["ok"] and case["ok"]}
        layerzero.close(model)
    return found


def _connections(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Measure device memory outside of torch's allocator: shard_model connects, and the first step adds nothing."""

    def outside() -> float:
        if args.device == "cpu":
            return 0.0
        free, total = torch.cuda.mem_get_info()  # of all ranks on this device
        reserved = torch.tensor(float(torch.cuda.memory_reserved()), device=args.device)
        dist.all_reduce(reserved)
        return (total - free - float(reserved)) / 2**20

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("layerzero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        outside()  # connects the default group
        dist.barrier()
        before = outside()
        model = _sharded(args)
        made = [layerzero.shard_optimizer(each, model) for each in _sgd(model)]
        dist.barrier()
        connected = outside()
        _train(args, model, made, range(1), clip=True)
        dist.barrier()
        after = outside()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    layerzero.close(model)
    grown = after - connected
    log = [line for line in lines if "connected" in line]
    return {"ok": grown < 16, "MiB of connections": connected - before, "MiB of the first step": grown, "log": log}


def _options(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train with NCCL's options of the replica axis, and read them back from the groups."""
    if args.device == "cpu":
        return {"ok": True, "skipped": "gloo has no such options"}
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    mesh = layerzero.init_mesh(_size(args), args.device, pg_options={"replica": options})
    model = layerzero.shard_model(_model(args), mesh=mesh, units={Block})
    made = [layerzero.shard_optimizer(each, model) for each in _sgd(model)]
    _train(args, model, made, range(_STEPS))
    found = _compare(args, _full(model), _plain(args), 1e-3)
    group: Any = get_state(model).mesh_info.replica_comm.group
    found["max_ctas"] = group._get_backend(torch.device("cuda")).options.config.max_ctas
    layerzero.close(model)
    return {**found, "ok": found["ok"] and found["max_ctas"] == 4}


def _saved(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Save, train, load into new objects, and train again: the same bits."""
    ends = []
    path = str(Path(folder, "checkpoint"))
    for resumes in (False, True):
        model = _sharded(args)
        (optimizer,) = (layerzero.shard_optimizer(each, model) for each in _sgd(model))
        if resumes:
            layerzero.checkpoint.load(path, model, optimizer)
        else:
            _train(args, model, [optimizer], range(2))
            layerzero.checkpoint.save(path, model, optimizer)
        _train(args, model, [optimizer], [2])
        ends.append(_full(model))
        layerzero.close(model)
    found = _compare(args, ends[1], _plain(args), 1e-3)
    found["bitwise"] = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    return {**found, "ok": found["ok"] and found["bitwise"]}


def _experts(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train a model of which the last rank calls no expert. Its values are exact in any order of additions."""

    def optimizer_of(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.25)

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        chosen = "none" if rank + 1 == args.ranks else "all"
        return model(torch.ones(1, 4, device=args.device), chosen).sum() * (rank + 1)

    own, _ = experts_mesh(1, 1, args.device)
    alone = ExpertNet("nested").to(args.device)
    plain_optimizer = optimizer_of(alone)
    model = ExpertNet("nested").to(args.device)
    mesh = expert_mesh_of(layerzero.init_mesh(args.ranks, args.device), own)
    model = layerzero.shard_model(model, mesh=mesh, units=expert_units("nested"))
    optimizer = layerzero.shard_optimizer(optimizer_of(model), model)
    for _ in range(_STEPS):
        loss_of(model, dist.get_rank()).backward()
        for rank in range(args.ranks):
            (loss_of(alone, rank) / args.ranks).backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    alike = all(torch.equal(a, b.detach().cpu()) for a, b in zip(_full(model), alone.parameters(), strict=True))
    layerzero.close(model)
    return {"ok": alike, "experts": sum(isinstance(module, Expert) for module in alone.modules())}


CASES: Cases = {
    "control, FSDP2": _control,
    **{f"parity, {mode}": partial(_parity, accumulation=mode) for mode in ("sharded", "full", "local")},
    "clip": partial(_parity, clip=True),
    "Muon": partial(_parity, optimizers=_muon, tolerance=0.1),
    "codecs, int8": partial(_parity, codecs=layerzero.Codecs(hop2=layerzero.Int8Blocks()), tolerance=0.2),
    "codecs, int4": partial(_parity, codecs=layerzero.Codecs(hop2=layerzero.Int4Blocks()), tolerance=0.5),
    "codecs, gather": partial(
        _parity, codecs=layerzero.Codecs(gather=layerzero.Float8Rows()), mp_policy=BF16, tolerance=0.5
    ),
    "save and load": _saved,
    "experts, one rank calls none": _experts,
    "connections": _connections,
    "options of the replica axis": _options,
}
