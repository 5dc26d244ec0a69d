"""Names on which add-ons are built.

An add-on imports from the core only public names of ``layerzero`` and the names of this module.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from layerzero.comm.collectives import PendingCollective
from layerzero.comm.observers import StepObserver
from layerzero.engine.hooks import get_state
from layerzero.utils.add_ons import ADD_ONS, addon

__all__ = ["ADD_ONS", "PendingCollective", "StepObserver", "addon", "attach", "get_state"]

_T = TypeVar("_T", bound=StepObserver)


def attach(model: nn.Module, observer: _T) -> _T:
    """Attach an observer to a sharded model, and return the observer.

    The model tells the observer of the events of its training steps, reports the observer's memory in
    ``layerzero.memory``, and closes the observer when the model is closed. ``observer.detach()`` ends this.

    Example::

        class Launches(layerzero.extend.StepObserver):
            def launched(self, works):
                print(works.launched.collective.value, works.launched.name)

        layerzero.extend.attach(model, Launches())
    """
    return get_state(model).attach(observer)
