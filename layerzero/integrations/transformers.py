"""Transformers: a ``Trainer`` for sharded models, and a mixin for subclasses of ``Trainer``, such as TRL's trainers.

``Trainer`` has no hook to choose the class of its accelerator. Therefore,
:meth:`LayerZeroMixin.create_accelerator_and_postprocess` replaces the accelerator with a LayerZeroAccelerator that it
constructs with the same arguments. The mixin also overrides some other methods. It does not monkey-patch any class.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from layerzero import checkpoint, full_state_dict
from layerzero.integrations.accelerate import LayerZeroAccelerator, LayerZeroPlugin
from layerzero.integrations.common import is_sharded
from layerzero.integrations.pretrained import from_pretrained

__all__ = ["LayerZeroArguments", "LayerZeroMixin", "LayerZeroTrainer", "from_pretrained"]

FOLDER = "layerzero"  # layerzero checkpoint next to model.safetensors; it replaces optimizer.pt


@dataclass
class LayerZeroArguments:
    """Command-line arguments for ``HfArgumentParser``, such as ``--layerzero_config layerzero.yaml --zero3_size 8``.

    Example::

        parser = HfArgumentParser((TrainingArguments, LayerZeroArguments))
        args, layerzero_args = parser.parse_args_into_dataclasses()
        trainer = LayerZeroTrainer(model, args, train_dataset=data, layerzero=layerzero_args)
    """

    layerzero_config: str | None = field(default=None, metadata={"help": "YAML file with layerzero's settings."})
    zero3_size: int | None = field(
        default=None, metadata={"help": "Number of ranks that share the compute weights. Default: ranks per node."}
    )


_Trainer: Any = object  # a subclass lists the mixin before a subclass of Trainer


class LayerZeroMixin(_Trainer):
    """Mixin that makes ``Trainer``, or a subclass, train sharded models. List the mixin before the trainer class.

    Args:
        layerzero: settings, as the path of a YAML file, a dict with the same names, :class:`LayerZeroArguments`, or a
            :class:`layerzero.integrations.accelerate.LayerZeroPlugin`. If it is None, the settings are read from the
            file that the environment variable ``ACCELERATE_LAYERZERO_CONFIG`` names. If the variable is not set, the
            defaults apply.
        args, kwargs: arguments of the trainer.

    Example::

        class Preferences(LayerZeroMixin, DPOTrainer): ...
    """

    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    args: Any

    def __init__(
        self,
        *args: Any,
        layerzero: str | os.PathLike[str] | Mapping[str, Any] | LayerZeroArguments | LayerZeroPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        self._plugin = _plugin(layerzero)
        self._accelerator_args: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Create the trainer's accelerator, then replace it with a LayerZeroAccelerator that has the same arguments."""
        super().create_accelerator_and_postprocess()
        self.accelerator = LayerZeroAccelerator(layerzero_plugin=self._plugin, **self._accelerator_args)
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, because the full model may not fit on the device, and sharding moves the shards there."""

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's prediction step, with ``synced_gpus`` if the step generates tokens.

        All ranks must take part in the gathers for each generated token, so every rank continues until the last rank
        has finished.
        """
        if getattr(self.args, "predict_with_generate", False):
            kwargs = {"synced_gpus": True, **getattr(self, "_gen_kwargs", {}), **kwargs}
        return super().prediction_step(model, inputs, *args, **kwargs)

    # Saving and loading; the trainer calls these methods on all ranks

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and is_sharded(self.model):
            state_dict = _state_to_save(self.model, rank0_only=not self.args.save_on_each_node)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        checkpoint.save(Path(output_dir) / FOLDER, self.model, self.optimizer.optimizer, overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        """Load masters, optimizer and scheduler from a layerzero checkpoint. ``Trainer`` loads other checkpoints."""
        if checkpoint_folder is None or not (Path(checkpoint_folder) / FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint_folder)
            return
        checkpoint.load(Path(checkpoint_folder) / FOLDER, self.model, self.optimizer.optimizer)
        scheduler = torch.load(Path(checkpoint_folder) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)


class LayerZeroTrainer(LayerZeroMixin, Trainer):
    """``transformers.Trainer`` with models sharded by layerzero instead of wrapped in ``DistributedDataParallel``.

    Example::

        trainer = LayerZeroTrainer(model, args, train_dataset=data, layerzero={"zero3_size": 8})
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model("out")       # AutoModelForCausalLM.from_pretrained("out")
    """


def _plugin(
    source: str | os.PathLike[str] | Mapping[str, Any] | LayerZeroArguments | LayerZeroPlugin | None,
) -> LayerZeroPlugin:
    if isinstance(source, LayerZeroPlugin):
        return source
    if isinstance(source, LayerZeroArguments):
        return LayerZeroPlugin(zero3_size=source.zero3_size, config_file=source.layerzero_config)
    if source is None or isinstance(source, Mapping):
        return LayerZeroPlugin(settings=source)
    return LayerZeroPlugin(config_file=source)


def _state_to_save(model: nn.Module, *, rank0_only: bool) -> dict[str, Tensor]:
    """Return the full tensors that ``save_pretrained`` needs. For a PEFT model, these are the adapters' tensors."""
    if not _is_peft(model):
        return full_state_dict(model, rank0_only=rank0_only)
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - optional dependency

    state = model.state_dict()
    saved: dict[int, str] = {}  # PEFT's name of each tensor that it saves, by id
    for adapter in cast(Any, model).peft_config:
        tensors = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
        saved |= {id(value): name for name, value in tensors.items()}
    if computed := saved.keys() - {id(value) for value in state.values()}:
        raise ValueError(
            f"an adapter saves {saved[computed.pop()]!r}, which PEFT computes and the state dict of the model does not "
            "contain. Save the adapter inside layerzero.unsharded(model)"
        )
    full = ((name, getattr(value, "full_tensor", value.clone)()) for name, value in state.items() if id(value) in saved)
    return {name: value.cpu() for name, value in full}


def _is_peft(model: nn.Module) -> bool:
    """Return whether `model` is a ``PeftModel``.

    A transformers model with ``add_adapter`` does not count, because it saves its adapters itself.
    """
    return hasattr(model, "peft_config") and not getattr(model, "_hf_peft_config_loaded", False)
