"""The core trains without the add-ons, and ``import layerzero`` loads the core only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import layerzero
from layerzero import _ADD_ONS
from layerzero.utils import add_ons
from tests.support.ranks import run_sharing

ROOT = Path(__file__).parents[2]
# Python imports this module first in each process. Imports of add-ons then fail, as if their files were gone.
NO_ADD_ONS = """
import sys
from benchmarks.code_size import PACKAGE, is_core

class NoAddOns:
    def find_spec(self, name, path=None, target=None):
        package, _, rest = name.partition(".")
        file = PACKAGE.joinpath(*rest.split(".")).with_suffix(".py")
        if package == "layerzero" and rest and not is_core(file if file.exists() else file.with_suffix("") / "x.py"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoAddOns())
"""
TRAINING = (
    "tests/end_to_end/test_parity.py::test_integer_training_equals_one_process_bit_for_bit",
    "tests/end_to_end/test_parity.py::test_settings_of_speed_and_memory_change_no_bit",
    "tests/engine/test_accumulation.py::test_no_sync_ends_with_its_block_and_nests",
    "tests/engine/test_gradient_storage.py::test_a_final_gradient_and_later_contributions_never_mix",
)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that can import the core, but no add-on."""
    (folder / "sitecustomize.py").write_text(NO_ADD_ONS, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_core_trains_without_any_add_on(tmp_path: Path) -> None:
    done = _run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TRAINING)
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT = """
import layerzero, sys
import torch, pytest
assert not {name for name in sys.modules if name.startswith("layerzero.ema")}
for name in ("EMA", "checkpoint", "verify"):
    with pytest.raises(ModuleNotFoundError, match="layerzero"):
        getattr(layerzero, name)
with pytest.raises(ImportError, match="add-on 'yaml'"):
    layerzero.LayerZeroConfig.from_yaml("settings.yaml")
with pytest.raises(ImportError, match="add-on 'shared_memory'"):
    layerzero.extend.addon("shared_memory")
"""


def test_a_missing_add_on_is_named_where_it_is_needed(tmp_path: Path) -> None:
    done = _run(tmp_path, "-c", WITHOUT)
    assert done.returncode == 0, done.stderr


def transport(rank: int) -> str:
    return layerzero.traffic(layerzero.shard_model(nn.Linear(4, 4), zero3_size=2)).transport


SHARES_NOTHING = """
from tests.project.test_core_alone import transport
from tests.support.ranks import run_sharing
assert run_sharing(transport, world_size=2) == ["process_group"] * 2
"""


def test_ranks_use_process_groups_if_the_add_on_for_shared_memory_is_missing(tmp_path: Path) -> None:
    done = _run(tmp_path, "-c", SHARES_NOTHING)
    assert done.returncode == 0, done.stderr


def _misses_the_add_on(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(add_ons.ADD_ONS, "shared_memory", "layerzero.gone" if rank else "layerzero.shared_memory")
        with pytest.raises(ValueError, match="add-on for shared memory"):
            layerzero.shard_model(nn.Linear(4, 4), zero3_size=2)


def test_the_add_on_for_shared_memory_is_on_all_ranks_or_none() -> None:
    run_sharing(_misses_the_add_on, world_size=2)


LOADED = """
import layerzero, sys
from pathlib import Path
from benchmarks.code_size import is_core
files = [Path(module.__file__) for name, module in sys.modules.items() if name.partition(".")[0] == "layerzero"]
assert not [file for file in files if not is_core(file)]
assert "torch.distributed.checkpoint" not in sys.modules, "it takes a third of the import time"
assert set(layerzero.__all__) <= set(dir(layerzero))
"""


def test_the_import_of_the_package_loads_no_add_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_public_name_is_found_at_its_first_use() -> None:
    for name in layerzero.__all__:
        assert getattr(layerzero, name) is not None
    of_add_ons = {name for names in _ADD_ONS.values() for name in names}
    assert of_add_ons <= set(layerzero.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        layerzero.nothing  # noqa: B018
