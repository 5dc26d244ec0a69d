"""torchtitan: its decoders sharded by layerzero where it would call ``fully_shard``, in its own trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan import trainer
from torchtitan.components import optimizer as optimizers
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from layerzero.engine.hooks import runtime_of
from layerzero.integrations.common import Settings, is_sharded
from layerzero.optimizers.sharded import shard_optimizer
from layerzero.views.loop import no_sync

__all__ = ["OptimizersContainer", "Trainer", "parallelize", "with_layerzero"]

_LAYER = re.compile(r"layers\.[^.]+")
_TIED = "tok_embeddings_and_lm_head"  # the unit of both
_EXPERTS = re.compile(r"layers\.[^.]+\.moe\.routed_experts\.inner_experts")


def with_layerzero(config: trainer.Trainer.Config, **settings: Any) -> Trainer.Config:
    """The same run, sharded by layerzero: for a function of your config registry.

    Args:
        config: torchtitan's, as one of its registries gives it; left as it was.
        settings: of :func:`layerzero.shard_model`, such as `accumulation`, or `config_file`, a YAML file with them.
            Which ranks share what, dtypes and resharding are torchtitan's settings, and refused here.

    Raises:
        TypeError: `config` is of a trainer of another class, whose steps are its own; see ``docs/loops.md``.

    Example::

        def llama3_8b_layerzero():
            return with_layerzero(llama3_8b(), accumulation="full")
    """
    if type(config) is not trainer.Trainer.Config:
        raise TypeError(
            f"{type(config).__qualname__} is not the config of torchtitan's own Trainer: set its model_spec's "
            "parallelize_fn to layerzero's, and its optimizer to a Config of layerzero's OptimizersContainer"
        )
    _settings_of(**settings)
    given = _fields(config)
    given["model_spec"] = replace(config.model_spec, parallelize_fn=partial(parallelize, **settings))
    given["optimizer"] = OptimizersContainer.Config(**_fields(config.optimizer))
    return Trainer.Config(**given)


def _fields(config: Any) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config)}


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
    **settings: Any,
) -> nn.Module:
    """``ModelSpec.parallelize_fn``: all that torchtitan does to a decoder, with :func:`layerzero.shard_model` for FSDP.

    Weights are shared by the ranks of `data_parallel_shard_degree`, which should be those of a node; gradients and
    masters by these and the replicas of `data_parallel_replicate_degree`. Gradients are summed, not averaged:
    torchtitan's losses are divided by the tokens of all ranks. Each layer is a unit, and embedding and head, which are
    one if their weights are tied.

    Args:
        model: a ``Decoder`` of torchtitan, best on meta; returned. The rest is as torchtitan gives it.
        settings: as for :func:`with_layerzero`.

    Raises:
        ValueError, TypeError: a setting of torchtitan has no counterpart here; names it, and what to do.
    """
    _refuse_others(model, parallel_dims, training, parallelism)
    given = _settings_of(**settings)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)  # type: ignore[operator]
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    policy = MixedPrecisionPolicy(
        TORCH_DTYPE_MAP[training.mixed_precision_param],
        TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    layout = {
        "mesh": _mesh_of(parallel_dims),
        "units": _units_of(model, parallel_dims),
        "mp_policy": policy,
        "gradient_divide_factor": 1.0,
        "reshard_after_forward": _reshards(parallelism.fsdp_reshard_after_forward),
        "param_init_fn": lambda module: None,  # torchtitan draws them afterwards, on all ranks alike
        "sync_module_states": False,
    }
    return Settings({**given, **layout}).shard(model)


_DEGREES = "data_parallel_shard_degree and data_parallel_replicate_degree"
_TORCHTITANS = {  # what torchtitan's own settings say
    "zero3_size": _DEGREES,
    "mesh": _DEGREES,
    "mp_policy": "mixed_precision_param and mixed_precision_reduce",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "gradient_divide_factor": "its loss, which is divided by the tokens of all ranks",
}


def _settings_of(config_file: str | None = None, **settings: Any) -> dict[str, Any]:
    given = dict(Settings.of(config_file, **settings).given)
    for name in sorted(_TORCHTITANS.keys() & given.keys()):
        raise ValueError(f"{name} follows from torchtitan's {_TORCHTITANS[name]}: set that instead")
    return given


def _refuse_others(
    model: nn.Module, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    if not isinstance(getattr(model, "layers", None), nn.ModuleDict):
        raise TypeError(
            f"{type(model).__qualname__} is no decoder of torchtitan, with its layers in a ModuleDict: write a "
            "parallelize_fn that calls layerzero.shard_model with its units"
        )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend={parallelism.spmd_backend!r} makes typed parts of tensors, or DTensors, of all "
            "parameters: use --parallelism.spmd_backend partial_dtensor"
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload would keep weights in host memory: leave it out, and give offload_optimizer="
            "True to with_layerzero, which keeps masters, gradients and the optimizer's state there"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError("parallelism.enable_fsdp_symm_mem is a setting of FSDP2's exchanges: leave it out")
    if parallel_dims.cp_enabled:
        raise ValueError("context_parallel_degree > 1 was never run with layerzero: use tensor_parallel_degree")
    if parallel_dims.pp_enabled:
        raise ValueError("pipeline_parallel_degree > 1 was never run with layerzero here: see docs/pipelines.md")


def _mesh_of(parallel_dims: ParallelDims) -> DeviceMesh | Callable[[str, nn.Module], DeviceMesh]:
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    dense: DeviceMesh = parallel_dims.get_mesh([*replicas, "fsdp"])
    if not parallel_dims.ep_enabled:
        return dense
    experts: DeviceMesh = parallel_dims.get_mesh([*replicas, "efsdp"])
    return lambda name, module: experts if _EXPERTS.fullmatch(_plain(name)) else dense


def _units_of(model: nn.Module, parallel_dims: ParallelDims) -> Callable[[str, nn.Module], bool | str]:
    are_tied = getattr(model, "enable_weight_tying", False)
    ends: dict[str, bool | str] = dict.fromkeys(("tok_embeddings", "lm_head"), _TIED if are_tied else True)

    def unit_of(name: str, module: nn.Module) -> bool | str:
        if parallel_dims.ep_enabled and _EXPERTS.fullmatch(_plain(name)):
            return True
        return bool(_LAYER.fullmatch(name)) or ends.get(name, False)

    return unit_of


def _plain(name: str) -> str:
    return name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "")


def _reshards(policy: str) -> bool | Callable[[str, nn.Module], bool]:
    """torchtitan's policy; by default all but the head, which the backward needs at once."""
    if policy == "default":
        return lambda name, module: name not in ("lm_head", _TIED)
    return policy == "always"


