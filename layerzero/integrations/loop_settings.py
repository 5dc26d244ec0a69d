"""What the loops of other packages share: settings, units, what is sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.config import LayerZeroConfig, Policy
from layerzero.config.yaml_file import read_settings, translate
from layerzero.engine.hooks import get_state
from layerzero.sharding.module_methods import register_forward_method
from layerzero.sharding.shard_model import shard_model
from layerzero.sharding.unit_selection import block_classes

__all__ = ["Settings", "current_parameters", "is_sharded", "let_generate", "lightning_dtype"]

_KNOWN = tuple(each.name for each in fields(LayerZeroConfig))


@dataclass(frozen=True)
class Settings:
    """Those settings of :func:`layerzero.shard_model` that were given; the others follow from the model and the loop.

    Attributes:
        given: by name, as :class:`layerzero.LayerZeroConfig` has them.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_all(
        cls,
        config_file: str | os.PathLike[str] | None,
        settings: Mapping[str, Any] | None,
        **arguments: Any,
    ) -> Settings:
        """From a file, a dict and arguments together; raises as :meth:`of`, also where two of them give the same."""
        return cls.of(config_file, **cls.of(settings, **arguments).given)

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Mapping[str, Any] | None, **more: Any) -> Settings:
        """From a YAML file or a dict with the same names, and from arguments, None of which count as not given.

        Raises:
            TypeError, ValueError: a name or value is unknown or wrong, or given in both places; names it.
        """
        if source is None or isinstance(source, Mapping):
            given = translate(dict(source or {}), _KNOWN)
        else:
            given = read_settings(source, _KNOWN)
        more = {name: value for name, value in more.items() if value is not None}
        if twice := sorted(given.keys() & more.keys()):
            raise ValueError(f"{', '.join(twice)} given twice, as an argument and in {source}")
        given |= more
        LayerZeroConfig(**given)  # says now what is wrong with them
        return cls(given)

    def shard(
        self, model: nn.Module, mixed_precision: torch.dtype | None = None, *, node_size: int | None = None
    ) -> nn.Module:
        """:func:`layerzero.shard_model`, unless the model is sharded already.

        Args:
            mixed_precision: what the loop was told to compute in: the `mp_policy` is made of it if none was given.
            node_size: the ranks of a node, which are the `zero3_size` if none was given; None: as torchrun says.

        Raises:
            ValueError: `mixed_precision` and the given `mp_policy` disagree.
        """
        if is_sharded(model):
            return model
        settings = dict(self.given)
        settings.setdefault("units", sorted(block_classes(model)) or None)
        settings.setdefault("zero3_size", node_size)
        settings["mp_policy"] = _policy(settings.get("mp_policy"), mixed_precision)
        return let_generate(shard_model(model, **settings))


def let_generate(model: nn.Module) -> nn.Module:
    """``generate`` of an encoder-decoder model calls the encoder by itself: the root is gathered for it."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "generate"):
        register_forward_method(model, "generate")
    return model


def _policy(given: Policy | None, mixed_precision: torch.dtype | None) -> Policy:
    if mixed_precision is None or callable(given):  # which says it for each unit
        return given or MixedPrecisionPolicy()
    if given is None:
        return MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
    if given.param_dtype not in (None, mixed_precision):
        raise ValueError(
            f"the loop is told to compute in {mixed_precision} and mp_policy.param_dtype is {given.param_dtype}: "
            "give one of them, or the same"
        )
    return replace(given, param_dtype=mixed_precision)


def lightning_dtype(precision: str) -> torch.dtype | None:
    """What Lightning's `precision` asks to compute in; None: as the module is.

    Raises:
        ValueError: a precision that has no counterpart here.
    """
    known = {
        "bf16-mixed": torch.bfloat16,
        "16-mixed": torch.float16,
        "32-true": None,
        "bf16-true": None,
        "64-true": None,
    }
    if precision not in known:
        raise ValueError(f"precision={precision!r} has no counterpart in layerzero: use one of {', '.join(known)}")
    return known[precision]


def is_sharded(model: object) -> bool:
    """Whether this is the whole model that :func:`layerzero.shard_model` returned."""
    if not isinstance(model, nn.Module):
        return False
    try:
        get_state(model)
    except ValueError:
        return False
    return True


def current_parameters(model: nn.Module, parameters: list[Tensor]) -> list[Tensor]:
    """The same parameters, those from before sharding replaced by what the model holds now."""
    members = get_state(model).parameters
    found = ((parameter, members.managed_param(parameter)) for parameter in parameters)
    return [parameter if member is None else member.sharded for parameter, member in found]
