"""Random programs on a sharded model for a given time: `make soak`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from tests.support.lasting import growth, held_over
from tests.support.monkey import Operation, Program, Setting, failure_of, program_of, shrunk


def soak(seconds: float, first: int) -> tuple[int, str | None]:
    """Run programs of seeds from `first` on; return their number, and the first failure, shortened, or None."""
    deadline = time.monotonic() + seconds
    for seed in count(first):
        program = program_of(seed)
        if (why := _failure(program)) is not None:

            def fails(operations: tuple[Operation, ...], program: Program = program) -> bool:
                return bool(operations) and _failure(program._replace(operations=operations)) is not None

            short = program._replace(operations=shrunk(program.operations, fails))
            return seed - first, f"seed {seed}: {why}\n\nits shortest form:\n{short!r}\n{_failure(short)}"
        if time.monotonic() > deadline:
            return seed - first + 1, None
    raise AssertionError


def _failure(program: Program) -> str | None:
    folder = tempfile.mkdtemp()
    try:
        return failure_of(program, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--operations", type=int, default=2000, help="on one model, over which nothing may grow")
    args = parser.parse_args()
    done, failure = soak(args.seconds, args.seed)
    print(failure or f"{done} programs of 40 operations, all equal to the plain model")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(2, "bf16", "sharded", "auto", muon=False)
        held = held_over(Path(folder), setting, seed=args.seed, operations=args.operations, timeout=3600.0)
    failure = failure or growth(held)
    print(growth(held) or f"{args.operations} operations on one model, and nothing has grown: {held[0][-1]}")
    sys.exit(failure is not None)
