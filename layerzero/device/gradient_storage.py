"""Memory of a sum: kept, scratch, or inside the memory of another sum. For slabs see gradient_offload.py.

[Note: The final gradient rests in the node sum]
Once hop 2 has sent a sharded node sum, nothing in it matters until the next backward. The final gradient therefore
needs no memory of its own: it rests in this rank's part of the node sum, which is what ``.grad`` shows.

It must leave before anything else is summed up there, if it is still wanted (no zero_grad since): it is a mean over all
ranks already, and what comes is a part of a sum. It is copied to memory of its own then, and back when the node sum has
been sent. That memory is allocated at the first such copy and kept, so that the memory of a model depends on the
program and not on timing. ``.grad`` always shows the home. It cannot be read while the home holds another sum, which is
during backwards and after a backward inside no_sync. A loop that zeroes gradients before the next backward, to None,
never moves anything.

Sums in slabs have no lasting place on the device, and a whole one may be opened to kernels (``main_grad``) while
``.grad`` is read: beside these, as where nothing waits, the final gradient has memory of its own.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from layerzero.device.buffer_pools import BufferPool

__all__ = ["AliasedStorage", "GradientStorage", "Lease", "PersistentStorage", "PooledStorage", "SendLease"]


class GradientStorage(ABC):
    """Flat memory for one sum, 1-D [numel].

    Attributes:
        lasting: an opened tensor stays valid when other places are opened.
        fixed: every opened tensor is the same one.
        guard: to be held where its memory must not be given to another place between two calls.
    """

    lasting = True
    fixed = False
    guard: AbstractContextManager[object] = nullcontext()

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype
        self._leases = 0

    @property
    def own_numel(self) -> int:
        """Elements of memory that nothing else has, once it has been opened."""
        return self.numel

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its own on the device now."""
        return 0

    @property
    def leased(self) -> bool:
        """An exchange reads it, or will be added to it: it stays where it is."""
        return self._leases > 0

    @property
    def blocked(self) -> bool:
        """It cannot be opened before an exchange that reads another place has ended."""
        return False

    def lease(self) -> Lease:
        """Keep it where it is while an exchange is in flight, which ends what this returns."""
        self._leases += 1
        return Lease(self._end_lease)

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> SendLease:
        """Let an exchange read all of it, as `wire`: in place, or with `copies` from scratch; nothing is to be kept."""
        tensor = self.open(keep=True)
        if tensor.dtype != wire or copies:
            tensor = pool.acquire(self.numel, wire).copy_(tensor)
            self.close(keep=False)
            return SendLease(partial(pool.release, tensor), tensor)
        self._leases += 1
        return SendLease(self._end_loan, tensor)

    def _end_lease(self) -> None:
        self._leases -= 1

    def _end_loan(self) -> None:
        self._leases -= 1
        self.close(keep=False)

    @abstractmethod
    def open(self, *, keep: bool) -> Tensor:
        """The memory, to be read and written now; without `keep` its contents are unspecified."""

    def home(self) -> Tensor:
        """Where it is between passes."""
        return self.open(keep=True)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory now, where the device is another."""
        return 0

    def wait_for_host(self) -> None:  # noqa: B027 - most are where they are computed
        """The host is about to read what was closed: return when it is there."""

    def prefetch(self, *, keep: bool) -> None:  # noqa: B027 - most places are where they are
        """It will be opened soon."""

    def close(self, *, keep: bool) -> None:  # noqa: B027
        """It is not needed for now, and its contents only with `keep`."""

    def set_aside(self, *, keep: bool) -> None:  # noqa: B027
        """Something else is about to be summed up where it rests; its contents are needed with `keep`."""

    def restore(self, *, keep: bool) -> None:  # noqa: B027
        """Where it rests is free again."""


class Lease:
    """Keeps a place where it is; whoever finishes the exchange ends it, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            end()


class SendLease(Lease):
    """A lease of what an exchange reads: `tensor`."""

    def __init__(self, end: Callable[[], None], tensor: Tensor) -> None:
        super().__init__(end)
        self.tensor = tensor


class PersistentStorage(GradientStorage):
    """Memory of its own, from its first use on; it starts with zeros."""

    fixed = True

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(numel, dtype)
        self._device = device
        self._tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.untyped_storage().nbytes()

    def open(self, *, keep: bool) -> Tensor:
        if self._tensor is None:
            self._tensor = torch.zeros(self.numel, dtype=self.dtype, device=self._device)
        return self._tensor


class PooledStorage(GradientStorage):
    """Memory that it takes from a pool when it is opened, and gives back when nothing is to be kept."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: BufferPool) -> None:
        super().__init__(numel, dtype)
        self._pool = pool
        self._tensor: Tensor | None = None

    @property
    def own_numel(self) -> int:
        return 0  # the pool's

    def open(self, *, keep: bool) -> Tensor:
        if self._tensor is None:
            self._tensor = self._pool.acquire(self.numel, self.dtype)
        return self._tensor

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> SendLease:
        if self.dtype != wire:
            return super().lend_send_buffer(wire, pool)
        tensor = self.open(keep=True)
        self._tensor = None  # what comes meanwhile lies elsewhere
        return SendLease(partial(self._pool.release, tensor), tensor)

    def close(self, *, keep: bool) -> None:
        if not keep and self._tensor is not None:
            tensor, self._tensor = self._tensor, None
            self._pool.release(tensor)


class AliasState(enum.Enum):
    """States of an :class:`AliasedStorage`: HOME -> AWAY (nothing to keep) -> ASIDE (in memory of its own) -> HOME."""

    IN_PLACE = "home"
    VACATED = "away"
    SET_ASIDE = "aside"


class AliasedStorage(GradientStorage):
    """A part of another place, which it leaves while something else is summed up there.

    See [Note: The final gradient rests in the node sum].
    """

    def __init__(self, around: GradientStorage, part: slice) -> None:
        super().__init__(part.stop - part.start, around.dtype)
        assert around.lasting
        self.state = AliasState.IN_PLACE
        self._around = around
        self._part = part
        self._aside: Tensor | None = None  # [numel], allocated at the first copy

    @property
    def own_numel(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0 if self._aside is None else self._aside.untyped_storage().nbytes()

    def home(self) -> Tensor:
        return self._around.open(keep=True)[self._part]

    def open(self, *, keep: bool) -> Tensor:
        if self.state is AliasState.IN_PLACE:
            return self.home()
        if self._aside is None:
            self._aside = torch.empty_like(self.home())
        self.state = AliasState.SET_ASIDE
        return self._aside

    def set_aside(self, *, keep: bool) -> None:
        if self.state is not AliasState.IN_PLACE:
            return
        self.state = AliasState.VACATED
        if keep:
            self.open(keep=False).copy_(self.home())

    def restore(self, *, keep: bool) -> None:
        if keep and self.state is AliasState.SET_ASIDE:
            assert self._aside is not None
            self.home().copy_(self._aside)
        self.state = AliasState.IN_PLACE
