"""Wait for a condition that another thread or rank makes true."""

from __future__ import annotations

import time
from collections.abc import Callable


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within some seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
