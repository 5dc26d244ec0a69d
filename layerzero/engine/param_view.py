"""What a model shows in place of its sharded masters, inside a context."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.unit import Unit

__all__ = ["ParamView", "refuse_gradients", "refuse_sharded", "viewing"]


class ParamView(enum.Enum):
    """A context that changes the parameters of a model. Only AVERAGES, and FULL for other parameters, allow nesting."""

    UNSHARDED = "layerzero.unsharded"  # whole parameters: nothing is gathered, and no gradient taken
    FULL_PRECISION = "layerzero.full_precision"  # gathers masters; forwards take no gradients
    EMA = "EMA.swapped()"  # what is written to masters is undone at the end


def refuse_gradients(label: str, view: ParamView = ParamView.UNSHARDED) -> None:
    """Raise where a forward among whole parameters would take gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"forward of {label} inside {view.value}, where nothing takes gradients: run it under "
            "torch.no_grad(), or leave the context to train"
        )


def refuse_sharded(unit: Unit, unsharded: Mapping[ManagedParam, bool]) -> None:
    """Raise if a forward inside ``layerzero.unsharded`` would need parameters that are sharded there."""
    if absent := next((member.name for member in unit.members() if not unsharded.get(member)), None):
        raise RuntimeError(
            f"forward of {unit.label} inside layerzero.unsharded, where its parameter {absent!r} is sharded on this "
            "rank and is not gathered. The context was entered for other modules, or with rank0_only=True. Pass a "
            "module to unsharded that contains this one, or call it outside the context"
        )


@contextmanager
def viewing(views: list[ParamView], view: ParamView) -> Iterator[None]:
    """Inside, `views`, of a runtime, have one more."""
    views.append(view)
    try:
        yield
    finally:
        views.remove(view)
