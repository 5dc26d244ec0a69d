"""Transformers: a callback that logs ``layerzero.metrics``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from layerzero.integrations.common import is_sharded
from layerzero.reports.metrics_log import metrics

__all__ = ["MetricsCallback"]


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that logs :func:`layerzero.metrics` whenever the trainer logs the loss.

    Args:
        trainer: the trainer whose loggers receive the metrics. Its reporting callbacks run before user callbacks, so
            the metrics are logged in a separate call.

    Example::

        trainer = LayerZeroTrainer(model, args, train_dataset=data, layerzero="layerzero.yaml")
        trainer.add_callback(MetricsCallback(trainer))
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Log the metrics after the trainer has logged the loss."""
        if logs and "loss" in logs and is_sharded(self._trainer.model):
            self._trainer.log(metrics(self._trainer.model))
