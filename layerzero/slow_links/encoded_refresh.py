"""Refresh the compute weights of all replicas with encoded messages, in background threads or on a device.

[Note: Encoded refreshes]
Before a refresh, all replicas have the same compute weights. Each rank therefore sends only the differences of its part
to the previous weights, and the other ranks add them in place. If the codec is lossy, the sender also stores the
weights that the receivers decode, so that all replicas stay equal. On CPUs, each mesh has two threads. The first thread
casts and encodes the masters, exchanges the message sizes, and launches the all-gather of the messages. The second
thread waits for the all-gather and decodes the messages. Encoding, communication and decoding of different handles
therefore overlap with each other and with the main thread. Both threads process the refreshes in launch order, which is
the same on all ranks, and use a communicator that no other code uses.

With the message size, each rank sends a flag that requests a full refresh. If any rank sets the flag, all ranks send
their cast masters without encoding. A rank requests a full refresh for its first refresh, when replicas may have
different weights, and after a load, a write by the user, a change of shard boundaries or a failed step. A full refresh
also resets the last changes, from which a codec may predict the next ones.

A flipped bit in the previous weights or the last changes of a replica would persist in its weights. Therefore, in every
`COMPARE_EVERY`-th refresh of a handle, each rank also sends a digest of its previous ZeRO-3 shard. If the digests
differ, waiting for the refresh raises an error on all ranks that received them.

[Note: Encoded refreshes on a device]
The host must not wait for a size, a flag or a digest, so messages have fixed sizes, and refreshes are sent in full if
all ranks know it: without a codec, by the core. Every `COMPARE_EVERY`-th refresh is one of them, which removes flipped
bits. The stream of the communicator casts the masters, encodes this rank's part, gathers the messages, and decodes all
of them, including its own. The computation and later collectives wait for the whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from layerzero.extend import (
    COMPARE_EVERY,
    REFRESHES_IN_FLIGHT,
    BufferPool,
    Collective,
    Communicator,
    DeferredCollectiveError,
    DifferenceCodec,
    EncodedRefresher,
    LaunchedCollective,
    MeshInfo,
    PendingCollective,
    PendingRefresh,
    RefreshInput,
    ThreadStream,
    all_gather,
    all_gather_small,
    digest,
    refresh_buffer_sizes,
)
from layerzero.slow_links.lossless_differences import LosslessDifferences

_PATIENCE = 4.0  # seconds to complete refreshes while the process exits; less than the patience of streams.py


class _Pending(PendingRefresh):
    """Refresh in flight. It is complete when all parts are in the ZeRO-3 shard."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self.finished: Future[None] = Future()
        self.launched: list[LaunchedCollective] = []  # the collective of the weights, once it is launched
        self._comm = comm
        self._name = name

    def done(self) -> bool:
        return self.finished.done()

    def wait(self, *, off_main_thread: bool = False, may_wait: Callable[[], bool] = lambda: True) -> None:
        """Wait for the refresh.

        Raises:
            RuntimeError: a collective has failed, a message is damaged, or the weights of the replicas differ.
        """
        if off_main_thread:
            self.finished.result()
            return
        try:
            self.finished.result()
        except DeferredCollectiveError as error:
            raise error.explain(error.error) from error.error


@dataclass
class _RefreshState:
    """State of one encoded refresh in the background threads: its input, what callers wait for, and its messages."""

    given: RefreshInput
    pending: _Pending
    headers: list[list[int]] = field(default_factory=list)  # size, request for a full refresh, and digest of each rank
    received: Tensor | None = None  # buffer of the messages of all replicas
    works: PendingCollective | None = None


@runtime_checkable
class FixedSizeCodec(DifferenceCodec, Protocol):
    """Codec whose messages have known sizes, and whose methods only enqueue operations on a device."""

    def message_bytes(self, numel: int) -> int:
        """Return the size of a message for `numel` weights, an even number of bytes."""

    def write(self, old: Tensor, new: Tensor, message: Tensor) -> None:
        """Write the message for `new`, 1-D [n], to `message`. `old` contains the previous weights."""

    def decode_parts(self, messages: Tensor, weights: Tensor) -> None:
        """Decode each row of `messages`, uint8 ``[m, size]``, and update the same row of `weights`, ``[m, n]``."""


