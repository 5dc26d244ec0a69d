"""Shard the parameters of one unit, with :func:`fully_shard`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from layerzero.extend import (
    ParamInfo,
    RowShardedTensor,
    UnitDefinition,
    build_unit,
    current,
    default_device_type,
    find_model_parallel_meshes,
    guard_fully_shard,
    guard_optimizers,
    guard_wrappers,
    has_forward,
    is_unit,
    plan_unit,
    ranks_in,
    refuse_shared_memory,
    refuse_unsupported,
    refuse_wrapped_parts,
)
from layerzero.fsdp2.fsdp_module import mix_in
from layerzero.fsdp2.unfinished import CallSettings, UnfinishedUnit, provisional_resources, unfinished_unit_of

_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> _Modules:
    """Shard the parameters of a module in place, with the arguments of ``torch.distributed.fsdp.fully_shard``.

    Call this function for each unit, innermost first, and last for the model, as with FSDP2. A call shards the
    parameters of `module` that no earlier call has sharded: ``module.parameters()`` then yields DTensors with this
    rank's rows of the masters, as after :func:`layerzero.shard_model`. The first forward, or the first function that
    needs the model (:func:`layerzero.shard_optimizer`, ``layerzero.checkpoint.save``, :func:`layerzero.memory`),
    completes it: the ranks compare their units and settings, and connect. The root is then the outermost module with a
    call, or the module that such a function is called with, if it contains all units. Wrap the optimizer with
    :func:`layerzero.shard_optimizer`.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: data-parallel mesh. On a mesh with one axis, weights and optimizer states are sharded over it. On a mesh
            with two axes, weights are sharded over the second, and optimizer states over both. The default is all
            ranks. Units such as experts may have a mesh of some ranks of the root's mesh; see docs/meshes.md. As with
            FSDP2, gradients are divided by the number of ranks of this mesh, unless `set_gradient_divide_factor` was
            called.
        reshard_after_forward: see :func:`layerzero.shard_model`. None means False for the root, and True otherwise.
        shard_placement_fn: accepted if it returns None or ``Shard(0)`` for each parameter, or torch's
            ``ShardPlacementResult`` of these, whose mesh must be the same for all parameters of a module. Modules on
            another mesh become units inside.
        mp_policy: dtypes of the unit. A :class:`layerzero.PrecisionPolicy` may set only the fields of torch's class.
        offload_policy: torch's ``CPUOffloadPolicy`` or :class:`layerzero.Offload`, equal in all calls of a model.
        ignored_params: parameters that are not sharded, and whose gradients are not reduced.
        dp_mesh_dims: not supported. Pass the data-parallel axes of the mesh: ``mesh["dp_replicate", "dp_shard"]``.

    Returns:
        `module`, whose class now derives from :class:`FSDPModule`.

    Raises:
        AssertionError: an earlier call has sharded the module.
        ValueError: a parameter, the module or a setting is not supported; or a parameter belongs to the unit of an
            earlier call, as if weights are tied across units. Pass their modules as one list.
        RuntimeError: torch.distributed is not initialized, or a unit inside the module belongs to a complete model.

    Example::

        for block in model.blocks:
            layerzero.fully_shard(block, mesh=mesh)
        layerzero.fully_shard(model, mesh=mesh)
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized. Call torch.distributed.init_process_group() first")
    modules = _outermost([module] if isinstance(module, nn.Module) else [*cast("Iterable[nn.Module]", module)])
    ignored_list = list(ignored_params or ())
    ignored = {id(parameter) for parameter in ignored_list}
    if dp_mesh_dims is not None:
        raise ValueError(
            "fully_shard: dp_mesh_dims is not supported. Pass the data-parallel axes of the mesh, such as "
            "mesh=mesh['dp_replicate', 'dp_shard']"
        )
    mesh = _mesh_or_default(mesh)
    for each in modules:
        _refuse_module(each)
        refuse_wrapped_parts(each, ignored)
    settings = CallSettings.of(mp_policy, reshard_after_forward, offload_policy)
    others = _on_other_meshes(modules, mesh, shard_placement_fn, ignored)
    for other, inner in others.items():
        _build(inner, other, settings, ignored_list)
    _build(modules, mesh, settings, ignored_list)
    for each in modules:
        mix_in(each, [module for inner in others.values() for module in inner])
    guard_wrappers()
    guard_optimizers(None)
    return module


def _build(modules: list[nn.Module], mesh: DeviceMesh, settings: CallSettings, ignored: Sequence[nn.Parameter]) -> None:
    """Build the unit of `modules`, with those of their parameters that no unit has yet."""
    definition, inside = _define(modules, mesh, {id(parameter) for parameter in ignored})
    shared = provisional_resources(mesh, settings.offload, find_model_parallel_meshes([definition])[mesh])
    for each in modules:
        refuse_shared_memory(each, {id(info.parameter) for info in definition.parameters})
    planned = plan_unit(definition, settings.of_unit(modules[0], mesh.shape[-1]), shared)
    built = build_unit(planned, shared, param_init_fn=_leave_uninitialized)
    UnfinishedUnit(modules, settings, shared, planned, built, inside, ignored)
    guard_fully_shard(definition.modules)


