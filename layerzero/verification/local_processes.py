"""Run a function on local gloo ranks. Each rank is a single-threaded process. The rendezvous uses a file."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

_GRACE = 2.0  # seconds that a rank gives another rank, on whose failure its own error depends, to report first
_DIED = (
    "its process ended without an exception. Its output may show the reason, such as too little memory. In a script, "
    'put the call under `if __name__ == "__main__":`'
)


def run_on_local_ranks(
    fn: Callable[[int, Mapping[str, Any]], Any], arguments: Mapping[str, Any], *, world_size: int, timeout: float
) -> Any:
    """Call ``fn(rank, arguments)`` in new processes with an initialized default group; return the result of rank 0.

    Args:
        fn: function that is defined at the top level of a module.
        arguments: values by name, which must be picklable.
        world_size: number of processes.
        timeout: timeout of a collective between the ranks, in seconds.

    Raises:
        TypeError: an argument cannot be pickled.
        RuntimeError: a rank raised an error or died. The message describes the first failure, with a traceback if there
            is one. All processes have exited before this error is raised.
    """
    for name, argument in arguments.items():
        try:
            pickle.dumps(argument)
        except Exception as error:  # pickle may raise an exception of any type
            advice = "Define it at the top level of a module, or call verify under torchrun, which starts the processes"
            raise TypeError(f"{name} cannot be sent to the processes of the ranks ({error}). {advice}") from error
    with tempfile.TemporaryDirectory() as folder:
        sent = (fn, pickle.dumps(dict(arguments)), world_size, Path(folder), timeout)
        try:
            start_processes(_run_rank, sent, nprocs=world_size, daemon=True)
        except ProcessExitedException as error:
            report = Path(folder, f"error {error.error_index}")
            reason = report.read_text() if report.exists() else f"{_DIED} (exit code {error.exit_code})"
            raise RuntimeError(f"rank {error.error_index} failed: {reason}") from None
        return pickle.loads(Path(folder, "result").read_bytes())


def _run_rank(
    rank: int,
    fn: Callable[[int, Mapping[str, Any]], Any],
    arguments: bytes,
    world_size: int,
    folder: Path,
    timeout: float,
) -> None:
    """Run one rank and end its process.

    The process groups are not destroyed, because this could deadlock with ranks that wait for this rank.
    """
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = fn(rank, pickle.loads(arguments))
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(world_size)])  # other ranks may still read from this one
        status = 0
    except BaseException as error:
        if "layerzero: " in str(error):  # it may only report that another rank failed, see comm/agreement.py
            time.sleep(_GRACE)
        (folder / f"error {rank}").write_text(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
