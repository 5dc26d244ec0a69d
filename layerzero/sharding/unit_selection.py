"""Assign modules and parameters to units, without changing the model."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from layerzero.config import AUTO, UNSUPPORTED, ModuleEntry, Units
from layerzero.dtensor.gather_extension import has_extension
from layerzero.dtensor.model_parallel_spec import local_part, reason_not_shardable
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.sharding.wrapper_checks import refuse_wrapped_parts
from layerzero.utils.add_ons import addon
from layerzero.utils.torch_compat import WrapPolicy


@dataclass(frozen=True, eq=False)
class ParamInfo:
    """Parameter of the model, its first name, and the (module, attribute) pairs that refer to it."""

    name: str
    parameter: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]


class BufferInfo(NamedTuple):
    """Buffer of a module, and its name in the model."""

    module: nn.Module
    attribute: str
    name: str
    buffer: torch.Tensor


@dataclass(eq=False)
class UnitDefinition:
    """Definition of a unit: its mesh, its modules, and the parameters that are gathered together."""

    name: str  # "" for the root
    mesh: DeviceMesh  # data-parallel mesh that the unit is sharded over
    called: list[nn.Module]  # a call to any of these modules is a call to the unit
    parameters: list[ParamInfo] = field(default_factory=list)
    enclosing: list[UnitDefinition] = field(default_factory=list)  # as Unit.enclosing
    modules: dict[nn.Module, str] = field(default_factory=dict)  # names of the modules whose innermost unit is this one

    @property
    def label(self) -> str:
        """Name of the unit in messages."""
        return f"unit {self.name!r}" if self.name else "the root"

    def reduced_with(self, replicas: int) -> str:
        """Return the name of the unit with which the gradients are reduced: this unit, or an enclosing one."""
        if not self.enclosing or replicas == 1:
            return self.name
        trained = (
            unit.name for unit in self.enclosing if any(info.parameter.requires_grad for info in unit.parameters)
        )
        return next(trained, "")

    def buffers(self) -> list[BufferInfo]:
        """Return the buffers of `modules`."""
        return [
            BufferInfo(module, attribute, qualified_name(module_name, attribute), buffer)
            for module, module_name in self.modules.items()
            for attribute, buffer in module._buffers.items()
            if buffer is not None
        ]


def qualified_name(module_name: str, attribute: str) -> str:
    """Return the name in the model of a parameter or buffer, from the name of its module."""
    return f"{module_name}.{attribute}" if module_name else attribute


def ranks_in(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def partition(
    model: nn.Module,
    units: Units,
    *,
    mesh_of: Callable[[str, nn.Module], DeviceMesh],
    ignored_params: Iterable[nn.Parameter] | str | None = None,
    ignored_modules: ModuleEntry | Iterable[ModuleEntry] | None = None,
) -> list[UnitDefinition]:
    """Return the units of a model in module order. The root is first.

    A parameter belongs to the innermost unit that contains all modules that refer to the parameter. A weight that is
    tied across two units belongs to the innermost unit that contains both of them.

    Args:
        mesh_of: function that returns the mesh of a unit, given its name and first module.

    Raises:
        TypeError, ValueError: an argument is invalid, or a parameter is not supported.
    """
    _refuse_sharded_twice(model)
    root = UnitDefinition("", mesh_of("", model), [model])
    ignored = _ignored_param_ids(model, ranks_in(root.mesh), ignored_params or (), ignored_modules or ())
    plans = {"": root}
    for unit_name, module in chosen_units(model, units, ignored):
        if unit_name:
            if unit_name not in plans:
                plans[unit_name] = UnitDefinition(unit_name, mesh_of(unit_name, module), [])
            plans[unit_name].called.append(module)
    refuse_wrapped_parts(model, ignored)
    around = units_around(model, plans.values())
    for name, module in model.named_modules():
        around[name][0].modules[module] = name
    _assign_parameters(model, around, ignored)
    refuse_shared_memory(model, {id(info.parameter) for plan in plans.values() for info in plan.parameters})
    return list(plans.values())


def units_around(model: nn.Module, plans: Collection[UnitDefinition]) -> dict[str, list[UnitDefinition]]:
    """Return the units that contain each module, innermost first, by path of the module. Set `enclosing` of all units.

    A module that is used in several places has several paths.
    """
    plan_of = {module: plan for plan in plans for module in plan.called}
    around: dict[str, list[UnitDefinition]] = {}
    chains = []  # for each path to a module of a unit
    for path, module in model.named_modules(remove_duplicate=False):
        around[path] = around[path.rpartition(".")[0]] if path else []
        if module in plan_of:
            around[path] = [plan_of[module], *around[path]]
            chains.append(around[path])
    if len({plan.mesh for plan in plans}) > 1:
        _find_enclosing(plan_of[model], chains)
    return around


def _assign_parameters(
    model: nn.Module, around: Mapping[str, Sequence[UnitDefinition]], ignored: Collection[int]
) -> None:
    """Add each parameter to the innermost unit that contains all modules that refer to it.

    Args:
        around: result of :func:`units_around`.
    """
    ranks: dict[UnitDefinition, list[int]] = {}
    for holders, info in _unique_parameters(model, ignored):
        first_chain, *other_chains = [around[holder] for holder in holders]
        owner = next(plan for plan in first_chain if all(plan in chain for chain in other_chains))
        if owner not in ranks:
            ranks[owner] = ranks_in(owner.mesh)
        refuse_unsupported(info, ranks[owner])
        owner.parameters.append(info)


def _find_enclosing(root: UnitDefinition, chains: Sequence[list[UnitDefinition]]) -> None:
    """Set `enclosing` of all units.

    Args:
        chains: for each path to a module of a unit, this unit and the units that contain the module, innermost first.
    """
    around: dict[UnitDefinition, list[UnitDefinition]] = {}  # units that contain all modules of a unit
    for chain in chains:
        around[chain[0]] = [each for each in around.get(chain[0], chain) if each in chain]
    for plan, units in around.items():
        common = list(itertools.takewhile(lambda each: each.mesh is root.mesh, reversed(units)))
        plan.enclosing = [] if plan in common else common[::-1]


def _ignored_param_ids(
    model: nn.Module,
    ranks: Sequence[int],
    ignored_params: Iterable[nn.Parameter] | str,
    ignored_modules: ModuleEntry | Iterable[ModuleEntry],
) -> set[int]:
    """Return the ids of all ignored parameters, which stay full on every rank."""
    owned = {id(parameter) for parameter in model.parameters()}
    unsupported: set[int] = set()  # unlike `ignored`, may contain all parameters of the model
    if isinstance(ignored_params, str):
        unsupported, ignored_params = _unsupported_param_ids(model, ignored_params, ranks), ()
    ignored = set()
    for position, parameter in enumerate(ignored_params):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"ignored_params contains {parameter!r}, which is not a parameter. Pass parameters of the model, not "
                "their names"
            )
        if id(parameter) not in owned:
            raise ValueError(
                f"ignored_params[{position}], of shape {list(parameter.shape)}, is not a parameter of this model. Pass "
                "parameters from model.parameters(), and read them after the last change of the model: a move or a "
                "copy may replace them"
            )
        ignored.add(id(parameter))
    select = _selector(model, "ignored_modules")
    for entry in [ignored_modules] if isinstance(ignored_modules, (str, type, nn.Module)) else ignored_modules:
        ignored |= {id(parameter) for module in select(entry) for parameter in module.parameters()}
    if owned and ignored == owned:
        raise ValueError(
            f"ignored_params and ignored_modules contain all {len(owned)} parameters of this {type(model).__name__}, "
            "so no parameter would be sharded. Pass only the parameters to ignore, or leave shard_model out"
        )
    return ignored | unsupported


def _unsupported_param_ids(model: nn.Module, ignored_params: str, ranks: Sequence[int]) -> set[int]:
    """Return the ids of the frozen parameters that cannot be sharded, for ``ignored_params="unsupported"``."""
    if ignored_params != UNSUPPORTED:
        raise TypeError(
            f"ignored_params={ignored_params!r} is not supported. Pass parameters of the model, or {UNSUPPORTED!r}"
        )
    frozen = [p for p in model.parameters() if not p.requires_grad and not is_lazy(p)]
    return {id(p) for p in frozen if _reason_unsupported(p, ranks) is not None}


def _unique_parameters(model: nn.Module, ignored: Collection[int]) -> list[tuple[list[str], ParamInfo]]:
    """Return each parameter once, with the names of all modules that refer to it."""
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in ignored:
                uses.setdefault(parameter, []).append((name, module, attribute))
    result = []
    for parameter, places in uses.items():
        name, _, attribute = places[0]
        owners = dict.fromkeys((module, attribute) for _, module, attribute in places)
        info = ParamInfo(qualified_name(name, attribute), parameter, tuple(owners))
        result.append(([name for name, _, _ in places], info))
    return result


def _ancestors(name: str) -> list[str]:
    """Return the name of a module and the names of its ancestors, from the innermost to the root ("")."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


