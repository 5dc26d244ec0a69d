"""Define helpers that several integrations use, for settings, sharding, dtypes and access to sharded parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.config import AUTO, LayerZeroConfig, Policy
from layerzero.config.yaml_file import read_settings, translate
from layerzero.engine.hooks import get_state
from layerzero.sharding.module_methods import register_forward_method
from layerzero.sharding.shard_model import shard_model
from layerzero.sharding.unit_selection import block_classes

__all__ = ["Settings", "is_sharded", "lightning_dtype", "register_generate"]

_KNOWN = tuple(each.name for each in fields(LayerZeroConfig))


@dataclass(frozen=True)
class Settings:
    """User-provided settings of :func:`layerzero.shard_model`. The model and the loop determine all other settings.

    Attributes:
        given: settings keyed by their names in :class:`layerzero.LayerZeroConfig`.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_all(
        cls,
        config_file: str | os.PathLike[str] | None,
        settings: Mapping[str, Any] | None,
        **arguments: Any,
    ) -> Settings:
        """Merge settings from a file, a dict and keyword arguments. Raises the same errors as :meth:`of`."""
        return cls.of(config_file, **cls.of(settings, **arguments).given)

    @classmethod
    def of(cls, source: str | os.PathLike[str] | Mapping[str, Any] | None, **more: Any) -> Settings:
        """Merge settings from a YAML file, or a dict with the same names, with keyword arguments.

        Keyword arguments that are None are ignored.

        Raises:
            TypeError, ValueError: a name is unknown, a value is invalid, or a setting is given twice. The message names
                the setting.
        """
        if source is None or isinstance(source, Mapping):
            settings = translate(dict(source or {}), _KNOWN)
        else:
            settings = read_settings(source, _KNOWN)
        more = {name: value for name, value in more.items() if value is not None}
        if duplicates := sorted(settings.keys() & more.keys()):
            raise ValueError(f"{', '.join(duplicates)} is set both as an argument and in {source}. Set it in one place")
        settings |= more
        LayerZeroConfig(**settings)  # raises if a value is wrong
        return cls(settings)

    def shard(
        self, model: nn.Module, mixed_precision: torch.dtype | None = None, *, node_size: int | None = None
    ) -> nn.Module:
        """Shard the model with :func:`layerzero.shard_model` unless it is already sharded, and return the model.

        Args:
            model: root of the model.
            mixed_precision: compute dtype of the loop, which becomes the `param_dtype` of the `mp_policy`. If it is
                None, the loop does not set a compute dtype.
            node_size: number of ranks per node, the default for `zero3_size`. If it is None, the default of
                ``shard_model`` applies.

        Raises:
            ValueError: `mixed_precision` and the given `mp_policy` disagree.
        """
        if is_sharded(model):
            return model
        settings = dict(self.given)
        settings.setdefault("units", AUTO if block_classes(model) else None)
        settings.setdefault("zero3_size", node_size)
        settings["mp_policy"] = _merge_precision(settings.get("mp_policy"), mixed_precision)
        return register_generate(shard_model(model, **settings))


def register_generate(model: nn.Module) -> nn.Module:
    """If the model is an encoder-decoder model, register its ``generate`` as a forward method. Return the model.

    The ``generate`` of these models calls the encoder outside the root's forward, so the root must be gathered during
    the call.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "generate"):
        register_forward_method(model, "generate")
    return model


def _merge_precision(policy: Policy | None, mixed_precision: torch.dtype | None) -> Policy:
    if mixed_precision is None or callable(policy):  # a callable returns the policy of each unit
        return policy or MixedPrecisionPolicy()
    if policy is None:
        return MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
    if policy.param_dtype not in (None, mixed_precision):
        raise ValueError(
            f"the loop computes in {mixed_precision}, but mp_policy.param_dtype is {policy.param_dtype}. Set one of "
            "them, or set both to the same dtype"
        )
    return replace(policy, param_dtype=mixed_precision)


def lightning_dtype(precision: str) -> torch.dtype | None:
    """Return the compute dtype for Lightning's `precision`, or None if it is the dtype of the parameters.

    Raises:
        ValueError: layerzero does not support this precision.
    """
    dtypes = {
        "bf16-mixed": torch.bfloat16,
        "16-mixed": torch.float16,
        "32-true": None,
        "bf16-true": None,
        "64-true": None,
    }
    if precision not in dtypes:
        raise ValueError(f"precision={precision!r} is not supported by layerzero. Use one of {', '.join(dtypes)}")
    return dtypes[precision]


def is_sharded(model: object) -> bool:
    """Return whether `model` is the root of a model sharded by :func:`layerzero.shard_model`."""
    if not isinstance(model, nn.Module):
        return False
    try:
        get_state(model)
    except ValueError:
        return False
    return True
