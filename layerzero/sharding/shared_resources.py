"""Create what the units of a model share before they are built: process groups, transports and memory pools."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.process_groups import ModelGroups, drop_released_groups
from layerzero.comm.refreshers import EncodedRefresher
from layerzero.comm.transport.base import BufferDemand, TransportTraits
from layerzero.comm.transport.selection import select_transports
from layerzero.config import LayerZeroConfig, Offload
from layerzero.device.accelerator import ConnectionCost, HostDeviceCopies, compute_device
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.engine.gradient_offload import AccumulatorAllocator
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.resources import MeshResources, ModelPools
from layerzero.estimates.scratch_buffers import buffer_demand
from layerzero.estimates.specs import HandleSpec
from layerzero.sharding.unit_meshes import ModelParallelMeshes, UnitMesh, connect_meshes
from layerzero.utils.add_ons import addon


@dataclass(frozen=True, eq=False)
class SharedResources:
    """Settings, ranks, process groups, transports and pools that the units of a model share.

    Attributes:
        sites: meshes of the units, with transports and pools. The root's mesh is the first key.
        connection_cost: time and memory that connections of the ranks have taken so far.
    """

    config: LayerZeroConfig
    ranks: ModelRanks
    pools: ModelPools
    sites: Mapping[DeviceMesh, UnitMesh]
    connection_cost: ConnectionCost

    @classmethod
    def create(
        cls, meshes: ModelParallelMeshes, config: LayerZeroConfig, groups: ModelGroups, *, sums_locally: bool
    ) -> SharedResources:
        """Create the communicators of a model, and transports over process groups. All of its ranks must call this.

        If the groups are deferred, this method does not communicate. Several meshes and encoded refreshes need
        groups.

        Args:
            meshes: the model-parallel mesh, or None, by mesh of units. The root's mesh is the first key.
            groups: owner of the process groups.
            sums_locally: see :meth:`MeshInfo.from_mesh`.
        """
        device = compute_device(next(iter(meshes)).device_type)
        pools, cost = _model_pools(device, config.offload), ConnectionCost(device)

        def resources_of(mesh_info: MeshInfo) -> MeshResources:
            transports = select_transports([mesh_info], None, pools.scratch, pools.full, setting=config.shared_memory)
            return MeshResources(mesh_info, transports[mesh_info], pools, _create_refresher(mesh_info, config, pools))

        with cost.measured():
            ranks, sites = connect_meshes(meshes, groups, resources_of, sums_locally=sums_locally)
        if not (groups.deferred or ranks.mesh_info.zero3_reduce_comm.held_group.is_local):
            drop_released_groups(ranks.all_gather_text, ranks.ranks)
        return cls(config, ranks, pools, sites, cost)

    def share_memory(self, handles: Sequence[HandleSpec]) -> SharedResources:
        """Return the resources for a model with these handles, whose ranks share memory if they can.

        All ranks of the model must call this method before they build units.
        """

        def demand(traits: TransportTraits) -> BufferDemand:
            rank_traits = RankTraits.of(self.ranks.mesh_info, traits, offload_params=False)
            return buffer_demand(handles, self.config, rank_traits)

        meshes = [site.mesh_info for site in self.sites.values()]
        transports = select_transports(
            meshes, demand, self.pools.scratch, self.pools.full, setting=self.config.shared_memory
        )
        sites = {
            mesh: replace(site, resources=replace(site.resources, transport=transports[site.mesh_info]))
            for mesh, site in self.sites.items()
        }
        return replace(self, sites=sites)


def _create_refresher(mesh_info: MeshInfo, config: LayerZeroConfig, pools: ModelPools) -> EncodedRefresher | None:
    if config.codecs.refresh is None or mesh_info.replicas == 1:
        return None
    refresher: EncodedRefresher = addon("slow_links").make_refresher(mesh_info, config.codecs.refresh, pools.scratch)
    return refresher


def _model_pools(device: torch.device, offload: Offload) -> ModelPools:
    transfers = HostDeviceCopies(device, pin_memory=offload.pin_memory) if offload.settings else None
    if transfers is not None and not transfers.pins:
        unpinned = "" if offload.pin_memory else " and no memory to pin"
        message = (
            f"Offload({', '.join(offload.settings)}) on {device}: there is no device memory to free{unpinned}. Results "
            "do not change. Leave offload out"
        )
        warnings.warn(message, stacklevel=6)
    return ModelPools(
        BufferPool.of(device),
        FullBufferPool(device),
        AccumulatorAllocator(device, transfers if offload.grads else None),
        transfers if offload.optimizer else None,
        transfers if offload.params else None,
    )
