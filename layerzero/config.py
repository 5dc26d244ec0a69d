"""Define the settings of :func:`layerzero.shard_model`, and refuse values that are invalid for any model.

The arguments `mesh`, `ignored_params` and `param_init_fn` are in sharding/unit_meshes.py, sharding/unit_selection.py
and sharding/meta_init.py. Refusals that depend on the model are in sharding/unit_settings.py,
sharding/unit_selection.py and sharding/wrapper_checks.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from layerzero.comm.codecs import DifferenceCodec, GatherCodec
from layerzero.utils.add_ons import addon, has_addon

ACCUMULATIONS = ("sharded", "full", "local")
SHARED_MEMORY_MODES = ("auto", "off")
REFRESH_CODECS = (None, "lossless")
_CODEC_METHODS = ("nbytes", "encode", "decode")
AUTO = "auto"  # value of `units` that selects the blocks that the model declares
UNSUPPORTED = "unsupported"  # value of `ignored_params` that selects frozen parameters that cannot be sharded

# Callable[..., bool] is an FSDP1 policy. A list inside the iterable is one unit of several modules.
ModuleEntry = type[nn.Module] | str | nn.Module
_UnitEntry = ModuleEntry | Iterable[ModuleEntry]
Units = _UnitEntry | Callable[[str, nn.Module], bool | str] | Callable[..., bool] | Iterable[_UnitEntry] | None
Accumulation = str | Callable[[str, nn.Module], str]
Policy = MixedPrecisionPolicy | Callable[[str, nn.Module], MixedPrecisionPolicy]
UnitReshards = bool | int | Literal["step"]
Reshards = UnitReshards | Callable[[str, nn.Module], UnitReshards]

_POLICY = "mp_policy=layerzero.PrecisionPolicy({}=...)"
_OFFLOAD = "offload=layerzero.Offload({}=...)"
_CODECS = "codecs=layerzero.Codecs({}=...)"
_NEW_PLACES = {
    "replica_reduce_dtype": _POLICY.format("replica_reduce_dtype"),
    "buffer_dtype": _POLICY.format("buffer_dtype"),
    "accumulation_dtype": _POLICY.format("accumulation_dtype"),
    "reduce_scatter_with_fp32_accumulation": _POLICY.format("fp32_accumulation"),
    "offload_grads": _OFFLOAD.format("grads"),
    "offload_optimizer": _OFFLOAD.format("optimizer"),
    "offload_params": _OFFLOAD.format("params"),
    "pin_memory": _OFFLOAD.format("pin_memory"),
    "gather_codec": _CODECS.format("gather"),
    "hop2_codec": _CODECS.format("hop2"),
    "refresh_codec": _CODECS.format("refresh"),
    "gradient_divide_factor": "model.set_gradient_divide_factor(...) after shard_model",
}
P = ParamSpec("P")
R = TypeVar("R")


def refuse_old_names(names: Iterable[str]) -> None:
    """Raise TypeError for the first of `names` that was a setting of its own, and name its new place."""
    for name in names:
        if name in _NEW_PLACES:
            raise TypeError(f"{name} is no longer a setting of shard_model. Use {_NEW_PLACES[name]}")


def names_new_places(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise the error of :func:`refuse_old_names` for its keyword arguments."""

    @functools.wraps(function)
    def with_new_names(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_old_names(kwargs)
        return function(*args, **kwargs)

    return with_new_names


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


@dataclass(frozen=True)
class PrecisionPolicy(MixedPrecisionPolicy):
    """Dtypes of weights, gradients and buffers: torch's ``MixedPrecisionPolicy`` with four more fields.

    `param_dtype`, `reduce_dtype`, `accumulation_dtype`, `output_dtype` and `cast_forward_inputs` may differ between
    units. `replica_reduce_dtype`, `buffer_dtype` and `fp32_accumulation` apply to the full model and are read from the
    root's policy.

    Attributes:
        param_dtype: dtype of compute weights and computation. The default is the dtype of the model.
        reduce_dtype: dtype of gradient reduction inside the ZeRO-3 group. The default is `param_dtype`.
        output_dtype: dtype to which floating-point outputs of the unit are cast. By default, outputs are not cast.
        cast_forward_inputs: cast floating-point inputs of the unit to `param_dtype`.
        replica_reduce_dtype: dtype of gradient reduction across replicas. The default is `reduce_dtype`.
        buffer_dtype: dtype to which floating-point buffers are cast, once. By default, buffers are not cast. Integer
            buffers are never cast. ``state_dict()`` and checkpoints store buffers in their original dtype, with the
            cast values.
        accumulation_dtype: None or ``torch.bfloat16``. With bf16, accumulators take half the memory. Each backward
            inside :func:`no_sync` adds its gradients in fp32 and rounds the sum to the nearest bf16 value. The backward
            that reduces gradients adds its own gradients and the accumulator in fp32, so they are not rounded again,
            and ``.grad`` keeps the dtype of the masters. Parameters then have no ``main_grad``. If there is one replica
            (or one rank), ``"sharded"`` accumulates in the final gradients, and the setting has no effect.
            ``accumulation="local"`` raises an error for the same reason. If a callable selects ``"local"`` for a unit,
            the unit ignores `accumulation_dtype`.
        fp32_accumulation: exchange gradients with an all-to-all, and add them in fp32 and in rank order on the rank
            that receives them. Messages have the same size as those of a reduce-scatter, and results are the same in
            every run. A receive buffer then holds the parts of all ranks. gloo and shared memory always reduce in this
            way. By default, other backends (NCCL) add in the dtype of the messages. Megatron-Core has this option as
            ``reduce_scatter_with_fp32_accumulation``.

    Raises:
        TypeError, ValueError: a field has an invalid type or value.

    Example::

        policy = layerzero.PrecisionPolicy(torch.bfloat16, torch.float32, replica_reduce_dtype=torch.bfloat16)
        model = layerzero.shard_model(model, units={Block}, mp_policy=policy)
    """

    replica_reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = None
    fp32_accumulation: bool = False

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy | None, **changes: Any) -> PrecisionPolicy:
        """Return a policy with the fields of `policy`, which may be torch's, and with `changes` to them."""
        given = {} if policy is None else {each.name: getattr(policy, each.name) for each in fields(policy)}
        return cls(**(given | changes))

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "replica_reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"mp_policy.{name} must be a floating-point torch.dtype or None, got {dtype!r}")
        _check_bools(self, ("fp32_accumulation",))
        dtype = self.accumulation_dtype
        if dtype is None or dtype is torch.bfloat16:
            return
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"accumulation_dtype must be torch.bfloat16 or None, got {dtype!r}")
        reason = " The range of fp16 is too small for sums of gradients." if dtype is torch.float16 else ""
        raise ValueError(
            f"accumulation_dtype={dtype} is not supported.{reason} Use torch.bfloat16, or None to keep accumulators in "
            "the dtype of the masters"
        )

    @property
    def torch_policy(self) -> MixedPrecisionPolicy:
        """Fields that torch's policy has."""
        return MixedPrecisionPolicy(**{each.name: getattr(self, each.name) for each in fields(MixedPrecisionPolicy)})

    def precision_of(self, dtype: torch.dtype, *, trainable: bool) -> Precision:
        """Return the dtypes that a handle uses for parameters of dtype `dtype`.

        Masters of trainable parameters have at least fp32 precision. Masters of frozen parameters have dtype `dtype`.
        """
        compute = self.param_dtype or dtype
        master = torch.promote_types(dtype, torch.float32) if trainable else dtype
        reduce = self.reduce_dtype or compute
        return Precision(master, compute, reduce, self.replica_reduce_dtype or reduce, self.accumulation_dtype)


