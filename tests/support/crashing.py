"""Processes that die, or are refused, at a chosen call of the operating system."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")  # of os, that change what is on the disk
SURVIVED, RAISED, WRONG = 0, 7, 8
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


def exit_codes(ranks: list[Any]) -> list[int]:
    """How they end, which they must do in time."""
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]
