"""Provide the memory of a gradient buffer: persistent, from a pool, inside another buffer, or on the host.

See gradient_offload.py for accumulators that are kept in host memory.

[Note: The final gradient inside the ZeRO-3 gradient shard]
Once hop 2 has sent the ZeRO-3 gradient shard, its contents are not needed until the next backward pass. Therefore the
final gradient needs no separate memory. It is stored in this rank's part of the ZeRO-3 gradient shard, and ``.grad`` is
a view of that part.

A final gradient is still needed if zero_grad has not been called. The final gradient is a mean over all ranks, but new
gradients are not. Before new gradients are added to the same memory, the final gradient is therefore copied to separate
memory. It is copied back when the ZeRO-3 gradient shard has been sent. The separate memory is allocated on the first
copy and kept from then on. The memory of a model therefore depends on the program and not on timing. ``.grad`` is
always a view of this rank's part of the ZeRO-3 gradient shard. Reads of ``.grad`` raise while that part contains other
gradients, that is, during backward passes and after a backward pass inside no_sync. A loop that sets gradients to None
before the next backward pass needs no copies.

The final gradient has separate memory in three cases:

- The accumulators are in slabs, which are not persistent.
- Full gradients are accumulated. Kernels may write to them (``main_grad``) while ``.grad`` is read.
- No ZeRO-3 gradient shard exists between backward passes.

With `accumulation_dtype`, the ZeRO-3 gradient shard that exists between backward passes is a bf16 accumulator; see
[Note: Separate accumulators] in reduction_spec.py. The final gradient keeps its dtype, and uses the first bytes of the
accumulator if the accumulator is large enough. This is the case if all ZeRO-1 shards have equal sizes. Only backward
passes inside no_sync then set the final gradient aside, because other reductions do not write to the accumulator.

[Note: Optimizer on the host]
If `Offload.optimizer` is True, masters and final gradients (``.grad``) are in pinned host memory. The optimizer runs on
the CPU, and its state is in host memory. A final gradient is accumulated in scratch memory on the device and copied to
the host when it is complete. A refresh copies updated rows to the ZeRO-3 shard on the device and casts them. Both
copies overlap with other work, and streams wait for them. Before the host reads a gradient, it waits for the copy. The
host may write to a master while the master is being copied to the device, because each write is followed by another
refresh.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.comm.transport.base import SendBuffer
from layerzero.device.accelerator import HostDeviceCopies, StreamEvent, StreamUses
from layerzero.device.buffer_pools import BufferPool, DeviceBufferPool


class LentBuffer(NamedTuple):
    """Buffer that a collective sends, and the function to call when it has been sent."""

    tensor: Tensor
    give_back: Callable[[], object]


class GradientStorage(ABC):
    """Flat memory of one gradient buffer, 1-D [numel].

    Attributes:
        lasting: True if an opened tensor stays valid when other storages are opened.
        fixed: True if :meth:`open` always returns the same tensor.
        returns_memory: True if the memory is returned to the allocator after a pass.
    """

    lasting = True
    fixed = False
    returns_memory = False

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated on the device for this storage alone."""
        return 0

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> LentBuffer:
        """Lend the contents, in the dtype `wire`, to a collective. They are discarded when the buffer is given back.

        Args:
            wire: dtype in which the contents are sent.
            pool: pool that provides a scratch buffer if the dtypes differ.
            copies: if True, use a scratch buffer even if the dtypes are equal.
        """
        tensor = self.open(keep=True)
        if tensor.dtype != wire or copies:
            tensor = pool.acquire(self.numel, wire).copy_(tensor)
            self.close(keep=False)
            return LentBuffer(tensor, partial(pool.release, tensor))
        return LentBuffer(tensor, partial(self.close, keep=False))

    @abstractmethod
    def open(self, *, keep: bool) -> Tensor:
        """Open the storage for reading and writing, and return its memory.

        If `keep` is False, the contents are unspecified.
        """

    def stored_tensor(self) -> Tensor:
        """Return the memory that stores the contents between passes."""
        return self.open(keep=True)

    @property
    def host_bytes(self) -> int:
        """Number of bytes currently allocated in host memory, if the device is not the CPU."""
        return 0

    def wait_for_host(self) -> None:  # noqa: B027 - most storages are on the device
        """Wait until the host can read the contents that the last :meth:`close` has preserved."""

    def prefetch(self, *, keep: bool) -> None:  # noqa: B027 - most storages need no preparation
        """Prepare the memory for an upcoming call of :meth:`open`."""

    def close(self, *, keep: bool) -> None:  # noqa: B027
        """End the use of the memory that :meth:`open` returned. If `keep` is False, the contents become unspecified."""

    def set_aside(self, *, keep: bool) -> None:  # noqa: B027
        """Move out of memory that is shared with another storage. The contents are preserved only if `keep` is True."""

    def restore(self, *, keep: bool) -> None:  # noqa: B027
        """Move back into the memory that is shared with another storage.

        The contents are preserved only if `keep` is True.
        """