@dataclass(frozen=True)
class Offload:
    """Tensors that are stored in host memory. None is by default.

    On the CPU, these settings only emit a warning.

    Attributes:
        grads: store accumulators in host memory between the backward passes of a step. On the device, the accumulators
            then use about twice the memory of the largest unit's accumulators, or less. Copies overlap with the work of
            neighboring units. If there is one replica (or one rank), ``"sharded"`` accumulates directly in the
            gradient shards, which stay on the device.
        optimizer: store masters, final gradients and the optimizer's state in host memory, and run the optimizer on the
            CPU. Sharded parameters and their ``.grad`` are then CPU tensors. Gradients are copied to the host as they
            are reduced. Weights are copied to the device as they are refreshed. Both copies overlap with other work.
            Compute weights, accumulators and scratch buffers remain on the device. Only element-wise optimizers are
            supported.
        params: store compute weights in host memory, for models that do not fit otherwise. Each gather first copies the
            ZeRO-3 shard to the device, in parallel with other work. With `optimizer` as well, the device holds only
            gathered units, gradients in flight and scratch buffers. If ranks share memory, the setting has no effect.
        pin_memory: pin the host memory. Use False if the machine limits pinned memory. Copies are then slower, and the
            host waits for them. On the CPU, no memory is pinned.

    Raises:
        TypeError, ValueError: a field is not a bool, or `pin_memory` is False and nothing is offloaded.

    Example::

        model = layerzero.shard_model(model, units={Block}, offload=layerzero.Offload(grads=True, optimizer=True))
    """

    grads: bool = False
    optimizer: bool = False
    params: bool = False
    pin_memory: bool = True

    @classmethod
    def of(cls, offload: Offload | OffloadPolicy | None) -> Offload:
        """Return the equivalent of torch's policy or of None."""
        if isinstance(offload, cls):
            return offload
        if isinstance(offload, CPUOffloadPolicy):
            return cls(grads=True, optimizer=True, params=True, pin_memory=offload.pin_memory)
        if offload is None or type(offload) is OffloadPolicy:
            return cls()
        raise TypeError(
            f"offload must be a layerzero.Offload, torch's CPUOffloadPolicy or None, got {offload!r}. Pass "
            "layerzero.Offload(optimizer=True), for example"
        )

    def __post_init__(self) -> None:
        _check_bools(self, ("grads", "optimizer", "params", "pin_memory"))
        if not self.pin_memory and not self.settings:
            raise ValueError(
                "pin_memory=False applies to the host memory of grads, optimizer and params, but none of them is set. "
                "Set one of them, or leave pin_memory out"
            )

    @property
    def settings(self) -> list[str]:
        """Settings that are on, as text for messages."""
        return [f"{name}=True" for name in ("grads", "optimizer", "params") if getattr(self, name)]


