"""List the units of a sharded model, with :func:`units`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from layerzero.engine.hooks import get_state
from layerzero.engine.managed_param import ManagedParam
from layerzero.utils.text_tables import size_text, table


@dataclass(frozen=True)
class UnitParameter:
    """Parameter of a unit, with the rows that this rank updates.

    Attributes:
        name: first name that the parameter has in the model.
        shape: full shape of the parameter.
        dtype: dtype of the master.
        requires_grad: True if the parameter is trainable.
        rows: range of indices along dim 0 whose masters are on this rank. A 0-dim parameter has one row.
        local_numel: number of elements in these rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    rows: range
    local_numel: int

    @property
    def numel(self) -> int:
        """Number of elements in the full parameter."""
        return int(torch.Size(self.shape).numel())

    @classmethod
    def of(cls, member: ManagedParam) -> UnitParameter:
        span, first = member.spec, member.spec.global_slices[0]
        rows = range(first.start, first.stop)
        master = member.master
        return cls(member.name, span.full_shape, master.dtype, member.sharded.requires_grad, rows, master.numel())


@dataclass(frozen=True)
class UnitInfo:
    """Description of a unit, whose parameters are gathered and freed together.

    Attributes:
        name: name of the unit's module, names of its modules joined by "+", or the key that a callable `units`
            returned for them. "" for the root.
        modules: classes of the modules whose forward gathers the unit, by module name.
        parameters: parameters of the unit, without the parameters of units inside the unit.
        gathered_bytes: size in bytes of the unit's gathered weights, in the compute dtype and including padding.
        zero3_size: S, number of ranks over which the compute weights are sharded.
        data_parallel: D, number of ranks over which the masters are sharded.
        reshard_after_forward: value of the setting `reshard_after_forward` for the unit.
    """

    name: str
    modules: dict[str, str]
    parameters: tuple[UnitParameter, ...]
    gathered_bytes: int
    zero3_size: int
    data_parallel: int
    reshard_after_forward: bool | int | str

    @property
    def numel(self) -> int:
        """Number of elements in the unit's full parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def local_numel(self) -> int:
        """Number of the unit's elements whose masters are on this rank."""
        return sum(parameter.local_numel for parameter in self.parameters)


class UnitList(tuple[UnitInfo, ...]):
    """Units of a model, with the root first. ``str()`` formats them as a table.

    Attributes:
        ignored: names of the ignored parameters, which are full on every rank and do not belong to any unit.
    """

    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for unit in self:
            classes = ", ".join(dict.fromkeys(unit.modules.values()))
            label = f"{unit.name or 'the root'} ({classes})"
            rows.append(
                (label, "", f"{unit.numel:,}", size_text(unit.gathered_bytes), f"{unit.local_numel:,} elements")
            )
            for parameter in unit.parameters:
                part = f"rows {parameter.rows.start}:{parameter.rows.stop}" if parameter.rows else "no rows"
                kind = str(parameter.dtype).removeprefix("torch.") + ("" if parameter.requires_grad else ", frozen")
                rows.append(
                    (f"  {parameter.name}", f"{list(parameter.shape)} {kind}", f"{parameter.numel:,}", "", part)
                )
        rows += [(f"ignored: {name}", "", "", "", "all rows") for name in self.ignored]
        return table(("unit", "parameter", "elements", "gathered", "on this rank"), rows, left=2)


def units(model: nn.Module) -> UnitList:
    """List the units of a sharded model, their parameters and sizes, and the rows on this rank.

    This function does not communicate, and the rows differ between ranks. ``print(model)`` also marks the modules that
    are units.

    Args:
        model: a sharded model.

    Example::

        print(layerzero.units(model))  # a table
        largest = max(layerzero.units(model), key=lambda unit: unit.gathered_bytes)
    """
    lz_state = get_state(model)
    names = {module: name for name, module in model.named_modules()}
    order = {name: index for index, name in enumerate(lz_state.members)}
    infos = UnitList(
        UnitInfo(
            name=unit.name,
            modules={names[module]: type(module).__name__ for module in unit.modules},
            parameters=tuple(map(UnitParameter.of, sorted(unit.members(), key=lambda member: order[member.name]))),
            gathered_bytes=sum(handle.layout.numel * handle.precision.compute.itemsize for handle in unit.handles),
            zero3_size=unit.mesh_info.zero3_size,
            data_parallel=unit.mesh_info.data_parallel,
            reshard_after_forward="step" if unit.stays_until_step else unit.reshard_after_forward,
        )
        for unit in lz_state.units
    )
    infos.ignored = tuple(n for n, p in model.named_parameters() if lz_state.parameters.is_ignored(p))
    return infos
