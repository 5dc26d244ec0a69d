"""Run a function on local gloo ranks. Each rank is a single-threaded process. The rendezvous uses a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["pickle_parts", "run_on_local_ranks"]

_GRACE = 2.0  # time in seconds to wait for errors of the other ranks after one rank has failed


@dataclass(frozen=True)
class _Failure:
    """Description of the failure of one rank, for the error message."""

    rank: int
    when: float  # seconds since the epoch
    summary: str  # one sentence
    traceback: str = ""

    @property
    def is_secondary(self) -> bool:
        """True if this rank only reports that another rank failed; see :mod:`layerzero.comm.agreement`."""
        return "layerzero: " in self.summary


def pickle_parts(parts: Mapping[str, object], *, way_out: str) -> bytes:
    """Pickle a dictionary for other processes.

    Args:
        parts: values by name.
        way_out: advice to the user that the error message contains.

    Raises:
        TypeError: a value cannot be pickled. The message names the value and contains `way_out`.
    """
    for name, part in parts.items():
        _require_picklable(name, part, way_out)
    return pickle.dumps(dict(parts))


def _require_picklable(name: str, part: object, way_out: str) -> None:
    try:
        pickle.dumps(part)
    except Exception as error:  # pickle may raise an exception of any type
        raise TypeError(f"{name} cannot be sent to the processes of the ranks ({error}). {way_out}") from error


def run_on_local_ranks(
    fn: Callable[[int, Mapping[str, Any]], Any], arguments: bytes, *, world_size: int, timeout: float
) -> Any:
    """Call ``fn(rank, arguments)`` in new processes with an initialized default group; return the result of rank 0.

    Args:
        fn: function that is defined at the top level of a module.
        arguments: result of :func:`pickle_parts`. Each process unpickles the result and passes it to `fn`.
        world_size: number of processes.
        timeout: timeout of a collective between the ranks, in seconds.

    Raises:
        RuntimeError: a rank raised an error or died. The message describes the first failure, with a traceback if there
            is one. All processes have exited before this error is raised.
    """
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[BaseProcess, Connection]] = []  # each process and the pipe to it
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        try:
            for rank in range(world_size):
                parent_pipe, child_pipe = context.Pipe()
                process: BaseProcess = context.Process(
                    target=_run_rank, args=(child_pipe, fn, arguments, rank, world_size, path, timeout), daemon=True
                )
                process.start()
                child_pipe.close()
                ranks.append((process, parent_pipe))
            results, failures = _collect_results([pipe for _, pipe in ranks])
        finally:
            for process, pipe in ranks:
                pipe.close()
                process.kill()
                process.join()
    if failures:
        codes = {rank: process.exitcode for rank, (process, _) in enumerate(ranks)}
        raise RuntimeError(_failure_message(failures, codes))
    return results[0]


def _collect_results(pipes: list[Connection]) -> tuple[dict[int, Any], list[_Failure]]:
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    deadline: float | None = None
    while pending and (deadline is None or deadline > time.monotonic()):
        for ready in wait(list(pending), None if deadline is None else deadline - time.monotonic()):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                value = ready.recv()
            except EOFError:
                value = _Failure(rank, time.time(), _DIED)
            if isinstance(value, _Failure):
                failures.append(value)
                deadline = deadline or time.monotonic() + _GRACE
            else:
                results[rank] = value
    return results, failures


_DIED = (
    "its process ended without an exception. Its output may show the reason, such as too little memory. In a script, "
    'put the call under `if __name__ == "__main__":`'
)


def _failure_message(failures: list[_Failure], exit_codes: Mapping[int, int | None]) -> str:
    """Return a message that describes the cause in full, and then the failures that followed.

    The cause is a rank that died. If no rank died, the cause is the first rank that raised an error.
    """
    first, *others = sorted(failures, key=lambda failure: (failure.is_secondary, bool(failure.traceback), failure.when))
    lines = [f"rank {first.rank} failed: {first.summary}"]
    if first.traceback:
        lines += ["", first.traceback]
    else:
        lines[0] += f" (exit code {exit_codes[first.rank]})"
    for failure in others:
        if failure.summary == first.summary:
            lines.append(f"rank {failure.rank} failed with the same error")
        elif not failure.is_secondary:
            lines.append(f"rank {failure.rank} failed as well: {failure.summary}")
    return "\n".join(lines)


def _run_rank(
    pipe: Connection,
    fn: Callable[[int, Mapping[str, Any]], Any],
    arguments: bytes,
    rank: int,
    world_size: int,
    path: str,
    timeout: float,
) -> None:
    torch.set_num_threads(1)
    try:
        parsed = pickle.loads(arguments)
        limit = timedelta(seconds=timeout)
        store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = fn(rank, parsed)
    except BaseException as error:
        pipe.send(_Failure(rank, time.time(), f"{type(error).__name__}: {error}", traceback.format_exc()))
        _exit_process(1)
    pipe.send(result)
    # A rank must not exit while another rank may still read from it. The caller closes the pipe after all ranks finish.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    _exit_process(0)


def _exit_process(status: int) -> NoReturn:
    """Exit without destroying process groups. Destroying them could deadlock with ranks that wait for this rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
