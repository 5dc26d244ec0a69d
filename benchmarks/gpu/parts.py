"""Parts of ``python -m benchmarks.gpu``; each runs in a process that reports its results."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import layerzero
from benchmarks.gpu import correctness, measurements, ranks
from benchmarks.gpu.models import SCHEMES, SHAPES, Block
from benchmarks.gpu.report import report
from examples.verify_gpt import loss, make_batch, make_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(_PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="cases of ranks with this in their name")
    parser.add_argument("--case-seconds", type=float, default=30, help="limit on a case of ranks")
    parser.add_argument("--jobs", type=int, default=8, help="number of processes of waits at a time")
    parser.add_argument("--model", choices=list(SHAPES), default="1.3b")
    parser.add_argument("--modes", nargs="+", choices=correctness.MODES, default=correctness.MODES)
    parser.add_argument("--place", help="place whose waits are left out; a check must notice")
    parser.add_argument("--setting", type=int, default=0, help="index of the setting that reaches the place")
    parser.add_argument("--scheme", choices=SCHEMES, default="layerzero")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--offload", choices=["nothing", "grads", "optimizer"], default="nothing")
    parser.add_argument("--side-stream", action="store_true", help="train on another stream than the default one")
    args = parser.parse_args()
    report(_PARTS[args.part](args))


def verify(args: argparse.Namespace) -> dict[str, Any]:
    """Compare plain and sharded training in every zero3_size and accumulation, with gloo ranks on one device."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_verify, (args, folder), nprocs=args.ranks)
        found: dict[str, Any] = json.loads(Path(folder, "result").read_text())
    return found


def _verify(rank: int, args: argparse.Namespace, folder: str) -> None:
    if args.device == "cuda":
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    found = {}
    for accumulation, offload in itertools.product(correctness.MODES, (False, True)):
        if offload and args.device == "cpu":
            continue
        result = layerzero.verify(
            make_model,
            make_batch,
            loss_fn=loss,
            units={Block},
            accumulation=accumulation,
            offload=layerzero.Offload(grads=offload),
        )
        worst, case = result.worst, accumulation + ", offload_grads" * offload
        found[case] = {"alike": result.ok, "largest": None if worst is None else str(worst)}
        if not result.ok:
            found[case]["report"] = str(result)
    if rank == 0:
        ok = all(each["alike"] for each in found.values())
        Path(folder, "result").write_text(json.dumps({"ok": ok, **found}))
    dist.barrier()
    dist.destroy_process_group()


_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": measurements.machine,
    "ranks": ranks.supervise,
    "loopback": correctness.loopback,
    "sanitizer": correctness.sanitizer,
    "waits": correctness.waits,
    "without-wait": correctness.without_wait,
    "blocking": measurements.blocking,
    "overhead": measurements.overhead,
    "graph": correctness.graph,
    "memory": measurements.memory,
    "offloads": measurements.offloads,
    "steps": correctness.steps,
    "verify": verify,
    "network": measurements.network,
    "codecs": measurements.codecs,
}

if __name__ == "__main__":
    main()
