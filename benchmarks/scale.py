"""Count by formula what grows with the number of ranks, and measure how long a model takes to start.

    python -m benchmarks.scale 16  # seconds from the sharding of a model to the end of its first step, for 16 ranks

The time includes neither the start of processes nor imports. benchmarks/plots.py draws the formulas, and
tests/end_to_end/test_scale.py compares the formulas with counts of real ranks, and with the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import layerzero

HYBRIDS = {  # gathers of a unit and reductions inside its node, in a step of A micro-batches
    "sharded": lambda a: (2 * a, a),
    "full": lambda a: (2 * a, 1),
    'sharded, "step"': lambda a: (1, a),
    'full, "step"': lambda a: (1, 1),
}
HSDP, FSDP2 = "FSDP2's HSDP", "FSDP2's full sharding"
SCHEMES = (*HYBRIDS, HSDP, FSDP2)


class Traffic(NamedTuple):
    """Messages and bytes that a rank sends per step, on average over the ranks of its node."""

    messages_inside: float
    messages_between: float
    bytes_inside: float
    bytes_between: float


@dataclass(frozen=True)
class Job:
    """Model and ranks. Collectives are rings, in which a rank sends n - 1 pieces of 1/n of the full buffer.

    Attributes:
        ranks: number D of data-parallel ranks.
        node_size: number S of ranks on a node, which is `zero3_size`.
        micro_batches: number A of micro-batches per step.
        units: number U of units, with the root.
        numel: number N of parameters.
        kept_numel: for each unit that stays gathered from the forward to the backward pass, its number of parameters.
        weight_bytes: bytes of a gathered or refreshed weight.
        gradient_bytes: bytes of a gradient in a message.
    """

    ranks: int
    node_size: int
    micro_batches: int
    units: int
    numel: int
    kept_numel: tuple[int, ...] = ()
    weight_bytes: int = 2
    gradient_bytes: int = 4

    def traffic(self, scheme: str) -> Traffic:
        """Return the traffic of a step whose gradients are sent between nodes once, if the scheme can."""
        a, weight, gradient = self.micro_batches, self.weight_bytes, self.gradient_bytes
        gathers, reductions = HYBRIDS.get(scheme, HYBRIDS["sharded"])(a)
        calls = (gathers + reductions) * self.units - a * len(self.kept_numel)
        sent = (gathers * weight + reductions * gradient) * self.numel - a * weight * sum(self.kept_numel)
        if scheme == FSDP2:  # a ring of all ranks leaves a node at one of its ranks
            messages, nbytes, crossing = (self.ranks - 1) * calls, sent * (1 - 1 / self.ranks), 1 / self.node_size
            inside = 1 - crossing
            return Traffic(messages * inside, messages * crossing, nbytes * inside, nbytes * crossing)
        replicas = self.ranks // self.node_size
        second = gradient if scheme == HSDP else weight  # of an all-reduce; otherwise, of the refresh
        between = (gradient + second) * self.numel / self.node_size * (1 - 1 / replicas)
        inside, across = (self.node_size - 1) * calls, 2 * self.units * (replicas - 1)
        return Traffic(inside, across, sent * (1 - 1 / self.node_size), between)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _started(scheme: str, node_size: int) -> tuple[nn.Module, Any]:
    if scheme not in (HSDP, FSDP2):
        model: nn.Module = layerzero.shard_model(
            Net(), mesh=layerzero.init_mesh(node_size, "cpu"), units=[nn.Linear], shared_memory="off"
        )
        return model, layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    ranks = dist.get_world_size()
    shape = (ranks // node_size, node_size) if scheme == HSDP else (ranks,)
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]), Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def _measure(rank: int, ranks: int, node_size: int, rounds: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    seconds: dict[str, list[float]] = {}
    for each in range(1 + rounds):
        for scheme in ("sharded", HSDP, FSDP2):
            dist.barrier()
            began = time.perf_counter()
            model, optimizer = _started(scheme, node_size)
            sharded = time.perf_counter() - began
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            dist.barrier()
            if each:  # the first round imports and compiles
                seconds.setdefault(f"{scheme}: sharding", []).append(sharded)
                seconds.setdefault(f"{scheme}: until the end of the first step", []).append(time.perf_counter() - began)
            if isinstance(optimizer, layerzero.ShardedOptimizer):
                layerzero.close(model)  # otherwise, the next round closes its groups; those of FSDP2 are never closed
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    os._exit(0)  # without a wait for the threads of all groups


def measure_start(ranks: int, node_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the first rank, by scheme and phase. Ranks are forked after the import of torch."""
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        processes = [
            context.Process(target=_measure, args=(rank, ranks, node_size, rounds, port, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        served = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    for process in processes:
        process.join()
    del served  # after the last rank
    if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
        raise RuntimeError(f"the ranks {failed} failed; their errors are above")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--node-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name, seconds in measure_start(args.ranks, min(args.ranks // 2, args.node_size), args.rounds).items():
        print(f"{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
