"""Start of the ranks of one contestant as new processes in the namespaces of their nodes, and collection of results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.network import Node
from benchmarks.worker import Job
from layerzero.extend import Progress

__all__ = ["RanksFailed", "meeting", "run_job"]

_ROOT = Path(__file__).resolve().parents[1]
_TAIL = 1500  # characters to keep of a failed rank's output
_PORT = 29500  # for emulated nodes, whose namespaces have no other processes


class RanksFailed(RuntimeError):
    """A rank failed or did not finish in time; the message has the end of its output."""


def run_job(job: Job, nodes: Sequence[Node], *, timeout: float) -> list[dict[str, Any]]:
    """Run the ranks and return their results, by rank.

    Args:
        timeout: seconds from the start of the processes until they are killed.

    Raises:
        RanksFailed: a rank failed or did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder, meeting(nodes) as store:
        processes = [
            _start(replace(job, folder=folder), nodes, rank, store, Path(folder)) for rank in range(job.task.ranks)
        ]
        try:
            with Progress(f"{job.contestant}, A={job.task.micro_batches}, {job.task.reduce}") as progress:
                _wait(processes, Path(folder), timeout, progress)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.task.ranks)]


@contextmanager
def meeting(nodes: Sequence[Node]) -> Iterator[dict[str, str]]:
    """Yield the environment variables with the address of the ranks' store.

    If this function chose a port for a rank to listen on later, another process could take the port first. Therefore
    this process serves the store of one machine, like torchrun's agent. The namespace of an emulated node has no other
    processes, and the fixed port is below the ephemeral ports.
    """
    address = nodes[0].address
    if nodes[0].prefix:
        yield {"MASTER_ADDR": address, "MASTER_PORT": str(_PORT)}
        return
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    yield {"MASTER_ADDR": address, "MASTER_PORT": str(port), **agents}
    del store  # the store is served until here


def _start(
    job: Job, nodes: Sequence[Node], rank: int, store: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    node_size = job.task.ranks // len(nodes)
    node = nodes[rank // node_size]
    environment = {
        **os.environ,
        **store,
        "PYTHONPATH": str(_ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % node_size),
        "WORLD_SIZE": str(job.task.ranks),
        "LOCAL_WORLD_SIZE": str(node_size),
        "GLOO_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [
        *node.prefix,
        sys.executable,
        "-m",
        "benchmarks.worker",
        replace(job, interface=node.interface).to_json(),
    ]
    with Path(folder, f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=_ROOT,
            stdin=subprocess.PIPE,  # never written to; see _die_with_launcher
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float, progress: Progress) -> None:
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll():
                raise RanksFailed(f"rank {rank} failed with status {process.returncode}: {_tail(folder, rank)}")
        elapsed = time.monotonic() - began
        progress.update(f"{elapsed:.0f} s of at most {timeout:.0f} s")
        if elapsed > timeout:
            raise RanksFailed(f"not finished after {timeout:.0f} s; rank 0 said: {_tail(folder, 0)}")
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise RanksFailed(f"rank {rank} failed with status {process.returncode}: {_tail(folder, rank)}")


def _tail(folder: Path, rank: int) -> str:
    return Path(folder, f"{rank}.log").read_text(errors="replace")[-_TAIL:].strip()