@dataclass(frozen=True)
class Codecs:
    """Encodings of messages. By default, messages are not encoded.

    Attributes:
        gather: encoding of bf16 or fp16 weights in gathers. Pass :class:`Float8Rows`, which halves the number of bytes,
            or an object with the methods of :class:`GatherCodec`. Forward and backward passes compute with the decoded
            weights. Masters stay exact. If there are no gathers, as with one rank or with shared memory, the setting
            has no effect.
        hop2: encoding of gradients in hop 2, which crosses nodes. Pass :class:`Int8Blocks` or :class:`Int4Blocks`,
            which send a quarter or an eighth of the bytes of fp32, or an object with the methods of
            :class:`GatherCodec`. The ranks add the decoded gradients in fp32 (layerzero's codecs exactly, and then
            rounded once), so `replica_reduce_dtype` has no effect.
            If there is one replica, the setting has no effect.
        refresh: encoding of refreshed weights, which cross nodes. With ``"lossless"``, each rank sends compressed
            differences between the 16-bit patterns of its new and its previous weights. Results are bitwise identical
            to those without the setting. Compression is fastest with the package zstandard, and runs only on CPUs, with
            gloo. :class:`Int4Difference` sends 4-bit differences, on CPUs or a device, so compute weights are no longer
            equal to the cast masters. The model must compute in bf16 or fp16. If there is one replica, the setting has
            no effect.

    Raises:
        TypeError, ValueError: a field is not a codec.

    Example::

        model = layerzero.shard_model(model, units={Block}, codecs=layerzero.Codecs(hop2=layerzero.Int8Blocks()))
    """

    gather: GatherCodec | None = None
    hop2: GatherCodec | None = None
    refresh: str | DifferenceCodec | None = None

    def __post_init__(self) -> None:
        for name, example in (("gather", "Float8Rows"), ("hop2", "Int8Blocks")):
            codec = getattr(self, name)
            has_methods = all(callable(getattr(codec, each, None)) for each in _CODEC_METHODS)
            if codec is not None and (isinstance(codec, type) or not has_methods):
                raise TypeError(
                    f"Codecs.{name} must be an object with the methods {', '.join(_CODEC_METHODS)} of "
                    f"layerzero.GatherCodec, such as layerzero.{example}(), got {codec!r}"
                )
        refresh = self.refresh
        if refresh not in REFRESH_CODECS and (isinstance(refresh, type) or not isinstance(refresh, DifferenceCodec)):
            raise ValueError(
                f"Codecs.refresh={refresh!r} is not supported. Use one of {REFRESH_CODECS} or "
                "layerzero.Int4Difference()"
            )


