"""Measure leaks of one process that shards many models: threads, descriptors, groups, hooks, seconds per model.

    python benchmarks/models_in_turn.py --models 300 --ranks 4

Each model runs one step and is deleted. After every tenth of the models, the output has the resources of rank 0 and
the median time of a model, which includes building the model, one step, and the release of the previous model.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim import optimizer as torch_optimizer

import layerzero


def _one(zero3_size: int, shared_memory: str, *, closes: bool) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    layerzero.shard_model(model, zero3_size=zero3_size, units={nn.Linear}, shared_memory=shared_memory)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    if closes:
        layerzero.close(model)


def _work(rank: int, args: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=args.ranks)
    part = max(1, args.models // 10)
    seconds: list[float] = []
    for number in range(1, args.models + 1):
        start = time.perf_counter()
        _one(args.zero3_size, args.shared_memory, closes=args.close)
        seconds.append(time.perf_counter() - start)
        if number % part == 0:
            gc.collect()
            time.sleep(0.2)
            dist.barrier()
            if rank == 0:
                world = dist.distributed_c10d._world
                print(
                    f"{number:4d} models: {len(os.listdir('/proc/self/task'))} threads, "
                    f"{len(os.listdir('/proc/self/fd'))} descriptors, {len(world.pg_group_ranks)} groups, "
                    f"{len(torch_optimizer._global_optimizer_pre_hooks)} hooks, "
                    f"{1e3 * statistics.median(seconds):.0f} ms a model",
                    flush=True,
                )
            seconds.clear()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--zero3-size", type=int, default=2)
    parser.add_argument("--shared-memory", default="auto", choices=["auto", "off"])
    parser.add_argument("--close", action="store_true", help="call layerzero.close instead of dropping the model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (given, os.path.join(folder, "store")), nprocs=given.ranks)
