"""A checkpoint that tests of this folder copy, damage and forge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damaging import save_intact
from tests.support.ranks import run_ranks


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "intact"
    run_ranks(save_intact, str(path), world_size=2)
    return path
