"""Import callables and classes by names of the form ``package.module:name``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any


def load_named(target: str, what: str) -> Callable[..., Any]:
    """Import and return a callable.

    Args:
        target: name of the callable, in the form ``package.module:name``.
        what: description of the callable, for error messages.

    Raises:
        ValueError: the name is malformed, the import fails, or the object is not callable.
    """
    module, _, path = target.partition(":")
    if not (module and path):
        raise ValueError(f"{what} must have the form package.module:name, got {target!r}")
    try:
        value = attrgetter(path)(importlib.import_module(module))
    except Exception as error:  # no such module or attribute, or raised by the module's own code
        raise ValueError(f"{what} {target!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(value):
        raise ValueError(f"{what} {target!r} is not callable: its type is {type(value).__name__}")
    return value  # type: ignore[no-any-return]
