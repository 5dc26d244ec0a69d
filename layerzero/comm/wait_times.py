"""Measure how long the program waits for collectives that background threads handle."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layerzero.comm.collectives import LaunchedCollective
from layerzero.comm.traffic_counters import Collective, TrafficCounters

__all__ = ["record_wait"]


@contextmanager
def record_wait(
    counters: TrafficCounters,
    collective: Collective,
    name: str = "",
    launched: Sequence[LaunchedCollective] = (),
    number: int = 0,
) -> Iterator[None]:
    """Context manager that times and traces the calling thread's wait for a collective of a background thread.

    Args:
        collective: collective to which the wait is attributed if `launched[number]` does not exist after the wait.
        launched: launched collectives. The background thread may append to this sequence during the wait.
        number: index of the awaited collective in `launched`.
    """
    began = time.perf_counter()
    with counters.observer.awaiting(
        collective.value, name, lambda: launched[number].trace if launched[number:] else None
    ):
        yield
    recorded = launched[number].collective if launched[number:] else collective
    counters.waited[recorded.value] += time.perf_counter() - began
