"""Define the contexts that replace the parameters of a model, and check forward passes inside these contexts."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.unit import Unit

__all__ = ["ParamView", "active_view", "require_no_grad", "require_unsharded"]


class ParamView(enum.Enum):
    """Context that replaces the parameters of a model.

    An UNSHARDED or FULL_PRECISION context can be entered inside an EMA context. UNSHARDED contexts can be nested if
    they have no parameter in common.
    """

    UNSHARDED = "layerzero.unsharded"  # full parameters, without gathers and without gradients
    FULL_PRECISION = "layerzero.full_precision"  # gathered masters; forward passes record no gradients
    EMA = "EMA.swapped()"  # writes to masters are undone on exit


def require_no_grad(label: str, view: ParamView = ParamView.UNSHARDED) -> None:
    """Raise RuntimeError if gradients are enabled in a forward pass inside `view`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"forward of {label} inside {view.value}, where gradients are not supported. Run the forward under "
            "torch.no_grad(), or train outside of the context"
        )


def require_unsharded(unit: Unit, unsharded: Mapping[ManagedParam, bool]) -> None:
    """Raise RuntimeError if a forward pass inside ``layerzero.unsharded`` needs a parameter that is still sharded."""
    if sharded := next((member.name for member in unit.members() if not unsharded.get(member)), None):
        raise RuntimeError(
            f"forward of {unit.label} inside layerzero.unsharded, where its parameter {sharded!r} is sharded on this "
            "rank and is not gathered. The context was entered for other modules, or with rank0_only=True. Pass a "
            "module to unsharded that contains this module, or run the forward outside of the context"
        )


@contextmanager
def active_view(views: list[ParamView], view: ParamView) -> Iterator[None]:
    """Context manager that appends `view` to `views`, the active views of a model, and removes it on exit."""
    views.append(view)
    try:
        yield
    finally:
        views.remove(view)
