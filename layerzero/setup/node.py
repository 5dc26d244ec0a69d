"""What a model has in the memory of its node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerzero.comm.collectives import Exchange, lost
from layerzero.comm.handover import HandOver, room_of, words_for
from layerzero.comm.meeting import share_memory
from layerzero.comm.node import NodeMemory, Region
from layerzero.comm.node_pool import RING_BYTES, NodePlace, NodePool, room_for
from layerzero.comm.topology import Topology
from layerzero.config import LayerZeroConfig, Precision
from layerzero.engine.route import Route
from layerzero.layout.flat import FlatLayout

__all__ = ["Node", "PlannedHandle", "share_node"]

_BUFFERS = 5  # of one size that may be in use at once, beside one for each other handle of that size
_FORESEEN = 3  # of the largest size


@dataclass(frozen=True)
class PlannedHandle:
    """What is known of a handle before it has memory."""

    kind: str  # of its parameters, for messages
    trainable: bool
    precision: Precision
    layout: FlatLayout
    route: Route

    def keeps_sum(self, config: LayerZeroConfig) -> bool:
        """What hop 1 sends is a sum that waits on this rank, and need not be copied to be read."""
        return self.route.lands is self.route.waits and not config.offload_grads

    def sent_bytes(self, config: LayerZeroConfig) -> int:
        """Of what hop 1 sends."""
        dtype = self.route.landing_dtype if self.keeps_sum(config) else self.route.legs[0].wire
        return room_for(self.layout.numel * dtype.itemsize)


@dataclass(frozen=True)
class Node:
    """The memory of a node, as a model uses it."""

    memory: NodeMemory
    weights: HandOver
    outgoing: NodePool

    def keep(self, numel: int, dtype: torch.dtype) -> NodePlace:
        """A place for a sum that hop 1 sends."""
        return NodePlace(numel, dtype, self.outgoing)


def share_node(handles: Sequence[PlannedHandle], config: LayerZeroConfig, topology: Topology) -> Node | None:
    """The node's memory for these handles; None on all of its ranks where they exchange. All of them must call this."""
    lane = topology.zero3_reduce
    if config.node_memory == "off" or topology.zero3_size == 1 or topology.device.type != "cpu" or not lane.is_gloo:
        return None
    kept = [each for each in handles if each.keeps_sum(config)]
    rotating = [each.sent_bytes(config) for each in handles if not each.keeps_sum(config)]
    region = Region(
        words=words_for(len(handles)),
        common=sum(room_of(each.layout.numel, each.precision.compute) for each in handles),
        part=RING_BYTES + sum(each.sent_bytes(config) for each in kept) + sum(rotating) * _BUFFERS,
        foreseen=RING_BYTES
        + sum(each.sent_bytes(config) for each in kept if each.trainable)
        + max(rotating, default=0) * _FORESEEN,
    )
    memory = share_memory(topology.node_control, region)
    if memory is None:
        return None
    explain = partial(lost, lane, Exchange.NODE_SUM, "")
    return Node(memory, HandOver(memory, topology.zero3_gather), NodePool(memory, explain))
