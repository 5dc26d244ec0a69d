"""Define and validate the settings for :func:`layerzero.shard_model`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.comm.codecs import DifferenceCodec, GatherCodec
from layerzero.utils.add_ons import addon

__all__ = ["ACCUMULATIONS", "AUTO", "OFFLOADS", "UNSUPPORTED", "LayerZeroConfig", "Precision", "Units", "codec_text"]

ACCUMULATIONS = ("sharded", "full", "local")
SHARED_MEMORY_MODES = ("auto", "off")
REFRESH_CODECS = (None, "lossless")
OFFLOADS = ("offload_grads", "offload_optimizer", "offload_params")
_BOOLS = (
    *OFFLOADS,
    "pin_memory",
    "reduce_scatter_with_fp32_accumulation",
    "sync_module_states",
)
_CODEC = ("nbytes", "encode", "decode")
AUTO = "auto"  # value of `units` that selects the blocks that the model declares
UNSUPPORTED = "unsupported"  # value of `ignored_params` that selects frozen parameters that cannot be sharded

# Callable[..., bool] is an FSDP1 policy. A list inside the iterable is one unit of several modules.
_UnitEntry = type[nn.Module] | str | nn.Module | Iterable[nn.Module | str]
Units = _UnitEntry | Callable[[str, nn.Module], bool | str] | Callable[..., bool] | Iterable[_UnitEntry] | None
Accumulation = str | Callable[[str, nn.Module], str]
Policy = MixedPrecisionPolicy | Callable[[str, nn.Module], MixedPrecisionPolicy]
Reshards = bool | int | Callable[[str, nn.Module], bool | int]


@dataclass(frozen=True)
class Precision:
    """Dtypes that one handle uses."""

    master: torch.dtype  # dtype of the ZeRO-1 shard and the final gradient, and of the accumulator by default
    compute: torch.dtype  # dtype of the ZeRO-3 shard and the full buffer
    reduce: torch.dtype  # most precise dtype in which hop 1 sends gradients
    replica_reduce: torch.dtype  # dtype in which hop 2 sends gradients
    accumulator: torch.dtype | None = None  # dtype of accumulators that are not the final gradient; None means `master`

    @property
    def casts_to_16_bits(self) -> bool:
        """True if the compute weights have a 16-bit dtype that differs from the dtype of the masters."""
        return self.compute.itemsize == 2 and self.master != self.compute


@dataclass(frozen=True, kw_only=True)
class LayerZeroConfig:
    """Settings for :func:`layerzero.shard_model`, which describes the meaning of each setting.

    Raises:
        TypeError, ValueError: a setting has an invalid type or value. The message names the setting and the accepted
            values.

    Example::

        config = layerzero.LayerZeroConfig.from_yaml("layerzero.yaml")
        model = layerzero.shard_model(model, **config.arguments())
    """

    zero3_size: int | None = None
    units: Units = None
    mp_policy: Policy = field(default_factory=MixedPrecisionPolicy)
    replica_reduce_dtype: torch.dtype | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    buffer_dtype: torch.dtype | None = None
    gradient_divide_factor: float | None = None
    accumulation: Accumulation = "sharded"
    accumulation_dtype: torch.dtype | None = None
    offload_grads: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    pin_memory: bool = True
    reshard_after_forward: Reshards = True
    prefetch: int = 1
    gather_codec: GatherCodec | None = None
    hop2_codec: GatherCodec | None = None
    refresh_codec: str | DifferenceCodec | None = None
    shared_memory: str = "auto"
    ignored_modules: Iterable[nn.Module | str] | None = None
    sync_module_states: bool = True

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> LayerZeroConfig:
        """Read the settings from a YAML file. This method requires PyYAML (``pip install PyYAML``).

        The names in the file are the field names of this class. Dtypes are written as ``bf16``, ``fp16``, ``fp32`` or
        with torch's names. `mp_policy` maps the fields of a MixedPrecisionPolicy to values. `units` and
        `ignored_modules` are lists with names of modules or of their classes. `gather_codec` can be ``float8_rows``,
        `hop2_codec` can be ``int8_blocks`` or ``int4_blocks``, and `refresh_codec` can be ``lossless``,
        or ``int4_difference``.

        The option names of MindSpeed's LayerZeRO are also accepted: ``transformer_layers``, ``param_dtype``,
        ``reduce_dtype``, ``autocast_input``, ``autocast_output`` (casts outputs to fp32), and ``forward_prefetch``
        together with ``backward_prefetch``.

        Raises:
            TypeError, ValueError: an entry is unknown, invalid, duplicated, or not supported, such as
                ``ckpt_load_path``. The message names the entry and the file. All entries are checked.

        Example::

            # layerzero.yaml
            zero3_size: 8
            units: [TransformerLayer]
            mp_policy: {param_dtype: bf16, reduce_dtype: fp32}
        """
        settings = addon("yaml").read_settings(path, tuple(field.name for field in fields(cls)))
        try:
            return cls(**settings)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from None

    def arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments for :func:`layerzero.shard_model`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __post_init__(self) -> None:
        if self.zero3_size is not None and (not isinstance(self.zero3_size, int) or isinstance(self.zero3_size, bool)):
            raise TypeError(f"zero3_size must be an int or None, got {self.zero3_size!r}")
        if self.zero3_size is not None and self.zero3_size < 1:
            raise ValueError(f"zero3_size={self.zero3_size} is not positive. Use the number of ranks of a node")
        if not callable(self.mp_policy):
            _check_policy(self.mp_policy, "mp_policy")
        _check_dtypes({"replica_reduce_dtype": self.replica_reduce_dtype, "buffer_dtype": self.buffer_dtype})
        factor = self.gradient_divide_factor
        if factor is not None and (not isinstance(factor, (int, float)) or isinstance(factor, bool)):
            raise TypeError(f"gradient_divide_factor must be a number or None, got {factor!r}")
        if factor is not None and not 0 < factor < float("inf"):
            raise ValueError(f"gradient_divide_factor must be positive and finite, got {factor}")
        if not callable(self.accumulation) and self.accumulation not in ACCUMULATIONS:
            raise ValueError(
                f"accumulation={self.accumulation!r} is not supported. Use one of {ACCUMULATIONS} or a callable"
            )
        _check_accumulation_dtype(self.accumulation_dtype, self.accumulation)
        if self.shared_memory not in SHARED_MEMORY_MODES:
            raise ValueError(f"shared_memory={self.shared_memory!r} is not supported. Use one of {SHARED_MEMORY_MODES}")
        refresh = self.refresh_codec
        if refresh not in REFRESH_CODECS and (isinstance(refresh, type) or not isinstance(refresh, DifferenceCodec)):
            raise ValueError(
                f"refresh_codec={refresh!r} is not supported. Use one of {REFRESH_CODECS} or layerzero.Int4Difference()"
            )
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not self.pin_memory and not any(getattr(self, name) for name in OFFLOADS):
            raise ValueError(
                f"pin_memory=False applies to the host memory of {', '.join(OFFLOADS)}, but none of them is set. Set "
                "one of them, or leave pin_memory out"
            )
        if not callable(self.reshard_after_forward):
            _check_reshards(self.reshard_after_forward, "reshard_after_forward")
        for name, example in (("gather_codec", "Float8Rows"), ("hop2_codec", "Int8Blocks")):
            codec = getattr(self, name)
            has_methods = all(callable(getattr(codec, each, None)) for each in _CODEC)
            if codec is not None and (isinstance(codec, type) or not has_methods):
                raise TypeError(
                    f"{name} must be an object with the methods {', '.join(_CODEC)} of layerzero.GatherCodec, such as "
                    f"layerzero.{example}(), got {codec!r}"
                )
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 0:
            raise ValueError(f"prefetch must be an int >= 0 (number of units gathered ahead), got {self.prefetch!r}")

    @property
    def encodes_refreshes(self) -> bool:
        """True if refreshes are sent as differences."""
        return self.refresh_codec is not None

    def accumulation_of(self, name: str, module: nn.Module) -> str:
        """Return the accumulation mode of a unit, one of `ACCUMULATIONS`."""
        if not callable(self.accumulation):
            return self.accumulation
        chosen = self.accumulation(name, module)
        if chosen not in ACCUMULATIONS:
            raise ValueError(f"accumulation({name!r}, module) returned {chosen!r}. Return one of {ACCUMULATIONS}")
        return chosen

    def policy_of(self, name: str, module: nn.Module) -> MixedPrecisionPolicy:
        """Return the mixed-precision policy of a unit."""
        if isinstance(self.mp_policy, MixedPrecisionPolicy):
            return self.mp_policy
        chosen = self.mp_policy(name, module)
        _check_policy(chosen, f"the result of mp_policy({name!r}, module)")
        return chosen

    def reshards(self, name: str, module: nn.Module, zero3_size: int) -> bool | int:
        """Return whether a unit is resharded after its forward.

        The result is True, False, or an int k with 1 < k < `zero3_size`. With an int, the backward gathers the unit
        from the post-forward shards on k ranks.

        Raises:
            ValueError: k does not divide `zero3_size`.
        """
        chosen, label = self.reshard_after_forward, "reshard_after_forward"
        if callable(chosen):
            chosen, label = chosen(name, module), f"the result of reshard_after_forward({name!r}, module)"
            _check_reshards(chosen, label)
        if isinstance(chosen, bool):
            return chosen
        if zero3_size == 1:  # there are no gathers, so any int is accepted
            return True
        if zero3_size % chosen:
            divisors = [ranks for ranks in range(1, zero3_size + 1) if zero3_size % ranks == 0]
            raise ValueError(
                f"{label} is {chosen}, which does not divide the zero3_size={zero3_size} ranks that share the weights "
                f"of unit {name!r}. Use one of {divisors}, where {zero3_size} means True and 1 means False"
            )
        return chosen == zero3_size if chosen in (1, zero3_size) else chosen

    def precision_of(self, dtype: torch.dtype, policy: MixedPrecisionPolicy, *, trainable: bool) -> Precision:
        """Return the dtypes that a handle uses for parameters of dtype `dtype` in a unit with the given policy.

        Masters of trainable parameters have at least fp32 precision. Masters of frozen parameters have dtype `dtype`.
        """
        compute = policy.param_dtype or dtype
        master = torch.promote_types(dtype, torch.float32) if trainable else dtype
        reduce = policy.reduce_dtype or compute
        return Precision(master, compute, reduce, self.replica_reduce_dtype or reduce, self.accumulation_dtype)

    def comparable_settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks, keyed by name.

        :meth:`of_unit` returns the settings that may differ between units.
        """
        policy, refresh = self.mp_policy, self.refresh_codec
        compression = addon("slow_links").LosslessDifferences.best().compression if isinstance(refresh, str) else None
        policy_fields = (
            {} if callable(policy) else {f"mp_policy.{f.name}": str(getattr(policy, f.name)) for f in fields(policy)}
        )
        return {
            **policy_fields,
            "reshard_after_forward": "a callable"
            if callable(self.reshard_after_forward)
            else self.reshard_after_forward,
            "zero3_size": self.zero3_size,
            "replica_reduce_dtype": str(self.replica_reduce_dtype),
            "reduce_scatter_with_fp32_accumulation": self.reduce_scatter_with_fp32_accumulation,
            "buffer_dtype": str(self.buffer_dtype),
            "gradient_divide_factor": self.gradient_divide_factor,
            "accumulation_dtype": str(self.accumulation_dtype),
            "offload_grads": self.offload_grads,
            "offload_optimizer": self.offload_optimizer,
            "offload_params": self.offload_params,
            "pin_memory": self.pin_memory,
            "prefetch": self.prefetch,
            "gather_codec": codec_text(self.gather_codec),
            "hop2_codec": codec_text(self.hop2_codec),
            "refresh_codec": refresh if isinstance(refresh, str) else codec_text(refresh),
            "compression that refresh_codec uses": compression,
            "shared_memory": self.shared_memory,
            "sync_module_states": self.sync_module_states,
        }

    def of_unit(self, name: str, module: nn.Module, zero3_size: int) -> dict[str, object]:
        """Return the settings of a unit that must be the same on all ranks, keyed by name."""
        reshards = self.reshards(name, module, zero3_size)
        chosen: dict[str, object] = {"accumulation": self.accumulation_of(name, module)}
        if callable(self.mp_policy):
            chosen["mp_policy"] = str(self.policy_of(name, module))
        if callable(self.reshard_after_forward):
            chosen["reshard_after_forward"] = reshards
        return chosen


