"""Describe the properties of a rank that determine its buffers, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.base import TransportTraits
from layerzero.device.accelerator import device_module
from layerzero.layout.shard_grid import Extent, ShardGrid


@dataclass(frozen=True)
class RankTraits:
    """Position of a rank in the grid, and the backend properties that determine its memory."""

    grid: ShardGrid
    transport: TransportTraits  # traits of the ZeRO-3 group's transport
    # True if this rank receives the parts of all ranks in hop 2 and adds them: on gloo, or with
    # `fp32_accumulation`.
    adds_hop2: bool
    on_device: bool  # True if the rank computes on an accelerator with its own streams and memory
    weights_in_host: bool = False  # True if ZeRO-3 shards are in host memory

    @classmethod
    def of(cls, mesh_info: MeshInfo, transport: TransportTraits, *, offload_params: bool) -> RankTraits:
        return cls(
            mesh_info.grid,
            transport,
            adds_hop2=mesh_info.replica_comm.sums_locally,
            on_device=device_module(mesh_info.device) is not None,
            weights_in_host=offload_params and not transport.shares_memory,
        )

    @property
    def needs_gather(self) -> bool:
        """True if the full buffer has memory in addition to the ZeRO-3 shard."""
        resident = self.transport.shares_memory or self.grid.same_elements(Extent.ZERO3, Extent.FULL)
        return self.weights_in_host or not resident
