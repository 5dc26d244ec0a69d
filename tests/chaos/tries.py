"""One try of a fault: a run in its own folder, and the checks of its outcome."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.chaos.ranks import rank_main
from tests.support.crashing import start_all

RANKS = 4


class Lost(Exception):
    """The fault was neither survived nor noticed."""


class Try:
    """A run in its own folder, whose files show the outcome."""

    def __init__(self, folder: Path, calm: str) -> None:
        self.folder, self.calm = folder, calm
        self.seconds: float | None = None  # from the restart to the end of the first step

    def start(self, plan: dict[str, Any], attempt: int = 0, world: int = RANKS) -> list[Any]:
        for old in self.folder.glob("end.*"):
            old.unlink()
        return start_all(rank_main, [(rank, world, str(self.folder), attempt, plan) for rank in range(world)])

    def texts(self, name: str) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob(f"{name}.*"))]

    def restarted(self, plan: dict[str, Any], world: int = RANKS) -> None:
        """Restart the run and require the bits of a run without faults.

        With another number of ranks additions have another order, so the final bits are not compared. There each rank
        proves when it resumes that it loaded the saved bits.
        """
        began = time.time()
        ended(self.start(plan, 1, world), seconds=60)
        self.seconds = max(map(float, self.texts("stepped")), default=began) - began
        if world == RANKS and self.texts("end") != [self.calm] * world:
            raise Lost(f"ended with other bits: {self.texts('end')}")

    def logged(self, pattern: str, seconds: float, ranks: int = 1, of: Collection[int] = range(RANKS)) -> None:
        """Wait until at least `ranks` of the ranks `of` have logged the pattern; else raise :class:`Lost`."""
        deadline = time.monotonic() + seconds
        while sum(bool(re.search(pattern, self._log(rank))) for rank in of) < ranks:
            if time.monotonic() > deadline:
                raise Lost(f"no {pattern!r} in {self.texts('log')}")
            time.sleep(0.05)

    def _log(self, rank: int) -> str:
        path = self.folder / f"log.{rank}"
        return path.read_text() if path.exists() else ""


def undisturbed(plan: dict[str, Any], seconds: float = 60) -> str:
    """Return the digest of a run without faults."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        run = Try(folder, "")
        ended(run.start(plan), seconds)
        (digest,) = set(run.texts("end"))
        return digest
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ended(ranks: list[Any], seconds: float, codes: tuple[int, ...] = (0,)) -> None:
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    found = [process.exitcode for process in ranks]
    kill(ranks)
    if any(code not in codes for code in found):
        raise Lost(f"exit codes {found}")


def kill(ranks: list[Any]) -> None:
    """Kill the remaining ranks, as a launcher does."""
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
