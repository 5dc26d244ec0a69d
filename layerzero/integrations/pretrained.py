"""Transformers: models that are sharded before their weights are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import GENERATION_CONFIG_NAME

from layerzero import checkpoint
from layerzero.integrations.loop_settings import let_generate
from layerzero.sharding.shard_model import shard_model
from layerzero.sharding.unit_selection import block_classes

__all__ = ["from_pretrained"]


def from_pretrained(kind: Any, folder: str | os.PathLike[str], *, config: Any = None, **settings: Any) -> Any:
    """``kind.from_pretrained(folder)`` of a model that is sharded before its weights are read.

    No rank ever holds more than a unit and its own rows, which it reads from the files. All ranks must call this.

    Args:
        kind: a model's class, or one of transformers' ``AutoModel...``.
        folder: what ``save_pretrained`` wrote, or ``huggingface_hub.snapshot_download`` returned.
        config: None: the folder's.
        settings: as for :func:`layerzero.shard_model`; `units` and `zero3_size` may be left out. Parameters are in
            fp32; `mp_policy` says what is computed in.

    Raises:
        FileNotFoundError, ValueError: as :func:`layerzero.checkpoint.load_safetensors`; or the files have tensors that
            transformers puts together (experts, which the model has in one tensor).

    Example::

        model = from_pretrained(AutoModelForCausalLM, "Llama-3.1-8B", mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    """
    config = AutoConfig.from_pretrained(folder) if config is None else config
    with torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)

    def write_buffers(module: nn.Module) -> None:
        if module._non_persistent_buffers_set:  # which are in no file
            model._init_weights(module)

    own = {"units": sorted(block_classes(model)) or None, "sync_module_states": False}  # all read the same files
    shard_model(model, **own | settings, param_init_fn=write_buffers)
    checkpoint.load_safetensors(folder, model, rename=_renaming(model))
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return let_generate(model).eval()


def _renaming(model: Any) -> Callable[[str], str]:
    """From a name in files to the model's own, as transformers has it."""
    held, known = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [each for each in known if isinstance(each, WeightRenaming)]
    converters = [each for each in known if not isinstance(each, WeightRenaming)]

    def rename(name: str) -> str:
        if name in held:
            return name
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, held)
        if converted is not None:
            raise ValueError(
                f"{name} is one of several tensors that transformers makes {renamed} of: write them in the model's own "
                "format, once, by from_pretrained(folder).save_pretrained(other, save_original_format=False)"
            )
        return str(renamed)

    return rename
