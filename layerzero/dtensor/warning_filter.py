"""Suppress torch's DTensor warnings that do not apply to sharded parameters."""

from __future__ import annotations

import logging

from layerzero.utils.torch_compat import REDISTRIBUTE_LOGGER


def filter_mesh_warnings() -> None:
    """Suppress torch's advice to flatten the (zero3, replica) mesh of sharded parameters.

    Otherwise, each rank would log this warning once, for example in ``p.norm().full_tensor()``, which reduces over two
    axes. A flattened mesh would need another process group, which would be used only to reduce scalars.
    """
    logging.getLogger(REDISTRIBUTE_LOGGER).addFilter(_is_other_message)  # once, if called again


def _is_other_message(record: logging.LogRecord) -> bool:
    return '["zero3", "replica"]' not in record.getMessage()
