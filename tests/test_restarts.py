"""torchrun starts a run again that has died, and it ends with the bits of one that never stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_restarts.py"
MENDED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def _run(folder: Path, *arguments: str, restarts: int, **environment: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(EXAMPLE), "--checkpoints", str(folder), *arguments]
    known = {key: value for key, value in os.environ.items() if key != MENDED}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _digest(said: str) -> str:
    return re.findall(r"digest of the run: (\w{64})", said)[-1]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run says that nobody has killed."""
    return _run(tmp_path_factory.mktemp("calm") / "run", restarts=1)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_killed_run_is_started_again_and_ends_with_the_same_bits(
    never_stopped: str, tmp_path: Path, seed: int
) -> None:
    said = _run(tmp_path / "run", "--kill", str(seed), restarts=2, **{MENDED: "1"})
    killed = int(re.findall(r"is killed \d+ ms into step (\d+)", said)[0])
    attempts = [(int(number), int(step)) for number, step in re.findall(r"attempt (\d): from step (\d+)", said)]
    assert attempts[0] == (0, 0) and len(attempts) == 2
    # A save waits for the one before it, so that is on the disk.
    assert attempts[1][0] == 1 and killed - 10 < attempts[1][1] <= killed + 5
    assert _digest(said) == _digest(never_stopped)
    assert f"{MENDED}=1" not in said, "there is nothing to warn of"


def test_restarts_that_torch_cannot_make_are_warned_of_at_the_start(never_stopped: str) -> None:
    warned = [line for line in never_stopped.splitlines() if f"{MENDED}=1" in line]
    assert len(warned) == 1, never_stopped
    assert "--max-restarts" in warned[0] and "--standalone" in warned[0]
