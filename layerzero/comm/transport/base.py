"""Define the interface of transports, which move weights and gradients between the ranks of one ZeRO-3 group.

A :class:`Transport` provides three kinds of memory:

- a :class:`FullBuffer` for the compute weights of each handle, with this rank's ZeRO-3 shard
- `send_scratch`, a pool of scratch buffers from which hop 1 sends
- a :class:`SendBuffer` for each accumulator that hop 1 sends

A transport also runs the reduce-scatter of hop 1 (see [Note: Three extents] in layout/shard_grid.py for the hops).
There are two transports. `process_group` calls all-gather and reduce-scatter of the backend. The add-on `shared_memory`
maps the weights and the sent gradients of all ranks into each rank, which reads them in place. It is used if all ranks
of the ZeRO-3 group compute on CPUs of one machine with gloo, unless it is disabled; see `selection`. The replica axis
always uses process groups. Formulas for memory and traffic depend only on :class:`TransportTraits`.

[Note: Write rounds]
A transport may store the shards of all ranks in memory that the peers may read at any time. Shards are then written in
rounds, which are the same on all ranks. :meth:`Transport.begin_write` begins a round, and has no effect inside a round.
Each write ends with :meth:`FullBuffer.publish`. :meth:`Transport.end_write` ends the round. A round belongs to the
transport, not to a full buffer. A user may write to the masters of one handle on one rank before the other ranks write
to theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.comm.codecs import GatherCodec
from layerzero.comm.collectives import Communicator, PendingCollective, PendingReduction
from layerzero.comm.refreshers import PendingRefresh
from layerzero.device.buffer_pools import BufferPool, Size
from layerzero.device.host_shard import HostShard
from layerzero.device.streams import Waitable
from layerzero.layout.flat_layout import FlatLayout


@dataclass(frozen=True)
class TransportTraits:
    """Properties of a transport that determine memory and traffic."""

    # In hop 1, each rank adds the parts of all ranks in fp32. If False, the backend adds them.
    sums_locally: bool
    # Full buffers always contain the shards of all ranks, and are neither gathered nor freed. Peers read send buffers
    # in place, in the dtype of the gradients, and round to the wire dtype. If False, hop 1 receives into scratch.
    shares_memory: bool = False

    @property
    def name(self) -> str:
        """Name for reports."""
        return "shared_memory" if self.shares_memory else "process_group"


class GatherOptions(NamedTuple):
    """Options for the gathers of a handle. A transport whose full buffers are resident ignores them."""

    codec: GatherCodec | None = None  # None if weights are not encoded
    post_forward_comm: Communicator | None = None  # connects the k ranks that keep post-forward shards, if any
    host_shard: HostShard | None = None  # ZeRO-3 shard in host memory, or None if the shard is on the device


@dataclass(frozen=True)
class BufferDemand:
    """Sizes of the buffers that a model requests from a transport; the same on all ranks of the ZeRO-3 group."""

    full_buffers: tuple[Size, ...]
    send_scratch: Mapping[Size, int]  # number of scratch buffers in use at the same time, by size
    accumulators: tuple[Size, ...]  # sizes of the accumulators that hop 1 sends
    gradients: tuple[Size, ...]  # sizes of the full gradients of all handles, in master dtype


class FullBuffer:
    """Full buffer of one handle, and the ZeRO-3 shard of this rank.

    This class never gathers. Either the shard is the full buffer (S = 1), or an all-gather extension gathers the shard.

    Attributes:
        full: full buffer, 1-D [G], compute dtype. Its storage is empty while the buffer is not allocated.
        shard: ZeRO-3 shard of this rank, 1-D [G / S], compute dtype. Refreshes write to it. The shard may be in host
            memory; see `GatherOptions`.
        read_by_peers: True if peers read `shard` in place. The shard may then be written only in write rounds.
        gather_waits_for_refresh: True if the stream of a gather, instead of the caller, waits for a refresh. See
            [Note: Collectives on streams of the engine] in comm/collectives.py.
        full_bytes: size of `full` in bytes while it is gathered, or 0 if `full` has no memory apart from the shard.
        encoded_bytes: size of the encoded shards in bytes during a gather.
        post_forward_bytes: size of the post-forward shard in bytes while the shard is kept.
    """

    read_by_peers = False
    gather_waits_for_refresh = False

    def __init__(
        self, full: Tensor, shard: Tensor, *, full_bytes: int = 0, encoded_bytes: int = 0, post_forward_bytes: int = 0
    ) -> None:
        self.full = full
        self.shard = shard
        self.full_bytes = full_bytes
        self.encoded_bytes = encoded_bytes
        self.post_forward_bytes = post_forward_bytes

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated, in addition to the shard."""
        return 0

    @property
    def has_post_forward_shard(self) -> bool:
        """True if the next gather uses post-forward shards."""
        return False

    def gather(self, *, name: str, after: PendingCollective | None = None) -> Waitable | None:
        """Start filling `full` with the shards of all ranks. Return None if no wait is needed.

        Args:
            name: name of the unit, for messages and traces.
            after: refresh for which the gather waits instead of the caller. Must be None unless
                `gather_waits_for_refresh` is True.
        """
        return None

    def free(self) -> None:
        """Free the memory of `full`."""

    def keep_post_forward(self) -> None:
        """Keep a post-forward shard of the gathered buffer, if the options enable it."""

    def drop_post_forward(self) -> None:
        """Free the post-forward shard."""

    def publish(self, pending: PendingRefresh | None) -> None:
        """Make the new contents of `shard` visible to the peers; see [Note: Write rounds].

        Args:
            pending: operation that writes to `shard`. The contents become visible when it completes. If `pending` is
                None, they become visible immediately.
        """

    def wait_published(self, name: str) -> None:
        """Wait until every rank has published its shard as many times as this rank."""


