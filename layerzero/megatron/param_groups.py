"""Create parameter groups with the keys that Megatron's learning-rate scheduler and logs expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.default_units import is_expert_parallel

__all__ = ["Condition", "param_groups"]

Condition = Callable[[str, nn.Parameter], bool]  # (name, parameter); the parameter has its global shape


def param_groups(
    chunk: ShardedChunk,
    config: Any,
    *,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    config_overrides: Mapping[Any, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a chunk's trainable parameters, one group per combination of settings.

    Raises:
        ValueError: `config_overrides` gives a parameter two values for one setting, or an optimizer other than
            ``config.optimizer``.
    """
    groups: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad:
            continue
        settings: dict[str, Any] = {}
        for key, override in (config_overrides or {}).items():
            if key.matches(parameter, name):
                _merge_override(settings, override, name)
        if config_overrides is None:
            settings |= _standard_overrides(name, parameter, config, no_weight_decay_cond)
        if scale_lr_cond is not None and scale_lr_cond(name, parameter):
            settings["lr_mult"] = lr_mult
        if is_expert_parallel(parameter):
            settings["is_expert_parallel"] = True
        if settings.setdefault("optimizer", config.optimizer) != config.optimizer:
            raise ValueError(
                f"config_overrides sets the optimizer of parameter {name!r} to {settings['optimizer']!r}, but "
                f"config.optimizer is {config.optimizer!r}. layerzero.megatron steps all parameters with one "
                "optimizer. Remove the optimizer from config_overrides"
            )
        del settings["optimizer"]
        group_key = tuple(sorted(settings.items()))
        if group_key not in groups:
            groups[group_key] = _new_group(config, settings)
        groups[group_key]["params"].append(parameter)
    return [groups[group_key] for group_key in sorted(groups, key=repr)]


def _standard_overrides(name: str, parameter: nn.Parameter, config: Any, no_decay: Condition | None) -> dict[str, Any]:
    """Return the settings that override Megatron's defaults for a parameter.

    If `no_decay` is None, biases and 1-D parameters have no weight decay. The embedding and the output layer may have
    a separate learning rate.
    """
    settings: dict[str, Any] = {}
    if no_decay is not None:
        no_weight_decay = no_decay(name, parameter)
    else:
        no_weight_decay = name.endswith(".bias") or parameter.ndim == 1
        if getattr(config, "apply_wd_to_qk_layernorm", False) and ("q_layernorm." in name or "k_layernorm." in name):
            no_weight_decay = False
    if no_weight_decay:
        settings["wd_mult"] = 0.0
    if config.decoupled_lr is not None and getattr(parameter, "is_embedding_or_output_parameter", False):
        settings |= {"max_lr": config.decoupled_lr, "is_decoupled_lr": True}
        if config.decoupled_min_lr is not None:
            settings["min_lr"] = config.decoupled_min_lr
    return settings


def _merge_override(settings: dict[str, Any], override: Mapping[str, Any], name: str) -> None:
    for key, value in override.items():
        if settings.setdefault(key, value) != value:
            raise ValueError(
                f"config_overrides sets {key} of parameter {name!r} to both {settings[key]!r} and {value!r}. Remove one"
            )


def _new_group(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = {
        "params": [],
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": not any("lr" in key for key in settings),
        **settings,
    }
    # Megatron's scheduler sets these values from its first step on.
    group["lr"] = group["max_lr"] * group["lr_mult"]
    group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return group
