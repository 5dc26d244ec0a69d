"""Lightning: a callback that logs ``layerzero.metrics``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from layerzero.integrations.common import is_sharded
from layerzero.reports.metrics_log import metrics

__all__ = ["MetricsCallback"]


class MetricsCallback(Callback):  # type: ignore[misc]
    """Callback that logs :func:`layerzero.metrics` to the trainer's loggers every `log_every_n_steps` optimizer steps.

    Example::

        trainer = Trainer(strategy="layerzero", callbacks=[MetricsCallback()])
    """

    def __init__(self) -> None:
        self._logged = 0  # last logged step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *unused: Any) -> None:
        """Log the metrics if the number of optimizer steps is now a multiple of `log_every_n_steps`."""
        step = trainer.global_step
        if step == self._logged or step % trainer.log_every_n_steps or not is_sharded(pl_module):
            return
        self._logged = step
        values = metrics(pl_module)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
