"""Waits of streams and of the host, by the place in layerzero that asks for them. A run may leave out one place."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import layerzero

_PACKAGE = str(Path(layerzero.__file__).parent) + "/"
# Methods that make a stream or the host wait. torch's `wait_stream` calls `wait_event`.
CUDA_WAITS = ((torch.cuda.Stream, "wait_event"), (torch.cuda.Event, "synchronize"))


def place() -> str | None:
    """Return the innermost function of layerzero on the call stack and, if it is in device/, its caller outside.

    Return None if layerzero is not on the stack.
    """
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            path = code.co_filename.removeprefix(_PACKAGE)
            if not found or not path.startswith("device/"):
                found.append(f"{path}:{frame.f_lineno} {code.co_qualname}")
                if not path.startswith("device/"):
                    break
        frame = frame.f_back
    return " from ".join(found) or None


@contextlib.contextmanager
def observed_waits(
    methods: Sequence[tuple[type, str]] = CUDA_WAITS, *, without: str | None = None
) -> Iterator[Counter[str]]:
    """Count the waits in the context by place, and leave out those of the place `without`."""
    found: Counter[str] = Counter()

    def counted(wait: Any) -> Any:
        def method(*args: Any) -> Any:
            where = place()
            if where is not None:
                found[where] += 1
            return None if where is not None and where == without else wait(*args)

        return method

    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield found
