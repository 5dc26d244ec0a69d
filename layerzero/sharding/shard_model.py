"""Sharding of a model in place: :func:`shard_model`."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.comm.agreement import has_peers, require_equal
from layerzero.comm.codecs import GatherCodec
from layerzero.comm.collectives import timeout_of
from layerzero.comm.mesh_info import AXES, MeshInfo, as_data_parallel
from layerzero.comm.process_groups import (
    ModelGroups,
    groups_so_far,
    kept_for_release,
    released_everywhere,
    settle_releases,
)
from layerzero.comm.transport.base import BufferDemand, TransportTraits
from layerzero.comm.transport.selection import process_group_traits, select_transports
from layerzero.comm.watchdog import Watchdog, default_limit, new_scope
from layerzero.config import OFFLOADS, Accumulation, LayerZeroConfig, Policy, Reshards, Units
from layerzero.device.accelerator import CurrentStream, HostDeviceCopies
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.dtensor.warning_filter import filter_mesh_warnings
from layerzero.engine.gradient_offload import AccumulatorAllocator
from layerzero.engine.hooks import register_hooks
from layerzero.engine.resources import MeshResources, ModelPools
from layerzero.engine.state import LayerZeroState
from layerzero.estimates.memory_estimate import held_bytes
from layerzero.estimates.scratch_buffers import ScratchBuffers, buffer_demand, plan_scratch
from layerzero.estimates.specs import RankTraits, specs_of
from layerzero.sharding.build_units import (
    agree_on_codec,
    build_unit,
    check_buffers,
    check_codec,
    check_meta,
    check_offload,
    parts_to_compare,
    plan_handles,
    settings_to_compare,
)
from layerzero.sharding.launchers import connections_warning, restart_warning
from layerzero.sharding.meta_init import UninitializedTensor, initialization_check
from layerzero.sharding.module_methods import bind_methods, show_units_in_repr
from layerzero.sharding.optimizer_hook import guard_optimizers
from layerzero.sharding.unit_meshes import (
    Further,
    MeshOf,
    agree_model_parallel,
    meshes_of_units,
    model_parallel_axes,
    root_mesh,
    unit_meshes,
)
from layerzero.sharding.unit_selection import UnitDefinition, partition, ranks_in
from layerzero.sharding.wrapper_checks import guard_wrappers, refuse_fully_shard

_log = logging.getLogger("layerzero")

__all__ = ["shard_model"]


def shard_model(
    model: nn.Module,
    *,
    mesh: DeviceMesh | MeshOf | None = None,
    zero3_size: int | None = None,
    units: Units = None,
    mp_policy: Policy | None = None,
    replica_reduce_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    gradient_divide_factor: float | None = None,
    accumulation: Accumulation = "sharded",
    offload_grads: bool = False,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    pin_memory: bool = True,
    reshard_after_forward: Reshards = True,
    prefetch: int = 1,
    gather_codec: GatherCodec | None = None,
    shared_memory: str = "auto",
    ignored_params: Iterable[nn.Parameter] | str | None = None,
    ignored_modules: Iterable[nn.Module | str] | None = None,
    sync_module_states: bool = True,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Shard a model in place, and return the same object.

    fp32 masters are sharded over all data-parallel ranks (ZeRO-1, Rajbhandari et al. 2020), compute weights over
    `zero3_size` neighbouring ranks (ZeRO-3). Between passes ``model.parameters()`` yields DTensors of the original
    shapes, whose local tensors are this rank's rows of the masters. ``.grad`` is their gradient, averaged over all
    ranks. All ranks must call this with the same model and settings.

    Args:
        model: any module. Parameters may be on the CPU, on the device, or on ``meta``.
        mesh: data-parallel ranks, instead of `zero3_size`: from :func:`init_mesh` or :func:`mesh_from_groups`, or a
            DeviceMesh of torch. On a mesh with one axis, all ranks share the weights. On a mesh with two axes, the
            first is the axis of replicas. Or ``callable(name, module) -> DeviceMesh``, called for each unit (``""`` is
            the root), for example for experts that are data-parallel over fewer ranks. Parameters may be DTensors on
            model-parallel axes (tensor and expert parallel). See ``docs/meshes.md``.
        zero3_size: S, number of ranks that share the compute weights. It must divide the world size. None, without a
            mesh: the number of ranks on a node, as torchrun sets it.
        units: modules that are gathered and freed together: module classes (``{Block}``), names of modules or of their
            classes (``["blocks.0", "Block"]``), modules of the model, and lists of modules or names. Each list is one
            unit that is gathered when any of its modules is called: ``[Block, [model.norm, model.head]]``. A list takes
            precedence over classes and names. Or ``callable(name, module) -> bool``; if it returns a str, all modules
            with this key are one unit. ``"auto"``: the classes in the model's ``_no_split_modules``, or those that
            transformers checkpoints. Or a policy of ``torch.distributed.fsdp.wrap``: a ``ModuleWrapPolicy``, or a
            function of ``(module, recurse, nonwrapped_numel)``, ``functools.partial`` included, such as
            ``size_based_auto_wrap_policy``. Parameters outside all units belong to the root. None: root only.
            :func:`layerzero.units` lists the units, and ``print(model)`` marks them.
        mp_policy: torch's ``MixedPrecisionPolicy``. `param_dtype` (None: dtype of the model): weights and compute.
            `reduce_dtype` (None: `param_dtype`): gradients inside the ZeRO-3 group. `output_dtype`,
            `cast_forward_inputs`: as in FSDP2, for every unit. Or ``callable(name, module)`` that returns a policy for
            each unit; ``""`` is the root, and a unit of several modules is passed as its key and its first module. A
            norm in fp32 between blocks in bf16 is a unit with
            ``MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)``.
        replica_reduce_dtype: dtype of gradient reduction across replicas; None: `reduce_dtype`.
        buffer_dtype: dtype that floating-point buffers are cast to, once; None: no cast. Integer buffers are never
            cast. ``state_dict()`` and checkpoints hold buffers in their original dtype, with the cast values.
        gradient_divide_factor: divisor of the sum of all ranks' gradients; None: D, which gives their mean. Use 1.0 to
            sum them, if the loss is already divided by the number of tokens on all ranks.
        accumulation: form in which gradients are accumulated between micro-batches. ``"sharded"`` keeps N/S fp32
            elements and reduces inside the ZeRO-3 group in each backward. ``"full"`` keeps N fp32 elements and sends
            nothing until the backward that reduces. Or ``callable(name, module)`` that chooses for each unit.
        offload_grads: keep accumulators in pinned host memory between the backwards of a step. On the device,
            accumulators then take at most twice the size of those of the largest unit. Copies overlap with the backward
            of the neighbouring unit. With one replica (or one rank), ``"sharded"`` accumulates in the gradient shards
            themselves, which stay on the device. On the CPU the setting warns, and changes nothing else.
        offload_optimizer: keep masters, final gradients and the optimizer's state in host memory, and run the optimizer
            on the CPU. Sharded parameters and their ``.grad`` are then CPU tensors. Gradients are copied to the host as
            they are reduced, and weights to the device as they are refreshed; both overlap with other work. Compute
            weights, accumulators and scratch buffers remain on the device. Only for element-wise optimizers. On the CPU
            the setting warns, and changes nothing else.
        offload_params: keep compute weights in host memory, for models that do not fit otherwise. Each gather first
            copies the ZeRO-3 shard to the device, in parallel with other work. Combined with `offload_optimizer`, the
            device holds gathered units, gradients in flight, and scratch. On the CPU the setting warns, and changes no
            results. If ranks share memory, it has no effect.
        pin_memory: pin the host memory of `offload_grads`, `offload_optimizer` and `offload_params`. Use False if the
            machine limits pinned memory; copies are then slower, and the host waits for them. On the CPU nothing is
            pinned.
        reshard_after_forward: free a unit's full weights after its forward and gather them again for its backward. Or
            ``callable(name, module) -> bool | int``: False for the last unit avoids a gather that no computation
            hides. An int, as in FSDP2: between forward and backward a unit stays sharded over that many neighbouring
            ranks, a divisor of `zero3_size`, and its backward gathers it among these ranks only. `zero3_size` itself
            means True, 1 means False.
        prefetch: number of units gathered ahead of the one that computes.
        gather_codec: encoding of bf16 or fp16 weights in gathers: :class:`Float8Rows`, which halves the bytes, or your
            own object with the methods of :class:`GatherCodec`. Forwards and backwards compute with the decoded
            weights; masters stay exact. None: no encoding. If nothing is gathered (one rank, shared memory), it has no
            effect.
        shared_memory: ``"auto"`` or ``"off"``. ``"auto"``: if the ranks of a ZeRO-3 group are processes of one machine
            and compute on its CPU, they share memory instead of sending weights and gradients to each other. If they
            cannot, a message is logged. ``"off"``: they communicate, as on devices. See ``docs/shared_memory.md``.
        ignored_params: parameters that are not sharded: they stay full on every rank, and their gradients are not
            averaged. ``"unsupported"``: frozen parameters that cannot be sharded, such as quantised bases under
            adapters: integers, 8-bit formats, or tensor subclasses. All ranks must have loaded the same values. A class
            with FSDP2's all-gather extension (torchao's float8 training) is sharded by the rows of its one inner
            tensor.
        ignored_modules: modules, or names as in `units`, whose parameters are all ignored in the same way. Passing the
            model itself, or modules that hold all of its parameters, is an error, because nothing would be sharded.
        sync_module_states: broadcast rank 0's parameters and buffers to all data-parallel ranks. With tensor
            parallelism, each part and each plain buffer comes from the first rank that has it. Replicated parameters
            come from the first rank of the model.
        param_init_fn: ``fn(module)`` that initialises a module's own parameters and buffers, after a module on the
            ``meta`` device has been given memory; by default its ``reset_parameters()``. It is called for one unit
            after the other, so that at most one unit has full tensors at a time. Values that it leaves unwritten must
            be loaded or assigned before the first forward, which raises otherwise.

    Raises:
        TypeError, ValueError: a setting is invalid, a parameter is unsupported, the model is already sharded, or ranks
            disagree. All of this is checked before the first collective, so that ranks raise instead of hanging.
        RuntimeError: torch.distributed is not initialised, or another rank failed here.

    Example::

        model = layerzero.shard_model(
            model, zero3_size=8, units={Block}, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group() first")
    root = _agreed_root(model, mesh, zero3_size)
    ranks = ranks_in(root)
    fields: dict[str, object] = {}
    plans: list[UnitDefinition] = []
    further: Further = {}
    failure: Exception | None = None
    try:
        config = LayerZeroConfig(
            zero3_size=root.size(1),
            units=units,
            mp_policy=mp_policy if mp_policy is not None else MixedPrecisionPolicy(),
            replica_reduce_dtype=replica_reduce_dtype,
            buffer_dtype=buffer_dtype,
            gradient_divide_factor=gradient_divide_factor,
            accumulation=accumulation,
            offload_grads=offload_grads,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            pin_memory=pin_memory,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            gather_codec=gather_codec,
            shared_memory=shared_memory,
            ignored_modules=ignored_modules,
            sync_module_states=sync_module_states,
        )
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        plans = partition(
            model,
            units,
            mesh_of=unit_meshes(mesh, root),
            ignored_params=ignored_params,
            ignored_modules=ignored_modules,
        )
        further = model_parallel_axes(plans)
        check_meta(plans, param_init_fn)
        check_codec(plans, config)
        check_offload(plans, config)
        if sync_module_states:
            check_buffers(plans)
        fields = settings_to_compare(model, plans, config)
    except Exception as error:  # reported to the other ranks, then raised here
        failure = error
    failure = agree_model_parallel(model, root, fields, failure)
    settle_releases()
    made = groups_so_far(*(dist.get_process_group_ranks(root.get_group(axis)) for axis in AXES), ranks)
    require_equal("shard_model", fields | parts_to_compare(plans), ranks=ranks, groups=made, failure=failure)

    groups = ModelGroups()
    try:
        runtime = _build(model, plans, further, config, groups, param_init_fn)
        _open(runtime, plans)
    except BaseException:
        groups.abandon()
        raise
    return model


def _build(
    model: nn.Module,
    plans: Sequence[UnitDefinition],
    further: Further,
    config: LayerZeroConfig,
    groups: ModelGroups,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> LayerZeroState:
    """Build the state, units and handles of the plans. All ranks of the model must call this, with equal plans."""
    everyone, sites = meshes_of_units(further, groups)
    topology = everyone.mesh_info
    if not topology.zero3_reduce_comm.held_group.is_local:
        released_everywhere(everyone.all_gather_text(kept_for_release()), everyone.ranks)
    averaged = topology.data_parallel
    handles = [
        plan_handles(plan, config, where, averaged=averaged, has_face=site.has_face)
        for plan in plans
        for site in (sites[plan.mesh],)
        for where in (_planned_traits(site.mesh_info, config),)
    ]
    for shared_over, site in sites.items():
        here = [index for index, plan in enumerate(plans) if plan.mesh == shared_over]
        agree_on_codec([plans[index] for index in here], [handles[index] for index in here], config, site)
    pools = _model_pools(topology.device, config)

    def demand(traits: TransportTraits) -> BufferDemand:
        where = RankTraits.of(topology, traits, offload_params=False)
        return buffer_demand([each for unit in handles for each in unit], config, where)

    meshes = [site.mesh_info for site in sites.values()]
    transports = select_transports(meshes, demand, pools.scratch, pools.full, setting=config.shared_memory)
    scratch = ScratchBuffers(Counter(), Counter())
    for shared_over, site in sites.items():
        planned = [each for plan, unit in zip(plans, handles, strict=True) if plan.mesh == shared_over for each in unit]
        traits = transports[site.mesh_info].traits
        where = RankTraits.of(site.mesh_info, traits, offload_params=config.offload_params)
        scratch = scratch.plus(plan_scratch(planned, config, where))
    pools.scratch.expected = scratch.scratch
    resources = {each: MeshResources(each, transport, pools) for each, transport in transports.items()}
    origins: list[tuple[nn.Parameter, str]] = []
    units_built = []
    unwritten: list[UninitializedTensor] = []
    was_on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for plan, planned in zip(plans, handles, strict=True):
        origins += [(found.parameter, found.name) for found in plan.parameters]
        site = sites[plan.mesh]
        unit, left = build_unit(plan, planned, config, site, resources[site.mesh_info], param_init_fn)
        units_built.append(unit)
        unwritten += left
    ignored = [parameter for parameter in model.parameters() if not isinstance(parameter, RowShardedTensor)]
    runtime = LayerZeroState(model, units_built, config, everyone, pools, ignored)
    runtime.parameters.remember_origins(origins)
    # Without sync_module_states, ranks may have left different tensors unwritten, so all of them must check.
    if unwritten or (was_on_meta and not config.sync_module_states):
        runtime.status.first_forward_checks.append(initialization_check(unwritten, runtime.members, everyone.ranks))
    return runtime


def _agreed_root(model: nn.Module, mesh: DeviceMesh | MeshOf | None, zero3_size: int | None) -> DeviceMesh:
    """Return the mesh of the root; if one rank of `mesh` cannot use it, all ranks of `mesh` raise."""
    try:
        return as_data_parallel(root_mesh(model, mesh, zero3_size))
    except (TypeError, ValueError) as error:
        ranks = sorted(ranks_in(mesh)) if isinstance(mesh, DeviceMesh) else []
        if dist.get_rank() in ranks:  # otherwise the calling ranks are unknown
            require_equal("shard_model", {}, ranks=ranks, failure=error)
        raise


def _open(runtime: LayerZeroState, plans: Iterable[UnitDefinition]) -> None:
    """Register the hooks, guards and methods of a sharded model, log its size, and start its watchdog."""
    register_hooks(runtime)
    guard_optimizers(runtime)
    guard_wrappers()
    refuse_fully_shard(module for plan in plans for module in plan.modules)
    bind_methods(runtime)
    show_units_in_repr(runtime.units)
    filter_mesh_warnings()
    topology = runtime.mesh_info
    if runtime.ranks.is_first:
        size = held_bytes(specs_of(runtime.units), runtime.config) / 2**20
        _log.info(
            "%s: %d units, the root included, D=%d, S=%d, %.1f MiB a rank without the optimizer's states",
            *(type(runtime.model).__name__, len(runtime.units), topology.data_parallel, topology.zero3_size, size),
        )
        for said in (restart_warning(), connections_warning(topology.device.type)):
            if said:
                _log.warning("%s", said)
    _watch(runtime)


def _watch(runtime: LayerZeroState) -> None:
    """Start the watchdog that runs by default on a device. See [Note: Watching a device] in comm/watchdog.py."""
    topology, ranks = runtime.mesh_info, runtime.ranks.ranks
    if CurrentStream.of(topology.device) is None or not has_peers(ranks):
        return
    groups = {each.zero3_gather_comm.group for each in (topology, *(handle.topology for handle in runtime.handles))}
    limit = default_limit(min(map(timeout_of, groups)))
    watchdog = Watchdog(topology, new_scope(ranks), limit, owner=runtime, is_default=True)
    runtime.on_close.append(watchdog.close)


def _planned_traits(mesh_info: MeshInfo, config: LayerZeroConfig) -> RankTraits:
    """Return the traits for planning handles, before the transport is selected: handles do not depend on it."""
    traits = process_group_traits(sums_locally=mesh_info.zero3_reduce_comm.is_gloo)
    return RankTraits.of(mesh_info, traits, offload_params=config.offload_params)


def _model_pools(device: torch.device, config: LayerZeroConfig) -> ModelPools:
    asked = [name for name in OFFLOADS if getattr(config, name)]
    transfers = HostDeviceCopies(device, pin_memory=config.pin_memory) if asked else None
    if transfers is not None and not transfers.pins:
        unpinned = "" if config.pin_memory else ", nothing is pinned"
        said = (
            f"{' and '.join(asked)}=True on {device}: there is no device to free memory of{unpinned}; "
            "results are the same"
        )
        warnings.warn(said, stacklevel=4)
    of_grads = transfers if config.offload_grads else None
    return ModelPools(
        BufferPool(device),
        FullBufferPool(device),
        AccumulatorAllocator(device, of_grads),
        transfers if config.offload_optimizer else None,
        transfers if config.offload_params else None,
    )