class SendBuffer:
    """Persistent memory of a gradient buffer, 1-D [numel]. The memory is allocated on first use and filled with zeros.

    Attributes:
        read_in_place: True if peers read this memory in place in hop 1 and round the values to the wire dtype.
    """

    read_in_place = False

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self.dtype = dtype
        self._device = device
        self._tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def open(self) -> Tensor:
        """Call :meth:`wait_until_writable` and return the memory."""
        if self._tensor is None:
            self._tensor = self._allocate()
        self.wait_until_writable()
        return self._tensor

    def wait_until_writable(self) -> None:
        """Wait until all peers have read the data that was last sent from the buffer."""

    def _allocate(self) -> Tensor:
        return torch.zeros(self.numel, dtype=self.dtype, device=self._device)


class Transport(ABC):
    """Abstract base class of transports, which move weights and gradients between the ranks of one ZeRO-3 group.

    Attributes:
        traits: properties from which memory and traffic are predicted.
        send_scratch: pool of the buffers from which hop 1 sends.
    """

    traits: TransportTraits
    send_scratch: BufferPool

    @abstractmethod
    def full_buffer(self, layout: FlatLayout, dtype: torch.dtype, options: GatherOptions) -> FullBuffer:
        """Return a new full buffer for a handle.

        All ranks must call this method with equal arguments, in the same order.
        """

    @abstractmethod
    def send_buffer(self, numel: int, dtype: torch.dtype) -> SendBuffer:
        """Return a new persistent buffer of `numel` elements for an accumulator that hop 1 sends."""

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, wire_dtype: torch.dtype, *, name: str) -> PendingReduction:
        """Start hop 1, in which rank i receives the sum over all ranks of piece i of `flat`, 1-D [G].

        Args:
            flat: gradient to reduce, in `wire_dtype`. If `traits.shares_memory` is True, it may have another dtype.
            name: name of the unit, for messages and traces.
        """

    @property
    def shared_bytes(self) -> int:
        """Number of bytes of memory that the ranks of the ZeRO-3 group share, as counted by the operating system."""
        return 0

    def record_pass(self) -> None:  # noqa: B027
        """Record that this rank begins a forward pass."""

    def begin_write(self) -> None:  # noqa: B027
        """Wait until no peer reads the full buffers to which this rank will write; see [Note: Write rounds].

        Shards that are written after this call must be published.
        """

    def end_write(self) -> None:  # noqa: B027
        """End a round of writes, after the last :meth:`FullBuffer.publish`."""

    def close(self) -> None:  # noqa: B027
        """Release the threads and the memory of the transport."""


def post_forward_bytes(numel: int, element: int, ranks: int) -> int:
    """Return the size in bytes of one rank's post-forward shard.

    Args:
        numel: number of elements of the full buffer.
        element: number of bytes per element.
        ranks: number of ranks over which the full buffer is sharded.
    """
    return numel // ranks * element
