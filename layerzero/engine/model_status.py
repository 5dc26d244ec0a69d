"""Conditions that the passes of a sharded model check before they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from layerzero.comm.process_groups import CLOSED
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.module_checks import StructureCheck
from layerzero.engine.param_view import ParamView

__all__ = ["Closable", "ModelStatus"]


class Closable:
    """Part of a sharded model that loses all attributes when the model is closed; every later use raises."""

    def clear(self) -> None:
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
    """Contexts that are entered, a load that failed, and changes of the model's structure.

    Attributes:
        active_views: contexts that are currently entered, outermost first.
        unsharded: parameters inside :func:`layerzero.unsharded`; True if full on this rank.
        load_error: error message after a load that failed halfway.
        first_forward_checks: called once, before the first forward. A check that raises is called again.
    """

    def __init__(self, structure: StructureCheck) -> None:
        self.active_views: list[ParamView] = []
        self.unsharded: dict[ManagedParam, bool] = {}
        self.load_error: str | None = None
        self.first_forward_checks: list[Callable[[], None]] = []
        self._structure = structure

    def require_usable(self) -> None:
        """Raise RuntimeError unless the model may compute."""
        if self.load_error is not None:
            raise RuntimeError(self.load_error)
        while self.first_forward_checks:
            self.first_forward_checks[0]()
            del self.first_forward_checks[0]
        self._structure.check_for_changes()