def codec_text(codec: object | None) -> str | None:
    """Return text that identifies a codec and is the same in all processes, or None if there is no codec.

    The text is the class name. For a dataclass, the text also includes the fields that are numbers, strings or dtypes.
    """
    if codec is None:
        return None
    values: dict[str, Any] = {f.name: getattr(codec, f.name) for f in fields(codec)} if is_dataclass(codec) else {}
    settings = [f"{name}={v!r}" for name, v in values.items() if isinstance(v, (int, float, str, torch.dtype))]
    return f"{type(codec).__module__}.{type(codec).__qualname__}({', '.join(settings)})"


def _check_policy(policy: object, label: str) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"{label} must be a torch.distributed.fsdp.MixedPrecisionPolicy, or a callable(name, module) that returns "
            f"a policy for each unit, got {type(policy).__name__}"
        )
    dtypes = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    dtypes["output_dtype"] = policy.output_dtype
    _check_dtypes(
        {f"{label}.{name}" if label == "mp_policy" else f"{name} of {label}": d for name, d in dtypes.items()}
    )


def _check_dtypes(dtypes: dict[str, Any]) -> None:
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{name} must be a floating-point torch.dtype or None, got {dtype!r}")


def _check_accumulation_dtype(dtype: Any, accumulation: Accumulation) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"accumulation_dtype must be torch.bfloat16 or None, got {dtype!r}")
    if dtype is not torch.bfloat16:
        reason = " The range of fp16 is too small for sums of gradients." if dtype is torch.float16 else ""
        raise ValueError(
            f"accumulation_dtype={dtype} is not supported.{reason} Use torch.bfloat16, or None to keep accumulators in "
            "the dtype of the masters"
        )
    if accumulation == "local":
        raise ValueError(
            f"accumulation_dtype={dtype} has no effect with accumulation='local', because its accumulators are the "
            "final gradients, which keep the dtype of the masters. Leave accumulation_dtype out, or use "
            "accumulation='sharded' or 'full'"
        )


def _check_reshards(value: object, label: str) -> None:
    if not isinstance(value, int):
        raise TypeError(
            f"{label} must be a bool, the number of ranks that a unit is sharded over until its backward, or a "
            f"callable(name, module) that returns one of these for each unit, got {value!r}"
        )
    if value < 1 and not isinstance(value, bool):
        raise ValueError(f"{label} is {value}, which is not positive. Use a divisor of zero3_size, True or False")
