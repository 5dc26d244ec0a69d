"""What a model shows in place of its sharded masters, inside a context."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["View", "refuse_gradients", "viewing"]


class View(enum.Enum):
    """FULL may be entered inside AVERAGES; nothing else inside another one."""

    FULL = "layerzero.unsharded"  # whole parameters: nothing is gathered, and no gradient taken
    AVERAGES = "EMA.swapped()"  # what is written to masters is undone at the end


def refuse_gradients(label: str) -> None:
    """Raise where a forward among whole parameters would take gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"forward of {label} inside layerzero.unsharded, where nothing takes gradients: run it under "
            "torch.no_grad(), or leave the context to train"
        )


@contextmanager
def viewing(views: list[View], view: View) -> Iterator[None]:
    """Inside, `views`, of a runtime, have one more."""
    views.append(view)
    try:
        yield
    finally:
        views.remove(view)
