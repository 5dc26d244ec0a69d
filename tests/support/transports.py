"""Transports of all ranks, without an engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

import layerzero
from layerzero.comm.transport.shared_memory import SharedMemoryTransport
from layerzero.comm.transport.shm_buffers import RING_BYTES, SharedBufferPool
from layerzero.comm.transport.shm_rendezvous import map_shared_segment
from layerzero.comm.transport.shm_segment import SegmentSizes
from layerzero.engine.hooks import get_state
from tests.support.models import integer_net

__all__ = ["numbered", "shared_transport"]


def shared_transport(part: int = 1 << 16) -> tuple[SharedMemoryTransport, SharedBufferPool]:
    """Return a transport through shared memory of all ranks, and its pool of send buffers."""
    model = layerzero.shard_model(integer_net(), zero3_size=dist.get_world_size())
    mesh_info = get_state(model).mesh_info
    segment = map_shared_segment(
        mesh_info.zero3_control_comm, SegmentSizes(num_counters=4, common=0, part=part, predicted=RING_BYTES)
    )
    assert segment is not None
    transport = SharedMemoryTransport(segment, mesh_info, {})
    transport.model = model  # type: ignore[attr-defined]  # its groups are released with it
    return transport, transport.send_buffers


def numbered(rank: int, number: int, numel: int = 64) -> torch.Tensor:
    """Return a rank's part of a sum, [numel]; the elements differ between ranks and numbers."""
    return torch.arange(numel, dtype=torch.float32) + 1000 * number + 100_000 * rank
