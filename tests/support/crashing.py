"""Processes that die or are delayed at system calls."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")  # functions of os that change the disk
SURVIVED, RAISED, WRONG, TAKEN = 0, 7, 8, 9
TIMEOUT = timedelta(seconds=20)
forks = multiprocessing.get_context("forkserver")


forks.set_forkserver_preload(["tests.support.checkpointing"])


def die_at(turn: int, *, half: bool) -> None:
    """Kill this process at its disk call number `turn`; with `half`, a write first writes half of its bytes."""
    turns = iter(range(turn + 1))

    def deadly(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(turns, None) == turn:
                if half and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name))


@contextmanager
def slow_disk(generator: random.Random) -> Iterator[None]:
    """Delay every call that changes the disk."""

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(generator.uniform(0, 0.004))
            return real(*args, **kwargs)

        return call

    reals = {name: getattr(os, name) for name in CALLS}
    for name, real in reals.items():
        setattr(os, name, late(real))
    try:
        yield
    finally:
        for name, real in reals.items():
            setattr(os, name, real)


def exit_codes(ranks: list[Any]) -> list[int]:
    """Return the exit codes; processes that run for longer than 60 s are killed."""
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]
