"""Inject each fault several times into real processes and count the outcomes: `make chaos`.

Each try is a separate run. The seed chooses the time and the place of the fault. If the run should survive the fault,
it is restarted as a launcher would do it. A try *survived* if the run ends with the same bits as a run without
faults. The fault is *noticed* if an error or the log names its kind and place. All other tries are *lost*.

    python -m tests.chaos --tries 5 --only node --json benchmarks/results/chaos/faults.json
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.network import why_unavailable
from tests.chaos.faults import FAULTS, NETWORK
from tests.chaos.tries import Lost, Try, undisturbed


def tries_of(name: str, tries: int, seed: int, calm: str) -> dict[str, Any]:
    """Inject the fault `tries` times and return the outcomes, the lost tries and the seconds to recover."""
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
        except Exception as error:  # the other tries still run
            lost.append(f"seed {seed + number}: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"tries": tries, "outcomes": dict(outcomes), "lost": lost, "seconds to go on": seconds}


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
    calm, results = undisturbed({}), {}
    for name in (name for name in FAULTS if args.only in name):
        began = time.monotonic()
        if name in NETWORK and (why := why_unavailable()):
            results[name] = {"tries": 0, "why": why}
            continue
        results[name] = tries_of(name, args.tries, args.seed, calm)
        print(f"{name}: {results[name]} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    print(table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return any(found.get("lost") for found in results.values())


if __name__ == "__main__":
    sys.exit(main())
