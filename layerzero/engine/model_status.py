"""Check that a sharded model may run a forward or backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from layerzero.comm.process_groups import CLOSED
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.module_checks import StructureCheck
from layerzero.engine.param_view import ParamView

__all__ = ["Closable", "ModelStatus"]


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
