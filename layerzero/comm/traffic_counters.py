"""Define the purposes and names of collectives, and count their calls and bytes."""

from __future__ import annotations

import enum
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from layerzero.comm.step_parts import StepParts


class Collective(enum.StrEnum):
    """Purpose of a collective; the value is its name in :class:`layerzero.TrafficReport`."""

    GATHER = "gather"  # ZeRO-3 shards -> full buffer; with shared memory, no bytes are counted
    REGATHER = "regather"  # post-forward shards of a few ranks -> full buffer
    HOP1 = "hop1"  # gradients, inside the ZeRO-3 group; with shared memory, the bytes that were read are counted
    HOP2 = "hop2"  # gradients, across replicas
    REFRESH = "refresh"  # ZeRO-1 shards -> ZeRO-3 shard
    REFRESH_SIZES = "refresh_sizes"  # sizes of the messages of an encoded refresh
    METADATA = "metadata"  # used parameters, one byte each, and other control messages
    GATHER_ORDER = "gather_order"  # name of the next unit to gather, if this unit was not predicted
    SCALAR_REDUCE = "scalar_reduce"  # gradient norms
    UNSHARD = "unshard"  # full parameters or masters outside of the gathers of training
    BROADCAST = "broadcast"  # initial weights
    OWNER_GATHER = "owner_gather"  # rows of a parameter and its gradient -> their owner, inside the ZeRO-3 group
    OWNER_SCATTER = "owner_scatter"  # updated rows of the owner -> the ranks that store them
    SITE_GRADIENTS = "site_gradients"  # final gradients, over all sites, in synchronous steps of layerzero.outer
    SITE_DELTAS = "site_deltas"  # anchors minus masters, over all sites (layerzero.outer)
    TRANSFER = "transfer"  # from one rank to another: files of a snapshot, and values of a checkpoint


GATHERS = (Collective.GATHER, Collective.REGATHER)

_SPELLED = {  # for messages
    Collective.REGATHER: "gather among fewer ranks",
    Collective.HOP1: "hop 1",
    Collective.HOP2: "hop 2",
    Collective.REFRESH_SIZES: "exchange of sizes before the refresh",
    Collective.METADATA: "agreement on used parameters",
    Collective.GATHER_ORDER: "comparison of orders before the gather",
    Collective.SCALAR_REDUCE: "norm of gradients",
    Collective.UNSHARD: "gather of full parameters",
    Collective.BROADCAST: "broadcast of initial values",
    Collective.OWNER_GATHER: "gather of full parameters on their owners",
    Collective.OWNER_SCATTER: "return of updated rows by the owners",
    Collective.SITE_GRADIENTS: "average of gradients over sites",
    Collective.SITE_DELTAS: "exchange of weight changes between sites",
}


def display_name(collective: Collective, name: str) -> str:
    """Return the display name of a collective, followed by `name`, for example the name of the unit."""
    return _SPELLED.get(collective, collective.value) + (f" of {name!r}" if name else "")


class Observers:
    """Observers of one model (:class:`~layerzero.comm.observers.StepObserver`), in the order of their attachment.

    This object refers to them weakly, because most of them refer to parts of the model, which refer to this object.
    """

    def __init__(self) -> None:
        # Replaced and never changed, because other threads may iterate over it.
        self._observers: tuple[weakref.ref[Any], ...] = ()
        self.hear_parts = False  # True if any of them is told of the parts of a step
        self.of_collectives: tuple[weakref.ref[Any], ...] = ()  # observers that are told of collectives

    def __iter__(self) -> Iterator[Any]:
        for reference in self._observers:
            if (observer := reference()) is not None:
                yield observer

    def add(self, observer: Any) -> None:
        self._set((*self, observer))

    def remove(self, observer: Any) -> None:
        self._set(each for each in self if each is not observer)

    def _set(self, observers: Iterable[Any]) -> None:
        self._observers = tuple(weakref.ref(each) for each in observers)
        self.hear_parts = any(each.hears_parts for each in self)
        self.of_collectives = tuple(weakref.ref(each) for each in self if each.hears_collectives)


_SHOWN = 6  # number of gathers before a failure that the error message names


def gather_name(collective: Collective, unit: str) -> str:
    """Return the name of a unit's gather or regather, for comparisons of gather orders and for error messages."""
    return f"{unit} (kept)" if collective is Collective.REGATHER else unit


class TrafficTotals(NamedTuple):
    """Snapshot of the counts of a :class:`TrafficCounters`."""

    calls: dict[str, int]
    bytes: dict[tuple[str, str], int]


@dataclass
class TrafficCounters:
    """Traffic counters of one model on this rank.

    Attributes:
        calls: number of calls, by collective.
        bytes: number of bytes that this rank has sent, by (collective, axis).
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    observers: Observers = field(default_factory=Observers)
    parts: StepParts = field(init=False)
    gathered: deque[str] = field(default_factory=lambda: deque(maxlen=4 * _SHOWN))  # names of the most recent gathers
    failure: str = ""  # message of the first collective that failed
    watchdog: Any = None  # watchdog of watchdog.py, also one of the observers; None if the model has none
    _lock: threading.Lock = field(default_factory=threading.Lock)  # background threads also launch collectives

    def __post_init__(self) -> None:
        self.parts = StepParts(self.observers)

    def record(self, collective: Collective, axis: str, sent: int, name: str = "") -> None:
        kind = str(collective)
        with self._lock:
            self.calls[kind] += 1
            self.bytes[kind, axis] += sent
        if collective in GATHERS:
            self.gathered.append(gather_name(collective, name))

    def gathers_up_to(self, collective: Collective, unit: str) -> tuple[str, ...]:
        """Return the names of the last gathers up to that of `unit`, without consecutive repeats.

        If `collective` is not a gather, `unit` is appended as the next gather.
        """
        names, name, launched = list(self.gathered), gather_name(collective, unit), collective in GATHERS
        if launched and name in names:
            while names[-1] != name:  # later units have been prefetched
                names.pop()
        return tuple(each for each, _ in groupby([*names, name]))[-_SHOWN:]

    def totals(self, *, reset: bool = False) -> TrafficTotals:
        """Return copies of all counts. If `reset` is True, set the counts to zero."""
        with self._lock:
            totals = TrafficTotals(dict(self.calls), dict(self.bytes))
            if reset:
                self.calls.clear()
                self.bytes.clear()
        return totals
