"""Functions that a training loop calls around its forwards and backwards."""

from __future__ import annotations

from torch import nn

from layerzero.engine.hooks import get_state
from layerzero.sharding.module_methods import gathered, no_sync, register_forward_method, set_requires_gradient_sync

__all__ = ["gathered", "no_sync", "refresh", "register_forward_method", "set_requires_gradient_sync"]


def refresh(model: nn.Module) -> None:
    """Refresh the compute weights of all replicas from the masters. All ranks must call this.

    Writes through a sharded parameter are detected, and the next forward refreshes its compute weights. Call this
    function after writes that cannot be detected, such as a write through a raw pointer.
    """
    get_state(model).refreshes.launch()
