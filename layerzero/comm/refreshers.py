"""Describe refreshes that send encoded messages instead of weights; the add-on ``layerzero.slow_links`` sends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerzero.device.buffer_pools import Size

COMPARE_EVERY = 50  # refreshes of a handle between two comparisons of digests
REFRESHES_IN_FLIGHT = 2  # encoded refreshes that have buffers at the same time: one is encoded, one sent and decoded


class PendingRefresh(Protocol):
    """Refresh in flight: a :class:`~layerzero.comm.collectives.PendingCollective`, or an encoded refresh."""

    def done(self) -> bool: ...

    def wait(self, *, off_main_thread: bool = False, may_wait: Callable[[], bool] = ...) -> None:
        """Wait until all parts are in the ZeRO-3 shard. See `PendingCollective.wait` for the arguments."""


@dataclass(frozen=True)
class RefreshInput:
    """Tensors and settings of one refresh. The masters must not change before the refresh has completed."""

    name: str  # name of the unit, for messages and traces
    shard: Tensor  # ZeRO-3 shard, 1-D, in a 16-bit dtype
    sizes: list[int]  # number of elements in the part of each replica
    cast: Callable[[Tensor], None]  # writes the masters of this rank's part to a 1-D tensor in the dtype of `shard`
    in_full: bool  # True if this rank asks for a full refresh
    compares: bool  # True if the ranks compare digests; the same on all ranks
    # Last change of each weight of the ZeRO-3 shard, int16, equal on all replicas; None if the codec does not predict.
    last_change: Tensor | None = None


class EncodedRefresher(Protocol):
    """Object that sends the refreshes of one mesh as encoded messages.

    Attributes:
        lossless: True if compute weights equal the cast masters after each refresh.
        predicts: True if refreshes need the last change of each weight.
        on_device: True if refreshes run on a stream of a device, and not in threads. The host then knows the size of
            each message in advance. It sends full refreshes itself, which all ranks must request alike.
    """

    lossless: bool
    predicts: bool
    on_device: bool

    def launch(self, given: RefreshInput) -> PendingRefresh:
        """Start a refresh. All ranks along the replica axis must call this method for the same units in one order."""

    def close(self) -> None:
        """End background work."""


def refresh_buffer_sizes(own: int, zero3: int, dtype: torch.dtype) -> list[Size]:
    """Return the sizes of the buffers of an encoded refresh: new weights, this rank's message, and all messages.

    Args:
        own: number of elements of this rank's part.
        zero3: number of elements of the ZeRO-3 shard.
    """
    return [(own, dtype), (own * dtype.itemsize, torch.uint8), (zero3 * dtype.itemsize, torch.uint8)]
