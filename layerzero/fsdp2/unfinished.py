"""Keep the units of a model until its root is known, and then complete the model.

[Note: Units before their root]
A call of ``fully_shard`` knows neither the names in the model nor its root, and later calls may add units around it. It
builds its unit with provisional names and resources, which refer to the groups of the mesh and create none. So nothing
is sent, except by the user's own ``full_tensor()``. The ranks may differ in what else they do, for example if one of
them prints the model. :func:`_complete` runs when a forward, or a function of layerzero, needs the model: it names the
units, compares them between ranks, creates the groups, and moves the units to the resources of the model.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils.hooks import RemovableHandle

from layerzero import LayerZeroConfig, Offload, PrecisionPolicy
from layerzero.extend import (
    BuiltUnit,
    HeldGroup,
    ModelGroups,
    ParamInfo,
    PlannedUnit,
    RowShardedTensor,
    SharedResources,
    UnfinishedHook,
    UnitDefinition,
    UnitSettings,
    agreed,
    build_unit,
    drop_idle_groups,
    find_model_parallel_meshes,
    forward_hooks,
    group_count_fields,
    is_unit,
    make_root,
    module_methods,
    move_unit,
    plan_unit,
    prepare_state_dict,
    qualified_name,
    ranks_in,
    replaced_param_error,
    tied_buffers,
    units_around,
)

_log = logging.getLogger(__name__)

_RESOURCES: weakref.WeakValueDictionary[object, SharedResources] = weakref.WeakValueDictionary()
_CHANGES = itertools.count()  # orders changes of settings


class _GroupsOfMesh(ModelGroups):
    """Groups of a mesh, for units whose model is not complete. Groups that the mesh does not have are deferred."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(deferred=True)
        self._of_mesh = [HeldGroup.of(group) for group in mesh.get_all_groups()]

    def new(self, ranks: Sequence[int], *, backend: str = "", **settings: Any) -> HeldGroup:
        for held in self._of_mesh:
            on_cpu = dict(each.split(":") for each in held.backends.split(",")).get("cpu")
            if sorted(held.ranks) == sorted(ranks) and backend in ("", on_cpu):
                return held
        return super().new(ranks, backend=backend, **settings)


@dataclass(frozen=True)
class CallSettings:
    """Settings of one call of ``fully_shard``. `reshards` is None if the call leaves it out."""

    policy: PrecisionPolicy
    reshards: bool | int | None
    offload: Offload

    @classmethod
    def of(
        cls,
        policy: MixedPrecisionPolicy | None,
        reshards: bool | int | None,
        offload: OffloadPolicy | Offload | None,
    ) -> CallSettings:
        """Check and convert the arguments of a call.

        Raises:
            TypeError, ValueError: an argument is invalid, or only :func:`layerzero.shard_model` supports it.
        """
        config = LayerZeroConfig(
            mp_policy=MixedPrecisionPolicy() if policy is None else policy,
            offload=Offload.of(offload),
            reshard_after_forward=True if reshards is None else reshards,
        )
        assert isinstance(config.mp_policy, PrecisionPolicy)
        if config.mp_policy != PrecisionPolicy.of(config.mp_policy.torch_policy):
            own = [each.name for each in fields(PrecisionPolicy) if not hasattr(MixedPrecisionPolicy(), each.name)]
            raise ValueError(
                f"mp_policy sets one of {own}, which only layerzero.shard_model supports. Use torch's "
                "MixedPrecisionPolicy, or shard_model"
            )
        return cls(config.mp_policy, reshards, config.offload)

    def of_unit(self, module: nn.Module, zero3_size: int, *, is_root: bool = False) -> UnitSettings:
        """Return the settings of a unit. Without a setting, the root keeps its weights until its backward."""
        reshards = not is_root if self.reshards is None else self.reshards
        config = LayerZeroConfig(mp_policy=self.policy, reshard_after_forward=reshards)
        return config.unit_settings("", module, zero3_size, self.policy)


