"""Delays in the engine's threads, so that the program always has to wait for them, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from layerzero.device.streams import ThreadStream

__all__ = ["late_threads"]


@contextmanager
def late_threads(seconds: float) -> Iterator[None]:
    """Delay every operation of a thread by `seconds`."""
    run = ThreadStream.run

    def late(stream: ThreadStream, operation: Callable[[], Any]) -> None:
        run(stream, lambda: time.sleep(seconds))
        run(stream, operation)

    with mock.patch.object(ThreadStream, "run", late):
        yield