@dataclass(frozen=True)
class UnitSettings:
    """Settings of one unit, which callables may have chosen."""

    policy: PrecisionPolicy
    accumulation: str  # one of `ACCUMULATIONS`
    # True, False, or an int k with 1 < k < zero3_size: the backward gathers from the post-forward shards on k ranks
    reshard_after_forward: bool | int
    reshard_after_backward: bool = True  # False: gathered weights stay until a step that may update them


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
    mp_policy: Policy = field(default_factory=PrecisionPolicy)
    accumulation: Accumulation = "sharded"
    offload: Offload = field(default_factory=Offload)
    codecs: Codecs = field(default_factory=Codecs)
    reshard_after_forward: Reshards = True
    prefetch: int = 1
    shared_memory: str = "auto"
    ignored_modules: ModuleEntry | Iterable[ModuleEntry] | None = None
    sync_module_states: bool = True

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> LayerZeroConfig:
        """Read the settings from a YAML file. This method requires PyYAML (``pip install PyYAML``).

        The names in the file are the field names of this class. Dtypes are written as ``bf16``, ``fp16``, ``fp32`` or
        with torch's names. `mp_policy`, `offload` and `codecs` map the fields of :class:`PrecisionPolicy`,
        :class:`Offload` and :class:`Codecs` to values. `units` and `ignored_modules` are lists with names of modules or
        of their classes. `codecs.gather` can be ``float8_rows``, `codecs.hop2` can be ``int8_blocks`` or
        ``int4_blocks``, and `codecs.refresh` can be ``lossless`` or ``int4_difference``.

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
            offload: {grads: true, optimizer: true}
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
            policy = _as_policy(self.mp_policy, "mp_policy")
            object.__setattr__(self, "mp_policy", policy)
            self._check_accumulation_dtype(policy)
        object.__setattr__(self, "offload", Offload.of(self.offload))
        object.__setattr__(self, "codecs", Codecs() if self.codecs is None else self.codecs)
        if not isinstance(self.codecs, Codecs):
            raise TypeError(f"codecs must be a layerzero.Codecs or None, got {self.codecs!r}")
        if not callable(self.accumulation):
            _check_accumulation(self.accumulation, "accumulation")
        if self.shared_memory not in SHARED_MEMORY_MODES:
            raise ValueError(f"shared_memory={self.shared_memory!r} is not supported. Use one of {SHARED_MEMORY_MODES}")
        _check_bools(self, ("sync_module_states",))
        if not callable(self.reshard_after_forward):
            _check_reshards(self.reshard_after_forward, "reshard_after_forward")
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 0:
            raise ValueError(f"prefetch must be an int >= 0 (number of units gathered ahead), got {self.prefetch!r}")

    def root_policy(self, model: nn.Module) -> PrecisionPolicy:
        """Return the mixed-precision policy of the root."""
        return self._policy_of("", model)

    def unit_settings(self, name: str, module: nn.Module, zero3_size: int, root: PrecisionPolicy) -> UnitSettings:
        """Return the settings of a unit.

        Args:
            name: name of the unit, ``""`` for the root.
            module: first module of the unit.
            zero3_size: number of ranks that share the unit's weights.
            root: policy of the root, which also determines the fields of the unit's policy that apply to the model.

        Raises:
            TypeError, ValueError: a callable has returned an invalid setting, or `reshard_after_forward` does not
                divide `zero3_size`.
        """
        policy = _with_fields_of_root(self._policy_of(name, module) if name else root, root, name)
        self._check_accumulation_dtype(policy)
        accumulation, label = self._chosen("accumulation", name, module)
        _check_accumulation(accumulation, label)
        reshards = self._reshards(name, module, zero3_size)
        if isinstance(reshards, str):
            return UnitSettings(policy, accumulation, reshard_after_forward=False, reshard_after_backward=False)
        return UnitSettings(policy, accumulation, reshards)

    def _chosen(self, setting: str, name: str, module: nn.Module) -> tuple[Any, str]:
        """Return the value of a setting for a unit, and a label for error messages about it."""
        value = getattr(self, setting)
        if callable(value):
            return value(name, module), f"the result of {setting}({name!r}, module)"
        return value, setting

    def _check_accumulation_dtype(self, policy: PrecisionPolicy) -> None:
        if policy.accumulation_dtype is not None and self.accumulation == "local":
            raise ValueError(
                f"accumulation_dtype={policy.accumulation_dtype} has no effect with accumulation='local', because its "
                "accumulators are the final gradients, which keep the dtype of the masters. Leave accumulation_dtype "
                "out, or use accumulation='sharded' or 'full'"
            )

    def _policy_of(self, name: str, module: nn.Module) -> PrecisionPolicy:
        return _as_policy(*self._chosen("mp_policy", name, module))

    def _reshards(self, name: str, module: nn.Module, zero3_size: int) -> UnitReshards:
        chosen: UnitReshards
        chosen, label = self._chosen("reshard_after_forward", name, module)
        _check_reshards(chosen, label)
        if isinstance(chosen, str):
            return chosen
        if isinstance(chosen, bool) or zero3_size == 1:  # without gathers, any int is accepted
            return bool(chosen)
        if zero3_size % chosen:
            divisors = [ranks for ranks in range(1, zero3_size + 1) if zero3_size % ranks == 0]
            raise ValueError(
                f"{label} is {chosen}, which does not divide the zero3_size={zero3_size} ranks that share the weights "
                f"of unit {name!r}. Use one of {divisors}, where {zero3_size} means True and 1 means False"
            )
        return chosen == zero3_size if chosen in (1, zero3_size) else chosen

    def comparable_settings(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks, keyed by name.

        :meth:`comparable_settings_of_unit` returns the settings that may differ between units.
        """
        refresh, reshards = self.codecs.refresh, self.reshard_after_forward
        policies = {"mp_policy": self.mp_policy, "offload": self.offload, "codecs": self.codecs}
        compared: dict[str, object] = {
            f"{name}.{each.name}": _comparable(getattr(policy, each.name))
            for name, policy in policies.items()
            if is_dataclass(policy)  # a callable is called for each unit
            for each in fields(policy)
        }
        if isinstance(refresh, str):
            compared["compression that codecs.refresh uses"] = (
                addon("slow_links").LosslessDifferences.best().compression
            )
        if self.shared_memory != "off":
            compared["add-on for shared memory"] = "installed" if has_addon("shared_memory") else "missing"
        names = ("zero3_size", "prefetch", "shared_memory", "sync_module_states")
        compared |= {name: getattr(self, name) for name in names}
        return compared | {"reshard_after_forward": "a callable" if callable(reshards) else reshards}

    def comparable_settings_of_unit(self, chosen: UnitSettings) -> dict[str, object]:
        """Return the settings of a unit that must be the same on all ranks, keyed by name."""
        compared: dict[str, object] = {"accumulation": chosen.accumulation}
        if callable(self.mp_policy):
            compared["mp_policy"] = str(chosen.policy)
        if callable(self.reshard_after_forward):
            reshards = chosen.reshard_after_forward if chosen.reshard_after_backward else "step"
            compared["reshard_after_forward"] = reshards
        return compared


