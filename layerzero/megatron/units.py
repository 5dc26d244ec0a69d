"""What is gathered together: transformer layers, and the modules as large as the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["default_units", "language_model"]


def language_model(chunk: nn.Module) -> nn.Module | None:
    """The module of a chunk that knows about embeddings, inside all wrappers; None if there is none."""
    module: Any = chunk
    while module is not None and not hasattr(module, "pre_process"):
        module = getattr(module, "module", None)
    return module if isinstance(module, nn.Module) else None


def default_units(module: nn.Module, *, pipeline_size: int) -> Callable[[str, nn.Module], bool]:
    """Which modules of a chunk are units.

    Word embeddings and the output layer are units, too, unless they are one weight on one stage: then the output layer
    reads the weight of the embedding, which must be there during the whole forward.
    """
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer  # noqa: PLC0415

    apart = set()
    language = language_model(module)
    if language is not None and (pipeline_size > 1 or not getattr(language, "share_embeddings_and_output_weights", 0)):
        embedding = getattr(getattr(language, "embedding", None), "word_embeddings", None)
        output = getattr(language, "output_layer", None)
        apart = {id(m) for m in (embedding, output) if m is not None and getattr(m, "weight", None) is not None}

    def is_unit(name: str, module: nn.Module) -> bool:
        layer = isinstance(module, BaseTransformerLayer) and any(True for _ in module.parameters())
        return layer or id(module) in apart

    return is_unit
