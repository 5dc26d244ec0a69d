"""Shared memory with default settings, in processes started as torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import serve

pytestmark = pytest.mark.slow

_SCRIPT = """
import logging, sys
import torch, torch.distributed as dist
import layerzero
from layerzero.engine.hooks import get_state

class Heard(logging.Handler):
    lines = 0
    def emit(self, record):
        Heard.lines += "use collectives instead of shared memory" in record.getMessage()

logging.getLogger("layerzero").addHandler(Heard())
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = layerzero.shard_model(torch.nn.Linear(1 << 10, 1 << 7), zero3_size=2)
optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=2**-4), model)
for _ in range(2):
    model(torch.ones(1, 1 << 10)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
handles = get_state(model).handles
shared = all(handle.weights.buffer.read_by_peers for handle in handles)
print(f"rank {dist.get_rank()}: shared {shared}, said {Heard.lines}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or subprocess.run(["unshare", "-m", "-p", "-f", "true"], check=False).returncode != 0,
    reason="needs root, and namespaces of mounts and processes",
)


def _ranks(folder: Path, *before: str) -> list[str]:
    """Return the output of two ranks, each started with the command `before`."""
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    store = serve()
    environment = {**os.environ, "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = [
        subprocess.Popen(
            [*before, sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [printed.strip() for printed, _ in outputs]


def test_memory_is_shared_by_default(tmp_path: Path) -> None:
    assert _ranks(tmp_path) == ["rank 0: shared True, said 0", "rank 1: shared True, said 0"]


@pytest.mark.exhaustive
@needs_root
def test_a_small_dev_shm_is_no_obstacle(tmp_path: Path) -> None:
    """Use weights of half a megabyte; /dev/shm has 64 kB."""
    mounted = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"'
    assert _ranks(tmp_path, "unshare", "-m", "sh", "-c", mounted) == [
        "rank 0: shared True, said 0",
        "rank 1: shared True, said 0",
    ]


@needs_root
def test_ranks_that_do_not_see_each_others_processes_use_collectives_and_one_of_them_says_so(tmp_path: Path) -> None:
    """Run as in two containers of one machine."""
    apart = _ranks(tmp_path, "unshare", "-m", "-p", "-f", "--mount-proc")
    assert apart == ["rank 0: shared False, said 1", "rank 1: shared False, said 0"]
