"""What a sharded model can be told through methods of its own, as models under torch's wrappers can."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from layerzero.engine.hooks import runtime_of

__all__ = ["bind_methods", "no_sync", "set_requires_gradient_sync"]

_LOG = logging.getLogger("layerzero")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Only accumulate: backwards inside exchange nothing between nodes, and leave ``.grad`` unfinished.

    What counts is where ``backward()`` runs. The next backward outside, or ``optimizer.step()``, reduces all that has
    been accumulated. With ``accumulation="sharded"`` gradients are still reduced inside the node.

    Example::

        for i, batch in enumerate(batches):
            with layerzero.no_sync(model) if i + 1 < len(batches) else contextlib.nullcontext():
                (model(batch) / len(batches)).backward()

    A sharded model has it as a method, too, as under DDP: ``with model.no_sync():``.
    """
    runtime = runtime_of(model)
    before, runtime.reduces = runtime.reduces, False
    try:
        yield
    finally:
        runtime.reduces = before


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Whether the backwards from here on reduce; False is as :func:`no_sync`, until it is set again.

    Bound to a sharded model, ``model.set_requires_gradient_sync(is_last)``, for loops that are written for FSDP2.
    """
    runtime_of(model).reduces = bool(requires_gradient_sync)


def bind_methods(model: nn.Module) -> None:
    """Give the model ``no_sync`` and ``set_requires_gradient_sync``, for loops that look for them.

    An attribute of that name that it has already stays, and the log says so.
    """
    for function in (no_sync, set_requires_gradient_sync):
        name = function.__name__
        if not hasattr(model, name):
            setattr(model, name, _method(function, model))
        else:
            _LOG.warning(
                "layerzero: the model has a %s of its own, which is left alone; a loop that calls it does not reach "
                "layerzero. Call layerzero.no_sync(model)",
                name,
            )


def _method(function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """As a bound method, which would keep the model for as long as the garbage collector does not run."""
    weak = weakref.ref(model)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(weak(), *args, **kwargs)

    return method
