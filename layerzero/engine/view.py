"""What a model shows in place of its sharded masters, inside a context."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["View", "viewing"]


class View(enum.Enum):
    """FULL may be entered inside AVERAGES; nothing else inside another one."""

    FULL = "layerzero.unsharded"  # whole parameters: no forward can run
    AVERAGES = "EMA.swapped()"  # what is written to masters is undone at the end


@contextmanager
def viewing(views: list[View], view: View) -> Iterator[None]:
    """Inside, `views`, of a runtime, have one more."""
    views.append(view)
    try:
        yield
    finally:
        views.remove(view)
