"""Build units from their definitions: check settings, allocate and initialize parameters, and create handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from layerzero.comm.agreement import require_equal
from layerzero.comm.codecs import EncodedPartsSpec, encoded_bytes, encoded_sizes, has_feedback, is_encoded
from layerzero.comm.collectives import backend_of
from layerzero.comm.transport.base import GatherOptions
from layerzero.config import Codecs, LayerZeroConfig, Precision, UnitSettings
from layerzero.device.accelerator import device_module
from layerzero.dtensor.gather_extension import GatheredBytes, GatherExtension, has_extension
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec, local_part
from layerzero.dtensor.ops_data import copy_attributes_and_hooks
from layerzero.dtensor.stale_parameter import make_stale
from layerzero.engine.buffers import CastBuffer, keep_dtypes_in_state
from layerzero.engine.gathered_params import is_row_major
from layerzero.engine.handle import Handle
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.engine.resources import MeshResources
from layerzero.engine.unit import Unit
from layerzero.estimates.specs import HandleSpec
from layerzero.layout.flat_layout import FlatLayout, Slot, plan_layouts
from layerzero.layout.shard_grid import ShardGrid
from layerzero.sharding.meta_init import UninitializedTensor, fill_sentinel, has_sentinel
from layerzero.sharding.unit_meshes import UnitMesh
from layerzero.sharding.unit_selection import ParamInfo, UnitDefinition, describe_tensor_kind, is_plain_strided
from layerzero.utils.add_ons import addon

__all__ = [
    "build_unit",
    "check_codecs",
    "check_meta_init",
    "check_offload",
    "parts_to_compare",
    "plan_handles",
    "require_broadcastable_buffers",
    "require_equal_encoded_sizes",
    "settings_of_units",
    "settings_to_compare",
]

InitFn = Callable[[nn.Module], None]


def _label(plan: UnitDefinition) -> str:
    return f"unit {plan.name!r}" if plan.name else "the root"


ChosenSettings = Mapping[UnitDefinition, UnitSettings]


def settings_of_units(
    plans: Sequence[UnitDefinition], config: LayerZeroConfig, zero3_size: int | None = None
) -> dict[UnitDefinition, UnitSettings]:
    """Return the settings of each unit.

    Args:
        zero3_size: number of ranks that share the weights of each unit. If None, the meshes of the units determine it.
    """
    root = config.root_policy(plans[0].called[0])
    return {
        plan: config.unit_settings(plan.name, plan.called[0], zero3_size or plan.mesh.shape[-1], root) for plan in plans
    }


def settings_to_compare(model: nn.Module, settings: ChosenSettings, config: LayerZeroConfig) -> dict[str, object]:
    """Return the settings and model properties that must be the same on all ranks of the model, by name."""
    fields, plans = config.comparable_settings(), [*settings]
    fields["units"] = [plan.name for plan in plans]
    for plan, chosen in settings.items():
        compared = config.comparable_settings_of_unit(chosen)
        fields |= {f"{name} of {_label(plan)}": value for name, value in compared.items()}
        if len(plan.called) > 1:
            fields[f"modules that call {_label(plan)}"] = [plan.modules.get(module) for module in plan.called]
        for info in plan.parameters:
            parameter = info.parameter
            frozen = "" if parameter.requires_grad else " frozen"
            on_meta = " on meta" if parameter.is_meta else ""
            sharding = (
                f" {parameter.placements} on {list(parameter.device_mesh.shape)}"
                if isinstance(parameter, DTensor)
                else ""
            )
            kind = f" {type(parameter).__name__}" if has_extension(parameter) else ""
            text = f"{list(parameter.shape)} {parameter.dtype}{kind}{frozen}{on_meta}{sharding} in {_label(plan)}"
            fields[f"parameter {info.name!r}"] = text
        if plan.mesh is not plans[0].mesh:
            fields[f"shape of the mesh of {_label(plan)}"] = list(plan.mesh.shape)
    for name, buffer in model.named_buffers():
        fields[f"buffer {name!r}"] = f"{list(buffer.shape)} {buffer.dtype}{' on meta' if buffer.is_meta else ''}"
    return fields


def parts_to_compare(plans: Sequence[UnitDefinition]) -> dict[str, object]:
    """Return this rank's model-parallel coordinates for each DTensor, by parameter name.

    Only units on the root's mesh are included. The coordinates must be the same on all ranks of the root's mesh.
    """
    return {
        f"model-parallel coordinates of parameter {found.name!r}": found.parameter.device_mesh.get_coordinate()
        for plan in plans
        for found in plan.parameters
        if isinstance(found.parameter, DTensor) and plan.mesh is plans[0].mesh
    }


def require_broadcastable_buffers(plans: Sequence[UnitDefinition]) -> None:
    """Raise ValueError if a buffer cannot be broadcast from rank 0."""
    for plan in plans:
        for module, module_name in plan.modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_plain_strided(buffer):
                    raise ValueError(
                        f"buffer {f'{module_name}.{name}'.lstrip('.')!r} is {describe_tensor_kind(buffer)}, which "
                        "cannot be broadcast from rank 0. Pass sync_module_states=False, and give the buffer equal "
                        "values on all ranks"
                    )


def check_offload(plans: Sequence[UnitDefinition], config: LayerZeroConfig) -> None:
    """Raise ValueError if parameters are offloaded and the class of a parameter has an all-gather extension."""
    extended = [info for plan in plans for info in plan.parameters if has_extension(info.parameter)]
    if config.offload.params and extended:
        raise ValueError(
            f"Offload(params=True) is not supported for parameter {extended[0].name!r}: the all-gather extension of "
            f"its class {type(extended[0].parameter).__name__} reads its shard on the device. Leave params out. "
            "Offloads of grads and optimizer are supported"
        )


def check_codecs(settings: ChosenSettings, codecs: Codecs, mesh: DeviceMesh | None = None) -> None:
    """Raise ValueError if a codec does not support the model's compute dtypes, replicated parameters or backend.

    Args:
        mesh: mesh of the root. If None, backends are not checked.
    """
    computes = {
        chosen.policy.param_dtype or found.parameter.dtype
        for plan, chosen in settings.items()
        for found in plan.parameters
    }
    if codecs.gather is not None and computes and not any(map(is_encoded, computes)):
        raise ValueError(
            f"Codecs.gather encodes weights in bf16 and fp16, but the model computes in {computes}. Set param_dtype in "
            "mp_policy, or leave gather out"
        )
    if has_feedback(codecs.hop2) and any(each.compute is torch.float16 for each in _precisions(settings)):
        raise ValueError(
            f"{type(codecs.hop2).__name__} adds the encoding errors of one step to the gradients of the next step. "
            "Because the model computes in fp16, the loss scale may differ between the two steps. Compute in bf16, or "
            "pass feedback=False"
        )
    refresh = codecs.refresh
    codec = codecs.hop2 or (None if refresh is None or isinstance(refresh, str) or refresh.lossless else refresh)
    if codec is not None and _has_replicated_params([*settings]):
        raise ValueError(
            f"{type(codec).__name__} encodes adjacent parameters with a common scale, so the copies of a parameter on "
            "tensor-parallel ranks, which have different neighbors, would become different. Leave the codec out. "
            "Codecs(refresh='lossless') is supported"
        )
    _check_refresh(settings, codecs, mesh)


def _has_replicated_params(plans: Sequence[UnitDefinition]) -> bool:
    """Return whether ranks along a model-parallel axis have copies of a parameter."""
    on_root = [info.parameter for plan in plans if plan.mesh is plans[0].mesh for info in plan.parameters]
    dtensors = [info.parameter for plan in plans for info in plan.parameters if isinstance(info.parameter, DTensor)]
    are_mixed = len({isinstance(parameter, DTensor) for parameter in on_root}) == 2
    return are_mixed or any(isinstance(each, Replicate) for dtensor in dtensors for each in dtensor.placements)


def _check_refresh(settings: ChosenSettings, codecs: Codecs, mesh: DeviceMesh | None) -> None:
    """Raise ValueError if refreshes are encoded and the backend or the dtypes of the model do not allow it."""
    precisions = _precisions(settings)
    if codecs.refresh is None or not precisions:
        return
    backend = "gloo" if mesh is None else backend_of(mesh.get_group(0), mesh.device_type)
    if mesh is not None and (mesh.device_type != "cpu" or backend != "gloo"):
        raise ValueError(
            f"Codecs.refresh={codecs.refresh!r} encodes weights on the CPU and sends them with gloo, but this model is "
            f"on {mesh.device_type} and uses {backend}. Leave refresh out"
        )
    if not any(each.casts_to_16_bits for each in precisions):
        computes = sorted({str(each.compute) for each in precisions})
        raise ValueError(
            f"Codecs.refresh={codecs.refresh!r} encodes compute weights in bf16 and fp16 that have masters of higher "
            f"precision, but the model computes in {', '.join(computes)}. Set param_dtype in mp_policy, or leave "
            "refresh out"
        )


def _precisions(settings: ChosenSettings) -> set[Precision]:
    """Return the precisions of the trainable parameters."""
    return {
        chosen.policy.precision_of(found.parameter.dtype, trainable=True)
        for plan, chosen in settings.items()
        for found in plan.parameters
        if found.parameter.requires_grad
    }


def require_equal_encoded_sizes(
    handles: Mapping[UnitDefinition, Sequence[HandleSpec]], config: LayerZeroConfig, site: UnitMesh
) -> None:
    """Raise ValueError on all ranks of a mesh if their codecs produce messages of different sizes."""
    size, data_parallel = site.mesh_info.zero3_size, site.mesh_info.grid.data_parallel
    fields: dict[str, object] = {}
    if config.codecs.gather is not None:
        fields |= {
            f"bytes of Codecs.gather for {_label(plan)}": [
                encoded_sizes(config.codecs.gather, each.layout, size, each.precision.compute) for each in unit
            ]
            for plan, unit in handles.items()
        }
    if (codec := config.codecs.hop2) is not None and data_parallel > size:
        grids = [ShardGrid.of_rank(rank, data_parallel=data_parallel, zero3_size=size) for rank in range(data_parallel)]
        fields |= {
            f"bytes of Codecs.hop2 for {_label(plan)}": [
                EncodedPartsSpec.of(codec, each.layout, grid, torch.float32).sizes
                for each in unit
                for grid in grids[:: data_parallel // size]
            ]
            for plan, unit in handles.items()
        }
    if fields:
        require_equal("shard_model", fields, ranks=site.mesh_info.ranks)


def check_meta_init(plans: Sequence[UnitDefinition], param_init_fn: InitFn | None) -> None:
    """Raise an error if `param_init_fn` is invalid or a module on the meta device cannot be initialized.

    Raises:
        TypeError: `param_init_fn` is neither callable nor None.
        ValueError: an ignored parameter is on the meta device, or a module on the meta device has no
            ``reset_parameters()`` and `param_init_fn` is None.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            f"param_init_fn must be a callable(module) or None, got {param_init_fn!r}. Pass a function that "
            "initializes a module on the meta device, such as model._init_weights"
        )
    sharded = {id(found.parameter) for plan in plans for found in plan.parameters}
    for module, module_name in ((module, name) for plan in plans for module, name in plan.modules.items()):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in sharded:
                raise ValueError(
                    f"parameter {f'{module_name}.{name}'.lstrip('.')!r} is ignored and on the meta device. layerzero "
                    "does not allocate or initialize ignored parameters. Build it on a real device, or do not ignore it"
                )
        if param_init_fn is None and _has_meta(module) and not hasattr(module, "reset_parameters"):
            where = f"module {module_name!r}" if module_name else "the model"
            raise ValueError(
                f"{where} ({type(module).__name__}) has parameters or buffers on the meta device and no "
                "reset_parameters(). Pass param_init_fn, a function that initializes one module"
            )


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
    reduced_with = plan.name
    if plan.enclosing and where.grid.replicas > 1:
        trained = (u.name for u in plan.enclosing if any(info.parameter.requires_grad for info in u.parameters))
        reduced_with = next(trained, "")

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
            reduced_with,
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
    planned = []
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
            planned.append(
                handle_spec(kind, trainable, precision, layout, strided=own_strides, coded=encoded_bytes(sizes))
            )
    for info in (each for each in plan.parameters if has_extension(each.parameter)):
        # One handle for each parameter, with shards of full rows. See [Note: All-gather extensions].
        parameter, ranks = info.parameter, where.grid.data_parallel
        slot = Slot(info.name, tuple(parameter.shape), 0)
        layout = FlatLayout((slot,), -(-slot.rows // ranks) * slot.row_numel, ranks, align=1)
        in_compute = chosen.policy.precision_of(parameter.dtype, trainable=parameter.requires_grad)
        precision = replace(in_compute, compute=parameter.dtype)
        # The class reports its all-gather inputs at the first gather. Until then, assume the compute dtype.
        extension = GatheredBytes((layout.numel * in_compute.compute.itemsize,), ())
        kind = f"{type(parameter).__name__} {info.name!r}"
        planned.append(handle_spec(kind, parameter.requires_grad, precision, layout, extension=extension))
    return planned


def build_unit(
    plan: UnitDefinition,
    planned: Sequence[HandleSpec],
    chosen: UnitSettings,
    config: LayerZeroConfig,
    site: UnitMesh,
    mesh: MeshResources,
    param_init_fn: InitFn | None,
    enclosing: Sequence[Unit],
) -> tuple[Unit, list[UninitializedTensor]]:
    """Build a unit and replace its parameters in the model. Return the unit and its uninitialized tensors.

    Units are built one at a time, so that at most one unit has full tensors at any time.
    """
    mesh_info, originals, policy, reshards = site.mesh_info, list(plan.parameters), chosen.policy, chosen.reshards
    extensions = _take_extensions(plan, policy)
    was_on_meta = _tensors_on_meta(plan)
    _materialize_on_all_ranks(plan, site, param_init_fn)
    if config.sync_module_states:
        _broadcast_from_rank_0(plan, site)
    uninitialized = _uninitialized_tensors(plan, was_on_meta)
    cast_buffers = _cast_buffers(plan, policy.buffer_dtype)
    by_name = {info.name: info for info in plan.parameters}
    root_stays_gathered = not plan.name and device_module(mesh_info.device) is not None
    # The communicator is created with every transport. ZeRO-3 groups may use different transports, but all ranks must
    # create the same process groups.
    post_forward_comm = None if root_stays_gathered or isinstance(reshards, bool) else mesh_info.subgroup_comm(reshards)
    options = GatherOptions(config.codecs.gather, post_forward_comm)
    handles = [
        Handle(
            f"unit {plan.name!r}, {each.kind}",
            each.layout,
            [_handle_arguments(by_name[slot.name], site) for slot in each.layout.slots],
            label=plan.name or "the root",
            precision=each.precision,
            reduction_spec=each.reduction_spec,
            mesh=mesh,
            options=options,
            extension=None if each.extension is None else extensions[each.layout.slots[0].name],
        )
        for each in planned
    ]
    for info in plan.parameters:
        # Free the memory of the old parameter, even if user code still refers to it.
        nothing = torch.empty(0, dtype=info.parameter.dtype, device=info.parameter.device)
        if isinstance(info.parameter, DTensor):
            info.parameter._local_tensor = nothing
        else:
            info.parameter.data = nothing
        info.parameter.grad = None
    replacements = {member.name: member.sharded for handle in handles for member in handle.members}
    for parameter, name in {info.parameter: info.name for info in (*originals, *plan.parameters)}.items():
        make_stale(parameter, name, replacements[name])
    unit = Unit(
        plan.name,
        plan.called,
        tuple(handles),
        mesh,
        policy=policy,
        reshards=reshards,
        cast_buffers=cast_buffers,
        enclosing=enclosing,
    )
    unit.show_sharded()
    return unit, uninitialized


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


def _handle_arguments(
    info: ParamInfo, site: UnitMesh
) -> tuple[nn.Parameter, tuple[tuple[nn.Module, str], ...], ModelParallelSpec | None]:
    """Return the local part, the owners and the model-parallel spec of a parameter, as :class:`Handle` needs them."""
    parameter, part = info.parameter, info.parameter
    if isinstance(parameter, DTensor):
        part = nn.Parameter(local_part(parameter).detach(), requires_grad=parameter.requires_grad)
        copy_attributes_and_hooks(parameter, gathered=part, sharded=part)
    return part, info.owners, site.model_parallel_spec_of(parameter)


def _has_meta(module: nn.Module) -> bool:
    return any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))