class OptimizersContainer(optimizers.OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container, whose optimizers are each a :class:`layerzero.ShardedOptimizer`.

    `optimizer_name` may be that of any class of ``torch.optim``: "Muon" in place of torchtitan's "DistMuon".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(optimizers.OptimizersContainer.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError("optimizer.implementation 'fused_opt_states_bf16' is for torchtitan alone: use 'fused'")
        super().__init__(config, model_parts=model_parts)
        self.optimizers: list[torch.optim.Optimizer] = [self._shard(each) for each in self.optimizers]

    def _post_init(self, all_params: list[nn.Parameter]) -> None:
        super()._post_init(all_params)
        self.param_groups.clear()  # its optimizers have them, and step them

    def _shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        held = optimizer.param_groups[0]["params"][0]
        owner = next((m for m in self.model_parts if is_sharded(m) and runtime_of(m).parameters.member_of(held)), None)
        return optimizer if owner is None else shard_optimizer(optimizer, owner)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        factory = getattr(torch.optim, name, None)
        if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
            raise ValueError(f"optimizer_name {name!r} is no optimizer of torch.optim, such as 'AdamW' or 'Muon'")
        return factory


class Trainer(trainer.Trainer):  # type: ignore[misc]
    """torchtitan's trainer, in whose steps gradients cross nodes once, after the last micro-batch.

    torchtitan has no hook there: without this class each micro-batch reduces, and each chunk of a loss in chunks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Trainer.Config):  # type: ignore[misc]
        """As torchtitan's; of :func:`with_layerzero`."""

    _done = 0  # micro-batches of this step

    def train_step(self, data_iterator: Any) -> None:
        self._done = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        sharded = [part for part in self.model_parts if is_sharded(part)]
        with ExitStack() as stack:
            for part in sharded:
                stack.enter_context(no_sync(part))
            loss: Tensor = super().forward_backward_step(**batch)
        self._done += 1
        if self._done == self.gradient_accumulation_steps:
            for part in sharded:
                runtime_of(part).complete_gradients()
        return loss
