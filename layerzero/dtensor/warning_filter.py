"""Filter for torch warnings about DTensors that do not apply to sharded parameters."""

from __future__ import annotations

import logging

__all__ = ["filter_mesh_warnings"]


class _AboutOurMesh(logging.Filter):
    """Filter for torch's advice to flatten the mesh of sharded parameters.

    A flattened mesh would need one more process group, only to reduce scalars.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return '["zero3", "replica"]' not in record.getMessage()


def filter_mesh_warnings() -> None:
    """Install the filter. ``p.norm().full_tensor()`` reduces along two axes, so torch would warn once on each rank."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(found, _AboutOurMesh) for found in logger.filters):
        logger.addFilter(_AboutOurMesh())
