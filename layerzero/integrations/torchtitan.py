"""torchtitan: a ``Trainer`` that shards its models with layerzero instead of ``fully_shard``."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchtitan import trainer
from torchtitan.components import optimizer as optimizers
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, init_optim_state
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from layerzero import PrecisionPolicy, ShardedOptimizer, no_sync, shard_optimizer
from layerzero.extend import Reshards, get_state, set_gradient_divide_factor
from layerzero.integrations.common import is_sharded, merge_settings, model_of, shard

__all__ = ["OptimizersContainer", "Trainer", "parallelize", "with_layerzero"]

_DECODERS = {"tok_embeddings", "layers", "norm", "lm_head"}  # the parts of a decoder
_LAYER = re.compile(r"layers\.[^.]+")
_TIED = "tok_embeddings_and_lm_head"  # name of the unit with both, if their weights are tied
_EXPERTS = re.compile(r"layers\..+\.inner_experts")


def with_layerzero(config: trainer.Trainer.Config, **settings: Any) -> Trainer.Config:
    """Return a copy of a torchtitan config that trains with layerzero.

    Call this function in a function of your config registry.

    Args:
        config: a config from one of torchtitan's registries, which is not changed. In the copy, `spmd_backend` is
            ``"partial_dtensor"``, and CUDA graphs are disabled because they would replay a step without its
            collectives.
        settings: settings of :func:`layerzero.shard_model`, such as `accumulation`, or `config_file`, a YAML file with
            such settings. A setting that torchtitan's own config or model determines raises an error.

    Raises:
        TypeError: the config of the trainer or of the optimizer is not torchtitan's own class; see ``docs/loops.md``.
        ValueError: `settings` contains a setting that torchtitan determines.

    Example::

        def llama3_8b_layerzero():
            return with_layerzero(llama3_8b(), accumulation="full")
    """
    for source, expected in (config, trainer.Trainer), (config.optimizer, optimizers.OptimizersContainer):
        if type(source) is not expected.Config:
            raise TypeError(
                f"{type(source)} is not the Config of torchtitan's {expected.__name__}, so it cannot be converted. Set "
                "parallelize_fn of the model_spec to layerzero's, and the optimizer to a Config of layerzero's "
                "OptimizersContainer"
            )
    _read_settings(**settings)
    converted = Trainer.Config(**_field_values(copy.deepcopy(config)))
    converted.model_spec = replace(converted.model_spec, parallelize_fn=partial(parallelize, **settings))
    converted.optimizer = OptimizersContainer.Config(**_field_values(converted.optimizer))
    converted.parallelism.spmd_backend, converted.training.disable_cuda_graphs = "partial_dtensor", True
    return converted


def _field_values(config: Any) -> dict[str, Any]:
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
    """Parallelize a decoder like torchtitan, but with :func:`layerzero.shard_model` instead of FSDP.

    This is a ``ModelSpec.parallelize_fn``. The `data_parallel_shard_degree` ranks of a ZeRO-3 group should be on one
    node. Gradients are summed, not averaged, because torchtitan divides losses by the tokens of all ranks. Each layer
    is a unit. The embedding and the head are also units, or a single unit if their weights are tied.

    Args:
        model: a torchtitan ``Decoder``, preferably on meta. torchtitan passes the arguments that follow.
        settings: as for :func:`with_layerzero`.

    Returns:
        `model`.

    Raises:
        ValueError, TypeError: layerzero does not support a torchtitan setting. The message names the setting and a
            remedy.
    """
    _refuse_unsupported(model, parallel_dims, training, parallelism)
    given_settings = _read_settings(**settings)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        decoder: Any = model
        decoder.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    param_dtype, reduce_dtype = (
        TORCH_DTYPE_MAP[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    derived = {
        "mesh": _mesh_of(parallel_dims),
        "units": _unit_selector(model, parallel_dims),
        "mp_policy": replace(
            PrecisionPolicy.of(given_settings.get("mp_policy")),
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": _reshard_setting(parallelism.fsdp_reshard_after_forward, parallel_dims),
        "param_init_fn": lambda module: None,  # torchtitan initializes afterwards, with equal values on all ranks
        "sync_module_states": not any(parameter.is_meta for parameter in model.parameters()),
    }
    sharded = shard(model, {**given_settings, **derived})
    set_gradient_divide_factor(sharded, 1.0)  # torchtitan divides losses by the tokens of all ranks
    return sharded


_NOT_HERE = {
    **dict.fromkeys(
        ("zero3_size", "mesh"), "data_parallel_shard_degree and data_parallel_replicate_degree determine it"
    ),
    **dict.fromkeys(("ignored_modules", "ignored_params"), "torchtitan's trainer does not average gradients"),
    **dict.fromkeys(("param_init_fn", "sync_module_states"), "torchtitan initializes the parameters"),
    "reshard_after_forward": "fsdp_reshard_after_forward determines it",
    "units": "the units are the layers, the embedding and the head",
}


def _read_settings(config_file: str | None = None, **settings: Any) -> dict[str, Any]:
    values = merge_settings(config_file, **settings)
    if names := sorted(_NOT_HERE.keys() & values.keys()):
        raise ValueError(f"{names[0]} is not supported with torchtitan: {_NOT_HERE[names[0]]}. Leave it out")
    policy = values.get("mp_policy")
    if policy is not None and (
        not isinstance(policy, PrecisionPolicy) or policy.torch_policy != MixedPrecisionPolicy()
    ):
        raise ValueError(
            "mp_policy is not supported with torchtitan: mixed_precision_param and mixed_precision_reduce determine "
            "its dtypes. Pass only fields that torch's policy does not have: layerzero.PrecisionPolicy("
            "replica_reduce_dtype=...)"
        )
    return values


def _refuse_unsupported(
    model: nn.Module, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    unknown = {name for name, child in model.named_children() if any(True for _ in child.parameters())} - _DECODERS
    if unknown or not isinstance(getattr(model, "layers", None), nn.ModuleDict):
        raise TypeError(
            f"{type(model).__qualname__} is not a plain torchtitan decoder (other modules: "
            f"{', '.join(sorted(unknown))}). Write a parallelize_fn that calls layerzero.shard_model with its units"
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "CUDA graphs are not supported, because they would replay a step without its collectives. Use "
            "--training.disable_cuda_graphs"
        )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"spmd_backend={parallelism.spmd_backend!r} is not supported, because it changes parameters that only "
            "data-parallel ranks share. Use --parallelism.spmd_backend partial_dtensor"
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload is not supported. Leave it out. with_layerzero(..., "
            "offload=layerzero.Offload(optimizer=True)) stores all tensors except the compute weights in host memory"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError("parallelism.enable_fsdp_symm_mem applies to collectives of FSDP2 only. Leave it out")
    if parallel_dims.cp_enabled or parallel_dims.pp_enabled:
        raise ValueError(
            "context_parallel_degree and pipeline_parallel_degree > 1 are not supported with torchtitan. Use "
            "tensor_parallel_degree, or a training loop as in docs/meshes.md"
        )


def _mesh_of(parallel_dims: ParallelDims) -> DeviceMesh | Callable[[str, nn.Module], DeviceMesh]:
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    dense: DeviceMesh = parallel_dims.get_mesh([*replicas, "fsdp"])
    if not parallel_dims.ep_enabled:
        return dense
    experts: DeviceMesh = parallel_dims.get_mesh([*replicas, "efsdp"])
    return lambda name, module: experts if _EXPERTS.fullmatch(name) else dense


def _unit_selector(model: nn.Module, parallel_dims: ParallelDims) -> Callable[[str, nn.Module], bool | str]:
    are_tied = getattr(model, "enable_weight_tying", False)
    ends: dict[str, bool | str] = dict.fromkeys(("tok_embeddings", "lm_head"), _TIED if are_tied else True)

    def unit_of(name: str, module: nn.Module) -> bool | str:
        has_own_mesh = parallel_dims.ep_enabled and _EXPERTS.fullmatch(name)
        return bool(has_own_mesh or _LAYER.fullmatch(name)) or ends.get(name, False)

    return unit_of


def _reshard_setting(when: str | int, parallel_dims: ParallelDims) -> Reshards:
    """Translate torchtitan's `fsdp_reshard_after_forward` into layerzero's `reshard_after_forward`.

    ``"default"`` reshards all units except the head, which the backward needs first. If the value is a number of ranks,
    units have post-forward shards on that many ranks. If the number does not divide the size of the experts' mesh, the
    experts are fully resharded.
    """
    if when == "default":
        return lambda name, module: name not in ("lm_head", _TIED)
    settings: dict[str | int, Reshards] = {"always": True, "never": False, "step": "step"}
    if isinstance(when, str) and when not in settings:
        raise ValueError(
            f"fsdp_reshard_after_forward is {when!r}, which is not supported. Use 'default', 'always', 'never', 'step' "
            "or a number of ranks"
        )
    if isinstance(when, str):
        return settings[when]
    if parallel_dims.ep_enabled and parallel_dims.get_mesh(["efsdp"]).size() % when:
        return lambda name, module: True if _EXPERTS.fullmatch(name) else when
    return when


class OptimizersContainer(optimizers.OptimizersContainer):
    """torchtitan optimizer container in which the optimizers of sharded models are sharded as well.

    The container then contains instances of :class:`layerzero.ShardedOptimizer`. `optimizer_name` may be the name of
    any optimizer class of ``torch.optim``. Use "Muon" instead of torchtitan's "DistMuon".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(optimizers.OptimizersContainer.Config):
        """Config with the same fields as torchtitan's."""

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError("optimizer.implementation 'fused_opt_states_bf16' is not supported. Use 'fused'")
        super().__init__(config, model_parts=model_parts)
        self.optimizers: list[torch.optim.Optimizer] = [self._shard_optimizer(each) for each in self.optimizers]

    def _post_init(self, all_params: list[nn.Parameter]) -> None:
        super()._post_init(all_params)
        self.param_groups.clear()  # the contained optimizers step the parameters

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        model = model_of(optimizer, self.model_parts)
        return optimizer if model is None else shard_optimizer(optimizer, model)

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's flat state dict, with sharded tensors. All ranks must call this method.

        An optimizer without state returns state for a load to fill. If the optimizer needs full parameters, as Muon
        does, it first takes a step with zero gradients and learning rate 0, as in torchtitan.
        """
        flat: dict[str, Any] = {}
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer) and optimizer.has_owners:
                _create_owned_state(optimizer)
                by_name = optimizer.state_dict_by_name()  # a collective; torchtitan calls this method twice
                flat |= get_flat_optim_state_dict(SimpleNamespace(state_dict=lambda by_name=by_name: by_name))
            else:
                init_optim_state(optimizer)
                flat |= get_flat_optim_state_dict(optimizer)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. All ranks must call this method."""
        for optimizer in self.optimizers:  # torchtitan loads only the entries of states that are stored
            if isinstance(optimizer, ShardedOptimizer) and optimizer.has_owners:
                _create_owned_state(optimizer)
        super().load_state_dict(state_dict)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        factory = getattr(torch.optim, name, None)
        if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
            raise ValueError(
                f"optimizer_name {name!r} is not an optimizer of torch.optim. Use a name such as 'AdamW' or 'Muon'"
            )
        return factory


