"""``layerzero doctor`` in one process, run as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.__main__ import main
from tests.doctor.test_machine import install

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ["Python and torch", "devices", "launch", "environment variables", "memory", "packages"]


def run(folder: Path, *arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m layerzero doctor`` in `folder`, with `packages` on the import path."""
    path = [str(ROOT), *([str(packages)] if packages else [])]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TORCH_", "GLOO_"))}
    command = [sys.executable, "-W", "error", "-m", "layerzero", "doctor", *arguments]
    env |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_healthy_environment_ends_with_0(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert [line for line in ran.stdout.splitlines() if line and not line.startswith(" ")][:-1] == GROUPS
    assert ran.stdout.splitlines()[-1].startswith("no problems, ")
    assert ran.stderr == ""


@pytest.mark.exhaustive
def test_a_package_of_others_ends_with_1(tmp_path: Path) -> None:
    install(tmp_path, "LayerZero", "0.5.14", files=("layerzero/Trainer.py",))
    ran = run(tmp_path, "--json", packages=tmp_path)
    assert ran.returncode == 1, ran.stderr
    printed = json.loads(ran.stdout)
    (text,) = (each["text"] for each in printed["findings"] if each["level"] == "problem")
    assert printed["problems"] == 1
    assert text == f"LayerZero 0.5.14 in {tmp_path} is another project that also installs the module layerzero"


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["layerzero", "doctor", "--timeout", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""
