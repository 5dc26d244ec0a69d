"""Read settings from a YAML file.

The names in the file are the field names of :class:`LayerZeroConfig` or the option names of MindSpeed's LayerZeRO.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero import Codecs, Float8Rows, Int4Blocks, Int4Difference, Int8Blocks, Offload, PrecisionPolicy
from layerzero.extend import refuse_old_names

_log = logging.getLogger("layerzero")

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_CODECS: dict[str, dict[str, Any]] = {  # by field of Codecs and name in a file
    "gather": {"float8_rows": Float8Rows()},
    "hop2": {"int8_blocks": Int8Blocks(), "int4_blocks": Int4Blocks()},
    "refresh": {"lossless": "lossless", "int4_difference": Int4Difference()},
}
_POLICY = tuple(field.name for field in fields(PrecisionPolicy))
_FLAGS = ("cast_forward_inputs", "fp32_accumulation")  # fields of a policy that are no dtypes
_PREFETCH = ("forward_prefetch", "backward_prefetch")
_OFFLOADS = {"offload_grads": "grads", "offload_optimizer": "optimizer"}
_ONLY_IN_MINDSPEED = ("buffer_dtype", *_OFFLOADS)  # accepted in files that have other names of MindSpeed
_DTYPES_OF_MINDSPEED = ("param_dtype", "reduce_dtype", "buffer_dtype")
# Options of MindSpeed without a counterpart: the only supported value, and the reason.
_WITHOUT_COUNTERPART: dict[str, tuple[object, str]] = {
    "ckpt_load_path": (
        None,
        "settings cannot load a checkpoint. Leave it out, and call layerzero.checkpoint.load(path, model, optimizer) "
        "after shard_optimizer. MindSpeed's pickled checkpoints are not supported",
    ),
    "param_init_fn": (None, "a file cannot contain functions. Pass it to layerzero.shard_model"),
    "limit_all_gathers": (
        True,
        "layerzero always limits the units that are gathered ahead. Leave it out, and set prefetch",
    ),
    "backward_reduce_scatter": (
        "BACKWARD_PRE",
        "layerzero always reduces a unit's gradients while the next unit computes. Use BACKWARD_PRE, or leave it out",
    ),
}
_MINDSPEED = {
    *("transformer_layers", "param_dtype", "reduce_dtype", "autocast_input", "autocast_output"),
    *_PREFETCH,
    *_WITHOUT_COUNTERPART,
}


def read_settings(path: str | os.PathLike[str], known: tuple[str, ...]) -> dict[str, Any]:
    """Read a YAML file and return its settings as arguments for :class:`layerzero.LayerZeroConfig`.

    Args:
        path: YAML file to read.
        known: names of the accepted settings, in addition to MindSpeed's names.

    Raises:
        ValueError: a name or value is invalid or not supported. The message names the setting and the file.
    """
    content = _read_yaml(Path(path))
    try:
        return translate(content, known)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def has_names_of_mindspeed(path: str | os.PathLike[str]) -> bool:
    """Return whether a file uses MindSpeed's names. In such files, `zero3_size` also counts tensor-parallel ranks."""
    return not _read_yaml(Path(path)).keys().isdisjoint(_MINDSPEED)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file.

    Raises:
        ValueError: the file is not YAML, does not contain a mapping, or contains a name twice.
    """
    try:
        import yaml  # noqa: PLC0415 - needed only to read a file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reading settings from YAML needs PyYAML: pip install PyYAML") from error

    class Strict(yaml.SafeLoader):
        """YAML loader for plain data that raises an error for duplicate names instead of using the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            if twice := sorted({str(name) for name in names if names.count(name) > 1}):
                raise ValueError(f"{path}: {', '.join(twice)} given twice. Remove one of the entries")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Strict)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a mapping of names to values, got {type(content).__name__}")
    return content


