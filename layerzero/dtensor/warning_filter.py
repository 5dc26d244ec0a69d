"""Suppress torch's DTensor warnings that do not apply to sharded parameters."""

from __future__ import annotations

import logging

__all__ = ["filter_mesh_warnings"]


class _MeshAdviceFilter(logging.Filter):
    """Logging filter that drops torch's advice to flatten the mesh of sharded parameters.

    A flattened mesh would need another process group, which would be used only to reduce scalars.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return '["zero3", "replica"]' not in record.getMessage()


def filter_mesh_warnings() -> None:
    """Suppress torch's advice to flatten the (zero3, replica) mesh of sharded parameters.

    Otherwise, each rank would log this warning once, for example in ``p.norm().full_tensor()``, which reduces over two
    axes.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(found, _MeshAdviceFilter) for found in logger.filters):
        logger.addFilter(_MeshAdviceFilter())
