"""Shard a model on the meta device, with the same units and padding as :func:`layerzero.shard_model`.

No processes are needed.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.comm.transport.selection import process_group_traits
from layerzero.config import LayerZeroConfig
from layerzero.estimates.specs import RankTraits, UnitSpec
from layerzero.layout.shard_grid import ShardGrid
from layerzero.sharding.build_units import plan_handles, settings_of_units
from layerzero.sharding.unit_selection import partition

__all__ = ["MetaSharding", "traits_of"]


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
        for plan, chosen in settings_of_units(self.plans, config, zero3_size=where.grid.zero3_size).items():
            handles = plan_handles(
                plan, chosen, config, where, averaged=ranks, has_model_parallel_spec=lambda parameter: False
            )
            specs.append(UnitSpec(plan.name, tuple(handles), where, chosen.reshards))
        return specs
