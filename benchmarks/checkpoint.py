"""Compare saves and loads of layerzero with those of FSDP2 and torch.distributed.checkpoint, on the same disk.

    python -m benchmarks.checkpoint                    # 300 M parameters, 4 ranks: 3.6 GB a checkpoint
    python -m benchmarks.checkpoint --width 512        # a small model, as a quick test
    python -m benchmarks.checkpoint --plan 4096        # only the global plan of a save of Llama 3 70B by 4,096 ranks

The model has AdamW state. Each contestant runs in new processes, and rounds alternate between the contestants. The time
of a save ends when the bytes are on disk (both flush their files). A stall ends when save_async returns. A load
reads from the page cache and ends when the optimizer has its state.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import layerzero
from benchmarks.model_shapes import llama
from benchmarks.results import FOLDER
from layerzero.checkpoint.checkpoint_writer import CheckpointWriter, chunk_of
from layerzero.checkpoint.collect_state import CollectedState
from layerzero.layout.flat_layout import plan_layouts

__all__ = ["main"]

CONTESTANTS = ("layerzero", "fsdp2")
LAYERS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=3536, help=f"of each of the {LAYERS} layers")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder on the disk to measure; default: a temporary one"
    )
    parser.add_argument("--results", type=Path, default=FOLDER / "checkpoint" / "checkpoint.json")
    parser.add_argument("--plan", type=int, metavar="RANKS", help="time only the global plan of a save, in one process")
    args = parser.parse_args()
    if args.plan:
        print(plan_globally(args.plan))
        return
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in CONTESTANTS}
    sizes: dict[str, int] = {}
    for turn in range(args.rounds):
        for name in CONTESTANTS if turn % 2 == 0 else reversed(CONTESTANTS):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                mp.spawn(_rank, (args.ranks, name, args.width, folder), nprocs=args.ranks)
                found = json.loads(Path(folder, "seconds.json").read_text())
            sizes[name] = found.pop("bytes")
            for what, value in found.items():
                seconds[name].setdefault(what, []).append(value)
            print(name, {what: round(value, 2) for what, value in found.items()}, flush=True)
    settings = {"parameters": LAYERS * args.width**2, "ranks": args.ranks, "torch": torch.__version__}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps({"settings": settings, "bytes": sizes, "seconds": seconds}, indent=1) + "\n")
    print(table(json.loads(args.results.read_text())))


def plan_globally(ranks: int) -> dict[str, float]:
    """Return the seconds and the memory of the global plan of a save of Llama 3 70B, with AdamW, by this many ranks."""
    began = time.perf_counter()
    plans = [[[chunk_of(item) for item in items], [], True] for items in _write_items(ranks)]
    planned, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        topology = {"data_parallel": ranks, "zero3_size": 8}
        state = CollectedState({}, {}, [], {}, [])
        writer = CheckpointWriter(Path(folder, "one"), state, topology, rank=0)
        writer.merge_plans(plans)
    return {
        "items": sum(len(chunks) for chunks, *_ in plans),
        "local plans (s)": round(planned - began, 2),
        "global plan (s)": round(time.perf_counter() - planned, 2),
        "global plan, CPU time (s)": round(time.process_time() - cpu, 2),
        "peak memory (GB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


def _write_items(ranks: int) -> list[list[WriteItem]]:
    """Return the items of the local plan of each rank."""
    items: list[list[WriteItem]] = [[] for _ in range(ranks)]
    properties = TensorProperties(torch.float32)
    for unit in llama("Llama 3 70B", layers=80, dim=8192, kv_dim=1024, hidden=28672):
        params = [(name, tuple(128_256 if size == 32_000 else size for size in shape)) for name, shape in unit.params]
        layouts = plan_layouts(params, num_shards=ranks, align=8)
        for copy, layout in itertools.product(range(unit.copies), layouts):
            for rank, slot in itertools.product(range(ranks), layout.slots):
                if rows := layout.rows_in(slot, layout.shard_range(rank)):
                    offsets = torch.Size([rows.start, *(0 for _ in slot.shape[1:])])
                    chunk = ChunkStorageMetadata(offsets, torch.Size([len(rows), *slot.shape[1:]]))
                    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(slot.shape))
                    kind, name = WriteItemType.SHARD, f"{unit.unit}.{copy}.{slot.name}"
                    for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
                        items[rank].append(WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data))
    return items


def table(results: dict[str, Any]) -> str:
    """Return the table of docs/checkpoints.md: medians in seconds, with minimum and maximum."""
    lines = ["| | layerzero | FSDP2, torch.distributed.checkpoint | ratio |", "| --- | --- | --- | --- |"]
    ours, theirs = (results["seconds"][name] for name in CONTESTANTS)
    for what in ours:
        cells = [f"{statistics.median(v):.2f} s ({min(v):.2f} … {max(v):.2f})" for v in (ours[what], theirs[what])]
        ratio = statistics.median(theirs[what]) / statistics.median(ours[what])
        lines.append(f"| {what} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    sizes = [f"{results['bytes'][name] / 1e9:.2f} GB" for name in CONTESTANTS]
    return "\n".join([*lines, f"| on disk | {sizes[0]} | {sizes[1]} | |"])


def _rank(rank: int, ranks: int, name: str, width: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    try:
        seconds = {"layerzero": _ours, "fsdp2": _fsdp2}[name](width, folder)
        if rank == 0:
            Path(folder, "seconds.json").write_text(json.dumps(seconds))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _net(width: int) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    model(torch.ones(1, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds from the common start of all ranks until the last one has finished, and the result."""
    dist.barrier()
    began = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - began, result


