"""What a training loop says about its passes."""

from __future__ import annotations

from torch import nn

from layerzero.engine.hooks import get_state
from layerzero.sharding.module_methods import gathered, no_sync, register_forward_method, set_requires_gradient_sync

__all__ = ["gathered", "no_sync", "refresh", "register_forward_method", "set_requires_gradient_sync"]


def refresh(model: nn.Module) -> None:
    """Carry the masters to the compute weights of all replicas. All ranks must call this.

    Edits through a sharded parameter are noticed and carried at the next forward; this is for changes that nothing
    can notice, such as a write through a raw pointer.
    """
    get_state(model).refreshes.launch()
