"""Measurement of a process's resources over many operations, to detect growth."""

from __future__ import annotations

import gc
import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.monkey import OPERATIONS, Setting, _Monkey
from tests.support.ranks import run_ranks

_KEPT = 2  # checkpoints that later operations may load


class Held(NamedTuple):
    """Resources of one rank after some operations."""

    resident: int  # bytes
    tensors: int  # bytes
    threads: int
    files: int  # open files
    groups: int
    keys: int  # keys in the store


def _held() -> Held:
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and type(each) in (Tensor, torch.nn.Parameter) and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return Held(
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        sum(storages.values()),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(dist.distributed_c10d._world.pg_map),
        dist.distributed_c10d._get_default_store().num_keys(),
    )


def _lasts(rank: int, folder: str, setting: Setting, seed: int, operations: int, marks: int) -> list[Held]:
    ape = _Monkey(rank, setting, folder)
    ape._shard = lambda size: None  # type: ignore[method-assign]  # torch would keep the groups of each new model
    draw, found, saves = random.Random(seed), [], 0
    names = [name for name, (_, weight) in OPERATIONS.items() for _ in range(weight)]
    # Run each operation twice before the first mark, so that one-time allocations do not count as growth.
    for turn, name in enumerate([*OPERATIONS, *OPERATIONS, *(draw.choice(names) for _ in range(operations))]):
        OPERATIONS[name][0](ape, random.Random(draw.randrange(1 << 30)))
        if len(ape.saved) > _KEPT:
            path, _ = ape.saved.pop(0)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            saves += 1
            ape.folder = f"{folder}/after {saves}"  # a name is the number of kept checkpoints, so it would repeat
        done = turn + 1 - 2 * len(OPERATIONS)
        if done > 0 and done % (operations // marks) == 0:
            ape._zero()
            ape.compare(name)
            dist.barrier()
            found.append(_held())
            dist.barrier()
    return found


def held_over(
    folder: Path, setting: Setting, *, seed: int, operations: int, marks: int = 4, timeout: float = 300.0
) -> list[list[Held]]:
    """Return, for each rank, its resources at `marks` points during `operations` random operations."""
    arguments = (str(folder), setting, seed, operations, marks)
    return run_ranks(_lasts, *arguments, timeout=timeout, shared_memory=None)


def growth(held: list[list[Held]]) -> str | None:
    """Describe the resources that have grown from the first mark to the last one; None if none has."""
    for rank, marks in enumerate(held):
        first, last = marks[0], marks[-1]
        grown = {
            "tensors": last.tensors - first.tensors > 1 << 20,
            "threads": last.threads > first.threads,
            "files": last.files > first.files,
            "groups": last.groups > first.groups,
            "keys": last.keys > first.keys + 8,  # some ranks may not have finished an agreement yet
            "resident": last.resident - first.resident > 24 << 20,
        }
        if any(grown.values()):
            return f"rank {rank}: {[what for what, is_so in grown.items() if is_so]} of {marks}"
    return None