_ACCEPTED = (
    "Use module classes, names of modules or classes, modules, lists of modules that form one unit, 'auto', one "
    "callable(name, module) -> bool or str, or a policy of torch.distributed.fsdp.wrap"
)
_Chosen = list[tuple[str, nn.Module]]  # (unit name, module whose forward gathers the unit), in module order


def chosen_units(model: nn.Module, units: Units, ignored: Collection[int]) -> _Chosen:
    """Return (unit name, module) for each module whose forward gathers a unit. Unit names may repeat."""
    if units is None:
        return []
    if isinstance(units, str) and units == AUTO:
        units = auto_units(model, ignored)
    if isinstance(units, WrapPolicy) or _takes_recurse(units):
        return _units_by_policy(model, units, ignored)
    if not isinstance(units, (str, type, nn.Module)) and callable(units):
        chosen = _units_by_predicate(model, units)
    else:
        chosen = _units_by_entries(model, units)
    has_parameters = {unit for unit, module in chosen if any(True for _ in module.parameters())}
    for unit, module in chosen:
        if unit not in has_parameters:
            raise ValueError(f"unit {unit!r} ({type(module).__name__}) has no parameters. Leave it out of units")
        if not has_forward(module):
            raise ValueError(
                f"unit {unit!r} ({type(module).__name__}) does not define forward, so no call would gather it. "
                "Use its members as units instead"
            )
    return chosen


