"""Overlap, read from the events that an observer is told of: early launches and late waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

import layerzero
from tests.support.graphs import WORLD, blocks, one_pass, sgd, shard
from tests.support.launches import Event, launches_of
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow

UNITS = 6


def _steps(rank: int, **settings: Any) -> list[Event]:
    """Return the events of two steps of two micro-batches, in a steady state."""
    model = shard(blocks(UNITS), **settings)
    optimizer = layerzero.shard_optimizer(sgd(model), model)

    def step(index: int) -> None:
        for micro_batch in range(2):
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                one_pass(model, rank, index)
        optimizer.step()
        optimizer.zero_grad()

    for index in range(2):
        step(index)
    launches = launches_of(model)
    for index in range(2):
        step(index)
    return launches.events


def _place(events: Sequence[Event], start: int = 0, **wanted: str) -> int:
    """Return the index of the first event from `start` on with these fields."""
    for place in range(start, len(events)):
        if all(getattr(events[place], field) == value for field, value in wanted.items()):
            return place
    raise AssertionError(f"no {wanted} after event {start}")


@on_ranks(world_size=WORLD, shared_memory="off")
def test_collectives_run_behind_the_computation_of_other_units(rank: int) -> None:
    for mode in ("sharded", "full"):
        events = _steps(rank, accumulation=mode)
        names = [f"units.{index}" for index in range(UNITS)]
        first_update = _place(events, kind="begun", phase="update")
        reducing = _place(events, kind="launched", collective="hop2")
        for above, name, below in zip(names[2:], names[1:], names, strict=False):
            case = (mode, name)
            # Forward: the next unit is gathered before this one computes.
            begins = _place(events, kind="begun", phase="forward", name=name)
            assert _place(events, kind="launched", collective="gather", name=above) < begins, f"{case}: prefetched"
            # The reducing backward: hop 1 is launched before the backward of the unit after the next begins.
            start = _last_backward(events, first_update)
            hop1 = _place(events, start=start, kind="launched", collective="hop1", name=name)
            if below != names[0]:
                later = names[names.index(below) - 1]
                assert hop1 < _place(events, start=start, kind="begun", name=later), case
        assert reducing < first_update, mode
        # Refresh: launched by the step; waited for at the next gather of the unit, behind the forward of earlier units.
        for index in range(2, UNITS):
            launched = _place(events, start=first_update, kind="launched", collective="refresh", name=names[index])
            awaited = _place(events, start=launched, kind="done", collective="refresh", name=names[index])
            computes = _place(events, start=first_update, kind="begun", phase="forward", name=names[index - 2])
            assert launched < computes < awaited, (mode, names[index])


def _last_backward(events: Sequence[Event], before: int) -> int:
    return max(
        place
        for place in range(before)
        if (events[place].kind, events[place].phase, events[place].name) == ("begun", "backward", f"units.{UNITS - 1}")
    )
