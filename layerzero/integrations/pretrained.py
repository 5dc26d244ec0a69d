"""Transformers: a ``from_pretrained`` that shards the model before it reads the weights."""

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
from layerzero.integrations.common import shard

__all__ = ["from_pretrained"]


def from_pretrained(kind: Any, folder: str | os.PathLike[str], *, config: Any = None, **settings: Any) -> Any:
    """Load the model that ``kind.from_pretrained(folder)`` loads, but shard the model before reading its weights.

    Each rank reads only its own rows from the files and never allocates more than its rows and one full unit. All ranks
    must call this function.

    Args:
        kind: a model class, or one of transformers' ``AutoModel...`` classes.
        folder: a folder written by ``save_pretrained`` or returned by ``huggingface_hub.snapshot_download``.
        config: the model's config. The default is the config in the folder.
        settings: as for :func:`layerzero.shard_model`; `units` and `zero3_size` are optional. Parameters are in fp32;
            `mp_policy` sets the compute dtype.

    Returns:
        The sharded model, in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: see :func:`layerzero.checkpoint.load_safetensors`; or the files contain several
            tensors that transformers merges into one tensor, such as experts.

    Example::

        model = from_pretrained(AutoModelForCausalLM, "Llama-3.1-8B", mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    """
    config = AutoConfig.from_pretrained(folder) if config is None else config
    with torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)

    def init_missing_buffers(module: nn.Module) -> None:
        if module._non_persistent_buffers_set:  # the files do not have these buffers
            model._init_weights(module)

    # All ranks read the same files, so they need no broadcast.
    shard(model, {"sync_module_states": False, **settings, "param_init_fn": init_missing_buffers})
    checkpoint.load_safetensors(folder, model, rename=_rename_function(model))
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _rename_function(model: Any) -> Callable[[str], str]:
    """Return a function that maps a tensor name in the files to the tensor's name in the model.

    The function applies transformers' renaming rules.
    """
    state, conversions = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if not isinstance(conversion, WeightRenaming)]

    def rename(name: str) -> str:
        if name in state:
            return name
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converted is not None:
            raise ValueError(
                f"{name} is one of several tensors that transformers merges into {renamed}, which is not supported. "
                "Convert the files once to the model's own format with "
                "from_pretrained(folder).save_pretrained(other, save_original_format=False)"
            )
        return str(renamed)

    return rename
