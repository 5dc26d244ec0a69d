"""Processes that die or are delayed at system calls."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SOON = 10.0  # seconds on a busy machine; the timeout of transfers is an hour
CALLS = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir")  # functions of os that change the disk
SURVIVED, RAISED, WRONG, TAKEN = 0, 7, 8, 9
TIMEOUT = timedelta(seconds=20)
forks = multiprocessing.get_context("forkserver")


forks.set_forkserver_preload(["tests.support.checkpointing"])


def start_all(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Start one process for each tuple of arguments and return the processes."""
    processes = [forks.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return processes


def join_ranks(file: str, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> None:
    """Initialize the default process group of processes that share a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(file, world_size)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


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
def fails_at(owner: object, name: str, turn: int, fail: Callable[[], object]) -> Iterator[None]:
    """Call `fail` before call number `turn` of a function."""
    real, turns = getattr(owner, name), iter(range(turn + 1))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(turns, None) == turn:
            fail()
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


def interrupt() -> None:
    raise KeyboardInterrupt("by hand")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failure_of(act: Callable[[], object]) -> str:
    """Return the error of `act`, which must be raised soon."""
    began, said = time.monotonic(), "nothing was raised"
    try:
        act()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    assert time.monotonic() - began < SOON, said
    return said


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


def survivors(
    folder: Path, act: Callable[[int], str], *, world_size: int, victim: int, timeout: timedelta = TIMEOUT
) -> dict[int, str]:
    """Return the results of `act`, which kills one rank, on the other ranks. The first rank serves the store."""
    arguments = [(rank, world_size, folder, act, timeout) for rank in range(world_size)]
    ranks = start_all(_live, arguments)
    files = {rank: folder / f"said.{rank}" for rank in range(world_size) if rank != victim}
    deadline = time.monotonic() + 180  # on a busy machine, a process may need a minute to start
    while not all(file.exists() for file in files.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    return {rank: file.read_text() if file.exists() else "nothing" for rank, file in files.items()}


def _live(rank: int, world_size: int, folder: Path, act: Callable[[int], str], timeout: timedelta) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
    else:
        while not (folder / "port").exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    said = act(rank)
    (folder / f"{rank}.new").write_text(said)
    (folder / f"{rank}.new").rename(folder / f"said.{rank}")
    time.sleep(60)  # until all have reported: a rank that ends closes its connections


def exit_codes(ranks: list[Any]) -> list[int]:
    """Return the exit codes; processes that run for longer than 60 s are killed."""
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]
