"""Lines on standard error about long work."""

from __future__ import annotations

import math
import sys
import threading
import time
from contextlib import suppress

_INTERVAL = 10.0  # seconds


class Progress:
    """Context manager for long work. It prints nothing in the first ten seconds, and then a line every ten seconds.

    On a terminal, a line replaces the previous one, and the last one is erased on exit. Work in threads other than the
    main thread is not shown.
    """

    def __init__(self, work: str, *, shown: bool = True) -> None:
        self.work = work
        shown = shown and threading.current_thread() is threading.main_thread()
        self._due = time.monotonic() + _INTERVAL if shown else math.inf
        self._erase = ""

    def update(self, state: str) -> None:
        """Print the work and its state if the line is due."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _INTERVAL
        with suppress(OSError, ValueError):  # the work goes on if standard error is closed
            self._erase = "\r\x1b[K" if sys.stderr.isatty() else ""
            end = "" if self._erase else "\n"
            print(f"{self._erase}layerzero: {self.work}: {state}", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._erase:
            with suppress(OSError, ValueError):
                print(self._erase, end="", file=sys.stderr, flush=True)
