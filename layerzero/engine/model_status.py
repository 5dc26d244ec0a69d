"""Define the contexts that replace the parameters of a model, and check that a model may run a pass."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from layerzero.comm.process_groups import CLOSED
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.module_checks import StructureCheck


class Closable:
    """Base class for parts of a sharded model. After :meth:`close`, which deletes all attributes, every use raises."""

    def close(self) -> None:
        self.__dict__.clear()

    @property
    def closed(self) -> bool:
        return not self.__dict__

    def require_open(self) -> None:
        """Raise RuntimeError if the model was closed."""
        if self.closed:
            raise RuntimeError(CLOSED)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("__"):
                self.require_open()
            raise AttributeError(name)


class ModelStatus:
    """Status that determines whether a model may compute: active contexts, a failed load, and the module structure.

    Attributes:
        active_views: contexts that are currently active, outermost first.
        unsharded: parameters that are unsharded inside :func:`layerzero.unsharded`. The value is True if the full
            parameter is available on this rank.
        load_error: error message after a load that failed partway, otherwise None.
        first_forward_checks: functions that are called once, before the first forward pass. A function that raises is
            called again before the next forward pass.
    """

    def __init__(self, structure: StructureCheck) -> None:
        self.active_views: list[ParamView] = []
        self.unsharded: dict[ManagedParam, bool] = {}
        self.load_error: str | None = None
        self.first_forward_checks: list[Callable[[], None]] = []
        self._structure = structure

    def refuse_inside(self, *views: ParamView, what: str, why: str = "") -> None:
        """Raise RuntimeError if one of `views` is active.

        Args:
            views: contexts in which a call is refused. If there are none, all contexts refuse it.
            what: name of the call, for the message.
            why: clause that states the reason, such as "which would undo the update".
        """
        if active := [view.value for view in self.active_views if not views or view in views]:
            reason = f", {why}" if why else ""
            raise RuntimeError(f"{what} was called inside {active[-1]}{reason}. Leave the context first")

    def require_usable(self) -> None:
        """Run the pending `first_forward_checks`, and check that the model may run a pass.

        Raises:
            RuntimeError: a load failed partway, a parameter was replaced, or a trainable parameter was added.
        """
        if self.load_error is not None:
            raise RuntimeError(self.load_error)
        while self.first_forward_checks:
            self.first_forward_checks[0]()
            del self.first_forward_checks[0]
        self._structure.check_for_changes()


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


def require_unsharded(label: str, members: Iterable[ManagedParam], unsharded: Mapping[ManagedParam, bool]) -> None:
    """Raise RuntimeError if a forward pass inside ``layerzero.unsharded`` needs a parameter that is still sharded."""
    if sharded := next((member.name for member in members if not unsharded.get(member)), None):
        raise RuntimeError(
            f"forward of {label} inside layerzero.unsharded, where its parameter {sharded!r} is sharded on this "
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
