"""Default units: transformer and Mamba layers, and the modules with a dimension of the vocabulary size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

__all__ = [
    "default_units",
    "is_expert_parallel",
    "language_model",
    "named",
    "only_experts",
    "warn_of_what_is_gathered_at_once",
    "with_named",
]

IsUnit = Callable[[str, nn.Module], bool]


def language_model(chunk: nn.Module) -> nn.Module | None:
    """Return the language model inside all wrappers of a chunk; None if there is none.

    It is the first module with an attribute ``pre_process``.
    """
    module: Any = chunk
    while module is not None and not hasattr(module, "pre_process"):
        module = getattr(module, "module", None)
    return module if isinstance(module, nn.Module) else None


def default_units(module: nn.Module, *, pipeline_size: int) -> IsUnit:
    """Return the predicate ``is_unit(name, module)`` for the modules of a chunk.

    Units are the transformer and Mamba layers, the word embeddings and the output layer. If there is one pipeline
    stage and the embeddings are tied, embeddings and output layer are no units: the output layer reads the weight of
    the embedding, which must stay gathered during the whole forward.
    """
    from megatron.core.ssm.mamba_layer import MambaLayer  # noqa: PLC0415
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer  # noqa: PLC0415

    apart = set()
    language = language_model(module)
    if language is not None and (pipeline_size > 1 or not getattr(language, "share_embeddings_and_output_weights", 0)):
        embedding = getattr(getattr(language, "embedding", None), "word_embeddings", None)
        output = getattr(language, "output_layer", None)
        apart = {id(m) for m in (embedding, output) if m is not None and getattr(m, "weight", None) is not None}

    def is_unit(name: str, module: nn.Module) -> bool:
        layer = isinstance(module, (BaseTransformerLayer, MambaLayer)) and any(True for _ in module.parameters())
        return layer or id(module) in apart

    return is_unit


def is_expert_parallel(parameter: nn.Parameter) -> bool:
    """Return whether Megatron marks the parameter as expert parallel: other data-parallel ranks hold other experts."""
    return not getattr(parameter, "allreduce", True)


def only_experts(module: nn.Module) -> bool:
    """Return whether the module has parameters and all of them are expert parallel."""
    marks = [is_expert_parallel(parameter) for parameter in module.parameters()]
    return bool(marks) and all(marks)


def with_named(default: Sequence[IsUnit], names: Sequence[str]) -> IsUnit:
    """Return a predicate for the default units and for modules whose name or class name is in `names`."""

    return lambda name, module: bool(named(name, module, names)) or any(each(name, module) for each in default)


def named(name: str, module: nn.Module, names: Sequence[str]) -> set[str]:
    """Return those of `names` that match the module: by its name, its class name or its qualified class name."""
    kind = type(module)
    own = {name, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
    while name.startswith("module."):  # added by each wrapper around Megatron's model
        own.add(name := name.removeprefix("module."))
    return own & set(names)


def warn_of_what_is_gathered_at_once(chunk: nn.Module, units: set[int]) -> None:
    """Warn if layers of a chunk are not units: they are all gathered and freed together with the chunk.

    Args:
        units: ids of the modules that are units.
    """
    lost = list(_layers_without_units(chunk, units))
    if not lost:
        return
    parameters = {id(p): p for layer in lost for p in layer.parameters()}.values()
    kinds = ", ".join(sorted({type(layer).__name__ for layer in lost}))
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    warnings.warn(
        f"layerzero.megatron.wrap: {len(lost)} layers of class {kinds} are no units, so that the whole of them "
        f"({nbytes / 2**20:,.1f} MiB on this rank) is gathered at once, for all of a forward and a backward: name "
        "their class in units",
        stacklevel=3,
    )


def _layers_without_units(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Yield members of module lists that have parameters and are not a unit, inside a unit or around a unit."""
    if id(module) in units:
        return
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(id(m) in units for m in child.modules()):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _layers_without_units(child, units)