def has_forward(module: nn.Module) -> bool:
    # A module that torch.compile returns has a forward of its own.
    is_defined = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return is_defined and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _units_by_predicate(model: nn.Module, units: Callable[[str, nn.Module], bool | str]) -> _Chosen:
    try:
        inspect.signature(units).bind("", model)
    except TypeError as error:
        raise TypeError(f"units={units!r} cannot be called with a name and a module: {error}. {_ACCEPTED}") from None
    except ValueError:  # a callable that has no signature
        pass
    chosen = []
    unit_names: set[str] = set()
    keys: set[str] = set()
    for name, module in model.named_modules():
        answer = units(name, module) if name else False
        if answer:
            unit = answer if isinstance(answer, str) else name
            (keys if isinstance(answer, str) else unit_names).add(unit)
            chosen.append((unit, module))
    if ambiguous := sorted(unit_names & keys):
        raise ValueError(
            f"units returned {ambiguous[0]!r} as a key, but a module of that name is a unit, too. Return another key"
        )
    return chosen


def _takes_recurse(units: object) -> bool:
    """Return whether `units` is a function with the arguments of an FSDP1 policy, ``functools.partial`` included."""
    if isinstance(units, (str, type, nn.Module)) or not callable(units):
        return False
    try:
        return units is always_wrap_policy or "recurse" in inspect.signature(units).parameters
    except ValueError:  # a callable that has no signature
        return False


def _units_by_policy(model: nn.Module, policy: Any, ignored: Collection[int]) -> _Chosen:
    """Return the modules that FSDP1 would wrap.

    Modules without a forward or without parameters to shard are omitted, because FSDP1 would wrap them without effect.
    """
    wrapped: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}
    if isinstance(policy, WrapPolicy):
        for module, settings in policy._run_policy(model, set(), {}).items():
            if settings:
                raise ValueError(
                    f"units={policy!r} returns the settings {settings} for module {names[module]!r}, but only FSDP1 "
                    "supports them. Return True for the module, and choose settings of units with mp_policy=, "
                    "accumulation= or reshard_after_forward=callable(name, module)"
                )
            wrapped.add(module)
    else:
        _collect_wrapped(model, policy, ignored, wrapped)
    wrapped = {each for each in wrapped if has_forward(each) and _numel(each, ignored)}
    return [(name, module) for module, name in names.items() if name and module in wrapped]


def _collect_wrapped(module: nn.Module, policy: Any, ignored: Collection[int], wrapped: set[nn.Module]) -> int:
    """Add the modules that a policy wraps to `wrapped`, children first. Return the number of elements in them."""
    numel, inside = _numel(module, ignored), 0
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    for child in module.children():
        inside += _collect_wrapped(child, policy, ignored, wrapped)
    if not policy(module=module, recurse=False, nonwrapped_numel=numel - inside) or not has_forward(module):
        return inside
    wrapped.add(module)
    return numel


