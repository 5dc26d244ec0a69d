"""What a model has in the memory of its node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from layerzero.comm.collectives import Exchange, lost
from layerzero.comm.handover import HandOver, room_of, words_for
from layerzero.comm.meeting import share_memory
from layerzero.comm.node import NodeMemory, Region
from layerzero.comm.node_pool import RING_BYTES, NodePool, room_for
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
    precision: Precision
    layout: FlatLayout
    route: Route

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of the two buffers that hop 1 may need: what lands, and what is sent; 0 where it is none."""
        lands = self.layout.numel * self.route.landing_dtype.itemsize if self.route.lands is not self.route.waits else 0
        wire = self.route.legs[0].wire if self.route.legs else self.route.landing_dtype
        copied = self.route.lands is self.route.waits or wire != self.route.landing_dtype
        return room_for(lands), room_for(self.layout.numel * wire.itemsize) if copied else 0


@dataclass(frozen=True)
class Node:
    """The memory of a node, as a model uses it."""

    memory: NodeMemory
    weights: HandOver
    outgoing: NodePool


def share_node(handles: Sequence[PlannedHandle], config: LayerZeroConfig, topology: Topology) -> Node | None:
    """The node's memory for these handles; None on all of its ranks where they exchange. All of them must call this."""
    lane = topology.zero3_reduce
    if config.node_memory == "off" or topology.zero3_size == 1 or topology.device.type != "cpu" or not lane.is_gloo:
        return None
    sizes = [size for each in handles for size in each.sent_bytes]
    largest = max(sizes, default=0)
    region = Region(
        words=words_for(len(handles)),
        common=sum(room_of(each.layout.numel, each.precision.compute) for each in handles),
        part=RING_BYTES + sum(sizes) * _BUFFERS,
        foreseen=RING_BYTES + largest * _FORESEEN,
    )
    memory = share_memory(topology.node_control, region)
    if memory is None:
        return None
    explain = partial(lost, lane, Exchange.NODE_SUM, "")
    return Node(memory, HandOver(memory, topology.zero3_gather), NodePool(memory, explain))
