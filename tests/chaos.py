"""Every fault that a long run meets, as often as is asked, and what became of it: `make chaos`.

Each try is a run of its own: real processes, a fault at a moment and a place that the seed draws, and where it is to be
survived a restart as a launcher would make it. A try has *survived* if the run ends with the bits of one that met no
fault; the fault is *noticed* if an error or the log names what it was and where; else it is *lost*.

    python -m tests.chaos --tries 5 --only node --json benchmarks/results/chaos/faults.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import checkpoint
from layerzero.comm.texts import share_texts
from layerzero.engine.hooks import runtime_of
from layerzero.layout.grid import Extent
from layerzero.tensors.sharded import plain
from tests.support.bits import flip
from tests.support.checkpointing import GLOBAL_BATCHES, everything, sharded_net
from tests.support.crashing import forks
from tests.support.models import integer_batch

STEPS, EVERY, RANKS, LIMIT = 16, 4, 4, 2.0
FLIPS = {
    "compute weights": {"compute weights"},
    "masters": {"masters"},
    "moments": {"optimizer state 'momentum_buffer'"},
    "gradients": {"gradient"},
}


# --- one rank ---


def rank_main(rank: int, world: int, folder: str, attempt: int, plan: dict[str, Any]) -> None:
    """Train, or go on with it, and meet the fault of `plan` in the first attempt."""
    place, flips = Path(folder), plan.get("flip")
    _join(rank, world, place, attempt)
    model, optimizer = _models(plan)
    keeper, first = _gone_on(place, attempt, plan, model, optimizer)
    logging.getLogger("layerzero").addHandler(logging.FileHandler(place / f"log.{rank}"))
    if plan.get("watch"):
        layerzero.watchdog(model, LIMIT)
    request = checkpoint.on_signal(signal.SIGTERM, model, deadline=20) if plan.get("what") == "term" else None
    if flips:
        layerzero.guard_bits(model, optimizer, every=1)
    for step in range(first, STEPS):
        (place / f"step.{rank}").write_text(str(step))
        meets = attempt == 0 and step == plan.get("step")
        if meets:
            _meet(plan, rank, model)
        _backward(model, step)
        if meets and flips and rank == plan["rank"]:
            _flip(plan, model, optimizer)
        try:
            optimizer.step()
        except layerzero.SilentCorruption as error:
            said = [[each.kind, list(each.ranks)] for each in error.corruptions]
            (place / f"corruption.{rank}").write_text(json.dumps(said))
            os._exit(5)
        optimizer.zero_grad()
        if attempt and step == first:
            (place / f"stepped.{rank}").write_text(str(time.time()))
        if (step + 1) % EVERY == 0 and keeper is not None:
            keeper.snapshot(_extra(model, optimizer, step + 1))
        elif (step + 1) % EVERY == 0:
            _save(place, rank, model, optimizer, step + 1, plan if attempt == 0 else {})
        if plan.get("what") in ("kill", "term"):
            time.sleep(0.02)  # so that a moment is in one of these steps
        if request is not None and request.asked():
            if (step + 1) % EVERY:
                _save(place, rank, model, optimizer, step + 1, {})
            request.leave()
    if keeper is not None:
        keeper.wait()
    digest = hashlib.sha256()
    for name, tensor in sorted(everything(model, optimizer).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    (place / f"end.{rank}").write_text(digest.hexdigest())
    dist.barrier()
    if keeper is not None:
        keeper.close()
    os._exit(0)


def _join(rank: int, world: int, place: Path, attempt: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / f"store.{attempt}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40))


def _gone_on(place: Path, attempt: int, plan: dict[str, Any], model: Any, optimizer: Any) -> tuple[Any, int]:
    """Who keeps snapshots, if somebody does; and the step from which the run goes on."""
    rank, keeper = dist.get_rank(), None
    if nodes := plan.get("nodes"):
        memory = place / f"node{nodes[attempt][rank]}"
        memory.mkdir(exist_ok=True)
        keeper = checkpoint.Buddies(model, optimizer, name="chaos", memory=memory)
        found = keeper.load()
    else:
        found = checkpoint.load_latest(place / "saved", model, optimizer)
    first = 0
    if found is not None:
        first = int(found.extra["step"])
        checkpoint.set_random_states(found.extra["random"])
        checkpoint.Chain(model, optimizer).resume(found.extra["chain"])  # what was loaded is what was saved
    (place / f"first.{attempt}.{rank}").write_text(str(first))
    return keeper, first


def _backward(model: Any, step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for batch in range(rank, GLOBAL_BATCHES, world):
        inputs, targets = integer_batch(step=step, rank=batch)
        (8 * (model(inputs) * targets).sum(1).mean() / (GLOBAL_BATCHES // world)).backward()


def _models(plan: dict[str, Any]) -> tuple[Any, Any]:
    """Of bits that flip, in bf16: masters and compute weights are not one memory."""
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if "flip" in plan else {}
    return sharded_net(2, node_memory="off", **settings)


def _extra(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    link = checkpoint.Chain(model, optimizer).link(step)
    return {"step": step, "chain": link, "random": checkpoint.random_states(0, step)}


def _save(place: Path, rank: int, model: Any, optimizer: Any, step: int, plan: dict[str, Any]) -> None:
    real, left = os.write, [plan.get("writes", 0)]

    def full(descriptor: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    is_full = plan.get("what") == "full" and step == plan["step"] and rank == plan["rank"]
    if is_full:
        os.write = full
    try:
        checkpoint.save(place / "saved" / f"{step:06d}", model, optimizer, _extra(model, optimizer, step), keep_last=3)
    except checkpoint.CheckpointError as error:
        (place / f"failed.{rank}").write_text(str(error))
    finally:
        os.write = real


def _meet(plan: dict[str, Any], rank: int, model: Any) -> None:
    what, is_mine = plan.get("what"), rank == plan["rank"]
    if what in ("kill", "term") and rank in plan["ranks"]:
        number = signal.SIGKILL if what == "kill" else signal.SIGTERM
        threading.Timer(plan["delay"], os.kill, (os.getpid(), number)).start()
    elif what == "stop" and is_mine:
        subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 6}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "late" and is_mine:
        time.sleep(LIMIT + 6)
    elif what == "skip" and not is_mine:
        share_texts(runtime_of(model).everyone.control, "all but one say this")


def _flip(plan: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Of one bit of this rank's, drawn by the seed."""
    draw = random.Random(plan["draw"])
    runtime = runtime_of(model)
    member = draw.choice([each for each in runtime.members.values() if each.master.numel()])
    if plan["flip"] == "compute weights":
        handle = next(each for each in runtime.handles if member in each.members)
        own = handle.zero3[handle.topology.grid.place(handle.layout, Extent.RANK, Extent.NODE)]
        start = (member.master.data_ptr() - handle.master.data_ptr()) // member.master.element_size()
        flip(own, start + draw.randrange(member.master.numel()), draw.randrange(16))
        return
    tensor = {
        "masters": lambda: member.master,
        "moments": lambda: optimizer.state_by_name()[member.name]["momentum_buffer"],
        "gradients": lambda: plain(member.parameter.grad),
    }[plan["flip"]]()
    flip(tensor, draw.randrange(tensor.numel()), draw.randrange(32))