def translate(content: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Convert the contents of a settings file to arguments for :class:`layerzero.LayerZeroConfig`.

    See :func:`read_settings` for the arguments and errors.
    """
    of_mindspeed = set(_MINDSPEED)
    if of_mindspeed.isdisjoint(content):
        refuse_old_names(map(str, content))
    else:
        of_mindspeed |= {*_ONLY_IN_MINDSPEED}
    accepted = {*known, *of_mindspeed}
    if unknown := sorted(str(name) for name in content if name not in accepted):
        similar = {name: difflib.get_close_matches(name, sorted(accepted), n=1) for name in unknown}
        listed = ", ".join(name + "".join(f" (did you mean {each}?)" for each in similar[name]) for name in unknown)
        raise ValueError(f"unknown settings {listed}. Use only {', '.join(sorted(accepted))}")
    settings = {name: value for name, value in content.items() if name not in of_mindspeed}
    mindspeed = {name: value for name, value in content.items() if name in of_mindspeed}
    if settings.get("shared_memory") is False:  # YAML reads `off` as false
        settings["shared_memory"] = "off"
    if isinstance(offload := settings.get("offload"), Mapping):
        settings["offload"] = Offload(**_fields("offload", offload, Offload))
    if isinstance(codecs := settings.get("codecs"), Mapping):
        named = {name: _codec_named(name, each) for name, each in _fields("codecs", codecs, Codecs).items()}
        settings["codecs"] = Codecs(**named)
    policy = _policy(settings.pop("mp_policy", None))
    _translate_mindspeed(mindspeed, settings, policy)
    _set_prefetch(mindspeed, settings)
    if policy:
        settings["mp_policy"] = PrecisionPolicy(**policy)
    return settings


def _translate_mindspeed(mindspeed: Mapping[str, Any], settings: dict[str, Any], policy: dict[str, Any]) -> None:
    """Add MindSpeed's options, except for those of prefetching, to `settings` and to the fields of the policy."""
    for name, (supported, reason) in _WITHOUT_COUNTERPART.items():
        value = mindspeed.get(name, supported)
        if type(value) is not type(supported) or value != supported:  # 1 is not True
            raise ValueError(f"{name} is {value!r}, but {reason}")
    if offloads := {field: mindspeed[name] for name, field in _OFFLOADS.items() if name in mindspeed}:
        settings["offload"] = Offload(**offloads)
    for name in [name for name in _DTYPES_OF_MINDSPEED if name in mindspeed]:
        if name in policy:
            raise ValueError(f"{name} is given twice, outside and inside mp_policy. Remove one of the entries")
        policy[name] = _dtype(name, mindspeed[name])
    if "autocast_input" in mindspeed:
        policy["cast_forward_inputs"] = _bool("autocast_input", mindspeed["autocast_input"])
    if "autocast_output" in mindspeed:
        policy["output_dtype"] = torch.float32 if _bool("autocast_output", mindspeed["autocast_output"]) else None
    if "transformer_layers" in mindspeed:  # this is a MindSpeed file, so MindSpeed's defaults apply
        _set_units(mindspeed["transformer_layers"], settings)
        for name in ("param_dtype", "reduce_dtype"):
            if name not in policy:
                _log.info("%s is not given. Using torch.float16, MindSpeed's default", name)
                policy[name] = torch.float16
        policy.setdefault("cast_forward_inputs", True)
        policy.setdefault("output_dtype", torch.float32)  # autocast_output is true by default


def _fields(name: str, value: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return a mapping of the fields of a policy. Raise ValueError if a name is not a field of `kind`."""
    known = [field.name for field in fields(kind)]
    if not set(value) <= set(known):
        raise ValueError(f"{name} must be a mapping with the names {', '.join(known)}, got {dict(value)!r}")
    return dict(value)


def _policy(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, MixedPrecisionPolicy):  # the settings come from Python code instead of a file
        policy = PrecisionPolicy.of(value)
        return {name: getattr(policy, name) for name in _POLICY}
    if not isinstance(value, dict):
        raise ValueError(f"mp_policy must be a mapping with the names {', '.join(_POLICY)}, got {value!r}")
    given = _fields("mp_policy", value, PrecisionPolicy)
    return {name: each if name in _FLAGS else _dtype(name, each) for name, each in given.items()}


def _dtype(name: str, value: Any) -> torch.dtype | None:
    return None if value is None else dtype_named(name, value)


def _codec_named(setting: str, name: Any) -> Any:
    """Return the codec with this name. Values that are not names are returned."""
    codecs = _CODECS[setting]
    if not isinstance(name, str):
        return name
    if name not in codecs:
        raise ValueError(
            f"codecs.{setting} is {name!r}, but a file supports only {' and '.join(codecs)}. Pass other codecs to "
            "shard_model"
        )
    return codecs[name]


def dtype_named(name: str, value: Any) -> torch.dtype:
    """Convert the value of a setting to a dtype.

    Args:
        name: name of the setting, for the error message.
        value: a dtype, or the name of a dtype.

    Raises:
        ValueError: `value` does not name a supported dtype.
    """
    dtype = _DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{name} is {value!r}, which is not a supported dtype. Use one of {', '.join(_DTYPES)}")
    return dtype


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _set_units(value: Any, settings: dict[str, Any]) -> None:
    if "units" in settings:
        raise ValueError("units and transformer_layers are both given, but they mean the same. Use only one of them")
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise ValueError(f"transformer_layers must be a list of class names, got {value!r}")
    settings["units"] = value


def _set_prefetch(mindspeed: Mapping[str, Any], settings: dict[str, Any]) -> None:
    if not mindspeed.keys() & _PREFETCH:
        return
    if "prefetch" in settings:
        raise ValueError(
            "prefetch is given together with forward_prefetch or backward_prefetch, which control the same setting. "
            "Use only prefetch, or only forward_prefetch and backward_prefetch"
        )
    backward = mindspeed.get("backward_prefetch", "BACKWARD_PRE" if mindspeed.get("forward_prefetch") is True else None)
    if backward not in (None, "BACKWARD_PRE"):
        raise ValueError(
            f"backward_prefetch is {backward!r}, which is not supported. Use BACKWARD_PRE to gather the next unit "
            "before the current unit computes, or null with forward_prefetch: false for no prefetch"
        )
    forward = _bool("forward_prefetch", mindspeed.get("forward_prefetch", backward is not None))
    if forward != (backward is not None):
        raise ValueError(
            f"forward_prefetch is {forward} and backward_prefetch is {backward!r}, but layerzero has one setting for "
            "both. Use true and BACKWARD_PRE, or false and null"
        )
    settings["prefetch"] = int(forward)
