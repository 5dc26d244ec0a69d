"""Turns the plan of a unit into the unit: memory, initial values, handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from layerzero.agreement import agree
from layerzero.buffers import Buffers
from layerzero.collectives import Exchange, broadcast
from layerzero.config import LayerZeroConfig
from layerzero.handle import Handle
from layerzero.layout import plan_layouts
from layerzero.partition import Found, UnitPlan
from layerzero.sharded_tensor import carry_over
from layerzero.topology import Topology
from layerzero.unit import Unit

__all__ = ["build_unit", "check_meta", "describe"]

InitFn = Callable[[nn.Module], None]


def describe(model: nn.Module, plans: Sequence[UnitPlan], config: LayerZeroConfig) -> dict[str, object]:
    """Everything about a model and its settings that must be equal on all ranks."""
    fields = config.fingerprint()
    fields["units"] = [plan.name for plan in plans]
    for plan in plans:
        fields[f"accumulation of unit {plan.name!r}"] = config.accumulation_of(plan.name, plan.module)
        for found in plan.parameters:
            parameter = found.parameter
            frozen = "" if parameter.requires_grad else " frozen"
            place = " on meta" if parameter.is_meta else ""
            text = f"{list(parameter.shape)} {parameter.dtype}{frozen}{place} in unit {plan.name!r}"
            fields[f"parameter {found.name!r}"] = text
    for name, buffer in model.named_buffers():
        fields[f"buffer {name!r}"] = f"{list(buffer.shape)} {buffer.dtype}{' on meta' if buffer.is_meta else ''}"
    return fields


def check_meta(plans: Sequence[UnitPlan], param_init_fn: InitFn | None) -> None:
    """Every module on the meta device can be initialised."""
    if param_init_fn is not None:
        return
    for plan in plans:
        for module in plan.modules:
            if _has_meta(module) and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"a {type(module).__name__} of unit {plan.name!r} is on the meta device and has no "
                    "reset_parameters(); pass param_init_fn"
                )


def build_unit(
    plan: UnitPlan, config: LayerZeroConfig, topology: Topology, buffers: Buffers, param_init_fn: InitFn | None
) -> Unit:
    """The unit of a plan, its parameters replaced in the model; no more than this unit is ever whole."""
    _materialise_together(plan, topology, param_init_fn)
    _cast_buffers(plan, config.buffer_dtype)
    if config.sync_module_states:
        _take_rank_0(plan, topology)
    accumulation = config.accumulation_of(plan.name, plan.module)
    kinds: dict[tuple[torch.dtype, bool], list[Found]] = {}
    for found in plan.parameters:
        kinds.setdefault((found.parameter.dtype, found.parameter.requires_grad), []).append(found)

    handles = []
    for (dtype, trainable), members in kinds.items():
        precision = config.precision_of(dtype, trainable=trainable)
        by_name = {found.name: found for found in members}
        layouts = plan_layouts(
            [(found.name, tuple(found.parameter.shape)) for found in members],
            num_shards=topology.data_parallel,
            align=16 // min(precision.compute.itemsize, precision.master.itemsize),
        )
        for layout in layouts:
            kind = f"{'trainable' if trainable else 'frozen'} {str(dtype).removeprefix('torch.')}"
            handles.append(
                Handle(
                    f"unit {plan.name!r}, {kind}",
                    layout,
                    [(by_name[slot.name].parameter, by_name[slot.name].owners) for slot in layout.slots],
                    label=plan.name or "the root",
                    precision=precision,
                    trainable=trainable,
                    accumulation=accumulation,
                    divide_factor=config.gradient_divide_factor or topology.data_parallel,
                    topology=topology,
                    buffers=buffers,
                )
            )
    for found in plan.parameters:
        # Whoever still holds the old parameter holds no memory with it.
        found.parameter.data = torch.empty(0, dtype=found.parameter.dtype, device=found.parameter.device)
        found.parameter.grad = None
    unit = Unit(plan.name, plan.module, tuple(handles))
    unit.show_sharded()
    return unit


def _has_meta(module: nn.Module) -> bool:
    return any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))


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
            parameter = nn.Parameter(empty, requires_grad=found.parameter.requires_grad)
            carry_over(found.parameter, gathered=parameter, sharded=parameter)
            for owner, attribute in found.owners:
                owner._parameters[attribute] = parameter
            plan.parameters[index] = Found(found.name, parameter, found.owners)
    for module in plan.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
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
    for lane in (topology.replica, topology.gather):
        if lane.size > 1:
            broadcast(lane, Exchange.BROADCAST, sent)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(torch.view_as_complex(sent) if tensor.is_complex() else sent)
