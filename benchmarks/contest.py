"""Run contestants against each other and store the measurements.

    python -m benchmarks.contest --where two-nodes                  # everything; needs root
    python -m benchmarks.contest --where one-machine --micro-batches 4 --only layerzero fsdp2-hsdp

Every contestant runs in new processes. Each round runs a part of the steps of all contestants; the second round has the
reverse order, so that a drift of the machine affects all contestants equally. Results are written to
benchmarks/results/ after every run. An interrupted contest resumes where it stopped; `--again` first deletes the
selected records.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contestants import ENTRIES, why_missing
from benchmarks.launch import RanksFailed, run_job
from benchmarks.network import Node, one_machine, two_nodes, why_unavailable
from benchmarks.results import FOLDER, Results, summarize
from benchmarks.task import REDUCE_DTYPES, Task, make_model
from benchmarks.worker import Job

__all__ = ["main"]

_DEFAULTS = Task(micro_batches=1, reduce="fp32")
_START_SECONDS = 180  # for imports, building and warm-up, in addition to the time limit of the steps


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the network is torn down
    sizes = {field: getattr(args, field) for field in _DEFAULTS.settings}
    settings: dict[str, Any] = {
        **sizes,
        "parameters": sum(parameter.numel() for parameter in make_model(replace(_DEFAULTS, **sizes)).parameters()),
        "steps": args.steps,
        "limit": args.limit,
    }
    if args.where == "two-nodes":
        settings["rate"] = args.rate
    path = args.results or FOLDER / f"{args.where}.json"
    results = Results.load(path) if path.exists() else Results(args.where, settings)
    if results.settings != settings:
        raise SystemExit(f"{path} was measured with {results.settings}, not {settings}; give another --results")
    if args.where == "two-nodes" and (reason := why_unavailable()):
        print(f"skipped: {reason}")
        return 0
    results.machine = _machine()
    results.commands.append(shlex.join(["python", "-m", "benchmarks.contest", *(arguments or sys.argv[1:])]))

    jobs = [(name, a, reduce) for a in args.micro_batches for reduce in args.reduce for name in args.only]
    jobs = list({Results.key(*job): job for job in jobs}.values())  # contestants without reductions run once
    if args.again:
        for job in jobs:
            results.records.pop(Results.key(*job), None)
    until = time.monotonic() + 60 * args.minutes
    with two_nodes(args.rate) if args.where == "two-nodes" else one_machine() as nodes:
        for turn in range(args.rounds):
            for job in jobs if turn % 2 == 0 else reversed(jobs):
                if len(results.record(*job)["runs"]) <= turn:
                    if time.monotonic() > until:
                        print("out of time; the same command goes on", flush=True)
                        return 0
                    _run(job, args, settings, results, nodes)
                    results.save(path)
    return 0


def _run(
    job: tuple[str, int, str],
    args: argparse.Namespace,
    settings: dict[str, Any],
    results: Results,
    nodes: Sequence[Node],
) -> None:
    name, micro_batches, reduce = job
    record = results.record(*job)
    record["problem"] = why_missing(name)
    began = time.monotonic()
    if record["problem"] is None:
        sizes = {field: settings[field] for field in _DEFAULTS.settings}
        task = Task(micro_batches=micro_batches, reduce=reduce, **sizes)
        work = Job(
            contestant=name,
            task=task,
            steps=math.ceil(args.steps / args.rounds),
            limit=args.limit / args.rounds,
        )
        try:
            ranks = run_job(work, nodes, timeout=_START_SECONDS + 4 * args.limit)
            run = summarize(ranks, nodes=len(nodes))
            run["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            record["runs"].append(run)
        except RanksFailed as error:
            record["problem"] = str(error)
    row = results.row(*job)
    assert row is not None
    said = row.problem or f"{row.median:.3f} s a step, loss {row.losses[-1]:.4f}"
    print(f"{Results.key(*job):<34} {said}  ({time.monotonic() - began:.0f} s)", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--where", choices=["one-machine", "two-nodes"], required=True)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16], metavar="A")
    parser.add_argument("--reduce", nargs="+", choices=REDUCE_DTYPES, default=list(REDUCE_DTYPES))
    parser.add_argument(
        "--only", nargs="+", choices=ENTRIES, default=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES)
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps of all rounds together")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds for the measured steps of one contestant")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run later than that")
    parser.add_argument("--rate", default="1gbit", help="of the cable between two nodes, in each direction")
    parser.add_argument("--again", action="store_true", help="measure anew what has been measured")
    parser.add_argument("--results", type=Path, help="file; by default benchmarks/results/WHERE.json")
    for field, default in _DEFAULTS.settings.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    return parser.parse_args(arguments)


def _machine() -> dict[str, str]:
    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    packages = {
        name: importlib.metadata.version(name) for name in ("torch", "deepspeed") if importlib.util.find_spec(name)
    }
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**20:.0f} GiB",
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        **packages,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    sys.exit(main())
