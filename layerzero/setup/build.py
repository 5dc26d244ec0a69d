"""Turns the plan of a unit into the unit: memory, initial values, handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from layerzero.comm.agreement import agree
from layerzero.comm.collectives import Exchange, broadcast
from layerzero.comm.topology import Topology
from layerzero.config import LayerZeroConfig
from layerzero.engine.handle import Handle
from layerzero.engine.route import Route
from layerzero.engine.unit import Unit
from layerzero.layout.flat import plan_layouts
from layerzero.setup.node import Node
from layerzero.setup.partition import Found, UnitPlan, is_plain_storage, kind_of
from layerzero.setup.scratch import PlannedHandle
from layerzero.setup.unwritten import Unwritten, bears_mark, mark
from layerzero.storage.slabs import Buffers
from layerzero.tensors.moves import carry_over

__all__ = ["build_unit", "check_buffers", "check_meta", "describe", "plan_handles"]

InitFn = Callable[[nn.Module], None]


def describe(model: nn.Module, plans: Sequence[UnitPlan], config: LayerZeroConfig) -> dict[str, object]:
    """Everything about a model and its settings that must be equal on all ranks."""
    fields = config.fingerprint()
    fields["units"] = [plan.name for plan in plans]
    for plan in plans:
        chosen = config.of_unit(plan.name, plan.called[0])
        fields |= {f"{name} of unit {plan.name!r}": value for name, value in chosen.items()}
        for found in plan.parameters:
            parameter = found.parameter
            frozen = "" if parameter.requires_grad else " frozen"
            place = " on meta" if parameter.is_meta else ""
            text = f"{list(parameter.shape)} {parameter.dtype}{frozen}{place} in unit {plan.name!r}"
            fields[f"parameter {found.name!r}"] = text
    for name, buffer in model.named_buffers():
        fields[f"buffer {name!r}"] = f"{list(buffer.shape)} {buffer.dtype}{' on meta' if buffer.is_meta else ''}"
    return fields


def check_buffers(plans: Sequence[UnitPlan]) -> None:
    """Every buffer can be sent to the other ranks."""
    for plan in plans:
        for module, module_name in plan.modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_plain_storage(buffer):
                    raise ValueError(
                        f"buffer {f'{module_name}.{name}'.lstrip('.')!r} is {kind_of(buffer)}, which cannot be "
                        "broadcast from rank 0: pass sync_module_states=False, and make ranks start equal"
                    )


def check_meta(plans: Sequence[UnitPlan], param_init_fn: InitFn | None) -> None:
    """Every module on the meta device can be initialised."""
    sharded = {id(found.parameter) for plan in plans for found in plan.parameters}
    for plan in plans:
        for module, module_name in plan.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and id(parameter) not in sharded:
                    raise ValueError(
                        f"parameter {f'{module_name}.{name}'.lstrip('.')!r} is ignored and on the meta device, where "
                        "nothing would give it memory: build it on a real device, or do not ignore it"
                    )
    if param_init_fn is not None:
        return
    for plan in plans:
        for module in plan.modules:
            if _has_meta(module) and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"a {type(module).__name__} of unit {plan.name!r} is on the meta device and has no "
                    "reset_parameters(); pass param_init_fn"
                )


def plan_handles(plan: UnitPlan, config: LayerZeroConfig, topology: Topology) -> list[PlannedHandle]:
    """The handles of a unit: one or several for each kind of parameters. Nothing is allocated."""
    accumulation = config.accumulation_of(plan.name, plan.called[0])
    policy = config.policy_of(plan.name, plan.called[0])
    factor = config.gradient_divide_factor or topology.data_parallel
    kinds: dict[tuple[torch.dtype, bool], list[Found]] = {}
    for found in plan.parameters:
        kinds.setdefault((found.parameter.dtype, found.parameter.requires_grad), []).append(found)
    planned = []
    for (dtype, trainable), members in kinds.items():
        kind = f"{'trainable' if trainable else 'frozen'} {str(dtype).removeprefix('torch.')}"
        precision = config.precision_of(dtype, policy, trainable=trainable)
        route = Route.plan(topology.grid, precision, accumulation=accumulation, divide_factor=factor)
        layouts = plan_layouts(
            [(found.name, tuple(found.parameter.shape) or (1,)) for found in members],  # a 0-dim one is a row
            num_shards=topology.data_parallel,
            align=16 // min(precision.compute.itemsize, precision.master.itemsize),
        )
        planned += [PlannedHandle(plan.name, kind, trainable, precision, layout, route) for layout in layouts]
    return planned


def build_unit(
    plan: UnitPlan,
    planned: Sequence[PlannedHandle],
    config: LayerZeroConfig,
    topology: Topology,
    buffers: Buffers,
    node: Node | None,
    param_init_fn: InitFn | None,
) -> tuple[Unit, list[Unwritten]]:
    """The unit of a plan, its parameters replaced in the model, and what its initialisation has left unwritten.

    No more than this unit is ever whole.
    """
    was_on_meta = _tensors_on_meta(plan)
    _materialise_together(plan, topology, param_init_fn)
    if config.sync_module_states:
        _take_rank_0(plan, topology)
    unwritten = _still_marked(plan, was_on_meta)
    _cast_buffers(plan, config.buffer_dtype)
    by_name = {found.name: found for found in plan.parameters}
    handles = [
        Handle(
            f"unit {plan.name!r}, {each.kind}",
            each.layout,
            [(by_name[slot.name].parameter, by_name[slot.name].owners) for slot in each.layout.slots],
            label=plan.name or "the root",
            precision=each.precision,
            route=each.route,
            topology=topology,
            buffers=buffers,
            shared=None if node is None else node.weights.share(each.layout.numel, each.precision.compute),
        )
        for each in planned
    ]
    for found in plan.parameters:
        # Whoever still holds the old parameter holds no memory with it.
        found.parameter.data = torch.empty(0, dtype=found.parameter.dtype, device=found.parameter.device)
        found.parameter.grad = None
    policy, reshards = config.policy_of(plan.name, plan.called[0]), config.reshards(plan.name, plan.called[0])
    unit = Unit(plan.name, plan.called, tuple(handles), policy=policy, reshards=reshards)
    unit.show_sharded()
    return unit, unwritten


def _has_meta(module: nn.Module) -> bool:
    return any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))


def _tensors_on_meta(plan: UnitPlan) -> list[Unwritten]:
    parameters = [Unwritten(f.name, *f.owners[0], is_parameter=True) for f in plan.parameters if f.parameter.is_meta]
    buffers = [
        Unwritten(f"{module_name}.{name}" if module_name else name, module, name, is_parameter=False)
        for module, module_name in plan.modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    return [*parameters, *buffers]


def _still_marked(plan: UnitPlan, was_on_meta: Sequence[Unwritten]) -> list[Unwritten]:
    parameters = {found.name: found.parameter for found in plan.parameters}
    left = []
    for each in was_on_meta:
        held = parameters[each.name] if each.is_parameter else each.owner._buffers.get(each.attribute)
        if held is not None and bears_mark(held):
            left.append(each)
    return left


def _materialise_together(plan: UnitPlan, topology: Topology, param_init_fn: InitFn | None) -> None:
    """Materialise on every rank, or raise on every rank."""
    if not any(_has_meta(module) for module in plan.modules):
        _materialise(plan, topology.device, param_init_fn)
        return
    failure: Exception | None = None
    try:
        _materialise(plan, topology.device, param_init_fn)
    except Exception as error:
        failure = error
    agree(f"initialisation of unit {plan.name!r}", {}, ranks=topology.ranks, failure=failure)


def _materialise(plan: UnitPlan, device: torch.device, param_init_fn: InitFn | None) -> None:
    """Give meta parameters and buffers memory and values; move buffers to the device."""
    on_meta = [module for module in plan.modules if _has_meta(module)]
    for index, found in enumerate(plan.parameters):
        if found.parameter.is_meta:
            empty = torch.empty_like(found.parameter, device=device)
            mark(empty)
            parameter = nn.Parameter(empty, requires_grad=found.parameter.requires_grad)
            carry_over(found.parameter, gathered=parameter, sharded=parameter)
            for owner, attribute in found.owners:
                owner._parameters[attribute] = parameter
            plan.parameters[index] = Found(found.name, parameter, found.owners)
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                if buffer.is_meta:
                    mark(moved)
                module._buffers[name] = moved
    for module in on_meta:
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def _cast_buffers(plan: UnitPlan, dtype: torch.dtype | None) -> None:
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


@torch.no_grad()
def _take_rank_0(plan: UnitPlan, topology: Topology) -> None:
    buffers = [buffer for module in plan.modules for buffer in module._buffers.values() if buffer is not None]
    for tensor in (*(found.parameter for found in plan.parameters), *buffers):
        _broadcast(tensor.detach(), topology)


def _broadcast(tensor: Tensor, topology: Topology) -> None:
    if topology.data_parallel == 1 or tensor.numel() == 0:
        return
    sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sent = sent.to(topology.device).contiguous()
    for lane in (topology.replica, topology.zero3_gather):
        if lane.size > 1:
            broadcast(lane, Exchange.BROADCAST, sent)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(torch.view_as_complex(sent) if tensor.is_complex() else sent)