class DeviceRefresher(EncodedRefresher):
    """Object that sends the refreshes of one mesh on a device; see [Note: Encoded refreshes on a device].

    Args:
        comm: communicator along the replica axis whose collectives run on a stream.
        codec: codec of the differences.
    """

    on_device = True

    def __init__(self, comm: Communicator, codec: FixedSizeCodec) -> None:
        self.lossless = codec.lossless
        self.predicts = codec.predicts
        self._comm = comm
        self._codec = codec

    def launch(self, given: RefreshInput) -> PendingRefresh:
        comm, codec, device = self._comm, self._codec, given.shard.device
        nbytes = [codec.message_bytes(numel) for numel in given.sizes]
        received = torch.empty(sum(nbytes), dtype=torch.uint8, device=device)  # with this rank's message
        message, own = (torch.split(*each)[comm.rank] for each in ((received, nbytes), (given.shard, given.sizes)))

        def encode() -> None:
            new = torch.empty_like(own)
            given.cast(new)
            codec.write(own, new, message)

        def decode() -> None:
            start = start_byte = 0
            for numel, group in groupby(given.sizes):
                shape = len(list(group)), numel
                end, end_byte = start + shape[0] * numel, start_byte + shape[0] * codec.message_bytes(numel)
                if numel:
                    messages = received[start_byte:end_byte].view(shape[0], -1)
                    codec.decode_parts(messages, given.shard[start:end].view(shape))
                start, start_byte = end, end_byte
            comm.stream.keep_until_done(given.shard)

        parts = nbytes if len(set(nbytes)) > 1 else None
        return all_gather(
            comm, Collective.REFRESH, received, message, name=given.name, parts=parts, encode=encode, decode=decode
        )

    def close(self) -> None:
        """Do nothing: there are no threads."""


