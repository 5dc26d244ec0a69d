"""Which ranks can never continue, from the answers of ranks, without processes."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.distributed as dist

from layerzero.comm.traffic_counters import Collective, TrafficCounters
from layerzero.comm.waits import NonCollectiveWait, RankWaits, WaitMonitor, WaitState, find_stuck

GATHER = {"row": (5, ["gather"])}  # launches on the group "row"


def _answer(
    *waits: WaitState, launches: dict[str, tuple[int, list[str]]] | None = None, stuck: bool = True
) -> RankWaits:
    return RankWaits(0, stuck, "train.py:1", waits, launches or {}, {})


def _wait(group: str, number: int, *ranks: int, collective: str = "gather") -> WaitState:
    return WaitState(collective, ranks, group, number, collective)


def _absent(*ranks: int) -> WaitState:
    return WaitState("checkpoint.save", ranks)


IN_ROW = _wait("row", 5, 0, 1)
CASES = {
    "a gather and a save": ({0: _answer(IN_ROW, launches=GATHER), 1: _answer(_absent(0))}, {0, 1}),
    "a gather and a slow rank": ({0: _answer(IN_ROW, launches=GATHER), 1: _answer(stuck=False)}, set()),
    "a rank that does not answer": ({0: _answer(IN_ROW, launches=GATHER)}, set()),
    "a gather that all ranks have joined": (
        {0: _answer(IN_ROW, launches=GATHER), 1: _answer(IN_ROW, launches=GATHER)},
        set(),
    ),
    "two collectives of one number": (
        {
            0: _answer(IN_ROW, launches=GATHER),
            1: _answer(_wait("row", 5, 0, 1, collective="norm"), launches={"row": (5, ["norm"])}),
        },
        {0, 1},
    ),
    "three ranks in a ring": ({rank: _answer(_absent((rank + 1) % 3)) for rank in range(3)}, {0, 1, 2}),
    "a rank that waits for a cycle": (
        {rank: _answer(_absent(0 if rank == 2 else 1 - rank)) for rank in range(3)},
        {0, 1, 2},
    ),
    "a chain that ends in a slow rank": (
        {0: _answer(_absent(1)), 1: _answer(_absent(2)), 2: _answer(stuck=False)},
        set(),
    ),
    "a rank with a thread that runs": ({0: _answer(_absent(1)), 1: _answer(_absent(0), stuck=False)}, set()),
    "a rank that waits for nothing": ({0: _answer(_absent(1)), 1: _answer()}, set()),
    # Rank 1 waits for rank 0, but a thread of it also waits for the slow rank 2, and may then do what rank 0 needs.
    "a thread that waits for a slow rank": (
        {0: _answer(_absent(1)), 1: _answer(_absent(0), _absent(2)), 2: _answer(stuck=False)},
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_ranks_that_need_each_other_are_found(case: str) -> None:
    answers, expected = CASES[case]
    assert find_stuck(answers) == expected


def test_ranks_are_stuck_only_if_their_waits_lasted_at_the_same_time() -> None:
    """Answer a second time from the same wait of rank 1, or from a later wait with the same description."""
    store = dist.HashStore()
    first, later = (NonCollectiveWait("hop 1", lambda _: [0]).state(store) for _ in range(2))
    for again, expected in ((first, True), (later, False)):
        monitor = mock.Mock(_rank=0, _warned=0.0)
        answers = {0: _answer(_absent(1)), 1: _answer(first)}
        monitor._ask_all.return_value, monitor.ask.return_value = answers, answers | {1: _answer(again)}
        WaitMonitor._resolve(monitor, time.monotonic())
        assert monitor._accept.called is expected


def test_an_order_of_gathers_ends_with_the_gather_that_is_waited_for() -> None:
    counters = TrafficCounters()
    for name in ("a", "b", "b", "c"):
        counters.record(Collective.GATHER, "zero3", 0, name)
    assert counters.gathers_up_to(Collective.GATHER, "b") == ("a", "b"), "c was launched ahead"
    assert counters.gathers_up_to(Collective.GATHER_ORDER, "d") == ("a", "b", "c", "d")
