"""Every optimizer of other packages trains and resumes as in one process, or shard_optimizer refuses it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.optimizer_survey import classes
from tests.support.surveying import survey_and_resume

BATCHES = 8
NAMED = ("AggMo", "CAME", "Lamb", "SOAP", "Shampoo", "StableAdamW")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer, installed with --no-deps"
)


def names() -> list[str]:
    """Return the module and name of each class once."""
    with contextlib.redirect_stderr(io.StringIO()):  # packages that are not installed
        found = {kind: f"{package}.{name}" for package, name, kind in classes()}
    return list(found.values())


@pytest.mark.slow
def test_optimizers_with_lists_none_and_whole_parameters_resume(tmp_path: Path) -> None:
    found = survey_and_resume([f"pytorch_optimizer.{name}" for name in NAMED], tmp_path)
    assert [*found.values()] == ["on rows", *["whole"] * 5], found


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_optimizer_of_the_packages_is_accepted_and_wrong(tmp_path: Path, batch: int) -> None:
    found = survey_and_resume(names()[batch::BATCHES], tmp_path)
    counts = Counter(text.split(":")[0] for text in found.values())
    print(batch, dict(counts), {name: text[:200] for name, text in found.items() if ":" in text})
    assert not [text for text in found.items() if "WRONG" in text[1]], counts
