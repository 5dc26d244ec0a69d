"""Group the resources that the handles of a model share: the model's memory pools, and the transport of each mesh."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.refreshers import EncodedRefresher
from layerzero.comm.transport.base import Transport
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.engine.gradient_offload import AccumulatorAllocator


@dataclass(frozen=True)
class ModelPools:
    """Memory pools of a model, and objects that copy between device and host, shared by all meshes of the model."""

    scratch: BufferPool  # scratch buffers for collectives
    full: FullBufferPool
    accumulators: AccumulatorAllocator
    to_host: HostDeviceCopies | None = None  # copies masters and final gradients if the optimizer runs on the host
    weights_to_host: HostDeviceCopies | None = None  # copies compute weights if they are in host memory


@dataclass(frozen=True, eq=False)
class MeshResources:
    """Communicators, transport and pools for the handles on one mesh."""

    mesh_info: MeshInfo
    transport: Transport
    pools: ModelPools
    refresher: EncodedRefresher | None = None  # None if refreshes are not encoded