def _numel(module: nn.Module, ignored: Collection[int]) -> int:
    """Return the number of elements in those parameters of a module that are neither ignored nor lazy."""
    return sum(p.numel() for p in module.parameters() if id(p) not in ignored and not is_lazy(p))


def _units_by_entries(model: nn.Module, units: Any) -> _Chosen:
    if not isinstance(units, (str, type, nn.Module, Iterable)):
        raise TypeError(f"units={units!r} is not supported. {_ACCEPTED}")
    is_one = isinstance(units, (str, type, nn.Module)) and not isinstance(units, nn.ModuleList)
    select = _selector(model, "units")
    names = {module: name for name, module in model.named_modules()}
    unit_of: dict[nn.Module, str] = {}  # for modules and lists, which take precedence over names and classes
    single_units: dict[nn.Module, str] = {}
    for entry in [units] if is_one else cast("Iterable[Any]", units):
        if isinstance(entry, (str, type)):
            single_units |= {module: names[module] for module in select(entry)}
            continue
        group = _modules_in_list(model, entry, select)
        unit = "+".join(name for module, name in names.items() if module in group)
        for module in group:
            if unit_of.setdefault(module, unit) != unit:
                raise ValueError(
                    f"units contains module {names[module]!r} in {unit_of[module]!r} and in {unit!r}, but a module "
                    "can be in only one unit. Remove it from one of them"
                )
    unit_of = single_units | unit_of
    return [(unit_of[module], module) for module in names if module in unit_of]


def _modules_in_list(model: nn.Module, entry: Any, select: Callable[[object], list[nn.Module]]) -> set[nn.Module]:
    """Return the modules of one unit, for a module or a list in `units`, or none for the model itself."""
    members = [entry] if isinstance(entry, nn.Module) or not isinstance(entry, Iterable) else [*entry]
    group = {module for member in members for module in select(member)}
    if not group:
        raise ValueError("units contains an empty list, but each list is one unit. Add its modules, or remove the list")
    if model in group and len(members) > 1:
        raise ValueError(
            f"units contains a list that includes the model itself ({type(model).__name__}). The model is always a "
            "unit of its own, so remove it from the list. Parameters outside all other units belong to this unit"
        )
    return group - {model}


def _selector(model: nn.Module, setting: str) -> Callable[[object], list[nn.Module]]:
    """Return a function that returns the modules of a model that one entry of a setting selects.

    A module selects itself. A name selects the modules that have this name, or whose class or a base of it does, with
    or without its module path. A class selects its instances. Names and classes do not select the model itself.
    """
    selected: dict[object, list[nn.Module]] = {}
    for name, module in model.named_modules():
        paths = {f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__}
        kinds = {*paths, *(path.rpartition(".")[2] for path in paths)}
        if name:
            for key in {module, name, *kinds}:
                selected.setdefault(key, []).append(module)
        elif setting == "units":  # the root is always a unit
            selected |= {kind: [] for kind in kinds}
    selected[model] = [model]

    def select(entry: object) -> list[nn.Module]:
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            instances = [module for module in model.modules() if isinstance(module, entry)]
            inner = [module for module in instances if module is not model]
            if inner or (instances and setting == "units"):
                selected[entry] = inner
        elif not isinstance(entry, (str, nn.Module)):
            raise TypeError(
                f"{setting} contains {entry!r}, which is not supported. Use modules, their classes, or names of either"
            )
        if entry not in selected:
            names = [name for name, _ in model.named_modules() if name]
            listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:10])
            shown = (
                f"a {type(entry).__name__}" if isinstance(entry, nn.Module) else getattr(entry, "__name__", repr(entry))
            )
            raise ValueError(
                f"{setting} contains {shown}, which this model does not have. Pass modules of the model that you pass "
                f"to shard_model, or names from these lists: modules {listed or '(none)'}; classes {classes}"
            )
        return selected[entry]

    return select


def block_classes(model: nn.Module) -> set[str]:
    """Return the class names of a model's blocks.

    These are the classes named in ``_no_split_modules`` of the model and of its submodules. For a submodule without
    such blocks, they are the classes that transformers checkpoints individually (``GradientCheckpointingLayer``).
    """
    listed_classes, children = _no_split_class_names(model), list(model.named_modules())[1:]
    blocks = [f"{name}." for name, module in children if type(module).__name__ in listed_classes]
    classes = {type(module).__name__ for _, module in children if type(module).__name__ in listed_classes}
    for name, module in children:
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__):
            prefix = f"{name}."
            if not any(prefix.startswith(block) or block.startswith(prefix) for block in blocks):
                classes.add(type(module).__name__)
    return classes


