"""Move weights and gradients over process groups, with all-gathers and reduce-scatters.

[Note: Encoded gathers]
Each rank encodes its ZeRO-3 shard, and the encoded bytes are gathered. Each rank decodes the bytes of all ranks,
including its own, into its full buffer, so that all ranks compute with the same weights. The encoding does not change
masters or ZeRO-3 shards. Without a gather (S = 1, shared memory), weights are not encoded. Post-forward shards
contain decoded weights.

[Note: Post-forward shards]
With ``reshard_after_forward=k``, each of k consecutive ranks keeps 1/k of a full buffer after a forward pass that may
have a backward pass. The shard is freed at the end of the backward pass of the last forward pass that has kept it, or
when the weights change. The shard is kept even for a forward pass whose output is discarded. Otherwise the launched
gathers could differ between ranks, because the lifetime of the graph depends on each rank's garbage collection. While
the shard is allocated, gathers run only among the k ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from layerzero.comm.codecs import encoded_bytes, encoded_sizes, param_rows
from layerzero.comm.collectives import Collective, PendingCollective, PendingReduction, all_gather, reduce_scatter
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.transport.base import FullBuffer, GatherOptions, SendBuffer, Transport, TransportTraits
from layerzero.device.buffer_pools import BufferPool, FullBufferPool
from layerzero.device.streams import PendingWait
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent


class ProcessGroupTransport(Transport):
    """Transport over the process groups of a mesh.

    Args:
        scratch: pool of buffers from which collectives send and into which they receive.
        full: pool that provides the memory of full buffers.
    """

    def __init__(self, mesh_info: MeshInfo, scratch: BufferPool, full: FullBufferPool) -> None:
        self.traits = TransportTraits(sums_locally=mesh_info.zero3_reduce_comm.sums_locally)
        self.send_scratch = scratch
        self._mesh_info = mesh_info
        self._pool = full

    def full_buffer(self, layout: FlatLayout, dtype: torch.dtype, options: GatherOptions) -> FullBuffer:
        grid, device = self._mesh_info.grid, self._mesh_info.device
        if grid.same_elements(Extent.ZERO3, Extent.FULL) and options.host_shard is None:
            shard = torch.zeros(grid.numel(layout, Extent.ZERO3), dtype=dtype, device=device)
            return FullBuffer(shard, shard)
        return GatheredFullBuffer(layout, dtype, options, self._mesh_info, self._pool)

    def send_buffer(self, numel: int, dtype: torch.dtype) -> SendBuffer:
        return SendBuffer(numel, dtype, self._mesh_info.device)

    def reduce_scatter(self, flat: Tensor, wire_dtype: torch.dtype, *, name: str) -> PendingReduction:
        comm = self._mesh_info.zero3_reduce_comm
        return reduce_scatter(comm, Collective.HOP1, flat, self.send_scratch, wire=wire_dtype, name=name)


class GatheredFullBuffer(FullBuffer):
    """Full buffer that all-gathers fill; see [Note: Encoded gathers] and [Note: Post-forward shards].

    The constructor allocates the memory of `full`, so that the caller can create views of `full`. The first call of
    :meth:`free` frees the memory.

    Args:
        pool: pool that provides the memory of `full`, of encoded shards and of the post-forward shard.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, options: GatherOptions, mesh_info: MeshInfo, pool: FullBufferPool
    ) -> None:
        grid, device = mesh_info.grid, mesh_info.device
        full = torch.empty(layout.numel, dtype=dtype, device=device)  # 1-D [G]
        own_shard = full[grid.slice_within(layout, Extent.ZERO3, Extent.FULL)]  # 1-D [G / S]
        host = options.host_shard
        shard = torch.zeros(own_shard.numel(), dtype=dtype, device=device) if host is None else host.tensor
        self._post_forward_comm = options.post_forward_comm  # None: no post-forward shard is kept
        kept = 0 if self._post_forward_comm is None else full.numel() // self._post_forward_comm.size
        self._post_forward = torch.empty(kept, dtype=dtype, device=device)  # 1-D [G / k]
        self._comm = mesh_info.zero3_gather_comm
        self._codec = options.codec
        self._sizes = encoded_sizes(options.codec, layout, self._comm.size, dtype)
        self._blocks = param_rows(layout, self._comm.size) if self._sizes else []
        self._encoded = torch.empty(encoded_bytes(self._sizes), dtype=torch.uint8, device=device)  # 1-D [S * part]
        super().__init__(
            full,
            shard,
            full_bytes=full.untyped_storage().nbytes(),
            encoded_bytes=self._encoded.nbytes,
            post_forward_bytes=self._post_forward.nbytes,
        )
        self._host_shard = host
        self.gather_waits_for_refresh = self._comm.uses_streams and host is None and not self._sizes
        self._input = shard if host is None else own_shard  # input of gathers
        self._storage = full.untyped_storage()
        self._pool = pool
        for tensor in (self._encoded, self._post_forward):
            pool.free(tensor.untyped_storage())

    @property
    def nbytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in (self.full, self._encoded, self._post_forward))

    @property
    def has_post_forward_shard(self) -> bool:
        return self._post_forward_comm is not None and self._post_forward.untyped_storage().nbytes() > 0

    def gather(self, *, name: str, after: PendingCollective | None = None) -> PendingCollective | PendingWait:
        self._pool.allocate(self._storage, self.full_bytes)
        if self._post_forward_comm is not None and self.has_post_forward_shard:
            return all_gather(self._post_forward_comm, Collective.REGATHER, self.full, self._post_forward, name=name)
        if self._host_shard is None:
            if self.encoded_bytes:
                return self._gather_encoded(name)
            return all_gather(self._comm, Collective.GATHER, self.full, self._input, name=name, after=after)
        fetch = self._host_shard.start_fetch(self._input)
        if self._comm.size == 1:
            return fetch
        # The copy stream launches the gather, so the computation does not wait for the copy. Encoding runs on the
        # current stream.
        with self._host_shard.on_copy_stream() if self._codec is None else nullcontext():
            fetch.wait()
            if self.encoded_bytes:
                return self._gather_encoded(name)
            return all_gather(self._comm, Collective.GATHER, self.full, self._input, name=name)

    @torch.no_grad()
    def _gather_encoded(self, name: str) -> PendingWait:
        assert self._codec is not None
        self._pool.allocate(self._encoded.untyped_storage(), self.encoded_bytes)
        rank = self._comm.rank
        own_bytes = self._encoded.chunk(self._comm.size)[rank]
        if self._blocks[rank]:  # a shard may consist of padding only
            self._codec.encode(self._input, self._blocks[rank], own_bytes[: self._sizes[rank]])
        works = all_gather(self._comm, Collective.GATHER, self._encoded, own_bytes, name=name)
        return PendingWait(partial(self.decode, works))

    @torch.no_grad()
    def decode(self, works: PendingCollective) -> None:
        """Wait for a gather, decode the shards that it has received, and free the memory of the encoded bytes."""
        assert self._codec is not None
        works.wait()
        parts, outs = self._encoded.chunk(self._comm.size), self.full.chunk(self._comm.size)
        for part, size, blocks, out in zip(parts, self._sizes, self._blocks, outs, strict=True):
            if blocks:
                self._codec.decode(part[:size], blocks, out)
        self._pool.free(self._encoded.untyped_storage())

    def free(self) -> None:
        self._pool.free(self._storage)

    @torch.no_grad()
    def keep_post_forward(self) -> None:
        comm = self._post_forward_comm
        if comm is not None and not self.has_post_forward_shard:
            self._pool.allocate(self._post_forward.untyped_storage(), self.post_forward_bytes)
            self._post_forward.copy_(self.full.chunk(comm.size)[comm.rank])

    def drop_post_forward(self) -> None:
        if self.has_post_forward_shard:
            self._pool.free(self._post_forward.untyped_storage())
