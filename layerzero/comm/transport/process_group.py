"""How ZeRO-3 shards come together in a full buffer.

[Note: Encoded gathers]
Each rank encodes its ZeRO-3 shard, the bytes are gathered, and each rank decodes all of them into its full buffer, its
own ones, too: all compute with the same weights. Masters stay exact, and so do ZeRO-3 shards; where nothing is gathered
(S = 1, shared memory) nothing is encoded, and what `reshard_after_forward` keeps has been decoded before.
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

_ALIGNED = 16  # bytes: where a rank's part begins


class GatherOptions(NamedTuple):
    """What travels in the gathers of a handle, and among whom."""

    codec: GatherCodec | None = None  # None: the weights as they are
    keeping: Communicator | None = None  # of the ranks that keep it in parts until its backward; None: it is freed


def travels_coded(dtype: torch.dtype) -> bool:
    """Weights of a dtype are encoded."""
    return dtype in (torch.bfloat16, torch.float16)


def coded_sizes(codec: GatherCodec | None, layout: FlatLayout, zero3_size: int, dtype: torch.dtype) -> list[int]:
    """Bytes of each rank's encoded shard; none: nothing is encoded.

    Raises:
        TypeError: the codec does not say how many.
    """
    if codec is None or zero3_size == 1 or not travels_coded(dtype):
        return []
    sizes = [codec.nbytes(blocks, dtype) if blocks else 0 for blocks in _blocks(layout, zero3_size)]
    if wrong := [size for size in sizes if not isinstance(size, int) or size < 0]:
        raise TypeError(f"{type(codec).__name__}.nbytes must return a number of bytes, got {wrong[0]!r}")
    return sizes


def coded_bytes(sizes: Sequence[int]) -> int:
    """What is received where shards of these sizes are gathered: each rank sends as much."""
    return -(-max(sizes, default=0) // _ALIGNED) * _ALIGNED * len(sizes)


def _blocks(layout: FlatLayout, zero3_size: int) -> list[list[RowBlock]]:
    """Of each ZeRO-3 shard."""
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
    """The gathers of one handle; see [Note: Encoded gathers].

    Args:
        full: 1-D [G], the full buffer.
        shard: 1-D [G / S], this rank's ZeRO-3 shard.
    """

    def __init__(
        self,
        codec: GatherCodec | None,
        layout: FlatLayout,
        full: Tensor,
        shard: Tensor,
        lane: Communicator,
        storages: FullBufferPool,
    ) -> None:
        self._codec = codec
        self._full = full
        self._shard = shard
        self._lane = lane
        self._storages = storages
        self._sizes = coded_sizes(codec, layout, lane.size, full.dtype)
        self._blocks = _blocks(layout, lane.size) if self._sizes else []
        self._bytes = torch.empty(coded_bytes(self._sizes), dtype=torch.uint8, device=full.device)  # 1-D [S * each]
        self._storage = self._bytes.untyped_storage()
        self.size = self._storage.nbytes()  # while it travels
        storages.free(self._storage)

    @property
    def nbytes(self) -> int:
        """Bytes that are there now."""
        return self._storage.nbytes()

    @torch.no_grad()
    def gather(self, *, name: str) -> PendingCollective | PendingDecode:
        """Start gathering the shards of all ranks into the full buffer."""
        if self._codec is None or not self.size:
            return all_gather(self._lane, Collective.GATHER, self._full, self._shard, name=name)
        self._storages.allocate(self._storage, self.size)
        rank = self._lane.rank
        own = self._bytes.chunk(self._lane.size)[rank]
        if self._blocks[rank]:  # a shard may be padding alone
            self._codec.encode(self._shard, self._blocks[rank], own[: self._sizes[rank]])
        works = all_gather(self._lane, Collective.GATHER, self._bytes, own, name=name)
        return PendingDecode(works, self)

    @torch.no_grad()
    def decode(self) -> None:
        assert self._codec is not None
        parts, outs = self._bytes.chunk(self._lane.size), self._full.chunk(self._lane.size)
        for part, size, blocks, out in zip(parts, self._sizes, self._blocks, outs, strict=True):
            if blocks:
                self._codec.decode(part[:size], blocks, out)
        self._storages.free(self._storage)


@dataclass(frozen=True)
class PendingDecode:
    """A gather of encoded shards."""

    works: PendingCollective
    code: GatheredFullBuffer

    def wait(self) -> None:
        self.works.wait()
        self.code.decode()


def gathers_of(
    layout: FlatLayout, full: Tensor, shard: Tensor, lane: Communicator, travel: GatherOptions, storages: FullBufferPool
) -> tuple[PostForwardShard, GatheredFullBuffer]:
    """Among the few ranks that keep a handle for its backward, and among all ranks of a ZeRO-3 group."""
    kept = PostForwardShard(full, travel.keeping, storages)
    return kept, GatheredFullBuffer(travel.codec, layout, full, shard, lane, storages)