def _no_split_class_names(model: nn.Module) -> set[str]:
    listed_classes: set[str] = set()
    for module in model.modules():
        names = getattr(module, "_no_split_modules", None)
        listed_classes |= {str(name) for name in (names if isinstance(names, (list, tuple, set)) else ())}
    return listed_classes


def auto_units(model: nn.Module, ignored: Collection[int] = ()) -> list[str | nn.Module]:
    """Return the units for ``units="auto"``: the classes of blocks, and the model's embeddings and heads.

    An embedding or head whose weights are tied stays in the root, which is gathered from its first to its last use. A
    head also stays in the root if the ``forward`` of the model has been replaced. The replacement may read the head's
    weight without calling the head, as TRL's fused losses do.

    Raises:
        ValueError: the model does not declare the classes of its blocks.
    """
    if not (classes := block_classes(model)):
        listed_classes = sorted(_no_split_class_names(model))
        why = (
            f"has no module of the classes in its _no_split_modules, {listed_classes}"
            if listed_classes
            else "does neither"
        )
        raise ValueError(
            "units='auto' finds blocks only in models that list them in _no_split_modules, as most Hugging "
            "Face Transformers models do, or that apply activation checkpointing to each block. This "
            f"{type(model).__name__} {why}. Pass the classes of its blocks: units={{Block}}"
        )
    names = {module: name for name, module in model.named_modules()}
    blocks = [name for module, name in names.items() if type(module).__name__ in classes]
    owners = {id(info.parameter): info.owners for _, info in _unique_parameters(model, set())}
    kinds = ["get_input_embeddings"]
    if not any("forward" in vars(module) for module in names if hasattr(module, "get_output_embeddings")):
        kinds.append("get_output_embeddings")

    def may_be_unit(module: nn.Module) -> bool:
        name = names.get(module)
        if not name or not has_forward(module) or not _numel(module, ignored):
            return False
        if any(name in _ancestors(block) or block in _ancestors(name) for block in blocks):
            return False
        return all(len(owners[id(parameter)]) == 1 for parameter in module.parameters())

    embeddings: dict[nn.Module, None] = {}
    for module, kind in itertools.product(names, kinds):
        with suppress(AttributeError, NotImplementedError):  # not all Transformers models have embeddings
            embeddings[getattr(module, kind)()] = None
    return [*sorted(classes), *filter(may_be_unit, embeddings)]


def _refuse_sharded_twice(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RowShardedTensor):
            raise ValueError(
                f"parameter {name!r} is already sharded. Call shard_model once, on the full model. To shard a part of "
                "the model over other ranks, make it a unit and choose its mesh with mesh=callable(name, module)"
            )


def refuse_unsupported(info: ParamInfo, ranks: Sequence[int]) -> None:
    parameter, name = info.parameter, info.name
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is lazy and has no shape yet. Run a forward, which initializes it, before shard_model"
        )
    why = _reason_unsupported(parameter, ranks)
    if why is not None:
        frozen = (
            "" if parameter.requires_grad else f" (ignored_params={UNSUPPORTED!r} ignores all such frozen parameters)"
        )
        raise ValueError(f"parameter {name!r} is {why}. Convert it, or pass it in ignored_params{frozen}")


class _Memory(NamedTuple):
    """Memory of one tensor, as addresses in bytes. On the meta device, addresses are relative to the storage."""

    storage: tuple[str, int]  # device, and on the meta device the identity of the storage
    begin: int
    end: int
    name: str
    is_sharded: bool
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, is_sharded: bool) -> _Memory:
        storage, on_meta = tensor.untyped_storage(), tensor.is_meta
        last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * tensor.itemsize + (0 if on_meta else storage.data_ptr())
        key = str(tensor.device), storage._cdata if on_meta else 0
        return cls(key, begin, begin + (last + 1) * tensor.itemsize, name, is_sharded, tensor)


