"""Lightning Fabric: a strategy that shards modules and optimizers, registered as ``"layerzero"`` on import."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero import ShardedOptimizer, checkpoint, clip_grad_norm_, full_state_dict, no_sync, shard_optimizer
from layerzero.extend import get_state
from layerzero.integrations.common import StrategyMixin, is_sharded, model_of

__all__ = ["FabricStrategy"]

FILE = "fabric.ckpt"  # Fabric's own file in the checkpoint folder; it contains no state of sharded optimizers


class FabricStrategy(StrategyMixin, DDPStrategy):
    """Fabric's DDP strategy with modules sharded by layerzero instead of wrapped in ``DistributedDataParallel``.

    The arguments are those of :class:`layerzero.integrations.lightning.LayerZeroStrategy`.

    Example::

        fabric = Fabric(strategy=FabricStrategy(zero3_size=8, units={Block}), precision="bf16-mixed")
        model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()
        self._sharded: list[nn.Module] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module in place and return it."""
        self._shard(module, self.precision.precision)
        self._sharded.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, sharded if it holds parameters of a sharded module."""
        model = model_of(optimizer, self._sharded)
        return optimizer if model is None else shard_optimizer(optimizer, model)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of the full module to `max_norm` and return their norm over all ranks before clipping."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(module, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a module.

        For a sharded module, the first rank returns full tensors, and the other ranks return ``{}``.
        """
        return full_state_dict(module) if is_sharded(module) else super().get_module_state_dict(module)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a folder that contains Fabric's own file, with full modules, and layerzero checkpoints.

        A sharded module has one layerzero checkpoint per optimizer, or one without an optimizer.

        Raises:
            ValueError: `filter` is given and `state` has sharded modules.
        """
        folder = Path(self.broadcast(path))
        if filter is not None and _checkpoints_in(state):
            raise ValueError("filter does not support sharded modules, which are saved completely. Leave filter out")
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self.barrier()
        other_entries = {key: value for key, value in state.items() if not isinstance(value, ShardedOptimizer)}
        super().save_checkpoint(folder / FILE, other_entries, storage_options=storage_options, filter=filter)
        for name, module, optimizer in _checkpoints_in(state):
            checkpoint.save(folder / name, module, optimizer, overwrite=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a folder written by :meth:`save_checkpoint`, or a file written by Fabric's DDP strategy."""
        folder = Path(self.broadcast(path))
        if not folder.is_dir() or not isinstance(state, dict):
            file = folder / FILE if folder.is_dir() else folder
            remainder: dict[str, Any] = super().load_checkpoint(file, state, strict=strict, weights_only=weights_only)
            return remainder
        parts = _checkpoints_in(state)
        names = {key for key, value in state.items() if isinstance(value, ShardedOptimizer) or is_sharded(value)}
        other_entries = {key: value for key, value in state.items() if key not in names}
        # Fabric loads everything if the dict is empty.
        remainder = super().load_checkpoint(
            folder / FILE, other_entries or None, strict=strict, weights_only=weights_only
        )
        for name, module, optimizer in parts:
            checkpoint.load(folder / name, module, optimizer, strict=strict)
        state.update(other_entries)
        return {key: value for key, value in remainder.items() if key not in names}


class _NoSync:
    """Fabric's backward-sync control. It skips the reduction of gradients inside ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


def _checkpoints_in(state: Mapping[str, Any]) -> list[tuple[str, nn.Module, ShardedOptimizer | None]]:
    """Return ``(name, module, optimizer or None)`` for each layerzero checkpoint in a save or load of `state`."""
    checkpoints: list[tuple[str, nn.Module, ShardedOptimizer | None]] = []
    for key, module in state.items():
        if is_sharded(module):
            optimizers = [other for other in state.values() if isinstance(other, ShardedOptimizer)]
            own_optimizers = [other for other in optimizers if other in get_state(module).optimizers]
            checkpoints += [
                (f"layerzero_{key}_{i}", module, optimizer) for i, optimizer in enumerate(own_optimizers or [None])
            ]
    return checkpoints


STRATEGY_REGISTRY.register("layerzero", FabricStrategy, description="ZeRO-1 over all ranks, ZeRO-3 inside a node")