def codec_text(codec: object | None) -> str | None:
    """Return text that identifies a codec and is the same in all processes, or None if there is no codec.

    The text is the class name. For a dataclass, the text also includes the fields that are numbers, strings or dtypes.
    """
    if codec is None:
        return None
    values: dict[str, Any] = {f.name: getattr(codec, f.name) for f in fields(codec)} if is_dataclass(codec) else {}
    settings = [f"{name}={v!r}" for name, v in values.items() if isinstance(v, (int, float, str, torch.dtype))]
    return f"{type(codec).__module__}.{type(codec).__qualname__}({', '.join(settings)})"


def _comparable(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value)
    return value if value is None or isinstance(value, (bool, str)) else codec_text(value)


def _check_accumulation(value: object, label: str) -> None:
    if value not in ACCUMULATIONS:
        raise ValueError(f"{label}={value!r} is not supported. Use one of {ACCUMULATIONS} or a callable")


def _as_policy(policy: object, label: str) -> PrecisionPolicy:
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"{label} must be a layerzero.PrecisionPolicy, a torch.distributed.fsdp.MixedPrecisionPolicy, or a "
            f"callable(name, module) that returns a policy for each unit, got {type(policy).__name__}"
        )
    return PrecisionPolicy.of(policy)


def _with_fields_of_root(policy: PrecisionPolicy, root: PrecisionPolicy, name: str) -> PrecisionPolicy:
    """Return the policy of a unit, with the fields that only the root's policy determines."""
    of_root = {each: getattr(root, each) for each in ("replica_reduce_dtype", "buffer_dtype", "fp32_accumulation")}
    for each, value in of_root.items():
        own = getattr(policy, each)
        if own not in (None, False, value):
            raise ValueError(
                f"{each} of mp_policy({name!r}, module) is {own}, but {each} applies to the full model and is {value} "
                "in the root's policy. Set it in the policy for the name ''"
            )
    return PrecisionPolicy.of(policy, **of_root)


def _check_bools(settings: object, names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(value := getattr(settings, name), bool):
            raise TypeError(f"{type(settings).__name__}.{name} must be a bool, got {value!r}")


def _check_reshards(value: object, label: str) -> None:
    if value == "step":
        return
    if not isinstance(value, int):
        raise TypeError(
            f"{label} must be a bool, the number of ranks that a unit is sharded over until its backward, 'step', or "
            f"a callable(name, module) that returns one of these for each unit, got {value!r}"
        )
    if value < 1 and not isinstance(value, bool):
        raise ValueError(f"{label} is {value}, which is not positive. Use a divisor of zero3_size, True or False")
