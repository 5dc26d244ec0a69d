"""torchrun restarts a run that has died; it ends with the bits of an uninterrupted run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.comm.agreement import require_equal
from tests.support.checkpointing import sharded_net, train
from tests.support.crashing import forks
from tests.support.ranks import serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_restarts.py"
MENDED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def _run(folder: Path, *arguments: str, restarts: int, kept: str = "--checkpoints", **environment: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(EXAMPLE), kept, str(folder), *arguments]
    known = {key: value for key, value in os.environ.items() if key != MENDED}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    for _ in range(3):  # with MENDED, torchrun picks a free port, and a rank listens on it some seconds later
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=240, check=False)
        if "EADDRINUSE" not in done.stderr:
            break
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _digest(said: str) -> str:
    return re.findall(r"digest of the run: (\w{64})", said)[-1]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of an uninterrupted run."""
    return _run(tmp_path_factory.mktemp("calm") / "run", restarts=1)


@pytest.mark.parametrize(
    ("seed", "kept"), [(3, "--checkpoints"), pytest.param(4, "--snapshots", marks=pytest.mark.exhaustive)]
)  # rank 0, and rank 1
def test_a_killed_run_is_started_again_and_ends_with_the_same_bits(
    never_stopped: str, tmp_path: Path, seed: int, kept: str
) -> None:
    said = _run(tmp_path, "--kill", str(seed), restarts=2, kept=kept, **{MENDED: "1"})
    killed = int(re.findall(r"is killed \d+ ms into step (\d+)", said)[0])
    attempts = [(int(number), int(step)) for number, step in re.findall(r"attempt (\d): from step (\d+)", said)]
    assert attempts[0] == (0, 0) and len(attempts) == 2
    # A save waits for the previous one, so that one is on the disk.
    assert attempts[1][0] == 1 and killed - 10 < attempts[1][1] <= killed + 5
    assert _digest(said) == _digest(never_stopped)
    assert f"{MENDED}=1" not in said, "there is nothing to warn of"
    assert bool(list(tmp_path.rglob("*"))) == (kept == "--checkpoints"), "snapshots are removed at the end"


def test_restarts_that_torch_cannot_make_are_warned_of_at_the_start(never_stopped: str) -> None:
    warned = [line for line in never_stopped.splitlines() if f"{MENDED}=1" in line]
    assert len(warned) == 1, never_stopped
    assert "--max-restarts" in warned[0] and "--standalone" in warned[0]


def _keys(rank: int, port: int, attempt: int, dies: bool) -> None:
    """Run an attempt on a store that earlier attempts used; their keys must not interfere."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=2)
    model, optimizer = sharded_net(1, adam=True)
    layerzero.watchdog(model, 5.0)
    train(model, optimizer, range(1))
    if dies and rank == 1:  # while the other one waits in an agreement
        os.kill(os.getpid(), signal.SIGKILL)
    require_equal("a test", {"attempt": attempt}, ranks=(0, 1))
    train(model, optimizer, range(1, 3))
    os._exit(0)


def test_a_store_that_outlives_attempts_confuses_nobody() -> None:
    server = serve()
    left: set[str] = set()
    for attempt in range(3):
        ranks = [forks.Process(target=_keys, args=(rank, server.port, attempt, attempt < 2)) for rank in range(2)]
        for process in ranks:
            process.start()
        ranks[1].join(60)
        if attempt < 2:
            assert ranks[1].exitcode == -signal.SIGKILL
            ranks[0].kill()
        ranks[0].join(60)
        if hasattr(server, "list_keys"):
            new = {key for key in server.list_keys() if "layerzero" in key} - left
            assert new and all(key.startswith(f"attempt {attempt}/") for key in new)
            left |= new
    assert [process.exitcode for process in ranks] == [0, 0]