class DifferenceRefresher(EncodedRefresher):
    """Object that sends the refreshes of one mesh as encoded differences; see [Note: Encoded refreshes].

    Args:
        comm: gloo communicator along the replica axis that only this object uses.
        codec: codec of the differences.
        pool: pool of host buffers.
    """

    on_device = False

    def __init__(self, comm: Communicator, codec: DifferenceCodec, pool: BufferPool) -> None:
        self.lossless = codec.lossless
        self.predicts = codec.predicts
        self._comm = comm
        self._codec = codec
        self._pool = pool
        self._encoding, self._decoding = ThreadStream("refresh encoding"), ThreadStream("refresh decoding")
        self._free = threading.Semaphore(REFRESHES_IN_FLIGHT)
        self._failure: BaseException | None = None  # first error; this rank's collectives no longer match its peers'
        self._deadline: float | None = None  # for refreshes in flight while the process exits
        for stream in (self._encoding, self._decoding):
            stream.end_with(self)

    def launch(self, given: RefreshInput) -> PendingRefresh:
        refresh = _RefreshState(given, _Pending(self._comm, given.name))
        self._comm.held_group.log.track(refresh.pending)
        self._decoding.start()
        self._encoding.run(partial(self._start, refresh))
        return refresh.pending

    def close(self) -> None:
        """End the threads after their pending work."""
        for stream in (self._encoding, self._decoding):
            stream.thread.end()

    def _start(self, refresh: _RefreshState) -> None:
        self._free.acquire()
        if self._try_operation(refresh, self._send):
            self._decoding.run(partial(self._finish, refresh))
        else:
            self._free.release()

    def _finish(self, refresh: _RefreshState) -> None:
        if self._try_operation(refresh, self._receive):
            refresh.pending.finished.set_result(None)
        self._free.release()

    def _try_operation(self, refresh: _RefreshState, operation: Callable[[_RefreshState], None]) -> bool:
        """Run an operation and return whether it succeeded. The program raises the error when it waits."""
        try:
            if self._failure is not None:
                raise self._failure
            operation(refresh)
        except BaseException as error:
            self._failure = self._failure or error
            refresh.pending.finished.set_exception(error)
            return False
        return True

    def _send(self, refresh: _RefreshState) -> None:
        """Update and encode this rank's part, exchange message sizes and digests, and launch the gather of messages."""
        inputs, rank = refresh.given, self._comm.rank
        own_part = torch.split(inputs.shard, inputs.sizes)[rank]
        own_change = None if inputs.last_change is None else torch.split(inputs.last_change, inputs.sizes)[rank]
        sizes = refresh_buffer_sizes(own_part.numel(), inputs.shard.numel(), own_part.dtype)
        new, message, refresh.received = (self._pool.acquire(*size) for size in sizes)
        inputs.cast(new)
        size = own_part.nbytes if inputs.in_full else self._codec.encode(own_part, new, message, own_change)
        old_digest = int(digest(inputs.shard), 16) - 2**63 if inputs.compares and not inputs.in_full else 0
        header = all_gather_small(
            self._comm,
            Collective.REFRESH_SIZES,
            torch.tensor([size, inputs.in_full, old_digest], dtype=torch.int64),
            name=inputs.name,
        )
        self._wait(header.work)
        refresh.headers = header.said.tolist()
        sends_full = any(requests_full for _, requests_full, _ in refresh.headers)
        if sends_full:
            inputs.cast(new)  # a codec that is not lossless has changed the weights
            if own_change is not None:
                own_change.zero_()
            refresh.headers = [[numel * own_part.itemsize, 1, 0] for numel in inputs.sizes]
        self._require_equal(refresh)
        own_part.copy_(new)
        nbytes = [each[0] for each in refresh.headers]
        sent = new.view(torch.uint8) if sends_full else message[:size]
        received = refresh.received[: sum(nbytes)]
        refresh.works = all_gather(self._comm, Collective.REFRESH, received, sent, name=inputs.name, parts=nbytes)
        refresh.pending.launched.append(refresh.works.launched)
        for buffer in (new, message):  # the launch has copied the message
            self._pool.release(buffer)

    def _require_equal(self, refresh: _RefreshState) -> None:
        """Raise RuntimeError if the digests of the previous weights differ."""
        if len({old_digest for _, _, old_digest in refresh.headers}) > 1:
            digests = ", ".join(
                f"{old_digest + 2**63:x} on rank {rank}"
                for rank, (_, _, old_digest) in zip(self._comm.held_group.ranks, refresh.headers, strict=True)
            )
            raise RuntimeError(
                f"layerzero: the compute weights of {refresh.given.name!r} differ between replicas: their digests are "
                f"{digests}. A bit has changed in memory since the last comparison, at most {COMPARE_EVERY} refreshes "
                "ago, and refreshes with differences would keep it. Resume from an earlier checkpoint, and test the "
                "memory of these machines"
            )

    def _receive(self, refresh: _RefreshState) -> None:
        """Wait for the messages and decode them."""
        assert refresh.works is not None and refresh.received is not None
        self._wait(refresh.works)
        nbytes = [each[0] for each in refresh.headers]
        messages = torch.split(refresh.received[: sum(nbytes)], nbytes)
        shard, last_change, sizes = refresh.given.shard, refresh.given.last_change, refresh.given.sizes
        parts = torch.split(shard, sizes)
        changes = [None] * len(parts) if last_change is None else torch.split(last_change, sizes)
        for rank, (message, part, change) in enumerate(zip(messages, parts, changes, strict=True)):
            if rank == self._comm.rank:
                continue
            try:
                self._codec.decode(message, part, change)
            except ValueError as error:
                raise RuntimeError(
                    f"layerzero: the refresh of {refresh.given.name!r} received a damaged message from rank "
                    f"{self._comm.held_group.ranks[rank]}: {error}. Resume from an earlier checkpoint, and test the "
                    "memory and the network of these machines"
                ) from error
        self._pool.release(refresh.received)

    def _wait(self, works: PendingCollective) -> None:
        works.wait(off_main_thread=True, may_wait=self._may_wait)

    def _may_wait(self) -> bool:
        if threading.main_thread().is_alive():
            return True
        self._deadline = self._deadline or time.monotonic() + _PATIENCE
        return time.monotonic() <= self._deadline


def make_refresher(mesh_info: MeshInfo, codec: str | DifferenceCodec, pool: BufferPool) -> EncodedRefresher:
    """Return the refresher of a mesh. `codec` may also be ``"lossless"``.

    Raises:
        ValueError: the codec does not support the device or the backend.
    """
    chosen = LosslessDifferences.best() if isinstance(codec, str) else codec
    comm, device = mesh_info.replica_comm, mesh_info.device.type
    if comm.uses_streams and isinstance(chosen, FixedSizeCodec):
        return DeviceRefresher(comm, chosen)
    if comm.uses_streams or not (comm.is_gloo and device == "cpu"):
        raise ValueError(
            f"Codecs.refresh={codec!r} is not supported on {device} with the backends {comm.held_group.backends}. Use "
            "layerzero.Int4Difference() with NCCL, or compute on CPUs with gloo, or leave refresh out"
        )
    return DifferenceRefresher(mesh_info.new_refresh_comm(), chosen, pool)
