"""Define helpers that several integrations use, for settings, sharding, dtypes and access to sharded parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero import LayerZeroConfig, PrecisionPolicy, register_forward_method, shard_model
from layerzero.extend import Policy, Units, block_classes, get_state
from layerzero.integrations.yaml_file import read_settings, translate

_KNOWN = tuple(each.name for each in fields(LayerZeroConfig))


def merge_settings(*sources: str | os.PathLike[str] | Mapping[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """Merge settings of :func:`layerzero.shard_model`, with their names in :class:`layerzero.LayerZeroConfig`.

    Args:
        sources: YAML files, or dicts with the same names and values. None is ignored.
        arguments: further settings. Those that are None are ignored.

    Raises:
        TypeError, ValueError: a name is unknown, a value is invalid, or a setting is given twice. The message names the
            setting.
    """
    merged = {name: value for name, value in arguments.items() if value is not None}
    for source in sources:
        if source is None or isinstance(source, Mapping):
            found = translate(dict(source or {}), _KNOWN)
        else:
            found = read_settings(source, _KNOWN)
        if duplicates := sorted(found.keys() & merged.keys()):
            raise ValueError(f"{', '.join(duplicates)} is set both as an argument and in {source}. Set it in one place")
        merged |= found
    LayerZeroConfig(**merged)  # raises if a value is wrong
    return merged


def shard(
    model: nn.Module,
    settings: Mapping[str, Any],
    mixed_precision: torch.dtype | None = None,
    *,
    node_size: int | None = None,
) -> nn.Module:
    """Shard the model with :func:`layerzero.shard_model` unless it is already sharded, and return the model.

    Args:
        model: root of the model.
        settings: result of :func:`merge_settings`. The model and the loop determine all other settings.
        mixed_precision: compute dtype of the loop, which becomes the `param_dtype` of the `mp_policy`. If it is None,
            the loop does not set a compute dtype.
        node_size: number of ranks per node, the default for `zero3_size`. If it is None, the default of ``shard_model``
            applies.

    Raises:
        ValueError: `mixed_precision` and the given `mp_policy` disagree.
    """
    if is_sharded(model):
        return model
    defaults = {"units": "auto" if block_classes(model) else None, "zero3_size": node_size}
    policy = _merge_precision(settings.get("mp_policy"), mixed_precision)
    return _register_generate(shard_model(model, **{**defaults, **settings, "mp_policy": policy}))


def model_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module | None:
    """Return the sharded model whose parameters an optimizer steps; None if there is no such model in `models`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for model in models if parameters else ():
        if is_sharded(model) and get_state(model).parameters.managed_param(parameters[0]) is not None:
            return model
    return None


class StrategyMixin:
    """Settings of a strategy for Lightning or Fabric, and the sharding of its module. List it before the strategy.

    The arguments are those of :class:`layerzero.integrations.lightning.LayerZeroStrategy`.

    Raises:
        ValueError: an argument is for ``DistributedDataParallel``, or a setting is not supported.
    """

    num_processes: int

    def __init__(
        self,
        zero3_size: int | None = None,
        units: Units = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        config_file: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        hooks = [name for name in ("ddp_comm_hook", "ddp_comm_state") if kwargs.get(name) is not None]
        if of_ddp := [*getattr(self, "_ddp_kwargs", ()), *hooks]:
            raise ValueError(f"arguments of DistributedDataParallel are not supported. Leave them out: {of_ddp}")
        self._settings = merge_settings(config_file, settings, zero3_size=zero3_size, units=units, mp_policy=mp_policy)

    def _shard(self, module: nn.Module, precision: str) -> None:
        """Shard `module` with the compute dtype of Lightning's `precision`."""
        dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        if precision not in (*dtypes, *_TRUE_PRECISIONS):
            supported = ", ".join((*dtypes, *_TRUE_PRECISIONS))
            raise ValueError(f"precision={precision!r} is not supported by layerzero. Use one of {supported}")
        shard(module, self._settings, dtypes.get(precision), node_size=self.num_processes)


_TRUE_PRECISIONS = ("32-true", "bf16-true", "64-true")  # the compute dtype is that of the parameters


def _register_generate(model: nn.Module) -> nn.Module:
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
    if isinstance(policy, PrecisionPolicy) and policy.torch_policy == MixedPrecisionPolicy():
        policy = replace(policy, reduce_dtype=torch.float32)
    if policy.param_dtype not in (None, mixed_precision):
        raise ValueError(
            f"the loop computes in {mixed_precision}, but mp_policy.param_dtype is {policy.param_dtype}. Set one of "
            "them, or set both to the same dtype"
        )
    return replace(policy, param_dtype=mixed_precision)


def is_sharded(model: object) -> bool:
    """Return whether `model` is the root of a model sharded by :func:`layerzero.shard_model`."""
    if not isinstance(model, nn.Module):
        return False
    try:
        get_state(model)
    except ValueError:
        return False
    return True