def _create_owned_state(optimizer: ShardedOptimizer) -> None:
    """Call torchtitan's ``init_optim_state`` if no rank has state.

    That function does nothing if ``optimizer.state`` is truthy, and the state of an optimizer with owners always is.
    """
    if not optimizer.state_dict_by_name()["state"]:
        groups, step, zero_grad = optimizer.param_groups, optimizer.step, optimizer.zero_grad
        init_optim_state(SimpleNamespace(state={}, param_groups=groups, step=step, zero_grad=zero_grad))


class Trainer(trainer.Trainer):
    """torchtitan's trainer with one gradient reduction across replicas per step, during or after the last backward.

    torchtitan has no hook for such a reduction. torchtitan's own trainer would reduce gradients after each micro-batch
    and after each chunk of a chunked loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Trainer.Config):
        """Config with the same fields as torchtitan's; created by :func:`with_layerzero`."""

    _done = 0  # number of micro-batches so far, over all steps

    def forward_backward_step(self, **batch: Any) -> Tensor:
        sharded = [part for part in self.model_parts if is_sharded(part)]
        self._done += 1
        is_last = self._done % self.gradient_accumulation_steps == 0
        with ExitStack() as stack:
            if not is_last or isinstance(self.loss_fn, ChunkedLossWrapper):
                for part in sharded:
                    stack.enter_context(no_sync(part))
            loss: Tensor = super().forward_backward_step(**batch)
        for part in sharded if is_last else ():
            get_state(part).scheduler.complete_gradients()
        return loss
