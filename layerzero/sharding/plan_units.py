"""Plan the units of a model without processes, with the same padding as :func:`layerzero.shard_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.comm.transport.base import TransportTraits
from layerzero.config import LayerZeroConfig
from layerzero.engine.rank_traits import RankTraits
from layerzero.estimates.specs import UnitSpec
from layerzero.layout.shard_grid import ShardGrid
from layerzero.sharding.build_units import plan_handles
from layerzero.sharding.unit_selection import UnitDefinition, partition
from layerzero.sharding.unit_settings import check_codecs, settings_of_units


class _MetaMesh:
    """Stand-in for a DeviceMesh that has only the attribute ``mesh``."""

    mesh = torch.tensor([0])


def plan_units(model: nn.Module, config: LayerZeroConfig) -> list[UnitDefinition]:
    """Return the units into which ``shard_model`` would divide a model. The root is the first unit.

    Raises:
        TypeError, ValueError: ``shard_model`` would refuse the settings for this model.
    """
    if odd := [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]:
        raise ValueError(
            f"parameter {odd[0]!r} is a DTensor, which plan does not support. Pass a model with the parameters of "
            "one rank"
        )
    mesh = cast(DeviceMesh, _MetaMesh())
    units = partition(model, config.units, mesh_of=lambda name, module: mesh, ignored_modules=config.ignored_modules)
    check_codecs(settings_of_units(units, config, zero3_size=1), config.codecs)
    return units


def plan_unit_specs(
    units: Sequence[UnitDefinition], config: LayerZeroConfig, ranks: int, *, on_device: bool = True
) -> list[UnitSpec]:
    """Return the specs of the units on the first rank of a job of `ranks` data-parallel ranks.

    Args:
        units: units of the model, from :func:`plan_units`.
        config: settings, of which `zero3_size` must be set.
        on_device: True if the ranks compute on accelerators and the backend adds gradients, as NCCL does. Otherwise
            layerzero adds them, as with gloo, and the ranks of a node do not share memory.
    """
    assert config.zero3_size is not None
    adds = not on_device or config.root_policy(units[0].called[0]).fp32_accumulation
    where = RankTraits(
        ShardGrid.of_rank(0, data_parallel=ranks, zero3_size=config.zero3_size),
        TransportTraits(sums_locally=adds),
        adds_hop2=adds,
        on_device=on_device,
        weights_in_host=config.offload.params,
    )
    specs = []
    for unit, chosen in settings_of_units(units, config, zero3_size=config.zero3_size).items():
        handles = plan_handles(
            unit, chosen, config, where, averaged=ranks, has_model_parallel_spec=lambda parameter: False
        )
        reshards = chosen.reshard_after_forward, chosen.reshard_after_backward
        specs.append(UnitSpec(unit.name, tuple(handles), where, *reshards))
    return specs
