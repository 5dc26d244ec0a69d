"""Delays in the engine's threads, so that the program always has to wait for them, however busy the machine is."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from layerzero.comm.collectives import PendingReduction
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.streams import ThreadStream

_MOST_LATE = 3e-3  # seconds


@contextmanager
def late_threads(seconds: float) -> Iterator[None]:
    """Delay every operation of a thread by `seconds`."""
    run = ThreadStream.run

    def late(stream: ThreadStream, operation: Callable[[], Any]) -> None:
        run(stream, lambda: time.sleep(seconds))
        run(stream, operation)

    with mock.patch.object(ThreadStream, "run", late):
        yield


@contextmanager
def late_reductions(rank: int) -> Iterator[None]:
    """Delay waits and additions at random, and fill receive buffers with NaN.

    Raise AssertionError if a buffer is written while it is sent.
    """
    draw = random.Random(rank)
    init, wait, add = PendingReduction.__init__, PendingReduction.wait, PendingReduction.add_to
    take = BufferPool.acquire
    sent: dict[int, Tensor] = {}  # by collective in flight

    def launch(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        init(pending, *args, **settings)
        sent[id(pending)] = pending.sent.clone()

    def late_wait(pending: PendingReduction, **how: bool) -> None:
        wait(pending, **how)
        time.sleep(draw.random() * _MOST_LATE)
        before = sent.pop(id(pending))
        if not torch.equal(pending.sent.view(torch.uint8), before.view(torch.uint8)):
            raise AssertionError("written while it was sent")

    def late_add(pending: PendingReduction, *args: Any, **settings: Any) -> None:
        time.sleep(draw.random() * _MOST_LATE)
        add(pending, *args, **settings)

    def poisoned(pool: BufferPool, *args: Any) -> Tensor:
        return take(pool, *args).fill_(math.nan)

    with (
        mock.patch.object(PendingReduction, "__init__", launch),
        mock.patch.object(PendingReduction, "wait", late_wait),
        mock.patch.object(PendingReduction, "add_to", late_add),
        mock.patch.object(BufferPool, "acquire", poisoned),
    ):
        yield
