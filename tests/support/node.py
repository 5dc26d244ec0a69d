"""Shared-memory buffers of all ranks, without an engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

import layerzero
from layerzero.comm.collectives import Communicator
from layerzero.comm.transport.shm_buffers import RING_BYTES, SharedBufferPool
from layerzero.comm.transport.shm_rendezvous import map_shared_segment
from layerzero.comm.transport.shm_segment import SegmentSizes
from layerzero.engine.hooks import get_state
from tests.support.models import integer_net

__all__ = ["node_pool", "numbered"]


def node_pool(part: int = 1 << 16) -> tuple[Communicator, SharedBufferPool]:
    """Return the hop 1 communicator of all ranks, and a buffer pool in their shared memory."""
    model = layerzero.shard_model(integer_net(), zero3_size=dist.get_world_size())
    mesh_info = get_state(model).mesh_info
    memory = map_shared_segment(
        mesh_info.zero3_control_comm, SegmentSizes(words=4, common=0, part=part, predicted=RING_BYTES)
    )
    assert memory is not None
    pool = SharedBufferPool(memory, lambda error: error)
    pool.model = model  # type: ignore[attr-defined]  # its groups are released with it
    return mesh_info.zero3_reduce_comm, pool


def numbered(rank: int, number: int, numel: int = 64) -> torch.Tensor:
    """Return a rank's part of a sum, [numel]; the elements differ between ranks and numbers."""
    return torch.arange(numel, dtype=torch.float32) + 1000 * number + 100_000 * rank