# --- one try ---


class Lost(Exception):
    """What the fault was not survived or noticed by."""


class Try:
    """A run in a folder of its own, from which it is judged."""

    def __init__(self, folder: Path, calm: str) -> None:
        self.folder, self.calm = folder, calm
        self.seconds: float | None = None  # from the restart to the first new step

    def start(self, plan: dict[str, Any], attempt: int = 0, world: int = RANKS) -> list[Any]:
        for old in self.folder.glob("end.*"):
            old.unlink()
        arguments = [(rank, world, str(self.folder), attempt, plan) for rank in range(world)]
        ranks = [forks.Process(target=rank_main, args=each) for each in arguments]
        for process in ranks:
            process.start()
        return ranks

    def texts(self, name: str) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob(f"{name}.*"))]

    def restarted(self, plan: dict[str, Any], world: int = RANKS) -> None:
        """The run goes on, to the end, with the bits of one that met no fault.

        Other ranks add in another order: of them it is proven that they go on from the bits that were saved.
        """
        began = time.time()
        ended(self.start(plan, 1, world), seconds=60)
        self.seconds = max(map(float, self.texts("stepped")), default=began) - began
        if world == RANKS and self.texts("end") != [self.calm] * world:
            raise Lost(f"ended with other bits: {self.texts('end')}")

    def logged(self, pattern: str, seconds: float, ranks: int = 1) -> None:
        """The logs of so many ranks have a line like that in time."""
        deadline = time.monotonic() + seconds
        while sum(bool(re.search(pattern, text)) for text in self.texts("log")) < ranks:
            if time.monotonic() > deadline:
                raise Lost(f"no {pattern!r} in {self.texts('log')}")
            time.sleep(0.05)


def ended(ranks: list[Any], seconds: float, codes: tuple[int, ...] = (0,)) -> None:
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    found = [process.exitcode for process in ranks]
    kill(ranks)
    if any(code not in codes for code in found):
        raise Lost(f"exit codes {found}")


def kill(ranks: list[Any]) -> None:
    """As a launcher ends those that are left."""
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def died(ranks: list[Any], victims: list[int]) -> None:
    for rank in victims:
        ranks[rank].join(60)
        if ranks[rank].exitcode != -signal.SIGKILL:
            kill(ranks)
            raise Lost(f"rank {rank} was not killed, but ended with {ranks[rank].exitcode}")
    kill(ranks)


# --- the faults ---