def provisional_resources(
    mesh: DeviceMesh, offload: Offload, model_parallel_mesh: DeviceMesh | None
) -> SharedResources:
    """Return the resources of units on `mesh` until their model is complete; see [Note: Units before their root]."""
    key = (mesh, offload, model_parallel_mesh)
    shared = _RESOURCES.get(key)
    if shared is None:
        config = LayerZeroConfig(offload=offload, shared_memory="off", sync_module_states=False)
        meshes = {mesh: model_parallel_mesh}
        shared = SharedResources.create(meshes, config, _GroupsOfMesh(mesh), sums_locally=False)
        _RESOURCES[key] = shared
    return shared


class UnfinishedUnit:
    """Unit of a model that is not complete.

    Args:
        modules: modules of the unit.
        settings: settings of its call.
        shared: provisional resources.
        planned: plan of the unit, with provisional names.
        inside: units of earlier calls that this unit contains directly.
        ignored: ignored parameters of the call.

    Attributes:
        around: unit of a later call that contains this unit, or None.
        failure: why the model could not be completed, so that the unit cannot be used, or an empty string.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        settings: CallSettings,
        shared: SharedResources,
        planned: PlannedUnit,
        built: BuiltUnit,
        inside: Iterable[UnfinishedUnit],
        ignored: Iterable[nn.Parameter],
    ) -> None:
        self.modules, self.settings, self.shared = modules, settings, shared
        self.planned, self.built, self.ignored = planned, built, list(ignored)
        self.around: UnfinishedUnit | None = None
        for each in inside:
            each.around = self
        self.failure = ""
        self.changes: list[tuple[int, Callable[[], None]]] = []
        self._handles: list[RemovableHandle] = []
        for module in modules:
            hook = _FirstForwardHook(self)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            self._handles.append(module.register_load_state_dict_pre_hook(prepare_state_dict))

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the call."""
        return next(iter(self.shared.sites))

    @property
    def model_parallel_mesh(self) -> DeviceMesh | None:
        """Mesh of the parameters that were DTensors, or None."""
        axes = self.shared.sites[self.mesh].model_parallel
        return None if axes is None else axes.mesh

    @property
    def outermost(self) -> UnfinishedUnit:
        return self if self.around is None else self.around.outermost

    def defer(self, change: Callable[[], None]) -> None:
        """Make a change of settings when the model is complete."""
        self.changes.append((next(_CHANGES), change))

    def define(self, name: str, names: dict[nn.Module, str], mesh: DeviceMesh) -> UnitDefinition:
        """Return the definition of the unit with its name in the model.

        Args:
            names: names of all modules of the model.
            mesh: the mesh of the unit, as an object that all units on the mesh share.
        """
        old = self.planned.definition
        gathered = {member.name: member.gathered for member in self.built.unit.members()}
        parameters = [
            ParamInfo(qualified_name(names[info.owners[0][0]], info.owners[0][1]), gathered[info.name], info.owners)
            for info in old.parameters
        ]
        modules = {module: names[module] for module in old.modules if module in names}
        return UnitDefinition(name, mesh, sorted(old.called, key=list(names).index), parameters, modules=modules)

    def plan(self, definition: UnitDefinition) -> PlannedUnit:
        """Return the plan of the unit with names in the model."""
        old, replicas = self.planned.definition.parameters, definition.mesh.size() // definition.mesh.shape[-1]
        new_name = {before.name: after.name for before, after in zip(old, definition.parameters, strict=True)}
        handles = []
        for spec in self.planned.handles:
            slots = tuple(replace(slot, name=new_name[slot.name]) for slot in spec.layout.slots)
            layout = replace(spec.layout, slots=slots)
            handles.append(replace(spec, unit=definition.reduced_with(replicas), layout=layout))
        settings = self.settings.of_unit(definition.called[0], definition.mesh.shape[-1], is_root=not definition.name)
        return PlannedUnit(definition, settings, handles)

    def move_to(
        self, planned: PlannedUnit, names: Mapping[nn.Module, str], shared: SharedResources, around: list[BuiltUnit]
    ) -> BuiltUnit:
        """Return the unit with its name in the model, and with the resources of the model.

        Args:
            planned: result of :meth:`plan`.
            names: names of all modules of the model.
            around: see `enclosing` of :func:`build_unit`.
        """
        return move_unit(self.built, planned, shared, enclosing=around)._replace(
            uninitialized=[
                replace(each, name=qualified_name(names[each.owner], each.attribute))
                for each in self.built.uninitialized
                if each.owner in names
            ],
            was_on_meta=True,  # perhaps on another rank
        )

    def leave(self) -> None:
        """Remove the hooks from the modules. The hooks of the model take their places, as FSDP2's have them."""
        for module in self.modules:
            hooks: Any = module._forward_pre_hooks
            own = next(place for place, hook in enumerate(hooks.values()) if isinstance(hook, _FirstForwardHook))
            for key in [*hooks][:own][:0:-1]:  # the user has prepended them after the call; that of the model is first
                hooks.move_to_end(key, last=False)
        for handle in self._handles:
            handle.remove()


