"""Move weights and gradients through memory that all ranks of a ZeRO-3 group map, if they run on one machine.

[Note: Weights in shared memory]
The full buffer of a handle is one mapping for all ranks of a ZeRO-3 group. Each rank writes its ZeRO-3 shard and reads
the full buffer. Writes are grouped in rounds; see [Note: Write rounds] in comm/transport/base.py. A round is one
`RefreshRound` of the weight refresher. A rank increments its counter ARRIVED when it arrives at a round. From then on,
its earlier passes no longer read the weights, and its next pass follows the round. Ranks write only after all ranks
have arrived. If the master itself is in shared memory (fp32), the first write is the update by the optimizer or a write
by the user. In this case, the rank arrives at the round before that write.

A rank that has arrived must not read weights before the end of the round. Therefore a rank also marks the handles as
written when it arrives. A forward pass then begins with the refreshes of the handles, and a backward pass raises.

Each handle also has a counter of the completed refreshes of this rank's shard. A refresh completes when the parts of
all replicas have been received, which overlaps with the next forward pass. A thread increments the counter, because the
main thread may be busy, for example in a unit that other ranks do not call, or in a wait for other ranks. Before a rank
reads weights, it waits until all ranks have completed as many refreshes as it has launched. Therefore each rank may
read any handle at any time, in any order, independently of the other ranks. All ranks start the first forward pass
together. Before that, no rank reads weights, so writes need no wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.extend import (
    BufferDemand,
    Collective,
    Extent,
    FlatLayout,
    FullBuffer,
    GatherOptions,
    LaunchedCollective,
    MeshInfo,
    PendingCollective,
    PendingReduction,
    PendingRefresh,
    PendingWait,
    Size,
    ThreadStream,
    Transport,
    TransportTraits,
    launching,
    profiler_range,
)
from layerzero.shared_memory.buffers import (
    FIRST_FREE_COUNTER,
    RING_BYTES,
    PendingPeers,
    SharedBufferPool,
    SharedSendBuffer,
    aligned_bytes,
)
from layerzero.shared_memory.counters import wait_for_peers
from layerzero.shared_memory.rendezvous import map_shared_segment
from layerzero.shared_memory.segment import SegmentSizes, SharedSegment

_ARRIVED = FIRST_FREE_COUNTER
_PASSES = _ARRIVED + 1
_FIRST_HANDLE = _PASSES + 1
_LOG = logging.getLogger("layerzero")
_MORE = 5  # address space reserved for each handle in addition to the predicted buffers, in units of a full gradient


def segment_sizes(demand: BufferDemand) -> SegmentSizes:
    """Return the sizes of a segment that has room for the buffers in `demand`."""
    scratch = (size for size, count in demand.send_scratch.items() for _ in range(count))
    predicted = RING_BYTES + _aligned_bytes_of(scratch) + _aligned_bytes_of(demand.accumulators)
    return SegmentSizes(
        num_counters=_FIRST_HANDLE + len(demand.full_buffers),
        common=_aligned_bytes_of(demand.full_buffers),
        part=predicted + _aligned_bytes_of(demand.gradients) * _MORE,
        predicted=predicted,
    )


def _aligned_bytes_of(sizes: Iterable[Size]) -> int:
    return sum(aligned_bytes(numel * dtype.itemsize) for numel, dtype in sizes)


class SharedMemoryTransport(Transport):
    """Transport through a segment that the ranks of a ZeRO-3 group share; see [Note: Weights in shared memory].

    Args:
        segment: segment that all ranks of the group have mapped.
        send_scratch: number of scratch buffers that hop 1 uses at the same time, by size.
    """

    traits = TransportTraits(sums_locally=True, shares_memory=True)

    def __init__(self, segment: SharedSegment, mesh_info: MeshInfo, send_scratch: Mapping[Size, int]) -> None:
        hop1 = LaunchedCollective(mesh_info.zero3_reduce_comm, Collective.HOP1, name="", sent=0)
        self.send_scratch: SharedBufferPool = SharedBufferPool(segment, hop1, send_scratch)
        self._segment = segment
        self._mesh_info = mesh_info
        self._rounds = 0
        self._passes = 0
        self._warns = True
        self._arrived = 0
        self._handles = 0
        self._used = 0  # bytes of the common part that are in use
        self._publisher = ThreadStream("refresh")
        self._publisher.end_with(self)

    @classmethod
    def connect(cls, mesh_info: MeshInfo, demand: BufferDemand) -> SharedMemoryTransport | None:
        """Map a shared segment and return a transport that uses it, or None on all ranks if any rank cannot map it.

        All ranks of the ZeRO-3 group must call this method.
        """
        segment = map_shared_segment(mesh_info.zero3_control_comm, segment_sizes(demand))
        return None if segment is None else cls(segment, mesh_info, demand.send_scratch)

    def close(self) -> None:
        """End the thread and close the shared memory. The memory is freed with the last tensor that uses it."""
        self._publisher.thread.end()
        self._segment.close()

    def full_buffer(self, layout: FlatLayout, dtype: torch.dtype, options: GatherOptions) -> SharedFullBuffer:
        own_slice = self._mesh_info.grid.slice_within(layout, Extent.ZERO3, Extent.FULL)
        tensor = self._segment.common(layout.numel, dtype, self._used)
        self._used += aligned_bytes(tensor.numel() * tensor.element_size())
        self._handles += 1
        return SharedFullBuffer(self, tensor, own_slice, _FIRST_HANDLE + self._handles - 1)

    def send_buffer(self, numel: int, dtype: torch.dtype) -> SharedSendBuffer:
        return SharedSendBuffer(numel, dtype, self.send_scratch)

    def reduce_scatter(self, flat: Tensor, wire_dtype: torch.dtype, *, name: str) -> PendingReduction:
        """Start hop 1, in which each rank reads its pieces directly from the memory of the other ranks.

        See [Note: Reuse of send buffers] in buffers.py.
        """
        comm, pool = self._mesh_info.zero3_reduce_comm, self.send_scratch
        numel = flat.numel() // comm.size
        with launching(comm, Collective.HOP1, name, (comm.size - 1) * numel * flat.element_size()) as launched:
            send_buffer = flat if pool.contains(flat) else pool.acquire(flat.numel(), flat.dtype).copy_(flat)
            number = pool.publish(send_buffer)

            def release_buffers() -> None:
                pool.mark_consumed(number)
                if send_buffer is not flat:
                    pool.release(send_buffer)

            # The reader rounds to `wire_dtype`. The result is bitwise identical to that of sending rounded values, but
            # no extra memory is needed.
            parts = partial(pool.parts, number, numel, flat.dtype)
            return PendingReduction(
                launched.attach_transfers(PendingPeers(self._segment.counters, number)),
                flat,
                parts,
                wire_dtype,
                release_buffers,
            )

    @property
    def shared_bytes(self) -> int:
        return self._segment.allocated_bytes

    def begin_write(self) -> None:
        """Wait until all ranks have arrived at this round and no longer read the weights.

        Weights that are written after this call must be refreshed.
        """
        if self._arrived == self._rounds:
            self._arrived += 1
            self._segment.counters.increment(_ARRIVED)
        self.wait(_ARRIVED, self._arrived, "")
        if self._warns and (peers := self._segment.counters.absent(_PASSES, self._passes)):
            self._warns = False
            text = (
                "layerzero: rank %d has run a forward pass that ranks %s have not run. This works only because they "
                "share memory. With collectives, as on devices or with shared_memory='off', it is an error. Run the "
                "same passes on all ranks (no `if rank == 0: evaluate(model)`)"
            )
            _LOG.warning(text, dist.get_rank(), peers)

    def end_write(self) -> None:
        """End the round, after all refreshes of the round have been launched."""
        self._rounds = self._arrived

    def record_pass(self) -> None:
        """Count a forward pass of this rank. Ranks that run more passes than others log a warning, once."""
        self._passes += 1
        self._segment.counters.increment(_PASSES)

    def publish_shard(self, works: PendingRefresh | None, counter: int) -> None:
        """Increment the counter with index `counter` when `works` has completed, or immediately if `works` is None."""
        if works is None:
            self._segment.counters.increment(counter)
        else:
            self._publisher.run(partial(_publish_when_complete, works, self._segment, counter))

    def count_gather(self, name: str) -> None:
        """Count a gather that sends no bytes."""
        comm = self._mesh_info.zero3_gather_comm
        comm.counters.record(Collective.GATHER, comm.axis, 0, name)

    def wait(self, counter: int, target: int, name: str) -> None:
        """Wait until the counter with index `counter` is at least `target` on all ranks."""
        counters = self._segment.counters
        if not counters.ranks_below(counter, target):
            counters.wait(counter, target)
            return
        # Report a refresh instead of a gather, because ranks that share memory may gather in different orders.
        refresh = LaunchedCollective(self._mesh_info.zero3_gather_comm, Collective.REFRESH, name, sent=0)
        with profiler_range("wait", Collective.GATHER.value, name):
            wait_for_peers(counters, counter, target, refresh)


def _publish_when_complete(works: PendingRefresh, memory: SharedSegment, counter: int) -> None:
    with suppress(RuntimeError):  # the main thread raises the error when it waits for the same works
        works.wait(off_main_thread=True, may_wait=threading.main_thread().is_alive)
        memory.counters.increment(counter)


class SharedFullBuffer(FullBuffer):
    """Full buffer of one handle in shared memory. This rank writes its ZeRO-3 shard.

    Args:
        full: 1-D [G], compute dtype.
        own: slice of `full` that is this rank's ZeRO-3 shard.
        counter: index of the counter of completed refreshes of this shard.
    """

    read_by_peers = True

    def __init__(self, transport: SharedMemoryTransport, full: Tensor, own: slice, counter: int) -> None:
        super().__init__(full, full[own])
        self._transport = transport
        self._counter = counter
        self._launched = 0
        self._read = 0  # number of refreshes that all ranks are known to have completed

    def gather(self, *, name: str, after: PendingCollective | None = None) -> PendingWait:
        """Return a wait for the shards that all ranks have published."""
        self._transport.count_gather(name)
        return PendingWait(partial(self.wait_published, name))

    def publish(self, pending: PendingRefresh | None) -> None:
        self._launched += 1
        self._transport.publish_shard(pending, self._counter)

    def wait_published(self, name: str) -> None:
        if self._read < self._launched:
            self._transport.wait(self._counter, self._launched, name)
            self._read = self._launched
