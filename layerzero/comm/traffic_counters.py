"""The exchanges between ranks, by name, and the ledger that counts them."""

from __future__ import annotations

import enum
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from torch.optim import Optimizer

from layerzero.comm.trace_recorder import TraceDispatcher

__all__ = ["GATHERS", "Collective", "TrafficCounters", "Watched", "Watching", "gather_name", "spelled"]


class Collective(enum.Enum):
    """What an exchange is for; the value is its name in :class:`layerzero.TrafficReport`."""

    GATHER = "gather"  # ZeRO-3 shards -> full buffer
    REGATHER = "regather"  # what few ranks have kept of it since the forward -> full buffer
    HOP1 = "hop1"  # gradients, inside the node
    HOP2 = "hop2"  # gradients, across replicas
    REFRESH = "refresh"  # ZeRO-1 shards -> ZeRO-3 shard
    METADATA = "agree"  # which parameters were used, one byte each
    GATHER_ORDER = "order"  # which unit is gathered next, where that was not foreseen
    SCALAR_REDUCE = "norm"  # gradient norms
    UNSHARD = "unshard"  # full-precision parameters for people and checkpoints
    BROADCAST = "broadcast"  # initial weights
    NODE_SUM = "node_sum"  # hop 1 through the memory of the node: bytes that were read there
    OWNER_GATHER = "collect"  # rows of a parameter and its gradient -> their owner, inside the node
    OWNER_SCATTER = "hand_back"  # the rows that it has updated
    SNAPSHOT = "snapshot"  # a rank's part of a checkpoint -> the memory of another node
    HAND_OVER = "hand_over"  # of weights in the memory of the node, once a refresh: nothing is sent


GATHERS = (Collective.GATHER, Collective.REGATHER)

_SPELLED = {  # for people
    Collective.REGATHER: "gather among fewer ranks",
    Collective.HOP1: "hop 1",
    Collective.HOP2: "hop 2",
    Collective.METADATA: "agreement on used parameters",
    Collective.GATHER_ORDER: "comparison of orders before the gather",
    Collective.SCALAR_REDUCE: "norm of gradients",
    Collective.UNSHARD: "gather in full precision",
    Collective.BROADCAST: "broadcast of initial values",
    Collective.NODE_SUM: "hop 1",
    Collective.OWNER_GATHER: "collection of whole parameters on their owners",
    Collective.OWNER_SCATTER: "return of updated rows by the owners",
    Collective.HAND_OVER: "hand-over of weights for their refresh",
}


def spelled(exchange: Collective, name: str) -> str:
    """Return the name of an exchange in messages, with `name`, its unit for instance."""
    return _SPELLED.get(exchange, exchange.value) + (f" of {name!r}" if name else "")


class Watched(Protocol):
    """A launch that a watchdog knows."""

    def waited(self) -> None:
        """Note that the wait for it has returned, or failed."""


class Watching(Protocol):
    """A watchdog, from the side of what it watches."""

    def launched(self, works: Any) -> Watched:
        """Note that works have been launched."""

    def count_steps_of(self, optimizer: Optimizer) -> None:
        """Count the steps of the model by this optimizer."""


_SHOWN = 6  # gathers before a failure that its error names


def gather_name(exchange: Collective, unit: str) -> str:
    """Of a gather, where orders are compared and told."""
    return f"{unit} (kept)" if exchange is Collective.REGATHER else unit


@dataclass
class TrafficCounters:
    """Calls and bytes that this rank sent, by exchange and by (exchange, axis), and what else is counted.

    Attributes:
        waited: seconds that the program has waited, by exchange. Where a device's streams wait instead, next to none.
        steps: ``"taken"`` by optimizers, and ``"skipped"``: gradients that were forgotten and not stepped.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: Counter[str] = field(default_factory=Counter)
    observer: TraceDispatcher = field(default_factory=TraceDispatcher)
    gathered: deque[str] = field(default_factory=lambda: deque(maxlen=4 * _SHOWN))  # the last gathers, by name
    failure: str = ""  # of the first exchange that did
    on_launch: Watching | None = None  # is told of each exchange as it is launched, and when its wait has returned
    _lock: threading.Lock = field(default_factory=threading.Lock)  # threads launch exchanges, too

    def record(self, exchange: Collective, axis: str, sent: int, name: str = "") -> None:
        with self._lock:
            self.calls[exchange.value] += 1
            self.bytes[exchange.value, axis] += sent
        if exchange in GATHERS:
            self.gathered.append(gather_name(exchange, name))

    def gathers_up_to(self, exchange: Collective, unit: str) -> tuple[str, ...]:
        """The last gathers, each once in a row, up to that of `unit`: the last of them, or the next."""
        names, name, launched = list(self.gathered), gather_name(exchange, unit), exchange in GATHERS
        if launched and name in names:
            while names[-1] != name:  # others have been launched ahead
                names.pop()
        return tuple(each for each, _ in groupby([*names, name]))[-_SHOWN:]

    def reset(self) -> None:
        for counted in (self.calls, self.bytes, self.waited, self.steps):
            counted.clear()