def killed_rank(run: Try, draw: random.Random) -> str:
    victim = draw.randrange(RANKS)
    plan = {"what": "kill", "rank": victim, "ranks": [victim], "step": draw.randrange(1, STEPS - 1)}
    plan["delay"] = draw.uniform(0, 0.05)
    died(run.start(plan), [victim])
    run.restarted(plan)
    return "survived"


def killed_node(run: Try, draw: random.Random) -> str:
    """And its memory is lost: no disk is read, a spare takes the first ranks."""
    node = draw.randrange(2)
    victims = [2 * node, 2 * node + 1]
    plan = {"what": "kill", "rank": victims[0], "ranks": victims, "step": draw.randrange(EVERY, STEPS - 1)}
    plan |= {"delay": draw.uniform(0, 0.05), "nodes": [[0, 0, 1, 1], [2, 2, 1 - node, 1 - node]]}
    died(run.start(plan), victims)
    shutil.rmtree(run.folder / f"node{node}")
    run.restarted(plan)
    first, at = {int(text) for text in run.texts("first.1")}, int(plan["step"])
    if len(first) != 1 or not at - 2 * EVERY < first.pop() <= at + 2:
        raise Lost(f"killed in step {at}, and gone on from {run.texts('first.1')}")
    return "survived"


def stopped_rank(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "stop", "has not come and does not answer")


def late_rank(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "late", "has not come: it waits for nothing")


def skipped_collective(run: Try, draw: random.Random) -> str:
    return _named(run, draw, "skip", "has not come")


def _named(run: Try, draw: random.Random, what: str, said: str) -> str:
    """By the watchdog within 5 s beyond its limit; then all go on, or are started again."""
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
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    run.restarted({})
    if run.texts("first.1") != [str(STEPS - EVERY)] * RANKS:
        raise Lost(f"{file.name} was damaged, and the run went on from {run.texts('first.1')}")
    return "survived"


def asked_to_leave(run: Try, draw: random.Random) -> str:
    victim = draw.randrange(RANKS)
    plan = {"what": "term", "rank": victim, "ranks": [victim], "step": draw.randrange(1, STEPS - 6)}
    ended(run.start(plan | {"delay": draw.uniform(0, 0.05)}), 40, (143,))
    run.restarted(plan)
    return "survived"


def other_ranks(run: Try, draw: random.Random) -> str:
    victim = draw.randrange(RANKS)
    plan = {"what": "kill", "rank": victim, "ranks": [victim], "step": draw.randrange(EVERY + 1, STEPS - 1)}
    died(run.start(plan | {"delay": draw.uniform(0, 0.05)}), [victim])
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


FAULTS: dict[str, Callable[[Try, random.Random], str]] = {
    "SIGKILL of a rank": killed_rank,
    "SIGKILL of a node, its memory lost, a spare": killed_node,
    "SIGSTOP of a rank": stopped_rank,
    "a collective that one rank skips": skipped_collective,
    "a rank that has one batch less and waits": late_rank,
    "disk full in a save": full_disk,
    "the newest checkpoint damaged, one bit": damaged_newest,
    "SIGTERM to one rank, with a deadline": asked_to_leave,
    "SIGKILL, and a restart with 2 ranks of 4": other_ranks,
    **{f"a bit flips in {what}": flipped(what) for what in FLIPS},
}


def tries_of(name: str, tries: int, seed: int, calm: str) -> dict[str, Any]:
    """What became of each try of a fault."""
    outcomes: Counter[str] = Counter()
    lost, seconds = [], []
    for number in range(tries):
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        run = Try(folder, calm)
        try:
            outcomes[FAULTS[name](run, random.Random(f"{name}/{seed + number}"))] += 1
            if run.seconds is not None:
                seconds.append(round(run.seconds, 2))
        except Lost as error:
            lost.append(f"seed {seed + number}: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"tries": tries, "outcomes": dict(outcomes), "lost": lost, "seconds to go on": seconds}


def undisturbed() -> str:
    """The digest of a run that meets no fault."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        run = Try(folder, "")
        ended(run.start({}), 60)
        (digest,) = set(run.texts("end"))
        return digest
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| fault | tried | survived | noticed | lost |", "| --- | --- | --- | --- | --- |"]
    for name, found in results.items():
        counts: Counter[str] = Counter()
        for outcome, times in found.get("outcomes", {}).items():
            counts[outcome.partition(",")[0]] += times
        numbers = [found["tries"], counts["survived"], counts["noticed"], len(found.get("lost", ()))]
        lines.append(
            f"| {name} | {' | '.join(map(str, numbers))} |" if found["tries"] else f"| {name} | skipped | | | |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=5, help="of each fault")
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there")
    args = parser.parse_args(argv)
    calm, results = undisturbed(), {}
    for name in (name for name in FAULTS if args.only in name):
        began = time.monotonic()
        results[name] = tries_of(name, args.tries, args.seed, calm)
        print(f"{name}: {results[name]} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    print(table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return any(found.get("lost") for found in results.values())


if __name__ == "__main__":
    sys.exit(main())
