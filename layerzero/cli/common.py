"""Functions that several commands use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import typer

from layerzero.checkpoint.extend import escape_unprintable
from layerzero.extend import addon, load_named


def exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print a message to standard error, and exit."""
    typer.echo(f"layerzero: {message}", err=True)
    raise typer.Exit(status)


@contextmanager
def readable_failures(*errors: type[Exception], status: int) -> Iterator[None]:
    """Context manager that prints errors in one line without a traceback, and exits."""
    caught: tuple[type[Exception], ...] = (OSError, ValueError, *errors)
    try:
        yield
    except caught as error:
        exit_with_error(escape_unprintable(str(error)), status)


def import_callable(target: str, what: str) -> Callable[..., Any]:
    """Import the callable ``package.module:name``. If that fails, exit with status 2."""
    if os.getcwd() not in sys.path:  # `python -m layerzero` adds it, but the command `layerzero` does not
        sys.path.insert(0, os.getcwd())
    try:
        return load_named(target, what)
    except ValueError as error:
        exit_with_error(str(error))


def parse_dtype(option: str, name: str | None) -> torch.dtype | None:
    """Return the dtype with a name such as bf16. If there is no such dtype, exit with status 2."""
    if name is None:
        return None
    with readable_failures(status=2):
        dtype: torch.dtype = addon("yaml").dtype_named(option, name)
        return dtype
