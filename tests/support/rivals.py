"""Two jobs of two ranks each that save to one path at the same time, while one rank may die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tests.support.crashing import RAISED, SURVIVED, TAKEN, die_at, exit_codes, join_ranks, slow_disk, start_all
from tests.support.models import different
from tests.support.ranks import run_ranks


class Job(NamedTuple):
    """Weights of one job, and how it saves them and loads others beside them."""

    change: Callable[[int], object]  # the weights, in a round
    weights: Callable[[], dict[str, Tensor]]
    save: Callable[[Path, Any, bool], object]  # with `extra`, in the background or not
    load: Callable[[Path], tuple[Any, dict[str, Tensor]]]  # return `extra` and weights


MakeJob = Callable[[list[list[int]], int], Job]  # called with the ranks of all jobs and the seed of the weights


def _saved(job: Job, path: Path, extra: Any, later: bool) -> bool:
    try:
        job.save(path, extra, later)
    except FileExistsError as error:
        assert "already exists" in str(error)
        return False
    return True


def _race(rank: int, make_job: MakeJob, folder: Path, rounds: int) -> list[bool]:
    """Return for each round whether this rank's job won the name. The winner has loaded its checkpoint."""
    number = rank // 2
    job = make_job([[0, 1], [2, 3]], number)
    generator, alike = random.Random(rank), random.Random(50 + number)  # the second is the same on all ranks of a job
    won = []
    for turn in range(rounds):
        job.change(turn)
        path, extra, weights, later = folder / str(turn), {"job": number, "turn": turn}, job.weights(), alike.random()
        dist.barrier()
        time.sleep(alike.uniform(0, 0.05))
        with slow_disk(generator):
            won.append(_saved(job, path, extra, later < 0.5))
        for _ in range(2):  # the second time after the end of the other job
            if won[-1]:
                found, loaded = job.load(path)
                assert found == extra
                assert not (wrong := different(loaded, weights)), f"job {number} saved in round {turn}: {wrong}"
            dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted(map(str, range(rounds))), f"nothing is left of who came too late: {left}"
    return won


def race(make_job: MakeJob, folder: Path) -> None:
    """Let two jobs save to one path in each of several rounds; require that one of them gets it and can load it."""
    first, first_peer, second, second_peer = run_ranks(_race, make_job, folder, 10)
    assert first == first_peer and second == second_peer, "all ranks of a job are told the same"
    for turn, winners in enumerate(zip(first, second, strict=True)):
        assert sum(winners) == 1, f"round {turn}: {winners}"
    assert any(first) and any(second), "the race is one"


def _rival(make_job: MakeJob, folder: Path, number: int, rank: int, victim: tuple[int, int], turn: int) -> None:
    """Save when all four ranks are ready, then exit; the victim, a job and a rank, dies at its disk call `turn`."""
    join_ranks(f"{folder}.{number}.store", rank, 2)
    job = make_job([[0, 1]], number)
    dist.barrier()
    (folder / f"ready-{number}-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 4:
        time.sleep(0.001)
    if victim == (number, rank):
        die_at(turn, half=bool(turn % 2))
    generator = random.Random(turn + number)
    time.sleep(generator.uniform(0, 0.02))
    with slow_disk(generator):
        try:
            won = _saved(job, folder / "one", {"job": number}, bool(turn % 3))
        except RuntimeError:
            os._exit(RAISED)
    os._exit(SURVIVED if won else TAKEN)


def kill_one_of_two(make_job: MakeJob, folder: Path, turns: Iterable[int]) -> None:
    """Run two jobs in each of several folders, one of which dies; require that the other's checkpoint can be loaded."""
    winners: dict[Path, int] = {}
    for index, turn in enumerate(turns):
        place, victim = folder / str(turn), (index % 2, index // 2 % 2)
        place.mkdir()
        ranks = [(number, rank) for number in (0, 1) for rank in (0, 1)]
        processes = start_all(_rival, [(make_job, place, *who, victim, turn) for who in ranks])
        if (won := _winner(place, processes)) is not None:
            winners[place] = won
    run_ranks(_load_all, make_job, winners, world_size=2)
    assert len(winners) >= 2


def _load_all(rank: int, make_job: MakeJob, winners: dict[Path, int]) -> None:
    jobs = [make_job([[0, 1]], number) for number in (0, 1)]
    for folder, number in winners.items():
        extra, loaded = jobs[0].load(folder / "one")
        assert extra == {"job": number}, folder
        assert not different(loaded, jobs[number].weights()), folder


def _winner(place: Path, processes: list[Any]) -> int | None:
    """Wait for both jobs and return the job that reports a save; None if there is none."""
    exits = exit_codes(processes)
    assert set(exits) <= {SURVIVED, TAKEN, RAISED, -signal.SIGKILL}, exits
    assert -signal.SIGKILL in exits, f"{place}: the call to die at was never made: {exits}"
    returned = {index // 2 for index, code in enumerate(exits) if code == SURVIVED}
    assert len(returned) <= 1, f"{place}: both say that they have saved: {exits}"
    if not returned:
        assert TAKEN not in exits or (place / "one").exists(), f"{place}: nobody has the name: {exits}"
    return next(iter(returned), None)
