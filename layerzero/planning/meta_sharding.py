"""Shard a model on the meta device, with the same units and padding as :func:`layerzero.shard_model`.

This module also predicts the memory of a rank, including its optimizer state. No processes are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.comm.transport.selection import process_group_traits
from layerzero.config import LayerZeroConfig
from layerzero.estimates.memory_estimate import MemoryEstimate, estimate_memory
from layerzero.estimates.scratch_buffers import plan_scratch
from layerzero.estimates.specs import RankTraits, UnitSpec
from layerzero.layout.shard_grid import Extent, ShardGrid
from layerzero.sharding.build_units import plan_handles
from layerzero.sharding.unit_selection import partition

__all__ = ["MetaSharding", "optimizer_bytes", "predicted_memory", "traits_of"]

_STEP = 4  # size of a step counter in bytes


class _MetaMesh:
    """Stand-in for a DeviceMesh that has only the attribute ``mesh``."""

    mesh = torch.tensor([0])


def traits_of(
    ranks: int, zero3_size: int, *, rank: int = 0, on_device: bool = True, offload_params: bool = False
) -> RankTraits:
    """Return the :class:`RankTraits` of `rank` in a job of `ranks` data-parallel ranks.

    If `on_device` is True, the backend adds gradients, as NCCL does. Otherwise layerzero adds them, as with gloo.
    """
    grid = ShardGrid.of_rank(rank, data_parallel=ranks, zero3_size=zero3_size)
    return RankTraits(
        grid,
        process_group_traits(sums_locally=not on_device),
        adds_hop2=not on_device,
        on_device=on_device,
        weights_in_host=offload_params,
    )


class MetaSharding:
    """Units of a model, selected once. The specs for many combinations of settings are derived from these units."""

    def __init__(self, model: nn.Module, config: LayerZeroConfig) -> None:
        if odd := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
            raise ValueError(
                f"parameter {odd[0]!r} is a DTensor, which plan does not support. Pass a model with the parameters of "
                "one rank"
            )
        mesh = cast(DeviceMesh, _MetaMesh())
        self.plans = partition(
            model, config.units, mesh_of=lambda name, module: mesh, ignored_modules=config.ignored_modules
        )

    def unit_specs(self, config: LayerZeroConfig, where: RankTraits) -> list[UnitSpec]:
        """Return the specs of all units on one rank. The root is the first unit."""
        ranks, specs = where.grid.data_parallel, []
        for plan in self.plans:
            module = plan.called[0]
            handles = plan_handles(plan, config, where, averaged=ranks, has_model_parallel_spec=lambda parameter: False)
            reshards = config.reshards(plan.name, module, where.grid.zero3_size)
            specs.append(UnitSpec(plan.name, tuple(handles), where, reshards))
        return specs


def predicted_memory(units: Sequence[UnitSpec], config: LayerZeroConfig) -> MemoryEstimate:
    """Return the memory estimate of the rank for which `units` were planned."""
    traits = units[0].traits
    scratch = plan_scratch([handle for unit in units for handle in unit.handles], config, traits)
    return estimate_memory(units, config, scratch=scratch.nbytes)


def optimizer_bytes(units: Sequence[UnitSpec], numbers: int) -> int:
    """Return the size in bytes of the optimizer state on one rank.

    The state has `numbers` values per element, in the dtype of the masters, and one step counter per parameter.
    """
    total = 0
    for unit in units:
        grid = unit.traits.grid
        for handle in unit.handles:
            if handle.trainable:
                own_range = grid.range_of(handle.layout, Extent.ZERO1)
                sizes = [
                    len(range(max(s.offset, own_range.start), min(s.end, own_range.stop))) for s in handle.layout.slots
                ]
                total += sum(numbers * size * handle.precision.master.itemsize + _STEP for size in sizes)
    return total
