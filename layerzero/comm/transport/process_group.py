"""All-gather of ZeRO-3 shards into full buffers.

[Note: Encoded gathers]
Each rank encodes its ZeRO-3 shard, and the bytes are gathered. Each rank decodes all of them into its full buffer, its
own shard included, so that all ranks compute with the same weights. Masters and ZeRO-3 shards stay exact. Without a
gather (S = 1, shared memory) nothing is encoded. Post-forward shards hold decoded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.comm.codecs import GatherCodec, RowBlock
from layerzero.comm.collectives import Collective, Communicator, PendingCollective, all_gather
from layerzero.comm.transport.post_forward_shard import PostForwardShard
from layerzero.device.buffer_pools import FullBufferPool
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import overlap

__all__ = ["GatherOptions", "GatheredFullBuffer", "coded_bytes", "coded_sizes", "gathers_of", "travels_coded"]

_ALIGNED = 16  # bytes: alignment of each rank's part


class GatherOptions(NamedTuple):
    """Options for the gathers of a handle."""

    codec: GatherCodec | None = None  # None: weights are not encoded
    keeping: Communicator | None = None  # ranks that keep post-forward shards; None: nothing is kept


def travels_coded(dtype: torch.dtype) -> bool:
    """Return whether weights of a dtype are encoded."""
    return dtype in (torch.bfloat16, torch.float16)


def coded_sizes(codec: GatherCodec | None, layout: FlatLayout, zero3_size: int, dtype: torch.dtype) -> list[int]:
    """Return the size in bytes of each rank's encoded shard; an empty list if nothing is encoded.

    Raises:
        TypeError: ``codec.nbytes`` does not return a number of bytes.
    """
    if codec is None or zero3_size == 1 or not travels_coded(dtype):
        return []
    sizes = [codec.nbytes(blocks, dtype) if blocks else 0 for blocks in _blocks(layout, zero3_size)]
    if wrong := [size for size in sizes if not isinstance(size, int) or size < 0]:
        raise TypeError(f"{type(codec).__name__}.nbytes must return a number of bytes, got {wrong[0]!r}")
    return sizes


def coded_bytes(sizes: Sequence[int]) -> int:
    """Return the size in bytes of the buffer that receives encoded shards of these sizes, all padded to equal size."""
    return -(-max(sizes, default=0) // _ALIGNED) * _ALIGNED * len(sizes)


def _blocks(layout: FlatLayout, zero3_size: int) -> list[list[RowBlock]]:
    """Return the row blocks of each ZeRO-3 shard, by ZeRO-3 rank."""
    found: list[list[RowBlock]] = []
    for s in range(zero3_size):
        shard, blocks = layout.zero3_range(s, zero3_size), []
        for slot in layout.slots:
            place, rows = overlap(slot, shard).of_range, len(layout.rows_in(slot, shard))
            if place.stop > place.start:
                blocks.append(RowBlock(place.start, rows, slot.row_numel))
        found.append(blocks)
    return found


class GatheredFullBuffer:
    """Full buffer of one handle, filled by all-gathers; see [Note: Encoded gathers].

    Args:
        codec: None: weights are not encoded.
        full: 1-D [G], the full buffer.
        shard: 1-D [G / S], this rank's ZeRO-3 shard.
        comm: communicator of the gathers.
        storages: pool that provides the memory for encoded shards.
    """

    def __init__(
        self,
        codec: GatherCodec | None,
        layout: FlatLayout,
        full: Tensor,
        shard: Tensor,
        comm: Communicator,
        storages: FullBufferPool,
    ) -> None:
        self._codec = codec
        self._full = full
        self._shard = shard
        self._comm = comm
        self._storages = storages
        self._sizes = coded_sizes(codec, layout, comm.size, full.dtype)
        self._blocks = _blocks(layout, comm.size) if self._sizes else []
        self._bytes = torch.empty(coded_bytes(self._sizes), dtype=torch.uint8, device=full.device)  # 1-D [S * part]
        self._storage = self._bytes.untyped_storage()
        self.size = self._storage.nbytes()  # bytes during a gather
        storages.free(self._storage)

    @property
    def nbytes(self) -> int:
        """Bytes of encoded shards that are allocated now."""
        return self._storage.nbytes()

    @torch.no_grad()
    def gather(self, *, name: str) -> PendingCollective | PendingDecode:
        """Start gathering the shards of all ranks into the full buffer."""
        if self._codec is None or not self.size:
            return all_gather(self._comm, Collective.GATHER, self._full, self._shard, name=name)
        self._storages.allocate(self._storage, self.size)
        rank = self._comm.rank
        own = self._bytes.chunk(self._comm.size)[rank]
        if self._blocks[rank]:  # a shard may consist of padding only
            self._codec.encode(self._shard, self._blocks[rank], own[: self._sizes[rank]])
        works = all_gather(self._comm, Collective.GATHER, self._bytes, own, name=name)
        return PendingDecode(works, self)

    @torch.no_grad()
    def decode(self) -> None:
        assert self._codec is not None
        parts, outs = self._bytes.chunk(self._comm.size), self._full.chunk(self._comm.size)
        for part, size, blocks, out in zip(parts, self._sizes, self._blocks, outs, strict=True):
            if blocks:
                self._codec.decode(part[:size], blocks, out)
        self._storages.free(self._storage)


@dataclass(frozen=True)
class PendingDecode:
    """Gather in flight of encoded shards, which :meth:`wait` decodes."""

    works: PendingCollective
    code: GatheredFullBuffer

    def wait(self) -> None:
        self.works.wait()
        self.code.decode()


def gathers_of(
    layout: FlatLayout,
    full: Tensor,
    shard: Tensor,
    comm: Communicator,
    transfer: GatherOptions,
    storages: FullBufferPool,
) -> tuple[PostForwardShard, GatheredFullBuffer]:
    """Return the post-forward shard and the gathered full buffer of a handle."""
    kept = PostForwardShard(full, transfer.keeping, storages)
    return kept, GatheredFullBuffer(transfer.codec, layout, full, shard, comm, storages)
