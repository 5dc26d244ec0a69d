"""Third-party backend: gloo under another name, which fails if the engine asks whether a collective is done.

It is registered like any backend that torch does not know. In three ways it acts like a device's library: it is not
called gloo, it has no `options`, and the collectives that are done at some time differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.support import wrapped_gloo

NAME = "late"


def register() -> None:
    """Register the backend in this process; later calls have no effect."""
    wrapped_gloo.register(_Group)


class _Work(dist.Work):
    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def is_completed(self) -> bool:
        raise AssertionError("what is launched next must not depend on whether a collective is done")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._inner.wait()

    def get_future(self) -> Any:
        raise RuntimeError("this backend has no futures")


class _Group(wrapped_gloo.WrappedGloo):
    NAME = NAME

    def launch(self, run: Callable[[], dist.Work], output: Tensor, given: Tensor) -> _Work:
        return _Work(run())
