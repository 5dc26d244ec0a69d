"""Faults of processes, disks and bits."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from typing import Any

from tests.chaos.links import cut_cable, replaced_from_disk, replaced_from_memory, slow_cable
from tests.chaos.ranks import EVERY, LIMIT, STEPS
from tests.chaos.tries import RANKS, Lost, Try, died, ended, kill
from tests.support.damaging import flip_bit

FLIPS = {
    "compute weights": {"compute weights"},
    "masters": {"masters"},
    "moments": {"optimizer state 'momentum_buffer'"},
    "gradients": {"gradient"},
}


def _signal(draw: random.Random, what: str, first: int, last: int = STEPS - 1) -> dict[str, Any]:
    """Return a plan that sends a signal to one rank, in a step from `first` until before `last`."""
    victim = draw.randrange(RANKS)
    plan = {"what": what, "rank": victim, "ranks": [victim], "step": draw.randrange(first, last)}
    return plan | {"delay": draw.uniform(0, 0.05)}


def killed_rank(run: Try, draw: random.Random) -> str:
    plan = _signal(draw, "kill", 1)
    died(run.start(plan), plan["ranks"])
    run.restarted(plan)
    return "survived"


def killed_node(run: Try, draw: random.Random) -> str:
    """Kill both ranks of a node and delete its shared memory. No disk is read; a spare node hosts the first ranks."""
    node, plan = draw.randrange(2), _signal(draw, "kill", EVERY)
    plan |= {"ranks": [2 * node, 2 * node + 1], "nodes": [[0, 0, 1, 1], [2, 2, 1 - node, 1 - node]]}
    died(run.start(plan), plan["ranks"])
    shutil.rmtree(run.folder / f"node{node}")
    run.restarted(plan)
    first, at = {int(text) for text in run.texts("first.1")}, int(plan["step"])
    if len(first) != 1 or not at - 2 * EVERY < first.pop() <= at + 2:
        raise Lost(f"killed in step {at}, and gone on from {run.texts('first.1')}")
    return "survived"


def stopped_rank(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "stop", "has not joined and does not answer")


def late_rank(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "late", "has not joined, and waits in no collective")


def skipped_collective(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "skip", "has not joined")


def _named(run: Try, draw: random.Random, what: str, said: str) -> str:
    """Expect the watchdog to name the victim within 5 s beyond its limit. The run then goes on or is restarted."""
    victim = draw.randrange(RANKS)
    plan = {"what": what, "watch": True, "rank": victim, "step": draw.randrange(1, STEPS - 1)}
    ranks = run.start(plan)
    while ranks[0].is_alive() and f"{plan['step']}" not in run.texts("step"):
        time.sleep(0.01)
    try:
        run.logged(f"late by .*rank {victim} {said}", LIMIT + 5, RANKS - 1)
        if what == "skip":
            kill(ranks)
            run.restarted(plan)
        else:
            ended(ranks, 60)
            if run.texts("end") != [run.calm] * RANKS:
                raise Lost(f"went on with other bits: {run.texts('end')}")
    finally:
        kill(ranks)
    return "survived, rank named"


def full_disk(run: Try, draw: random.Random) -> str:
    plan = {"what": "full", "rank": draw.randrange(RANKS), "step": EVERY * draw.randrange(1, STEPS // EVERY)}
    ended(run.start(plan | {"writes": draw.randrange(3)}), 60)
    if not any("No space left" in text for text in run.texts("failed")):
        raise Lost(f"nobody was told: {run.texts('failed')}")
    if run.texts("end") != [run.calm] * RANKS:
        raise Lost("went on with other bits")
    run.restarted(plan)
    return "survived, told on all ranks"


def damaged_newest(run: Try, draw: random.Random) -> str:
    ended(run.start({}), 60)
    newest = run.folder / "saved" / f"{STEPS:06d}"
    file = draw.choice(sorted(newest.iterdir()))
    flip_bit(file, draw.randrange(file.stat().st_size))
    run.restarted({})
    if run.texts("first.1") != [str(STEPS - EVERY)] * RANKS:
        raise Lost(f"{file.name} was damaged, and the run went on from {run.texts('first.1')}")
    return "survived"


def asked_to_leave(run: Try, draw: random.Random) -> str:
    plan = _signal(draw, "term", 1, STEPS - 6)
    ended(run.start(plan), 40, (143,))
    run.restarted(plan)
    return "survived"


def other_ranks(run: Try, draw: random.Random) -> str:
    plan = _signal(draw, "kill", EVERY + 1)
    died(run.start(plan), plan["ranks"])
    run.restarted(plan, 2)
    return "survived"


def flipped(what: str) -> Callable[[Try, random.Random], str]:
    def fault(run: Try, draw: random.Random) -> str:
        victim = draw.randrange(RANKS)
        plan = {"flip": what, "rank": victim, "step": draw.randrange(1, STEPS), "draw": draw.randrange(1 << 30)}
        ended(run.start(plan), 60, (5,))
        said = run.texts("corruption")
        if len(set(said)) != 1 or len(said) != RANKS:
            raise Lost(f"ranks were told {said}")
        if any(kind not in FLIPS[what] or ranks != [victim] for kind, ranks in json.loads(said[0])):
            raise Lost(f"rank {victim}: {said[0]}")
        return "noticed, rank and parameter named"

    return fault


NETWORK: dict[str, Callable[[Try, random.Random], str]] = {  # needs root
    "SIGKILL of all processes on a node, replaced by a spare node, which resumes from memory": replaced_from_memory,
    "SIGKILL of all processes on a node, replaced by a spare node, which resumes from disk": replaced_from_disk,
    "the cable of a node cut": cut_cable,
    "the cable of a node at 1 %": slow_cable,
}
FAULTS: dict[str, Callable[[Try, random.Random], str]] = {
    "SIGKILL of a rank": killed_rank,
    "SIGKILL of a node, its memory lost, a spare": killed_node,
    "SIGSTOP of a rank": stopped_rank,
    "a collective that one rank skips": skipped_collective,
    "a rank that has one batch fewer and waits": late_rank,
    "disk full in a save": full_disk,
    "the newest checkpoint damaged, one bit": damaged_newest,
    "SIGTERM to one rank, with a deadline": asked_to_leave,
    "SIGKILL, and a restart with 2 ranks of 4": other_ranks,
    **NETWORK,
    **{f"a bit flips in {what}": flipped(what) for what in FLIPS},
}
