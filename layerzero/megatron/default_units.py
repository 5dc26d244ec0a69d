"""Select the default units of a Megatron model: its transformer and Mamba layers, word embeddings and output layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

IsUnit = Callable[[str, nn.Module], bool]


def language_model(chunk: nn.Module) -> nn.Module | None:
    """Return the language model inside the wrappers of a chunk; None if there is no language model.

    The language model is the outermost module that has an attribute ``pre_process``.
    """
    module: Any = chunk
    while module is not None and not hasattr(module, "pre_process"):
        module = getattr(module, "module", None)
    return module if isinstance(module, nn.Module) else None


def default_units(module: nn.Module, *, pipeline_size: int) -> IsUnit:
    """Return a predicate ``is_unit(name, module)`` that selects the default units of a chunk.

    Units are the transformer and Mamba layers, the word embeddings and the output layer. With a single pipeline stage
    and tied embeddings, the embeddings and the output layer are not units. The output layer then reads the embedding's
    weight, which must therefore stay gathered during the entire forward pass.
    """
    from megatron.core.ssm.mamba_layer import MambaLayer  # noqa: PLC0415
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer  # noqa: PLC0415

    separate_ids = set()
    language = language_model(module)
    if language is not None and (pipeline_size > 1 or not getattr(language, "share_embeddings_and_output_weights", 0)):
        embedding = getattr(getattr(language, "embedding", None), "word_embeddings", None)
        output = getattr(language, "output_layer", None)
        separate_ids = {id(m) for m in (embedding, output) if m is not None and getattr(m, "weight", None) is not None}

    def is_unit(name: str, module: nn.Module) -> bool:
        layer = isinstance(module, (BaseTransformerLayer, MambaLayer)) and any(True for _ in module.parameters())
        return layer or id(module) in separate_ids

    return is_unit


def is_expert_parallel(parameter: nn.Parameter) -> bool:
    """Return whether Megatron has marked the parameter as expert parallel.

    Data-parallel ranks may then hold different experts.
    """
    return not getattr(parameter, "allreduce", True)


def only_experts(module: nn.Module) -> bool:
    """Return whether the module has parameters, and all of these parameters are expert parallel."""
    marks = [is_expert_parallel(parameter) for parameter in module.parameters()]
    return bool(marks) and all(marks)


def expert_modules(chunk: nn.Module) -> dict[str, nn.Module]:
    """Return the experts of each layer by name: the outermost modules that contain only experts.

    Without expert parallelism, Megatron does not mark the parameters. The experts are then found in its MoE layers.
    """
    of_layers = {id(m.experts) for m in chunk.modules() if hasattr(m, "local_expert_indices") and hasattr(m, "experts")}
    experts: dict[str, nn.Module] = {}
    for name, module in chunk.named_modules():
        if (id(module) in of_layers or only_experts(module)) and not any(name.startswith(f"{e}.") for e in experts):
            experts[name] = module
    return experts


def add_named_modules(default: Sequence[IsUnit], names: Sequence[str]) -> IsUnit:
    """Return a predicate that selects the default units, and modules whose name or class name is in `names`."""

    return lambda name, module: bool(matching_names(name, module, names)) or any(each(name, module) for each in default)


def matching_names(name: str, module: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the entries of `names` that equal the module's name, class name or qualified class name."""
    kind = type(module)
    own_names = {name, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
    while name.startswith("module."):  # each wrapper around Megatron's model adds this prefix
        own_names.add(name := name.removeprefix("module."))
    return own_names & set(names)


def warn_of_layers_without_units(chunk: nn.Module, units: set[int]) -> None:
    """Emit a warning if a chunk has layers that are not units, because such layers are gathered and freed together.

    Args:
        units: ids of the modules that are units.
    """
    layers = list(_layers_without_units(chunk, units))
    if not layers:
        return
    parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    warnings.warn(
        f"layerzero.megatron.wrap: {len(layers)} layers of class {kinds} are not units. All of them "
        f"({nbytes / 2**20:,.1f} MiB on this rank) are gathered at once for the entire forward and backward. Add "
        "their class to units",
        stacklevel=3,
    )


def _layers_without_units(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Yield the layers that no unit covers.

    A layer is a child of a ``ModuleList`` or ``Sequential`` that has parameters. Layers that are a unit, contain a unit
    or are inside a unit are covered.
    """
    if id(module) in units:
        return
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(id(m) in units for m in child.modules()):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _layers_without_units(child, units)
