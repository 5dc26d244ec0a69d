"""Suppress torch's DTensor warnings that do not apply to sharded parameters."""

from __future__ import annotations

import logging

__all__ = ["filter_mesh_warnings"]


class _AboutOurMesh(logging.Filter):
    """Filter for torch's advice to flatten the mesh of sharded parameters.

    A flattened mesh would need another process group, which would only reduce scalars.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return '["zero3", "replica"]' not in record.getMessage()


def filter_mesh_warnings() -> None:
    """Install the filter.

    Without the filter, ``p.norm().full_tensor()`` emits a warning once on each rank, because it reduces over two axes.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(found, _AboutOurMesh) for found in logger.filters):
        logger.addFilter(_AboutOurMesh())
