"""What the program waits for an exchange that somebody else adds up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layerzero.comm.collectives import LaunchedCollective
from layerzero.comm.traffic_counters import Collective, TrafficCounters

__all__ = ["record_wait"]


@contextmanager
def record_wait(
    ledger: TrafficCounters,
    exchange: Collective,
    name: str = "",
    issued: Sequence[LaunchedCollective] = (),
    number: int = 0,
) -> Iterator[None]:
    """Around the program's waiting for an exchange that a thread adds up: `issued[number]`, once it is launched; or,
    without one, for all of a kind.
    """
    began = time.perf_counter()
    with ledger.observer.awaiting(exchange.value, name, lambda: issued[number].trace if issued[number:] else None):
        yield
    found = issued[number].collective if issued[number:] else exchange
    ledger.waited[found.value] += time.perf_counter() - began