def _stall(launch: Callable[[], Any], finish: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the seconds that a training loop is blocked, and the seconds until the checkpoint is complete."""
    dist.barrier()
    began = time.perf_counter()
    pending = launch()
    stalled = torch.tensor(time.perf_counter() - began)
    finish(pending)
    dist.all_reduce(stalled, dist.ReduceOp.MAX)
    dist.barrier()
    return float(stalled), time.perf_counter() - began


def _ours(width: int, folder: str) -> dict[str, float]:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)

    model = layerzero.shard_model(_net(width), zero3_size=2, units=nn.Linear, param_init_fn=fill)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True), model)
    _step(model, optimizer, width)
    path = f"{folder}/one"
    save, _ = _timed(lambda: layerzero.checkpoint.save(path, model, optimizer))
    load, _ = _timed(lambda: layerzero.checkpoint.load(path, model, optimizer))
    found = {"save": save, "load": load, "bytes": _bytes(path)}
    return found | _both_stalls(
        folder,
        lambda path: layerzero.checkpoint.save_async(path, model, optimizer),
        lambda pending: pending.wait(),
    )


def _fsdp2(width: int, folder: str) -> dict[str, float]:
    model = _net(width)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer, width)
    path = f"{folder}/one"

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load_all() -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    save, _ = _timed(lambda: dcp.save(state(), checkpoint_id=path))
    load, _ = _timed(load_all)
    found = {"save": save, "load": load, "bytes": _bytes(path)}
    return found | _both_stalls(
        folder,
        lambda path: dcp.async_save(state(), checkpoint_id=path),
        lambda pending: pending.result(),
    )


def _both_stalls(folder: str, launch: Callable[[str], Any], finish: Callable[[Any], Any]) -> dict[str, float]:
    """Return the stalls of a first and a second asynchronous save. The second reuses the host memory of the first."""
    found = {}
    for number, which in enumerate(("first", "next")):
        path = f"{folder}/async-{number}"
        stalled, whole = _stall(lambda path=path: launch(path), finish)
        found[f"save_async, {which}: stall"] = stalled
        found[f"save_async, {which}: until written"] = whole
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
    return found


def _bytes(path: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path))


if __name__ == "__main__":
    main()