def refuse_shared_memory(model: nn.Module, sharded: Collection[int]) -> None:
    """Raise ValueError if a parameter shares memory with another tensor of the model. Sharding would separate the two.

    Args:
        sharded: ids of the parameters that will be sharded.
    """
    used = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_sharded = id(tensor) in sharded
        is_wrapper = is_sharded and has_extension(tensor)
        values = addon("extensions").inner_tensor(tensor) if is_wrapper else local_part(tensor)
        if is_plain_strided(values) and values.numel():
            used.append(_Memory.of(name, values, is_sharded=is_sharded))
    ranges: list[list[_Memory]] = []  # tensors whose ranges of addresses overlap
    for memory in sorted(used, key=lambda each: (each.storage, each.begin)):
        if ranges and memory.storage == ranges[-1][0].storage and memory.begin < max(each.end for each in ranges[-1]):
            ranges[-1].append(memory)
        else:
            ranges.append([memory])
    for tensors in ranges:
        if len(tensors) > 1 and any(each.is_sharded for each in tensors):
            _refuse_shared_elements(sorted(tensors, key=lambda each: each.is_sharded))


def _refuse_shared_elements(tensors: Sequence[_Memory]) -> None:
    """Raise ValueError if a sharded parameter has elements of a tensor before it in `tensors`.

    Tensors whose ranges of addresses overlap may have different elements, such as columns of one matrix.
    """
    first, last = min(each.begin for each in tensors), max(each.end for each in tensors)
    unit = math.gcd(*(number for each in tensors for number in (each.begin - first, each.tensor.itemsize)))
    users = torch.zeros(
        (last - first) // unit, dtype=torch.int32
    )  # for each unit of memory: index in `tensors`, plus 1
    for index, (_, begin, _, name, is_sharded, tensor) in enumerate(tensors):
        itemsize = tensor.itemsize
        dims = [(size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        sizes, steps = zip(*dims, (itemsize // unit, unit), strict=True)
        own = users.as_strided(sizes, [step // unit for step in steps], (begin - first) // unit)
        if is_sharded and (other := int(own.max())):
            raise ValueError(
                f"parameter {name!r} shares memory with {tensors[other - 1].name!r}, for example because one was "
                "assigned to the other's .data. Sharding would separate the two. To tie weights, assign one parameter "
                "to both modules (b.weight = a.weight). Otherwise copy the values before shard_model (p.data = "
                "p.data.clone())"
            )
        own.fill_(index + 1)


def _reason_unsupported(parameter: nn.Parameter, ranks: Sequence[int]) -> str | None:
    """Return the reason why a parameter cannot be sharded over `ranks`, or None if it can be sharded."""
    dtype = parameter.dtype
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor
        if len({*parameter.device_mesh.mesh.flatten().tolist()} & {*ranks}) > 1:
            return (
                f"a DTensor of another framework on several of the ranks {list(ranks)} that would shard it (if these "
                "ranks have different parts of it, make its module a unit on another mesh, with mesh=callable)"
            )
        if (why := reason_not_shardable(parameter.placements, parameter.ndim)) is not None:
            return why
        if not _has_default_dispatch(local):
            return f"a DTensor whose local tensor is a {type(local).__name__}, a tensor subclass"
    elif has_extension(parameter):
        reason: str | None = addon("extensions").reason_not_extensible(parameter)
        if reason is not None:
            return reason
    elif not _is_plain(parameter):
        kind = type(parameter).__name__
        return f"a {kind}, a tensor subclass, which cannot be split into rows"
    if not dtype.is_floating_point:
        kind = "complex" if dtype.is_complex else "integer"
        return f"{kind} ({dtype}), but only floating-point parameters can be sharded"
    if dtype.itemsize < 2:
        return f"{dtype}, an 8-bit format"
    if parameter.layout is not torch.strided:
        return f"of layout {parameter.layout}, but only dense parameters can be sharded"
    return None


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return True if the parameter's class overrides neither ``__torch_function__`` nor ``__torch_dispatch__``."""
    kind = type(parameter)
    asks_function = kind.__torch_function__ is not nn.Parameter.__torch_function__
    return issubclass(kind, nn.Parameter) and not asks_function and _has_default_dispatch(parameter)


def _has_default_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Return whether collectives can send `tensor`: it is strided, not quantized, and not a wrapper subclass."""
    if is_lazy(tensor):
        return False
    return _has_default_dispatch(tensor) and tensor.layout is torch.strided and not tensor.is_quantized


def describe_tensor_kind(tensor: torch.Tensor) -> str:
    """Return a description, for error messages, of a tensor for which :func:`is_plain_strided` returns False."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"a {type(tensor).__name__}"
    return f"{'quantized' if tensor.is_quantized else tensor.layout} ({tensor.dtype})"
