"""Lightning: a strategy that shards the ``LightningModule``, registered as ``"layerzero"`` on import."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from layerzero import checkpoint, full_state_dict, no_sync, register_forward_method, shard_optimizer
from layerzero.checkpoint import save as save_sharded
from layerzero.integrations.common import StrategyMixin, is_sharded

__all__ = ["LayerZeroStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
FILE = "lightning.ckpt"  # Lightning's own file in the checkpoint folder; it contains no state of optimizers


class LayerZeroStrategy(StrategyMixin, DDPStrategy):
    """Lightning's DDP strategy with the module sharded by layerzero instead of wrapped in ``DistributedDataParallel``.

    Args:
        zero3_size: number of ranks over which the compute weights are sharded. The default is the number of ranks per
            node.
        units: as for :func:`layerzero.shard_model`. The default is ``"auto"`` if a submodule declares its block
            classes, otherwise only the root.
        mp_policy: mixed-precision policy. The default is to compute in the dtype of the trainer's `precision` and
            reduce gradients in fp32.
        config_file: YAML file with these or other settings.
        settings: other arguments of :func:`layerzero.shard_model`, with the names and values used in a settings file.
        kwargs: arguments of ``DDPStrategy`` that are not for DDP itself: `process_group_backend`, `timeout`, ...

    Example::

        trainer = Trainer(strategy=LayerZeroStrategy(zero3_size=8, units={Block}), precision="bf16-mixed")
    """

    optimizers: Any  # Lightning defines both as properties
    model: Any

    _restored = False  # True after load_checkpoint has loaded the module and its optimizers

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self.lightning_module
        return module

    # Setup and teardown

    def setup(self, trainer: Any) -> None:
        """Set up the strategy. The module is sharded only for a fit."""
        if trainer.state.fn != TrainerFn.FITTING and not is_sharded(self._module):
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if not is_sharded(self._module):
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.precision_plugin.convert_module(self._module)
            self._shard(self._module, self.precision_plugin.precision)
        for name in _STEPS:
            register_forward_method(self._module, name)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Shard the optimizers that ``configure_optimizers`` returned. Schedulers still refer to the originals."""
        super().setup_optimizers(trainer)
        self.optimizers = [shard_optimizer(optimizer, self._module) for optimizer in self.optimizers]

    def teardown(self) -> None:
        """Tear down the parts of the strategy. A sharded module is not moved to the CPU."""
        if not is_sharded(self.lightning_module):
            super().teardown()
            return
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager that disables gradient reduction across replicas.

        Lightning runs all micro-batches of a step except the last inside this context.
        """
        with no_sync(self._module):
            yield

    # A checkpoint is a folder with Lightning's file and one layerzero checkpoint for each optimizer

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always True, because the module is sharded before a checkpoint is loaded."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module.

        For a sharded module, the first rank returns full tensors, and the other ranks return ``{}``.
        """
        return full_state_dict(self._module) if is_sharded(self._module) else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return an empty dict, because the layerzero checkpoint contains the optimizer state."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint folder. All ranks must call this method."""
        if not is_sharded(self._module):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        folder = Path(self.broadcast(filepath))
        if self.is_global_zero:
            if folder.is_file():
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
        super().save_checkpoint(checkpoint, folder / FILE, storage_options=storage_options)
        self.barrier()
        optimizers = {
            f"layerzero_{i}": each for i, each in enumerate(self.optimizers if "optimizer_states" in checkpoint else [])
        }
        for name, optimizer in optimizers.items():
            save_sharded(folder / name, self._module, optimizer, overwrite=True)
        if self.is_global_zero:
            for path in folder.glob("layerzero_*"):  # leftovers of an earlier save with other optimizers
                if path.name not in optimizers:
                    shutil.rmtree(path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder written by :meth:`save_checkpoint`, or a file written by Lightning's DDP strategy."""
        folder = Path(self.broadcast(checkpoint_path))
        if not folder.is_dir():
            self._restored = False
            contents: dict[str, Any] = super().load_checkpoint(folder, weights_only=weights_only)
            return contents
        loaded: dict[str, Any] = super().load_checkpoint(folder / FILE, weights_only=weights_only)
        self._restored = is_sharded(self._module) and "optimizer_states" in loaded
        for i, optimizer in enumerate(self.optimizers if self._restored else []):
            checkpoint.load(folder / f"layerzero_{i}", self._module, optimizer)
        self._restored &= bool(self.optimizers)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors, unless :meth:`load_checkpoint` has loaded the module.

        The tensors must be the same on all ranks.
        """
        if not self._restored:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states, unless :meth:`load_checkpoint` has already loaded them."""
        if not self._restored:
            super().load_optimizer_state_dict(checkpoint)


StrategyRegistry.register("layerzero", LayerZeroStrategy, description="ZeRO-1 over all ranks, ZeRO-3 inside a node")
