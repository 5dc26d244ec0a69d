"""Transports through shared memory, without an engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.shared_memory.buffers import RING_BYTES, SharedBufferPool
from layerzero.shared_memory.rendezvous import map_shared_segment
from layerzero.shared_memory.segment import SegmentSizes
from layerzero.shared_memory.transport import SharedMemoryTransport
from tests.support.models import integer_net


class SharedTransport(NamedTuple):
    """Transport of all ranks, its pool of send buffers, and the model whose process groups it uses.

    The process groups are released with the model.
    """

    transport: SharedMemoryTransport
    pool: SharedBufferPool
    model: nn.Module


def shared_transport(part: int = 1 << 16) -> SharedTransport:
    """Return a transport of all ranks. The caller must hold the model while it uses the transport."""
    model = layerzero.shard_model(integer_net(), zero3_size=dist.get_world_size())
    mesh_info = get_state(model).mesh_info
    segment = map_shared_segment(
        mesh_info.zero3_control_comm, SegmentSizes(num_counters=4, common=0, part=part, predicted=RING_BYTES)
    )
    assert segment is not None
    transport = SharedMemoryTransport(segment, mesh_info, {})
    return SharedTransport(transport, transport.send_scratch, model)


def numbered(rank: int, number: int, numel: int = 64) -> torch.Tensor:
    """Return a rank's part of a sum, [numel]; the elements differ between ranks and numbers."""
    return torch.arange(numel, dtype=torch.float32) + 1000 * number + 100_000 * rank
