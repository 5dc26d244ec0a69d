"""layerzero.metrics in the logs of transformers' and Lightning's trainers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.loops import launched
from tests.support.ranks import run_ranks

needs_transformers = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
    reason="needs transformers, accelerate, peft: pip install --no-deps -r requirements-loops.txt",
)
needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs lightning: pip install --no-deps -r requirements-loops.txt"
)


def _with_transformers(rank: int, folder: str) -> list[dict[str, float]]:
    from layerzero.integrations.transformers_metrics import MetricsCallback  # noqa: PLC0415
    from tests.integrations.test_transformers import trainer  # noqa: PLC0415

    with launched():
        ours = trainer(folder, logging_steps=2)
        ours.add_callback(MetricsCallback(ours))
        ours.train()
    return list(ours.state.log_history)


@needs_transformers
def test_a_trainer_of_transformers_logs_them_beside_the_loss(tmp_path: Any) -> None:
    for history in run_ranks(_with_transformers, str(tmp_path), world_size=2):
        found = [entry for entry in history if "layerzero/steps/taken" in entry]
        assert len(found) == len([entry for entry in history if "loss" in entry]) == 2
        assert [entry["layerzero/steps/taken"] for entry in found] == [2.0, 2.0], "since the line before"
        assert [entry["step"] for entry in found] == [2, 4]
        assert all(entry["layerzero/bytes/zero3"] > 0 for entry in found)


def _with_lightning(rank: int, folder: str) -> list[tuple[int, dict[str, float]]]:
    from lightning.pytorch.loggers import Logger  # noqa: PLC0415

    from layerzero.integrations.lightning import LayerZeroStrategy  # noqa: PLC0415
    from layerzero.integrations.lightning_metrics import MetricsCallback  # noqa: PLC0415
    from tests.integrations.test_lightning import UNITS, fit  # noqa: PLC0415

    class Kept(Logger):  # type: ignore[misc]
        name, version = "kept", 0

        def __init__(self) -> None:
            self.lines: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.lines.append((step, dict(metrics)))

        def log_hyperparams(self, *unused: Any, **unused_too: Any) -> None:
            pass

    kept = Kept()
    settings = {"logger": kept, "callbacks": [MetricsCallback()], "log_every_n_steps": 2}
    with launched(TORCHELASTIC_RUN_ID="1"):
        fit(LayerZeroStrategy(2, UNITS), folder, **settings)
    return [(step, line) for step, line in kept.lines if "layerzero/steps/taken" in line]


@needs_lightning
def test_a_trainer_of_lightning_gives_them_to_its_loggers(tmp_path: Any) -> None:
    for lines in run_ranks(_with_lightning, str(tmp_path), world_size=4):
        assert [step for step, _ in lines] == [2, 4]
        assert [line["layerzero/steps/taken"] for _, line in lines] == [2.0, 2.0], "of two micro-batches each"
        assert all(line["layerzero/bytes/replica"] > 0 for _, line in lines)
