"""Two jobs of two ranks each that save to one path at the same time, while one rank dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.crashing import RAISED, SURVIVED, TAKEN, TIMEOUT, die_at, exit_codes, forks, slow_disk

Rival = Callable[[Path, int, int, tuple[int, int], int], None]  # (folder, job, rank, victim, turn), as for `meet`


def meet(folder: Path, job: int, rank: int) -> None:
    """Initialize the process group of one job."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}.{job}.store", 2)
    store.set_timeout(TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def save_beside(
    folder: Path, job: int, rank: int, victim: tuple[int, int], turn: int, save: Callable[[], bool]
) -> None:
    """Save when all four ranks are ready, then exit; the victim dies at its disk call number `turn`.

    Args:
        victim: job and rank that dies.
        save: returns True if this job has got the name; raises RuntimeError if the job's other rank has died.
    """
    dist.barrier()
    (folder / f"ready-{job}-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 4:
        time.sleep(0.001)
    if victim == (job, rank):
        die_at(turn, half=bool(turn % 2))
    generator = random.Random(turn + job)
    time.sleep(generator.uniform(0, 0.02))
    with slow_disk(generator):
        try:
            won = save()
        except RuntimeError:
            os._exit(RAISED)
    os._exit(SURVIVED if won else TAKEN)


def start(rival: Rival, place: Path, victim: tuple[int, int], turn: int) -> list[Any]:
    """Start the processes of both jobs in a new folder and return them."""
    place.mkdir()
    ranks = [(job, rank) for job in (0, 1) for rank in (0, 1)]
    processes = [forks.Process(target=rival, args=(place, *who, victim, turn), daemon=True) for who in ranks]
    for process in processes:
        process.start()
    return processes


def winner(place: Path, processes: list[Any]) -> int | None:
    """Wait for both jobs and return the job that reports a save; None if there is none."""
    exits = exit_codes(processes)
    assert set(exits) <= {SURVIVED, TAKEN, RAISED, -signal.SIGKILL}, exits
    assert -signal.SIGKILL in exits, f"{place}: the call to die at was never made: {exits}"
    returned = {index // 2 for index, code in enumerate(exits) if code == SURVIVED}
    assert len(returned) <= 1, f"{place}: both say that they have saved: {exits}"
    if not returned:
        assert TAKEN not in exits or (place / "one").exists(), f"{place}: nobody has the name: {exits}"
    return next(iter(returned), None)