def _mesh_or_default(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        return DeviceMesh.from_group(cast("dist.ProcessGroup", dist.group.WORLD), default_device_type())
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard expects mesh to be a DeviceMesh, got {mesh!r}. Pass a mesh, or an axis of one: "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))['dp']"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Pass its data-parallel axes")
    return mesh


def _leave_uninitialized(module: nn.Module) -> None:
    """Initialize no parameter of a module on meta: as with FSDP2, the user does that after the call."""


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of `modules` that are not inside another one."""
    if not modules:
        raise ValueError("fully_shard expected a module or a list of modules, got an empty list. Leave the call out")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard expected a torch.nn.Module, got {type(each).__name__}. Pass modules")
    distinct = list(dict.fromkeys(modules))
    return [each for each in distinct if not any(each in {*o.modules()} for o in distinct if o is not each)]


def _refuse_module(module: nn.Module) -> None:
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {type(module).__name__}. Call it "
            "for each member"
        )
    if unfinished_unit_of(module) is not None:
        raise AssertionError(
            f"fully_shard has already been applied to this {type(module).__name__}. Leave the call out"
        )


def _define(
    modules: list[nn.Module], mesh: DeviceMesh, ignored: Collection[int]
) -> tuple[UnitDefinition, list[UnfinishedUnit]]:
    """Return the definition of a unit with provisional names, and the units of earlier calls that are inside it."""
    own: dict[nn.Module, str] = {}
    inside: dict[UnfinishedUnit, None] = {}
    for index, module in enumerate(modules):
        _visit(module, str(index) if len(modules) > 1 else "", own, inside)
    definition = UnitDefinition(type(modules[0]).__name__, mesh, modules, modules=own)
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in own:
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in ignored:
                uses.setdefault(parameter, []).append((module, attribute))
    for parameter, owners in uses.items():
        owner, attribute = owners[0]
        name = f"{own[owner]}.{attribute}" if own[owner] else attribute
        _refuse_parameter(parameter, name)
        info = ParamInfo(name, parameter, tuple(owners))
        refuse_unsupported(info, ranks_in(mesh))
        definition.parameters.append(info)
    return definition, [*inside]


def _visit(module: nn.Module, name: str, own: dict[nn.Module, str], inside: dict[UnfinishedUnit, None]) -> None:
    """Add `module` and the modules in it to `own`, except for units of earlier calls, which are added to `inside`."""
    if is_unit(module):
        raise RuntimeError(
            f"fully_shard: the {type(module).__name__} {name!r} inside is a complete model or a unit of one, for "
            "example because it was called before. Call fully_shard for all units before the first forward"
        )
    unit = unfinished_unit_of(module)
    if unit is not None:
        inside[unit] = None
    elif module not in own:
        own[module] = name
        for attribute, child in module.named_children():
            _visit(child, f"{name}.{attribute}" if name else attribute, own, inside)


def _refuse_parameter(parameter: nn.Parameter, name: str) -> None:
    if current(parameter) is not parameter or isinstance(parameter, RowShardedTensor):
        raise ValueError(
            f"fully_shard: parameter {name!r} belongs to the unit of another call, or to a model that is complete. "
            "Call fully_shard for the innermost modules first. Pass modules that share a parameter as one list: "
            "fully_shard([model.embedding, model.head])"
        )


def _on_other_meshes(
    modules: Iterable[nn.Module], mesh: DeviceMesh, placement_of: Any, ignored: Collection[int]
) -> dict[DeviceMesh, list[nn.Module]]:
    """Return the modules whose parameters `placement_of` puts on another mesh than `mesh`, by that mesh."""
    found: dict[DeviceMesh, list[nn.Module]] = {}
    pending = [*modules] if placement_of is not None else []
    while pending:
        module = pending.pop()
        meshes = {
            name: _mesh_of(name, placement_of(parameter), mesh)
            for name, parameter in module.named_parameters()
            if id(parameter) not in ignored and not isinstance(parameter, RowShardedTensor)
        }
        distinct = {*meshes.values()}
        if len(distinct) == 1 and mesh not in distinct and module not in modules and has_forward(module):
            found.setdefault(distinct.pop(), []).append(module)
            continue
        if any(each != mesh for name, each in meshes.items() if "." not in name):
            raise ValueError(
                f"shard_placement_fn returned another mesh for some parameters of a {type(module).__name__}: {meshes}. "
                "Return one mesh for all of them. If it is that of all parameters of the call, pass it as mesh"
            )
        pending += [child for child in module.children() if unfinished_unit_of(child) is None]
    return found


def _mesh_of(name: str, placed: Any, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh in a result of `shard_placement_fn`, by default `mesh`."""
    placement = getattr(placed, "placement", placed)
    if placement is not None and placement != Shard(0):
        raise ValueError(
            f"shard_placement_fn returned {placement} for parameter {name!r}, but layerzero shards all parameters by "
            "rows. Return None"
        )
    own: DeviceMesh = placed.mesh_info.mesh if hasattr(placed, "mesh_info") else mesh
    return own
