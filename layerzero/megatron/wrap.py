"""Shard model chunks, and set the hooks that Megatron's pipeline schedules call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero import PrecisionPolicy, mesh_from_groups, shard_model
from layerzero.extend import Accumulation, Policy, Units, get_state, set_gradient_divide_factor
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.default_units import (
    default_units,
    expert_modules,
    language_model,
    only_experts,
    warn_of_layers_without_units,
)
from layerzero.megatron.finalize import FinalizeGradients, tied_weight
from layerzero.megatron.parallel_groups import ProcessGroups, process_groups
from layerzero.megatron.unsupported import refuse_fusion, refuse_model
from layerzero.reliability import LocalGradientCheck


def wrap(
    model_chunks: nn.Module | Sequence[nn.Module],
    config: Any,
    *,
    zero3_size: int | None = None,
    expert_zero3_size: int | None = None,
    groups: ProcessGroups | None = None,
    units: Units = None,
    mp_policy: Policy | None = None,
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
        expert_zero3_size: number of ranks over which the compute weights of experts are sharded, from 1 to Megatron's
            expert-data-parallel size; see :func:`process_groups`. It needs `zero3_size`.
        groups: process groups that :func:`process_groups` returned.
        units: as in :func:`layerzero.shard_model`. Names begin with ``module.``. If None, the units are the transformer
            and Mamba layers, the word embeddings and the output layer. A warning then lists the classes and the total
            size of layers that are not units. Experts that are sharded differently from other parameters are always
            units.
        mp_policy: mixed-precision policy. If it sets no field of torch's ``MixedPrecisionPolicy``, the model computes
            in the 16-bit dtype of `config`, and gradients are reduced in fp32. If `config` has no 16-bit dtype, the
            dtype of the parameters is used.
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
        **settings: other settings of :func:`layerzero.shard_model`: `prefetch`, `offload`, `codecs`, ...

    Returns:
        The sharded chunks. Pass them to the schedule and to :class:`ShardedMegatronOptimizer`.

    Raises:
        ValueError: the model or its config uses an unsupported feature. The message names the feature and a remedy.
    """
    modules = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    _refuse_sizes(zero3_size, expert_zero3_size, groups, config)
    for module in modules:
        refuse_model(module, config)
    if zero3_size is not None:
        groups = process_groups(zero3_size, expert_zero3_size)
    assert groups is not None
    sizes = [group.size() for group in (groups.zero3, groups.expert_zero3) if group is not None]
    refuse_fusion(config, max(sizes), accumulation=accumulation, mp_policy=mp_policy, **settings)
    mesh = mesh_from_groups(groups.zero1, groups.zero3)
    expert_mesh = None
    if groups.expert_zero3 is not None:
        expert_mesh = mesh_from_groups(groups.expert_zero1 or groups.zero1, groups.expert_zero3)
    chunks = []
    for module in modules:
        chunk = ShardedChunk(module, config, groups)
        unit_selection = units
        if unit_selection is None:
            unit_selection = default_units(module, pipeline_size=groups.pipeline.size())
            warn_of_layers_without_units(chunk, {id(m) for name, m in chunk.named_modules() if unit_selection(name, m)})
        experts = _separate_experts(chunk, groups)
        shard_model(
            chunk,
            mesh=mesh if expert_mesh is None else _mesh_selector(mesh, expert_mesh, experts),
            units=_with_experts(unit_selection, experts),
            mp_policy=_policy(mp_policy, config),
            accumulation=accumulation,
            **settings,
        )
        if config.calculate_per_token_loss:
            set_gradient_divide_factor(chunk, 1.0)
        if check_for_nan_in_grad:
            chunk.own_gradients = LocalGradientCheck(get_state(chunk).handles)
        chunks.append(chunk)
        _use_own_output_weight(chunk)
    tied_weight(chunks, groups)  # raises here if the gradients of the tied weight could not be summed later
    _set_config_functions(
        config, chunks, groups, align_grad_reduce=align_grad_reduce, align_param_refresh=align_param_refresh
    )
    return chunks


def _refuse_sizes(
    zero3_size: int | None, expert_zero3_size: int | None, groups: ProcessGroups | None, config: Any
) -> None:
    if (zero3_size is None) == (groups is None):
        raise ValueError("wrap requires either zero3_size or groups. Pass exactly one of them")
    if expert_zero3_size is not None and groups is not None:
        raise ValueError("groups already determine expert_zero3_size. Pass it to process_groups instead of wrap")
    if expert_zero3_size is not None and not config.num_moe_experts:
        raise ValueError(f"expert_zero3_size={expert_zero3_size}, but the model has no experts. Remove it")


def _separate_experts(chunk: ShardedChunk, groups: ProcessGroups) -> dict[str, nn.Module]:
    """Return the experts of each layer by name; an empty dict if they are sharded in the same way as other modules."""
    experts = expert_modules(chunk)
    for name, module in experts.items():
        if groups.expert_zero1 is None and only_experts(module):
            raise ValueError(
                f"the experts of {name!r} differ between data-parallel ranks, but groups has no groups for experts. "
                "Create groups with layerzero.megatron.process_groups after Megatron's own groups"
            )
    return {} if groups.expert_zero3 is None else experts


def _mesh_selector(
    mesh: DeviceMesh, expert_mesh: DeviceMesh, experts: dict[str, nn.Module]
) -> Callable[[str, nn.Module], DeviceMesh]:
    """Return a function that returns the mesh of a unit."""
    inside = {id(part) for module in experts.values() for part in module.modules()}
    return lambda name, module: expert_mesh if id(module) in inside else mesh


def _with_experts(units: Units, experts: dict[str, nn.Module]) -> Units:
    """Return `units`, extended by `experts`."""
    if not experts:
        return units
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


def _policy(given: Policy | None, config: Any) -> Policy:
    """Return `given`, or a policy for the dtype of `config` if `given` sets no field of torch's policy."""
    if isinstance(given, PrecisionPolicy):
        if given.torch_policy != MixedPrecisionPolicy():
            return given
    elif given is not None:
        return given
    compute_dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    # Megatron casts the inputs of a chunk. Some inputs, such as rotary embeddings, must stay in fp32.
    return PrecisionPolicy.of(
        given,
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
