"""The exchanges between ranks, by name."""

from __future__ import annotations

import enum

__all__ = ["SPELLED", "Exchange"]


class Exchange(enum.Enum):
    """What an exchange is for; the value is its name in :class:`layerzero.TrafficReport`."""

    GATHER = "gather"  # ZeRO-3 shards -> full buffer
    HOP1 = "hop1"  # gradients, inside the node
    HOP2 = "hop2"  # gradients, across replicas
    REFRESH = "refresh"  # ZeRO-1 shards -> ZeRO-3 shard
    AGREE = "agree"  # which parameters were used, one byte each
    ORDER = "order"  # which unit is gathered next, where that was not foreseen
    NORM = "norm"  # gradient norms
    UNSHARD = "unshard"  # full-precision parameters for people and checkpoints
    BROADCAST = "broadcast"  # initial weights
    NODE_SUM = "node_sum"  # hop 1 through the memory of the node: bytes that were read there
    COLLECT = "collect"  # rows of a parameter and its gradient -> their owner, inside the node
    HAND_BACK = "hand_back"  # the rows that it has updated
    HAND_OVER = "hand_over"  # of weights in the memory of the node, once a refresh: nothing is sent


SPELLED = {  # for people
    Exchange.HOP1: "hop 1",
    Exchange.HOP2: "hop 2",
    Exchange.AGREE: "agreement on used parameters",
    Exchange.ORDER: "comparison of orders before the gather",
    Exchange.NORM: "norm of gradients",
    Exchange.UNSHARD: "gather in full precision",
    Exchange.BROADCAST: "broadcast of initial values",
    Exchange.NODE_SUM: "hop 1",
    Exchange.COLLECT: "collection of whole parameters on their owners",
    Exchange.HAND_BACK: "return of updated rows by the owners",
    Exchange.HAND_OVER: "hand-over of weights for their refresh",
}
