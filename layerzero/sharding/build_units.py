"""Build units from their definitions: plan handles, allocate and initialize parameters, and create handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from layerzero.comm.agreement import agreed, require_equal
from layerzero.comm.codecs import EncodedPartsSpec, encoded_bytes, encoded_sizes
from layerzero.comm.transport.base import GatherOptions, TransportTraits
from layerzero.config import Codecs, LayerZeroConfig, Precision, UnitSettings
from layerzero.device.accelerator import device_module
from layerzero.dtensor.gather_extension import GatheredBytes, GatherExtension, has_extension
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec, local_part
from layerzero.dtensor.ops_data import copy_attributes_and_hooks
from layerzero.dtensor.stale_parameter import make_stale
from layerzero.engine.gathered_params import is_row_major
from layerzero.engine.handle import Handle
from layerzero.engine.module_buffers import CastBuffer, keep_dtypes_in_state
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.unit import Unit
from layerzero.estimates.specs import HandleSpec
from layerzero.layout.flat_layout import FlatLayout, Slot, plan_layouts
from layerzero.layout.shard_grid import ShardGrid
from layerzero.sharding.meta_init import (
    InitFn,
    UninitializedTensor,
    fill_sentinel,
    has_meta,
    tensors_on_meta,
    uninitialized_tensors,
)
from layerzero.sharding.shared_resources import SharedResources
from layerzero.sharding.unit_meshes import UnitMesh
from layerzero.sharding.unit_selection import ParamInfo, UnitDefinition
from layerzero.sharding.unit_settings import unit_to_compare
from layerzero.utils.add_ons import addon

# The local part of a parameter, its (module, attribute) pairs, and its model-parallel spec.
HandleArguments = tuple[nn.Parameter, tuple[tuple[nn.Module, str], ...], ModelParallelSpec | None]


class PlannedUnit(NamedTuple):
    """Unit that can be built: its definition, its settings, and the specs of its handles."""

    definition: UnitDefinition
    settings: UnitSettings
    handles: list[HandleSpec]


class BuiltUnit(NamedTuple):
    """Unit whose sharded parameters are in the modules of the model.

    Attributes:
        uninitialized: parameters and buffers that were on the meta device and have no values yet.
        was_on_meta: True if any parameter or buffer was on the meta device.
        to_compare: properties that all ranks must compare, by name, if their process groups are deferred.
    """

    unit: Unit
    uninitialized: list[UninitializedTensor]
    was_on_meta: bool
    to_compare: dict[str, object]


def plan_handles(
    plan: UnitDefinition,
    chosen: UnitSettings,
    config: LayerZeroConfig,
    where: RankTraits,
    *,
    averaged: int,
    has_model_parallel_spec: Callable[[nn.Parameter], bool],
) -> list[HandleSpec]:
    """Return the specs of a unit's handles, without allocating memory.

    Parameters are grouped by dtype, by whether they are trainable, and by whether they have a model-parallel spec. Each
    group gets one or more handles. Each parameter with an all-gather extension gets its own handle.

    Args:
        chosen: settings of the unit.
        where: traits of the rank for which the handles are planned.
        averaged: number of data-parallel ranks in the root's mesh. Gradients are averaged over these ranks, even if the
            unit is sharded over another mesh.
        has_model_parallel_spec: function that returns whether a parameter has a model-parallel spec.
    """

    def handle_spec(kind: str, trainable: bool, precision: Precision, layout: FlatLayout, **more: Any) -> HandleSpec:
        reduction = ReductionSpec.plan(
            where.grid,
            precision,
            accumulation=chosen.accumulation,
            divide_factor=averaged,
            adds_hop1=where.transport.sums_locally,
            adds_hop2=where.adds_hop2,
            hop2_codec=config.codecs.hop2,
        )
        encodes = config.codecs.refresh is not None and precision.casts_to_16_bits and where.grid.replicas > 1
        return HandleSpec(
            plan.reduced_with(where.grid.replicas),
            kind,
            trainable,
            precision,
            layout,
            reduction,
            in_host=config.offload.optimizer and (trainable or precision.master != precision.compute),
            encodes_refresh=trainable and encodes,
            **more,
        )

    kinds: dict[tuple[torch.dtype, bool, bool], list[ParamInfo]] = {}
    for info in plan.parameters:
        if not has_extension(info.parameter):
            key = info.parameter.dtype, info.parameter.requires_grad, has_model_parallel_spec(info.parameter)
            kinds.setdefault(key, []).append(info)
    specs = []
    for (dtype, trainable, _), members in kinds.items():
        kind = f"{'trainable' if trainable else 'frozen'} {str(dtype).removeprefix('torch.')}"
        precision = chosen.policy.precision_of(dtype, trainable=trainable)
        parts = {info.name: local_part(info.parameter) for info in members}
        layouts = plan_layouts(
            [(name, tuple(part.shape) or (1,)) for name, part in parts.items()],  # a 0-dim parameter is one row
            num_shards=where.grid.data_parallel,
            align=16 // min(precision.compute.itemsize, precision.master.itemsize),
        )
        strided = {
            name: part.numel() * precision.compute.itemsize for name, part in parts.items() if not is_row_major(part)
        }
        for layout in layouts:
            sizes = encoded_sizes(config.codecs.gather, layout, where.grid.zero3_size, precision.compute)
            own_strides = tuple(strided[slot.name] for slot in layout.slots if slot.name in strided)
            coded = encoded_bytes(sizes)
            specs.append(handle_spec(kind, trainable, precision, layout, strided=own_strides, coded=coded))
    for info in (each for each in plan.parameters if has_extension(each.parameter)):
        kind, trainable = f"{type(info.parameter).__name__} {info.name!r}", info.parameter.requires_grad
        precision, layout, extension = _plan_extension(info, chosen, where)
        specs.append(handle_spec(kind, trainable, precision, layout, extension=extension))
    return specs


def _plan_extension(
    info: ParamInfo, chosen: UnitSettings, where: RankTraits
) -> tuple[Precision, FlatLayout, GatheredBytes]:
    """Plan a handle for one parameter, with shards of full rows. See [Note: All-gather extensions]."""
    parameter, ranks = info.parameter, where.grid.data_parallel
    slot = Slot(info.name, tuple(parameter.shape), 0)
    layout = FlatLayout((slot,), -(-slot.rows // ranks) * slot.row_numel, ranks, align=1)
    in_compute = chosen.policy.precision_of(parameter.dtype, trainable=parameter.requires_grad)
    # The class reports its all-gather inputs at the first gather. Until then, assume the compute dtype.
    gathered = GatheredBytes((layout.numel * in_compute.compute.itemsize,), ())
    return replace(in_compute, compute=parameter.dtype), layout, gathered


def plan_unit(definition: UnitDefinition, settings: UnitSettings, shared: SharedResources) -> PlannedUnit:
    """Plan the handles of a unit, without allocating memory."""
    site, config = shared.sites[definition.mesh], shared.config
    # Both transports lead to the same plans.
    traits = TransportTraits(sums_locally=site.mesh_info.zero3_reduce_comm.sums_locally)
    handles = plan_handles(
        definition,
        settings,
        config,
        RankTraits.of(site.mesh_info, traits, offload_params=config.offload.params),
        averaged=shared.ranks.mesh_info.data_parallel,
        has_model_parallel_spec=site.has_model_parallel_spec,
    )
    return PlannedUnit(definition, settings, handles)


def require_equal_encoded_sizes(planned: Sequence[PlannedUnit], shared: SharedResources) -> None:
    """Raise ValueError on all ranks of a mesh if their codecs produce messages of different sizes."""
    for mesh, site in shared.sites.items():
        fields: dict[str, object] = {}
        for unit in planned:
            if unit.definition.mesh == mesh:
                fields |= _encoded_sizes_of(unit, shared.config.codecs, site.mesh_info.grid)
        if fields:
            require_equal("shard_model", fields, ranks=site.mesh_info.ranks)


def _encoded_sizes_of(unit: PlannedUnit, codecs: Codecs, grid: ShardGrid) -> dict[str, object]:
    """Return the numbers of bytes of the encoded messages of a unit, by name of the message."""
    size, data_parallel, label = grid.zero3_size, grid.data_parallel, unit.definition.label
    sizes: dict[str, object] = {}
    if codecs.gather is not None:
        sizes[f"bytes of Codecs.gather for {label}"] = [
            encoded_sizes(codecs.gather, each.layout, size, each.precision.compute) for each in unit.handles
        ]
    if codecs.hop2 is not None and grid.replicas > 1:
        ranks = range(0, data_parallel, data_parallel // size)
        grids = [ShardGrid.of_rank(rank, data_parallel=data_parallel, zero3_size=size) for rank in ranks]
        sizes[f"bytes of Codecs.hop2 for {label}"] = [
            EncodedPartsSpec.of(codecs.hop2, each.layout, grid, torch.float32).sizes
            for each in unit.handles
            for grid in grids
        ]
    return sizes


def build_unit(
    planned: PlannedUnit,
    shared: SharedResources,
    *,
    param_init_fn: InitFn | None = None,
    enclosing: Sequence[BuiltUnit] = (),
) -> BuiltUnit:
    """Build a unit: replace its parameters in the model with sharded parameters, and free the originals.

    Neither the other units of the model nor its root need to be known, except for `enclosing`. Units are built one at a
    time, so that at most one unit has full tensors at any time. :func:`make_root` completes the model. All ranks of the
    model must build the same units in the same order.

    Args:
        enclosing: common units that contain the unit, innermost first, if the unit is on another mesh than the root;
            see :class:`Unit`.
    """
    plan, policy, config = planned.definition, planned.settings.policy, shared.config
    site = shared.sites[plan.mesh]
    to_compare: dict[str, object] = {}
    if shared.ranks.mesh_info.groups.deferred:
        to_compare = unit_to_compare(plan, planned.settings, config, may_differ_on_meta=True)
        to_compare |= _encoded_sizes_of(planned, config.codecs, site.mesh_info.grid)
    originals = list(plan.parameters)
    extensions = _take_extensions(plan, policy)
    on_meta = tensors_on_meta(plan)
    _materialize_on_all_ranks(plan, site, param_init_fn)
    if config.sync_module_states:
        _broadcast_from_rank_0(plan, site)
    uninitialized = uninitialized_tensors(plan, on_meta)
    cast_buffers = _cast_buffers(plan, policy.buffer_dtype)
    by_name = {info.name: _handle_arguments(info, site) for info in plan.parameters}
    handles = [
        _make_handle(planned, each, by_name, shared, extension=extensions.get(each.layout.slots[0].name))
        for each in planned.handles
    ]
    _retire_parameters(plan, originals, handles)
    unit = _make_unit(planned, handles, shared, cast_buffers, [each.unit for each in enclosing])
    return BuiltUnit(unit, uninitialized, bool(on_meta), to_compare)


def move_unit(
    built: BuiltUnit, planned: PlannedUnit, shared: SharedResources, *, enclosing: Sequence[BuiltUnit] = ()
) -> BuiltUnit:
    """Build a unit again that no pass has used, with the process groups, transport and pools of `shared`.

    The sharded parameters remain the same objects, with the same rows on each rank. The old handles lose their memory
    one by one, so at most one handle needs memory twice.

    Args:
        planned: the plan from which the unit was built. Names and settings may have changed.
        enclosing: see :func:`build_unit`.
    """
    plan, handles = planned.definition, list(built.unit.handles)
    site = shared.sites[plan.mesh]
    owners = {info.name: info.owners for info in plan.parameters}
    for index, (spec, previous) in enumerate(zip(planned.handles, handles, strict=True)):
        originals = {
            slot.name: _handle_arguments(ParamInfo(slot.name, member.gathered, owners[slot.name]), site)
            for slot, member in zip(spec.layout.slots, previous.members, strict=True)
        }
        handles[index] = _make_handle(planned, spec, originals, shared, previous=previous)
        previous.__dict__.clear()
    unit = _make_unit(planned, handles, shared, built.unit.cast_buffers, [each.unit for each in enclosing])
    return built._replace(unit=unit)


def _make_handle(
    planned: PlannedUnit,
    spec: HandleSpec,
    originals: Mapping[str, HandleArguments],
    shared: SharedResources,
    *,
    extension: GatherExtension | None = None,
    previous: Handle | None = None,
) -> Handle:
    """Create a handle of a unit.

    Args:
        originals: the parameter, owners and model-parallel spec of each slot, by its name.
        previous: handle to replace; see :class:`Handle`.
    """
    plan = planned.definition
    site = shared.sites[plan.mesh]
    return Handle(
        f"unit {plan.name!r}, {spec.kind}",
        spec.layout,
        [originals[slot.name] for slot in spec.layout.slots],
        label=plan.name or "the root",
        precision=spec.precision,
        reduction_spec=spec.reduction_spec,
        mesh=site.resources,
        options=_gather_options(planned, shared.config, site),
        extension=extension if previous is None else previous.extension,
        previous=previous,
    )


def _make_unit(
    planned: PlannedUnit,
    handles: Sequence[Handle],
    shared: SharedResources,
    cast_buffers: Sequence[CastBuffer],
    enclosing: Sequence[Unit] = (),
) -> Unit:
    """Create a unit from its handles, and put the sharded parameters into its modules."""
    plan, chosen = planned.definition, planned.settings
    unit = Unit(
        plan.name,
        plan.called,
        tuple(handles),
        shared.sites[plan.mesh].resources,
        policy=chosen.policy,
        reshard_after_forward=chosen.reshard_after_forward,
        reshard_after_backward=chosen.reshard_after_backward,
        cast_buffers=cast_buffers,
        enclosing=enclosing,
    )
    unit.show_sharded()
    return unit


def _gather_options(planned: PlannedUnit, config: LayerZeroConfig, site: UnitMesh) -> GatherOptions:
    mesh_info, reshards = site.mesh_info, planned.settings.reshard_after_forward
    root_stays_gathered = not planned.definition.name and device_module(mesh_info.device) is not None
    # The communicator is created with every transport. ZeRO-3 groups may use different transports, but all ranks must
    # create the same process groups.
    post_forward_comm = None if root_stays_gathered or isinstance(reshards, bool) else mesh_info.subgroup_comm(reshards)
    return GatherOptions(config.codecs.gather, post_forward_comm)


def _retire_parameters(plan: UnitDefinition, originals: Sequence[ParamInfo], handles: Sequence[Handle]) -> None:
    """Free the memory of the old parameters, even if user code still refers to them, and make their use an error."""
    for info in plan.parameters:
        nothing = torch.empty(0, dtype=info.parameter.dtype, device=info.parameter.device)
        if isinstance(info.parameter, DTensor):
            info.parameter._local_tensor = nothing
        else:
            info.parameter.data = nothing
        info.parameter.grad = None
    replacements = {member.name: member.sharded for handle in handles for member in handle.members}
    for parameter, name in {info.parameter: info.name for info in (*originals, *plan.parameters)}.items():
        make_stale(parameter, name, replacements[name])


def _take_extensions(plan: UnitDefinition, policy: MixedPrecisionPolicy) -> dict[str, GatherExtension]:
    """Replace parameters that have an all-gather extension with plain parameters. Return the extensions by name."""
    extensions: dict[str, GatherExtension] = {}
    for index, info in enumerate(plan.parameters):
        if has_extension(info.parameter):
            module, _ = info.owners[0]
            plain, extensions[info.name] = addon("extensions").split_parameter(info.parameter, module, policy)
            for owner, attribute in info.owners:
                owner._parameters[attribute] = plain
            plan.parameters[index] = ParamInfo(info.name, plain, info.owners)
    return extensions


def _handle_arguments(info: ParamInfo, site: UnitMesh) -> HandleArguments:
    """Return the local part, the owners and the model-parallel spec of a parameter, as :class:`Handle` needs them."""
    parameter, part = info.parameter, info.parameter
    if isinstance(parameter, DTensor):
        part = nn.Parameter(local_part(parameter).detach(), requires_grad=parameter.requires_grad)
        copy_attributes_and_hooks(parameter, gathered=part, sharded=part)
    return part, info.owners, site.model_parallel_spec_of(parameter)


def _materialize_on_all_ranks(plan: UnitDefinition, site: UnitMesh, param_init_fn: InitFn | None) -> None:
    """Materialize the parameters and buffers of a unit. If any rank fails, raise an error on all ranks of the model.

    While process groups are deferred, ranks may differ in what is on meta, and do not communicate.
    """
    device = site.mesh_info.device
    if site.mesh_info.groups.deferred or not any(has_meta(module) for module in plan.modules):
        _materialize(plan, device, param_init_fn)
        return
    with agreed(f"initialization of {plan.label}", {}, ranks=site.ranks.ranks):
        _materialize(plan, device, param_init_fn)


def _materialize(plan: UnitDefinition, device: torch.device, param_init_fn: InitFn | None) -> None:
    """Allocate and initialize parameters and buffers that are on meta. Move other buffers to the device."""
    on_meta = [module for module in plan.modules if has_meta(module)]
    for index, info in enumerate(plan.parameters):
        if info.parameter.is_meta:
            empty = torch.empty_like(info.parameter, device=device)
            fill_sentinel(local_part(empty))
            parameter = nn.Parameter(empty, requires_grad=info.parameter.requires_grad)
            copy_attributes_and_hooks(info.parameter, gathered=parameter, sharded=parameter)
            for owner, attribute in info.owners:
                owner._parameters[attribute] = parameter
            plan.parameters[index] = ParamInfo(info.name, parameter, info.owners)
    for module, attribute, _, buffer in plan.buffers():
        if buffer.device != device:
            moved_buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            if buffer.is_meta:
                fill_sentinel(moved_buffer)
            module._buffers[attribute] = moved_buffer
    for module in on_meta:
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def _cast_buffers(plan: UnitDefinition, dtype: torch.dtype | None) -> list[CastBuffer]:
    """Cast floating-point buffers to `dtype`, and return the buffers that were cast. If `dtype` is None, cast none."""
    cast: list[CastBuffer] = []
    for module, attribute, _, buffer in plan.buffers():
        if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
            module._buffers[attribute] = buffer.to(dtype)
            cast.append(CastBuffer(weakref.ref(module), attribute, buffer.dtype))
    keep_dtypes_in_state(cast)
    return cast


@torch.no_grad()
def _broadcast_from_rank_0(plan: UnitDefinition, site: UnitMesh) -> None:
    for info in plan.parameters:
        site.broadcast_param_from_first(info.parameter)
    for each in plan.buffers():
        site.broadcast_from_first(each.buffer.detach())
