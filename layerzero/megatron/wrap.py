"""Shard model chunks, and set the hooks that Megatron's pipeline schedules call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.comm.mesh_info import mesh_from_groups
from layerzero.config import Accumulation, Units
from layerzero.engine.hooks import get_state
from layerzero.engine.reduction_spec import accumulates_full_gradients
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.default_units import (
    default_units,
    is_expert_parallel,
    language_model,
    only_experts,
    warn_of_layers_without_units,
)
from layerzero.megatron.finalize import FinalizeGradients, tied_weight
from layerzero.megatron.parallel_groups import ProcessGroups, process_groups
from layerzero.reliability.local_gradient_check import LocalGradientCheck
from layerzero.sharding.shard_model import shard_model

__all__ = ["wrap"]


def wrap(
    model_chunks: nn.Module | Sequence[nn.Module],
    config: Any,
    *,
    zero3_size: int | None = None,
    groups: ProcessGroups | None = None,
    units: Units = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    accumulation: Accumulation = "sharded",
    align_grad_reduce: bool = False,
    align_param_refresh: bool = False,
    check_for_nan_in_grad: bool = True,
    **settings: Any,
) -> list[ShardedChunk]:
    """Shard the model chunks of this rank. This function replaces Megatron's data-parallel wrapper.

    The function sets `no_sync_func`, `grad_sync_func`, `param_sync_func` and `finalize_model_grads_func` in `config`.
    Gradients are reduced over data-parallel ranks in each chunk's last backward pass. The optimizer's step launches the
    refresh. The next gather of each unit waits for the refresh of that unit.

    Args:
        model_chunks: Megatron's models, one for each chunk that this rank holds, with or without their
            ``Float16Module`` wrapper.
        config: TransformerConfig of the chunks.
        zero3_size: number S of ranks per ZeRO-3 group; see :func:`process_groups`. Pass either `zero3_size` or
            `groups`.
        groups: process groups that :func:`process_groups` returned.
        units: as in :func:`layerzero.shard_model`. Names begin with ``module.``. If None, the units are the transformer
            and Mamba layers, the word embeddings and the output layer. A warning then lists the classes and the total
            size of layers that are not units. Modules that have only expert-parallel parameters are always units.
        mp_policy: mixed-precision policy. If None, the model computes in the 16-bit dtype of `config`, and gradients
            are reduced in fp32. If `config` has no 16-bit dtype, the dtype of the parameters is used.
        accumulation: as in :func:`layerzero.shard_model`. `config.gradient_accumulation_fusion` needs ``"full"``, or
            ``"sharded"`` with a ZeRO-3 size of 1.
        align_grad_reduce: if True, all stages after the first reduce their gradients at the same time, in the pipeline
            bubble. Otherwise, each stage reduces its gradients in its last backward pass.
        align_param_refresh: if True and the schedule is interleaved, the schedule launches the refresh of every chunk
            except the first when it reaches the chunk, on all stages at the same time. Otherwise, the optimizer's step
            launches the refresh.
        check_for_nan_in_grad: if True, all ranks raise an error before a step if a gradient is NaN or infinite. The
            error names the rank and the parameter. If the loss scale is dynamic, such a step is skipped instead. This
            argument corresponds to Megatron-LM's ``--check-for-nan-in-loss-and-grad``, which is also on by default.
        **settings: other settings of :func:`layerzero.shard_model`: `prefetch`, `offload_grads`,
            `replica_reduce_dtype`, ...

    Returns:
        The sharded chunks. Pass them to the schedule and to :class:`ShardedMegatronOptimizer`.

    Raises:
        ValueError: the model or its config uses an unsupported feature. The message names the feature and a remedy.
    """
    modules = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if (zero3_size is None) == (groups is None):
        raise ValueError("wrap requires either zero3_size or groups. Pass exactly one of them")
    for module in modules:
        _refuse_unsupported(module, config)
    if groups is None:
        assert zero3_size is not None
        groups = process_groups(zero3_size)
    _check_fusion_settings(config, groups.zero3.size(), accumulation, settings)
    mesh = _meshes(groups)
    chunks = []
    for module in modules:
        chunk = ShardedChunk(module, config, groups)
        unit_selection = units
        if unit_selection is None:
            unit_selection = default_units(module, pipeline_size=groups.pipeline.size())
            warn_of_layers_without_units(chunk, {id(m) for name, m in chunk.named_modules() if unit_selection(name, m)})
        shard_model(
            chunk,
            mesh=mesh,
            units=_with_experts(unit_selection, chunk, groups),
            mp_policy=mp_policy or _policy(config),
            accumulation=accumulation,
            gradient_divide_factor=1.0 if config.calculate_per_token_loss else None,
            **settings,
        )
        if check_for_nan_in_grad:
            chunk.own_gradients = LocalGradientCheck(get_state(chunk).handles)
        chunks.append(chunk)
        _use_own_output_weight(chunk)
    tied_weight(chunks, groups)  # raises here if the gradients of the tied weight could not be summed later
    _set_config_functions(
        config, chunks, groups, align_grad_reduce=align_grad_reduce, align_param_refresh=align_param_refresh
    )
    return chunks


def _meshes(groups: ProcessGroups) -> DeviceMesh | Callable[[str, nn.Module], DeviceMesh]:
    """Return the mesh over which units are sharded.

    With expert parallelism, return a function that returns the mesh of a unit.
    """
    mesh = mesh_from_groups(groups.zero1, groups.zero3)
    if groups.expert_zero1 is None or groups.expert_zero3 is None:
        return mesh
    of_experts = mesh_from_groups(groups.expert_zero1, groups.expert_zero3)
    return lambda name, module: of_experts if only_experts(module) else mesh


def _with_experts(units: Units, chunk: ShardedChunk, groups: ProcessGroups) -> Units:
    """Return `units`, extended by the outermost modules in the chunk that have only expert-parallel parameters."""
    experts: dict[str, nn.Module] = {}
    for name, module in chunk.named_modules():
        if only_experts(module) and not any(name.startswith(f"{outer}.") for outer in experts):
            experts[name] = module
    if not experts:
        return units
    if groups.expert_zero1 is None:
        raise ValueError(
            f"the experts of {next(iter(experts))!r} differ between data-parallel ranks, but groups has no groups for "
            "experts. Create groups with layerzero.megatron.process_groups after Megatron's own groups"
        )
    if isinstance(units, (str, type)) or (isinstance(units, Iterable) and not callable(units)):
        return [*([units] if isinstance(units, (str, type)) else units), *experts]
    is_unit: Any = units
    return lambda name, module: name in experts or is_unit(name, module)


def _set_config_functions(
    config: Any,
    chunks: list[ShardedChunk],
    groups: ProcessGroups,
    *,
    align_grad_reduce: bool,
    align_param_refresh: bool,
) -> None:
    single = len(chunks) == 1
    config.no_sync_func = chunks[0].no_sync if single else [chunk.no_sync for chunk in chunks]
    config.grad_sync_func = None
    if align_grad_reduce:
        config.grad_sync_func = chunks[0].start_grad_sync if single else [chunk.start_grad_sync for chunk in chunks]
    config.param_sync_func = None
    if align_param_refresh and not single:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        for chunk in chunks[1:]:
            get_state(chunk).refreshes.deferred = True
    config.finalize_model_grads_func = FinalizeGradients(config, groups)


def _policy(config: Any) -> MixedPrecisionPolicy:
    compute_dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    # Megatron casts the inputs of a chunk. Some inputs, such as rotary embeddings, must stay in fp32.
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32 if compute_dtype is not None else None,
        cast_forward_inputs=False,
    )


def _use_own_output_weight(chunk: ShardedChunk) -> None:
    """Make the output layer use its own weight instead of the weight that Megatron's model passes to it.

    The model reads a tied output weight before it calls the output layer. At that time, the weight is not gathered yet.
    """
    output = getattr(language_model(chunk.module), "output_layer", None)
    if not isinstance(output, nn.Module) or getattr(output, "weight", None) is None:
        return

    def drop_weight_argument(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("weight") is module.weight:
            kwargs = {**kwargs, "weight": None}
        return args, kwargs

    output.register_forward_pre_hook(
        drop_weight_argument, prepend=True, with_kwargs=True
    )  # before the hooks of the unit


_REFUSED = {
    "mtp_num_layers": "multi-token prediction adds copies of the embeddings",
    "has_cond_embedder": "gradients of conditional embedders are summed over all pipeline stages",
    "defer_embedding_wgrad_compute": "gradients of the output layer are computed after the last backward",
    "overlap_moe_expert_parallel_comm": "its schedule calls parts of layers separately",
    "moe_router_enable_expert_bias": "the bias of routers is updated together with the gradients",
    "delay_wgrad_compute": "gradients of weights are computed after the backward of their layer",
    "fp8": "weights would be gathered in 16 bits and quantized in each forward",
    "fp4": "weights would be gathered in 16 bits and quantized in each forward",
    # since Megatron-Core 0.19
    "overlap_dispatch_backward_with_experts_wgrad": "gradients of experts are computed after their layer's backward",
    "moe_single_grouped_weight": "the experts of a rank are one tensor of Transformer Engine",
    "moe_single_grouped_bias": "the experts of a rank are one tensor of Transformer Engine",
    "moe_expert_rank_capacity_factor": "a step is repeated if experts get too many tokens",
    "flextron": "gradients of its routers are summed over pipeline stages",
}


def _refuse_unsupported(module: nn.Module, config: Any) -> None:
    for name, reason in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(
                f"config.{name}={getattr(config, name)!r} is not supported by layerzero.megatron: {reason}"
            )
    if getattr(config, "cuda_graph_impl", "none") not in ("none", None):
        raise ValueError(
            "config.cuda_graph_impl is not supported, because graphs record the addresses of weights, which layerzero "
            "frees and allocates again. Use 'none'"
        )
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):  # since Megatron-Core 0.19
        if getattr(config, name, 1) > 1:
            raise ValueError(
                f"config.{name}={getattr(config, name)} is not supported, because Megatron would shard the weights as "
                "well. Use 1, and set zero3_size"
            )
    if "quantile_balancing" in (getattr(config, "moe_router_load_balancing_type", None) or ()):
        raise ValueError(
            "config.moe_router_load_balancing_type='quantile_balancing' is not supported by layerzero.megatron: the "
            "bias of routers is updated together with the gradients. Use 'aux_loss' or 'sinkhorn'"
        )
    if getattr(config, "num_moe_experts", None):
        size, tensor_size = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
        if size not in (None, tensor_size):  # Megatron 0.16 does not mark such parameters, and their copies diverge
            raise ValueError(
                f"config.expert_tensor_parallel_size={size} is not supported, because experts would have other "
                f"data-parallel ranks than the other parameters. Use {tensor_size}, as tensor_model_parallel_size"
            )
    in_expert_modules = {
        id(parameter) for part in module.modules() if only_experts(part) for parameter in part.parameters()
    }
    for name, parameter in module.named_parameters():
        if is_expert_parallel(parameter) and id(parameter) not in in_expert_modules:
            raise ValueError(
                f"parameter {name!r} is expert parallel, but its module has parameters that are not. Put the experts "
                "into a separate module"
            )


def _check_fusion_settings(
    config: Any, zero3_size: int, accumulation: Accumulation, settings: Mapping[str, Any]
) -> None:
    if not getattr(config, "gradient_accumulation_fusion", False):
        return
    if not callable(accumulation) and not accumulates_full_gradients(accumulation, zero3_size):
        raise ValueError(
            'gradient_accumulation_fusion adds to full gradients between micro-batches. Use accumulation="full", or '
            '"sharded" with zero3_size=1, or disable the fusion'
        )
    if settings.get("accumulation_dtype") is not None:
        raise ValueError(
            "gradient_accumulation_fusion and accumulation_dtype exclude each other, because the fusion adds to "
            "main_grad in fp32, and the last micro-batch is not added to the accumulator. Disable one of them"
        )
    if settings.get("offload_grads", False):
        raise ValueError(
            "gradient_accumulation_fusion and offload_grads=True exclude each other, because the fusion uses main_grad "
            "from the forward to the backward, and offloading may move it. Disable one of them"
        )
