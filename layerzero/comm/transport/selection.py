"""Choose the transport for each mesh. No other module refers to a concrete transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.base import BufferDemand, Transport, TransportTraits
from layerzero.comm.transport.process_group import ProcessGroupTransport
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.utils.add_ons import addon, has_addon


def may_share_memory(mesh_info: MeshInfo, setting: str) -> bool:
    """Return whether the ranks of a ZeRO-3 group should try to share memory.

    This requires the CPU, gloo and the add-on. ``shard_model`` has compared whether the ranks have the add-on.

    Args:
        setting: value of ``shard_model(shared_memory=...)``.
    """
    on_cpu = mesh_info.device.type == "cpu" and mesh_info.zero3_reduce_comm.is_gloo
    return setting != "off" and mesh_info.zero3_size > 1 and on_cpu and has_addon("shared_memory")


def select_transports(
    meshes: Iterable[MeshInfo],
    demand: Callable[[TransportTraits], BufferDemand] | None,
    scratch: BufferPool,
    full: FullBufferPool,
    *,
    setting: str,
) -> dict[MeshInfo, Transport]:
    """Return the transport of each mesh of a model. All ranks of the model must call this function.

    Models on several meshes, and ZeRO-3 groups in which some rank cannot share memory, use process groups.

    Args:
        demand: function that returns the buffers that the model requests from a transport with the given traits. If it
            is None, the units of the model are not known yet, and process groups are used.
        scratch, full: pools of the model that the process-group transport uses.
        setting: value of ``shard_model(shared_memory=...)``.
    """
    meshes = tuple(meshes)
    if demand is not None and len(meshes) == 1 and may_share_memory(meshes[0], setting):
        transport = addon("shared_memory").SharedMemoryTransport
        shared: Transport | None = transport.connect(meshes[0], demand(transport.traits))
        if shared is not None:
            return {meshes[0]: shared}
    return {mesh_info: ProcessGroupTransport(mesh_info, scratch, full) for mesh_info in meshes}
