"""Processes that die, are refused or are late at calls of the operating system."""

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

CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")  # of os, that change what is on the disk
SURVIVED, RAISED, WRONG, TAKEN = 0, 7, 8, 9
TIMEOUT = timedelta(seconds=20)
forks = multiprocessing.get_context("forkserver")


forks.set_forkserver_preload(["tests.support.checkpointing"])


def die_at(turn: int, *, half: bool) -> None:
    """Kill this process instead of its call number `turn`; a write comes `half` as far."""
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
    """Every call that changes what is on the disk takes its time."""

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
    """How they end, which they must do in time."""
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]
