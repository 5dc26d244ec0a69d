"""Program of one rank of one contestant: ``python -m benchmarks.worker JOB``, started by :mod:`benchmarks.launch`.

[Note: Step timing]
Steps run without barriers between them. Each rank records the time when its `update` returns; all ranks use the same
clock, that of the machine. A step starts when the last rank has finished the previous step, and ends when the last rank
has finished this step. Work that a framework leaves in flight after its optimizer's step, such as a gather of new
weights, therefore counts for the next step. All time between steps is measured.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.contestants import ENTRIES, Contestant
from benchmarks.network import Carried, carried
from benchmarks.task import Task, make_batches

__all__ = ["WARM_UP", "Job", "main", "settled"]

WARM_UP = 2  # steps before the measured ones
PEAK_STEPS = 2  # steps after the measured ones, for the peak memory
FEWEST = 3  # minimum of measured steps, even if they are slow
SILENCE = 20_000  # bytes; less than any tensor of the model, more than a barrier


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of one run of a contestant."""

    contestant: str  # a key of ENTRIES
    task: Task
    steps: int  # maximum number of measured steps
    limit: float  # seconds for the measured steps; slow contestants take fewer steps
    interface: str = ""  # network interface with the byte counters; set by the launcher
    folder: str = ""  # folder for results; set by the launcher

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "task": Task(**fields["task"])})


def main() -> None:
    job = Job.from_json(sys.argv[1])
    rank = int(os.environ["RANK"])
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers warn about CPUs and deprecations
    build = ENTRIES[job.contestant].load()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        before = measure.resident_bytes()  # after the imports, before the model
        result = run(job, build(job.task), rank)
        result["peak_bytes"] -= before
        Path(job.folder, f"{rank}.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def _die_with_launcher() -> None:
    """Exit when the launcher dies, which closes the other end of our standard input."""
    os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter ends
    os._exit(1)


def run(job: Job, contestant: Contestant, rank: int) -> dict[str, Any]:
    """Warm up, measure, and return the measurements of this rank as plain numbers."""
    losses: list[float] = []
    state_bytes: dict[str, int] = {}
    for step in range(WARM_UP):
        batches = make_batches(job.task, rank=rank, step=step)
        began = time.monotonic()
        losses.append(take_step(contestant, batches, state_bytes if step == WARM_UP - 1 else None))
        seconds = time.monotonic() - began

    steps = _steps_within(job, seconds)
    contestant.ledger()
    wire = settled(job.interface)
    marks = []
    for step in range(WARM_UP, WARM_UP + 1 + steps):  # the first step starts with nothing in flight, so it is not timed
        losses.append(take_step(contestant, make_batches(job.task, rank=rank, step=step)))
        marks.append(time.monotonic())
    wire_after = settled(job.interface)
    ledger = contestant.ledger()
    measure.return_freed_memory()
    measure.reset_peak()
    for step in range(PEAK_STEPS):
        take_step(contestant, make_batches(job.task, rank=rank, step=step))
    peak = measure.peak_bytes(sharers=job.task.node_size)
    return {
        "marks": marks,
        "losses": losses,
        "state_bytes": state_bytes,
        "peak_bytes": peak,
        "sent_bytes": (wire_after.sent - wire.sent) / (steps + 1),
        "received_bytes": (wire_after.received - wire.received) / (steps + 1),
        "ledger": {axis: sent / (steps + 1) for axis, sent in ledger.items()},
        "kinds": contestant.kinds(),
    }


def settled(interface: str) -> Carried:
    """Wait until no rank has data in flight, and return the interface's counters."""
    while True:
        dist.barrier()
        before = carried(interface)
        time.sleep(0.3)
        now = carried(interface)
        moved = torch.tensor(now.sent - before.sent + now.received - before.received)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)  # all ranks leave the loop together
        if moved <= SILENCE:
            return now


def take_step(contestant: Contestant, batches: list[Tensor], state_bytes: dict[str, int] | None = None) -> float:
    """Run one optimizer step; return its mean loss on this rank.

    Args:
        state_bytes: filled with the bytes of model state by time in the step. See [Note: Model state].
    """
    losses = []
    for index, batch in enumerate(batches):
        last = index + 1 == len(batches)
        losses.append(contestant.backward(batch, last=last))
        if state_bytes is not None and (last or index == 0):
            moment = "after the last backward" if last else "between micro-batches"
            state_bytes[moment] = measure.model_state_bytes(apart_from=batches, sharers=contestant.task.node_size)
    contestant.update()
    if state_bytes is not None:
        sharers = contestant.task.node_size
        state_bytes["between steps"] = measure.model_state_bytes(apart_from=batches, sharers=sharers)
    return float(torch.stack(losses).float().mean())


def _steps_within(job: Job, seconds: float) -> int:
    """Return the number of steps of `seconds` that fit the limit; the same on every rank."""
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(min(FEWEST, job.steps), min(job.steps, int(job.limit / float(slowest))))


if __name__ == "__main__":
    main()
