"""Packages: one version, complete sources, and a command line that reports missing requirements."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import layerzero
from layerzero import checkpoint
from tests.support.ranks import on_ranks
from tests.support.snippets import Block, MyModel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_there_is_one_version() -> None:
    told = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == layerzero.__version__
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited == layerzero.__version__
    assert f"## {layerzero.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_files_of_requirements_agree_on_versions() -> None:
    pins: dict[str, set[str]] = {}
    for path in [ROOT / "constraints.txt", *ROOT.glob("requirements*.txt")]:
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            pins.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    assert len(pins.pop("megatron-core")) == 2  # the two supported minor versions
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout, to compare with")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(set(listed.stdout.split("\n")) - names - {""}) == []
    assert not [
        name for name in names if re.search(r"__pycache__|\.pyc$|^build/|^\.venv|\.egg-info/SOURCES.*\.so$", name)
    ]


def test_the_import_is_silent_without_numpy() -> None:
    if find_spec("numpy") is None:
        pytest.skip("needs numpy, to be without it")
    program = "import sys; sys.modules['numpy'] = None; import layerzero"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@on_ranks(world_size=2)
def test_what_needs_numpy_says_so_on_all_ranks(rank: int, tmp_path: Path) -> None:
    model = layerzero.shard_model(MyModel(), zero3_size=2, units={Block})
    with mock.patch.dict(sys.modules, {"numpy": None}):
        for wanted in (checkpoint.save, checkpoint.load):
            with pytest.raises(ModuleNotFoundError, match=r"a checkpoint needs numpy, .*Run pip install numpy"):
                wanted(f"{tmp_path}/one", model)
        with pytest.raises(ModuleNotFoundError, match=r"layerzero.verify needs numpy, .*Run pip install numpy"):
            layerzero.verify(MyModel, lambda index, rank: torch.ones(2, 8))
    checkpoint.save(f"{tmp_path}/one", model)