class PersistentStorage(GradientStorage):
    """Storage with separate memory: a send buffer of the transport, or plain memory of the device."""

    def __init__(self, buffer: SendBuffer) -> None:
        super().__init__(buffer.numel, buffer.dtype)
        self.fixed = not buffer.read_in_place  # if peers read in place, each write may have to wait
        self._buffer = buffer

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def open(self, *, keep: bool) -> Tensor:
        return self._buffer.open()

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> LentBuffer:
        """Lend the contents to a collective, as in the base class, unless peers read the memory in place.

        If they do, the tensor keeps the dtype of the storage, and the peers round to `wire`.
        """
        if self._buffer.read_in_place:
            return LentBuffer(self.open(keep=True), lambda: None)
        return super().lend_send_buffer(wire, pool, copies=copies)


class PooledStorage(GradientStorage):
    """Storage that acquires memory from a pool in :meth:`open` and releases it in ``close(keep=False)``."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: BufferPool) -> None:
        super().__init__(numel, dtype)
        self._pool = pool
        self.returns_memory = isinstance(pool, DeviceBufferPool)
        self._tensor: Tensor | None = None

    def open(self, *, keep: bool) -> Tensor:
        if self._tensor is None:
            self._tensor = self._pool.acquire(self.numel, self.dtype)
        return self._tensor

    def lend_send_buffer(self, wire: torch.dtype, pool: BufferPool, *, copies: bool = False) -> LentBuffer:
        if self.dtype != wire:
            return super().lend_send_buffer(wire, pool)
        tensor = self.open(keep=True)
        self._tensor = None  # gradients that arrive during the collective are written to another buffer
        return LentBuffer(tensor, partial(self._pool.release, tensor))

    def close(self, *, keep: bool) -> None:
        if not keep and self._tensor is not None:
            tensor, self._tensor = self._tensor, None
            self._pool.release(tensor)


class AliasState(enum.Enum):
    """State of an :class:`AliasedStorage`: in place, without contents (VACATED), or in separate memory (SET_ASIDE).

    :meth:`set_aside` changes IN_PLACE to SET_ASIDE if the contents are kept, otherwise to VACATED. :meth:`open` changes
    VACATED to SET_ASIDE. :meth:`restore` changes any state to IN_PLACE.
    """

    IN_PLACE = "in place"
    VACATED = "vacated"
    SET_ASIDE = "set aside"


class AliasedStorage(GradientStorage):
    """Storage that is a part of another storage. While the other storage accumulates, the contents are set aside.

    See [Note: The final gradient inside the ZeRO-3 gradient shard].

    Args:
        around: the other storage.
        part: elements of the other storage that this storage uses.
        dtype: dtype of this storage. If it is None, both storages have the same dtype.
    """

    def __init__(self, around: GradientStorage, part: slice, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or around.dtype
        super().__init__((part.stop - part.start) * around.dtype.itemsize // dtype.itemsize, dtype)
        assert around.lasting
        self.state = AliasState.IN_PLACE
        self._around = around
        self._part = part
        self._copy: Tensor | None = None  # [numel], allocated on the first copy

    @property
    def nbytes(self) -> int:
        return 0 if self._copy is None else self._copy.untyped_storage().nbytes()

    def stored_tensor(self) -> Tensor:
        return self._around.open(keep=True)[self._part].view(self.dtype)

    def open(self, *, keep: bool) -> Tensor:
        if self.state is AliasState.IN_PLACE:
            return self.stored_tensor()
        if self._copy is None:
            self._copy = torch.empty_like(self.stored_tensor())
        self.state = AliasState.SET_ASIDE
        return self._copy

    def set_aside(self, *, keep: bool) -> None:
        if self.state is not AliasState.IN_PLACE:
            return
        self.state = AliasState.VACATED
        if keep:
            self.open(keep=False).copy_(self.stored_tensor())

    def restore(self, *, keep: bool) -> None:
        if keep and self.state is AliasState.SET_ASIDE:
            assert self._copy is not None
            self.stored_tensor().copy_(self._copy)
        self.state = AliasState.IN_PLACE


class StagedStorage(GradientStorage):
    """Storage whose contents are kept on the host, and are on the device while the storage is open.

    :meth:`close` does not wait for the copy to the host. Its event guards the memory on both sides.
    """

    lasting = False

    def __init__(self, numel: int, dtype: torch.dtype, transfers: HostDeviceCopies) -> None:
        super().__init__(numel, dtype)
        self._transfers = transfers
        self._host: Tensor | None = None  # [numel], allocated on the first copy to the host
        self._stored: StreamEvent = None  # event of the last copy to the host
        self._device: Tensor | None = None  # [numel], while the storage is open
        self._awaited: Sequence[StreamEvent] = ()  # events for which each use of `_device` must wait
        self._stream_uses = StreamUses(transfers.module)

    @abstractmethod
    def _acquire(self) -> tuple[Tensor, Sequence[StreamEvent]]:
        """Return memory on the device, [numel], and the events after which it may be used."""

    @abstractmethod
    def _release(self, device: Tensor, after: Sequence[StreamEvent]) -> None:
        """Release the memory of :meth:`_acquire`. It may be reused after the events in `after`."""

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def stored_tensor(self) -> Tensor:
        if self._host is None:
            self._host = self._transfers.host_buffer(self.numel, self.dtype)
        return self._host

    def open(self, *, keep: bool) -> Tensor:
        device = self._fetch(keep=keep)
        for mark in self._awaited:
            self._transfers.wait(mark)
        self._stream_uses.record_use()
        return device

    def _fetch(self, *, keep: bool) -> Tensor:
        """Return memory on the device, which may be used after the events in `_awaited`."""
        if self._device is None:
            self._device, self._awaited = self._acquire()
            if keep:
                assert self._host is not None, "contents must be kept, but were never stored"
                after = (self._stored, *self._awaited)
                self._awaited = (self._transfers.copy(self._device, self._host, to_host=False, after=after),)
        return self._device

    def close(self, *, keep: bool) -> None:
        if self._device is None:
            return
        device, self._device = self._device, None
        self._stream_uses.record_use()  # a collective that reads the memory may end on another stream than its launch
        after: Sequence[StreamEvent] = (*self._awaited, *self._stream_uses.record_events())
        if keep:
            self._stored = self._transfers.copy(self.stored_tensor(), device, to_host=True, after=after)
            after = (self._stored,)
        self._release(device, after)

    def wait_for_host(self) -> None:
        stored, self._stored = self._stored, None
        self._transfers.finish(stored)


class HostStorage(StagedStorage):
    """Final gradient that is kept on the host, and computed in a scratch buffer; see [Note: Optimizer on the host]."""

    def __init__(self, numel: int, dtype: torch.dtype, transfers: HostDeviceCopies, pool: BufferPool) -> None:
        super().__init__(numel, dtype, transfers)
        self._pool = pool
        self.returns_memory = isinstance(pool, DeviceBufferPool)

    def _acquire(self) -> tuple[Tensor, Sequence[StreamEvent]]:
        return self._pool.acquire(self.numel, self.dtype), ()

    def _release(self, device: Tensor, after: Sequence[StreamEvent]) -> None:
        for mark in after:
            self._transfers.wait(mark)
        self._pool.release(device)
