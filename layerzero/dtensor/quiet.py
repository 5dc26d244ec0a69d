"""Keeps torch's advice on DTensors to itself where nobody can follow it."""

from __future__ import annotations

import logging

__all__ = ["quieten"]


class _AboutOurMesh(logging.Filter):
    """Drops the advice to flatten the mesh of sharded parameters: a process group more, to reduce single numbers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return '["zero3", "replica"]' not in record.getMessage()


def quieten() -> None:
    """``p.norm().full_tensor()`` reduces along two axes, about which torch warns each rank once."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(found, _AboutOurMesh) for found in logger.filters):
        logger.addFilter(_AboutOurMesh())
