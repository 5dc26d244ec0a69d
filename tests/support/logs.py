"""Capture of the package's log messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that are logged in this process inside the context."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener, log = Listener(), logging.getLogger("layerzero")
    log.addHandler(listener)
    try:
        yield lines
    finally:
        log.removeHandler(listener)
