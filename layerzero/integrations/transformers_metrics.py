"""Transformers: layerzero's numbers in the logs of a ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from layerzero.integrations.loop_settings import is_sharded
from layerzero.reports.metrics_log import metrics

__all__ = ["MetricsCallback"]


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Logs :func:`layerzero.metrics` where the trainer logs the loss, for all that it reports to.

    Args:
        trainer: whose logs. Callbacks of users come after those that report, so that numbers are logged by themselves.

    Example::

        trainer = LayerZeroTrainer(model, args, train_dataset=data, layerzero="layerzero.yaml")
        trainer.add_callback(MetricsCallback(trainer))
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """After the loss of some steps was logged."""
        if logs and "loss" in logs and is_sharded(self._trainer.model):
            self._trainer.log(metrics(self._trainer.model))