class _FirstForwardHook(UnfinishedHook):
    """Hook that completes the model in its first forward."""

    def __init__(self, unit: UnfinishedUnit) -> None:
        super().__init__()
        self.unit = unit
        self._run = torch.compiler.disable(_first_forward)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        changed: tuple[Any, Any] = self._run(self, module, args, kwargs)
        return changed

    def finish(self, module: nn.Module) -> None:
        _complete(_root_of(module, self.unit.outermost))


def _first_forward(hook: _FirstForwardHook, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    _complete(_root_of(module, hook.unit.outermost))
    before, _ = forward_hooks(module)  # torch has listed the hooks of this call before this one was registered
    return before(module, args, kwargs)


def unfinished_unit_of(module: nn.Module) -> UnfinishedUnit | None:
    """Return the unit of a call that has `module` as its argument, if its model is not complete."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.unit for hook in hooks if isinstance(hook, _FirstForwardHook)), None)


def _root_of(module: nn.Module, outermost: UnfinishedUnit) -> nn.Module:
    """Return the root: `module` if it contains all modules of the outermost unit, otherwise the unit's own module.

    Raises:
        RuntimeError: the outermost unit has several modules.
    """
    inside = {*module.modules()}
    if inside >= {*outermost.modules} and not any(is_unit(each) for each in inside):
        return module
    if len(outermost.modules) > 1:
        raise RuntimeError(
            f"the outermost fully_shard call has {len(outermost.modules)} modules, but a model has one root. Call "
            "fully_shard for the model that contains them, or pass the model to layerzero.shard_optimizer"
        )
    return outermost.modules[0]


@torch.inference_mode(False)  # the first forward may be an evaluation
def _complete(root: nn.Module) -> None:
    """Make `root` the root of the model of all units inside it. All ranks of the mesh must call this function.

    Raises:
        ValueError: units or settings do not fit together, or ranks disagree.
    """
    drop_idle_groups()
    names = {module: name for name, module in root.named_modules()}
    units = _named_units(names)
    first = next(iter(units))
    if first.failure:
        raise RuntimeError(f"the model could not be completed: {first.failure}. Build and shard a new model")
    policies = {name: unit.settings.policy for unit, name in units.items()}
    mesh = _root_mesh(root, units)
    config = LayerZeroConfig(
        zero3_size=mesh.shape[-1],
        mp_policy=lambda name, module: policies.get(name, PrecisionPolicy()),
        offload=first.settings.offload,
        sync_module_states=False,
    )
    definitions, meshes = _agree(root, names, units, mesh, config)
    groups = ModelGroups()
    try:
        shared = SharedResources.create(meshes, config, groups, sums_locally=False)
        planned = {unit: unit.plan(definition) for definition, unit in definitions.items() if unit is not None}
        shared = shared.share_memory([spec for each in planned.values() for spec in each.handles])
        built: dict[UnitDefinition, BuiltUnit] = {}
        for definition, unit in definitions.items():  # a unit follows those around it
            if unit is None:  # a module without a call contains all units
                settings = CallSettings.of(None, False, None).of_unit(root, mesh.shape[-1])
                built[definition] = build_unit(plan_unit(definition, settings, shared), shared)
            else:
                around = [built[each] for each in definition.enclosing]
                built[definition] = unit.move_to(planned[unit], names, shared, around)
        make_root(root, built.values(), shared)
    except BaseException as error:
        groups.abandon()
        for unit in units:
            unit.failure = f"{type(error).__name__}: {error}"
        raise
    for unit in units:
        unit.leave()
    if "" in policies and isinstance(first.settings.reshards, bool):
        module_methods.set_reshard_after_forward(root, first.settings.reshards, recurse=False)
    _apply_changes(units)


def _apply_changes(units: Iterable[UnfinishedUnit]) -> None:
    """Apply the changes of settings that were made before the model was complete. Raise the first error at the end."""
    errors = []
    for _, change in sorted((change for unit in units for change in unit.changes), key=itemgetter(0)):
        try:
            change()
        except Exception as error:  # the other changes apply nevertheless
            errors.append(error)
    if errors:
        raise errors[0]


def _named_units(names: Mapping[nn.Module, str]) -> dict[UnfinishedUnit, str]:
    """Return the names of the units inside a model, the root's first. They may also have modules outside of it.

    Args:
        names: names of all modules of the model.
    """
    order = {module: position for position, module in enumerate(names)}
    units = dict.fromkeys(unit for module in names if (unit := unfinished_unit_of(module)) is not None)
    modules = {unit: sorted(unit.modules, key=lambda module: order.get(module, -1)) for unit in units}
    return {unit: "+".join(names.get(module, "?") for module in own) for unit, own in modules.items()}


def _root_mesh(root: nn.Module, units: Iterable[UnfinishedUnit]) -> DeviceMesh:
    """Return the mesh of the root: that of its call, or without a call the largest."""
    own = next((unit.mesh for unit in units if unit.modules == [root]), None)
    return max((unit.mesh for unit in units), key=DeviceMesh.size) if own is None else own


def _agree(
    root: nn.Module,
    names: dict[nn.Module, str],
    units: Mapping[UnfinishedUnit, str],
    mesh: DeviceMesh,
    config: LayerZeroConfig,
) -> tuple[Mapping[UnitDefinition, UnfinishedUnit | None], dict[DeviceMesh, DeviceMesh | None]]:
    """Define the units of a model, and compare them and their settings between its ranks.

    Args:
        mesh: mesh of the root.

    Returns:
        The units by definition, the root first, which is None if it has no call; and the model-parallel mesh, or None,
        by mesh of units. If a rank cannot define them, all ranks raise an error.
    """
    ranks, fields = ranks_in(mesh), dict[str, object]()
    groups = group_count_fields(*(dist.get_process_group_ranks(group) for group in mesh.get_all_groups()), ranks)
    on_root = [unit.model_parallel_mesh for unit in units if ranks_in(unit.mesh) == ranks]
    axes = next((each for each in on_root if each is not None), None)
    with agreed("fully_shard", fields, ranks=ranks, groups=groups):
        along = () if axes is None else sorted(ranks_in(axes))
        with agreed("fully_shard", fields, ranks=along):  # on an error, the data-parallel ranks must raise, too
            _check(root, names, units)
            definitions = _define(root, names, units, mesh)
            meshes = find_model_parallel_meshes([*definitions])
            fields |= {"units": [*units.values()]} | config.comparable_settings() | tied_buffers(root)
            for definition, unit in definitions.items():
                fields |= {} if unit is None else _to_compare(definition, unit, mesh)
        if axes is not None:
            fields["model-parallel coordinate"] = axes.get_coordinate()
    return definitions, meshes


def _define(
    root: nn.Module, names: dict[nn.Module, str], units: Mapping[UnfinishedUnit, str], mesh: DeviceMesh
) -> dict[UnitDefinition, UnfinishedUnit | None]:
    """Return the units of a model by definition, in the order of the model."""
    meshes = {(*ranks_in(mesh), mesh.shape[-1]): mesh}
    definitions: dict[UnitDefinition, UnfinishedUnit | None] = {}
    if "" not in units.values():
        definitions[UnitDefinition("", mesh, [root])] = None
    for unit, name in units.items():
        own = meshes.setdefault((*ranks_in(unit.mesh), unit.mesh.shape[-1]), unit.mesh)
        definitions[unit.define(name, names, own)] = unit
    units_around(root, definitions)
    return definitions


def _to_compare(definition: UnitDefinition, unit: UnfinishedUnit, mesh: DeviceMesh) -> dict[str, object]:
    """Return the settings and properties of a unit that must be equal on all ranks of the model."""
    own: dict[str, object] = {"reshard_after_forward": unit.settings.reshards, "mp_policy": str(unit.settings.policy)}
    if definition.mesh is not mesh:
        own["shape of the mesh"] = list(definition.mesh.shape)
    return {f"{key} ({definition.name or 'root'})": value for key, value in (own | unit.built.to_compare).items()}


def _check(root: nn.Module, names: Mapping[nn.Module, str], units: Collection[UnfinishedUnit]) -> None:
    """Raise an error if the units, as they are on this rank, do not form a model with `root` as its root."""
    first = next(iter(units))
    for each in units:
        outside = [module for module in each.modules if module not in names]
        if outside:
            raise ValueError(
                f"fully_shard: a {type(outside[0]).__name__} of one unit is not inside the {type(root).__name__} that "
                "was called first. Call the model that contains all modules of the unit first"
            )
        if each.settings.offload != first.settings.offload:
            raise ValueError(
                f"fully_shard was called with different offload policies inside {type(root).__name__}: "
                f"{each.settings.offload} and {first.settings.offload}. Pass the same ones, or use "
                "layerzero.shard_model"
            )
        owners = {owner for info in each.planned.definition.parameters for owner, _ in info.owners}
        if removed := [type(owner).__name__ for owner in owners if owner not in names]:
            raise ValueError(
                f"fully_shard: a {removed[0]} with parameters was removed from {type(root).__name__} after the call "
                "that sharded it. Change the model before the calls"
            )
        for member in each.built.unit.members():
            if any(parameters.get(attribute) is not member.sharded for parameters, attribute in member.module_refs):
                raise replaced_param_error(member)
    _check_other_params(root, units, is_called=first.modules == [root])


def _check_other_params(root: nn.Module, units: Collection[UnfinishedUnit], *, is_called: bool) -> None:
    """Raise or log an error if a trainable parameter belongs to no unit and is not ignored."""
    ignored = {id(parameter) for unit in units for parameter in unit.ignored}
    for name, parameter in root.named_parameters():
        is_known = isinstance(parameter, RowShardedTensor) or id(parameter) in ignored
        if parameter.requires_grad and not is_known:
            if is_called:
                raise RuntimeError(
                    f"fully_shard: parameter {name!r} joined the model after its module was sharded, so its gradient "
                    "would not be averaged over the ranks. Add it before the calls, or pass it in ignored_params"
                )
            _log.warning(
                "layerzero: parameter %r, and perhaps others, is in no call of fully_shard, so ranks neither shard it "
                "nor average its gradient. Call fully_shard(model) too, or pass it in ignored_params",
                name,
            )
            break