def _tensors_on_meta(plan: UnitDefinition) -> list[UninitializedTensor]:
    parameters = [
        UninitializedTensor(f.name, *f.owners[0], is_parameter=True) for f in plan.parameters if f.parameter.is_meta
    ]
    buffers = [
        UninitializedTensor(f"{module_name}.{name}" if module_name else name, module, name, is_parameter=False)
        for module, module_name in plan.modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    return [*parameters, *buffers]


def _uninitialized_tensors(
    plan: UnitDefinition, was_on_meta: Sequence[UninitializedTensor]
) -> list[UninitializedTensor]:
    parameters = {info.name: info.parameter for info in plan.parameters}
    uninitialized = []
    for candidate in was_on_meta:
        tensor = (
            parameters[candidate.name] if candidate.is_parameter else candidate.owner._buffers.get(candidate.attribute)
        )
        if tensor is not None and has_sentinel(local_part(tensor)):
            uninitialized.append(candidate)
    return uninitialized


def _materialize_on_all_ranks(plan: UnitDefinition, site: UnitMesh, param_init_fn: InitFn | None) -> None:
    """Materialize the parameters and buffers of a unit. If any rank fails, raise an error on all ranks of the model."""
    device = site.mesh_info.device
    if not any(_has_meta(module) for module in plan.modules):
        _materialize(plan, device, param_init_fn)
        return
    failure: Exception | None = None
    try:
        _materialize(plan, device, param_init_fn)
    except Exception as error:
        failure = error
    require_equal(f"initialization of {_label(plan)}", {}, ranks=site.ranks.ranks, failure=failure)


def _materialize(plan: UnitDefinition, device: torch.device, param_init_fn: InitFn | None) -> None:
    """Allocate and initialize parameters and buffers that are on meta. Move other buffers to the device."""
    on_meta = [module for module in plan.modules if _has_meta(module)]
    for index, info in enumerate(plan.parameters):
        if info.parameter.is_meta:
            empty = torch.empty_like(info.parameter, device=device)
            fill_sentinel(local_part(empty))
            parameter = nn.Parameter(empty, requires_grad=info.parameter.requires_grad)
            copy_attributes_and_hooks(info.parameter, gathered=parameter, sharded=parameter)
            for owner, attribute in info.owners:
                owner._parameters[attribute] = parameter
            plan.parameters[index] = ParamInfo(info.name, parameter, info.owners)
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                moved_buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                if buffer.is_meta:
                    fill_sentinel(moved_buffer)
                module._buffers[name] = moved_buffer
    for module in on_meta:
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def _cast_buffers(plan: UnitDefinition, dtype: torch.dtype | None) -> list[CastBuffer]:
    """Cast floating-point buffers to `dtype`, and return the buffers that were cast. If `dtype` is None, cast none."""
    cast: list[CastBuffer] = []
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                module._buffers[name] = buffer.to(dtype)
                cast.append(CastBuffer(weakref.ref(module), name, buffer.dtype))
    keep_dtypes_in_state(cast)
    return cast


@torch.no_grad()
def _broadcast_from_rank_0(plan: UnitDefinition, site: UnitMesh) -> None:
    for info in plan.parameters:
        site.broadcast_param_from_first(info.parameter)
    for module in plan.modules:
        for buffer in module._buffers.values():
            if buffer is not None:
                site.broadcast_from_first(buffer.detach())
