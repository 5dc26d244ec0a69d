"""Import callables and classes by names of the form ``package.module:name``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["load_named"]


def load_named(target: str, what: str) -> Callable[..., Any]:
    """Import and return a callable.

    Args:
        target: name of the callable, in the form ``package.module:name``.
        what: description of the callable, for error messages.

    Raises:
        ValueError: the name is malformed, the import fails, or the object is not callable.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{what} must have the form package.module:name, got {target!r}")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{what} {target!r}: module {error.name!r} is not on the import path") from None
        raise ValueError(f"{what} {target!r}: importing {module_name!r} failed: {error}") from None
    except Exception as error:  # raised by the module's own code
        raise ValueError(
            f"{what} {target!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from None
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            raise ValueError(f"{what} {target!r}: {getattr(value, '__name__', module_name)!r} has no {attribute!r}")
        value = getattr(value, attribute)
    if not callable(value):
        raise ValueError(f"{what} {target!r} is not callable: its type is {type(value).__name__}")
    return value  # type: ignore[no-any-return]
