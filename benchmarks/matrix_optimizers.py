"""Compare a step with Muon and a step with AdamW, on two emulated nodes (needs root) or one machine.

    python -m benchmarks.matrix_optimizers --where two-nodes

Both optimizers train the model of the contest on the same batches, with alternating steps. The output has the median
time of a step, the median time of Muon's own computation in it (on the slowest rank), and the bytes that a rank sends
between nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from benchmarks.network import one_machine, two_nodes
from benchmarks.task import COMPUTE_DTYPE, OPTIMIZER, Block, Task, loss_of, make_batches, make_model

_PORT = 29533
_WARM_UP = 3


class _Muon(torch.optim.Muon):
    """Muon that measures the seconds of its steps."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        began = time.perf_counter()
        result = super().step(closure)
        _Muon.seconds += time.perf_counter() - began
        return result


class _Trained:
    def __init__(self, task: Task, *, muon: bool) -> None:
        self.task = task
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE, reduce_dtype=task.reduce_dtype)
        self.model = layerzero.shard_model(make_model(task), zero3_size=2, units=Block, mp_policy=policy)
        inside = [p for m in self.model.modules() if isinstance(m, Block) for p in m.parameters() if p.ndim == 2]
        chosen = inside if muon else []
        rest = [p for p in self.model.parameters() if all(p is not other for other in chosen)]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, **OPTIMIZER)]
        if muon:
            optimizers.insert(0, _Muon(chosen, lr=2e-2))
        self.optimizers = [layerzero.shard_optimizer(each, self.model) for each in optimizers]

    def step(self, number: int) -> dict[str, float]:
        batches = make_batches(self.task, rank=dist.get_rank(), step=number)
        dist.barrier()
        _Muon.seconds, began = 0.0, time.perf_counter()
        for index, batch in enumerate(batches):
            with nullcontext() if index + 1 == len(batches) else layerzero.no_sync(self.model):
                loss = loss_of(self.model, batch)
                (loss / len(batches)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        dist.barrier()
        said = torch.tensor([time.perf_counter() - began, _Muon.seconds], dtype=torch.float64)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        between = layerzero.traffic(self.model, reset=True).bytes_by_axis.get("replica", 0)
        return {"seconds": said[0].item(), "arithmetic": said[1].item(), "between": between, "loss": loss.item()}


def _work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = Task(micro_batches=args.micro_batches, reduce="bf16")
    trained = {name: _Trained(task, muon=name == "Muon") for name in ("AdamW", "Muon")}
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in trained}
    for number in range(_WARM_UP + args.steps):
        for name, each in trained.items():
            result = each.step(number)
            if number >= _WARM_UP:
                seen[name].append(result)
    sent = torch.tensor([[float(seen[name][-1]["between"]) for name in trained]])
    dist.all_reduce(sent)
    if dist.get_rank() == 0:
        for name, each in seen.items():
            seconds = sorted(one["seconds"] for one in each)
            row = {
                "optimizer": name,
                "step_s": round(statistics.median(seconds), 3),
                "least_s": round(seconds[0], 3),
                "most_s": round(seconds[-1], 3),
                "arithmetic_s": round(statistics.median(one["arithmetic"] for one in each), 3),
                "between_nodes_MB_all_ranks": round(sent[0, list(seen).index(name)].item() / 1e6, 2),
                "loss": round(each[-1]["loss"], 4),
            }
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--where", choices=["one-machine", "two-nodes"], default="two-nodes")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(args)
        return
    with two_nodes() if args.where == "two-nodes" else one_machine() as nodes:
        launched = []
        for index, node in enumerate(nodes):
            torchrun = f"--nnodes {len(nodes)} --node-rank {index} --nproc-per-node {4 // len(nodes)}".split()
            torchrun += (
                f"--master-addr {nodes[0].address} --master-port {_PORT} -m benchmarks.matrix_optimizers".split()
            )
            given = f"--worker --micro-batches {args.micro_batches} --steps {args.steps}".split()
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1"}
            command = [*node.prefix, sys.executable, "-m", "torch.distributed.run", *torchrun, *given]
            launched.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).resolve().parents[1]))
        for each in launched:
            if each.wait():
                raise SystemExit(each.returncode)


if __name__ == "__main__":
    main()
