"""A third-party backend: gloo under another name, which is never asked whether an exchange is done.

Registered like any backend that torch does not know. It stands in for a device's library in what matters here: it is
not called gloo, it has no `options`, and which exchanges are done already differs between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.support import wrapped_gloo

__all__ = ["NAME", "register"]

NAME = "late"


def register() -> None:
    """Make the backend known to torch in this process, as often as is asked."""
    wrapped_gloo.register(_Group)


class _Work(dist.Work):
    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def is_completed(self) -> bool:
        raise AssertionError("what is launched next must not depend on whether an exchange is done")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._inner.wait()

    def get_future(self) -> Any:
        raise RuntimeError("this backend has no futures")


class _Group(wrapped_gloo.WrappedGloo):
    NAME = NAME

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> _Work:
        return _Work(run())
