"""Define the protocols of codecs, which encode messages, and compute the sizes of encoded shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import ClassVar, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid, overlap

_ALIGNED = 16  # bytes: alignment of each rank's encoded shard


class ParamRows(NamedTuple):
    """Rows of one parameter in a ZeRO-3 shard."""

    start: int  # index of the first element in the shard
    rows: int
    length: int  # number of elements per row

    @property
    def numel(self) -> int:
        return self.rows * self.length

    def of(self, shard: Tensor) -> Tensor:
        """Return a view of these rows in `shard`, of shape ``[rows, length]``."""
        return shard[self.start : self.start + self.numel].view(self.rows, self.length)


class GatherCodec(Protocol):
    """Protocol for codecs that encode bf16 or fp16 ZeRO-3 shards for gathers: ``Codecs(gather=...)``.

    ``Codecs(hop2=...)`` uses the same methods for gradients between nodes. A shard is then the part of a
    gradient that one rank receives, in fp32, and each block is one row of adjacent elements. The rank adds the decoded
    parts of the other replicas to its own part, in the order of replicas.

    A codec has no state. Decoded weights depend only on the encoded bytes, so all ranks decode the same weights.
    In each method, `blocks` lists the rows of each parameter in the shard, and ``block.of(shard)`` has shape ``[rows,
    length]``. Elements between blocks are padding.
    """

    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
        """Return the size of an encoded shard in bytes. The size must not depend on the values of the weights."""

    def encode(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        """Encode the 1-D `shard` into `out`, a uint8 tensor ``[nbytes]`` that is aligned to 16 bytes."""

    def decode(self, encoded: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        """Decode `encoded`, a uint8 tensor ``[nbytes]``, into the blocks of `out`, a 1-D shard."""


@runtime_checkable
class FeedbackCodec(GatherCodec, Protocol):
    """Codec with error feedback: if `feedback` is True, each message's encoding error is added to the next message."""

    @property
    def feedback(self) -> bool: ...

    def encode_with_feedback(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor, residual: Tensor) -> None:
        """Encode ``shard + residual`` into `out`, and store the error of the encoding in `residual` (1-D, bf16)."""


@runtime_checkable
class PartsCodec(Protocol):
    """Additional methods of a codec for gradients, which encode or add the parts of several replicas at once.

    The number of kernels then does not depend on the number of replicas. The parts are the rows of 2-D tensors and have
    the same `blocks`. The rows of encoded parts begin at multiples of 16 bytes.
    """

    def encode_parts(
        self, parts: Tensor, blocks: Sequence[ParamRows], out: Tensor, residuals: Tensor | None = None
    ) -> None:
        """Encode each row of `parts` into the same row of `out`, uint8 ``[m, nbytes]``.

        If `residuals` is given, do so as in ``encode_with_feedback``.
        """

    def add_decoded(self, encoded: Tensor, blocks: Sequence[ParamRows], total: Tensor) -> None:
        """Decode each row of `encoded`, uint8 ``[m, nbytes]``, and add them to `total`, 1-D."""


class _PartByPart:
    """Encode and add parts one after the other, for a codec that is not a :class:`PartsCodec`."""

    def __init__(self, codec: GatherCodec, dtype: torch.dtype) -> None:
        self._codec = codec
        self._dtype = dtype  # in which parts are encoded

    def encode_parts(
        self, parts: Tensor, blocks: Sequence[ParamRows], out: Tensor, residuals: Tensor | None = None
    ) -> None:
        for index, (part, message) in enumerate(zip(parts, out, strict=True)):
            exact = part if part.dtype is self._dtype else torch.empty_like(part, dtype=self._dtype).copy_(part)
            if residuals is not None and has_feedback(self._codec):
                self._codec.encode_with_feedback(exact, blocks, message, residuals[index])
            else:
                self._codec.encode(exact, blocks, message)

    def add_decoded(self, encoded: Tensor, blocks: Sequence[ParamRows], total: Tensor) -> None:
        decoded = torch.empty_like(total)
        for message in encoded:
            self._codec.decode(message, blocks, decoded)
            total.add_(decoded)


@runtime_checkable
class DifferenceCodec(Protocol):
    """Protocol for codecs that encode 16-bit weights relative to previous weights, which all receivers have.

    All methods may be called from several threads at once. A message that is as large as the weights contains the
    weights themselves.

    Attributes:
        lossless: True if receivers decode exactly the weights that were encoded.
        predicts: True if a message depends on the differences of the previous message, which senders and receivers
            keep. Otherwise, `last_change` is None.
    """

    lossless: ClassVar[bool]
    predicts: ClassVar[bool]

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        """Encode `new` into the beginning of `out`, and return the size of the message in bytes.

        A codec that is not lossless then replaces `new` with the weights that receivers decode.

        Args:
            old: previous weights, 1-D [n], in a 16-bit dtype and in host memory.
            new: weights to encode, with the dtype and shape of `old`.
            out: uint8 [2 n].
            last_change: int16 [n], equal for the sender and the receivers of the weights. Both methods update it. A
                message that contains the weights themselves sets it to zero.
        """

    def decode(self, encoded: Tensor, weights: Tensor, last_change: Tensor | None = None) -> None:
        """Replace the previous `weights`, 1-D [n], with the weights of the message `encoded`, 1-D uint8.

        Raises:
            ValueError: the message is damaged, or was not encoded for `weights` of this size.
        """


def has_feedback(codec: GatherCodec | None) -> TypeGuard[FeedbackCodec]:
    """Return whether the errors of a codec's messages are added to its next messages."""
    return isinstance(codec, FeedbackCodec) and codec.feedback


def is_encoded(dtype: torch.dtype) -> bool:
    """Return whether codecs encode weights of the given dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def encoded_sizes(codec: GatherCodec | None, layout: FlatLayout, zero3_size: int, dtype: torch.dtype) -> list[int]:
    """Return the size in bytes of each rank's encoded shard, or an empty list if nothing is encoded.

    Raises:
        TypeError: ``codec.nbytes`` does not return a number of bytes.
    """
    if codec is None or zero3_size == 1 or not is_encoded(dtype):
        return []
    return [_encoded_nbytes(codec, blocks, dtype) for blocks in param_rows(layout, zero3_size)]


def _encoded_nbytes(codec: GatherCodec, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
    size = codec.nbytes(blocks, dtype) if blocks else 0
    if not isinstance(size, int) or size < 0:
        raise TypeError(
            f"{type(codec).__name__}.nbytes must return a number of bytes, got {size!r} for a shard in {dtype}. The "
            "buffers of a message have this size. Return a non-negative int"
        )
    return size


def encoded_bytes(sizes: Sequence[int]) -> int:
    """Return the size in bytes of the receive buffer for encoded shards that are padded to a common size.

    Args:
        sizes: size of each rank's encoded shard, in bytes, before padding.
    """
    return -(-max(sizes, default=0) // _ALIGNED) * _ALIGNED * len(sizes)


def param_rows(layout: FlatLayout, zero3_size: int) -> list[list[ParamRows]]:
    """Return the rows of each parameter in each ZeRO-3 shard, by ZeRO-3 rank."""
    blocks_by_rank: list[list[ParamRows]] = []
    for s in range(zero3_size):
        shard, blocks = layout.zero3_range(s, zero3_size), []
        for slot in layout.slots:
            span, rows = overlap(slot, shard).of_range, len(layout.rows_in(slot, shard))
            if span.stop > span.start:
                blocks.append(ParamRows(span.start, rows, slot.row_numel))
        blocks_by_rank.append(blocks)
    return blocks_by_rank


def replica_param_ranges(layout: FlatLayout, grid: ShardGrid) -> list[list[ParamRows]]:
    """Return the elements of parameters in each replica's part of this rank's ZeRO-3 gradient shard, without padding.

    Padding has unspecified contents. Each block is one row of adjacent elements.
    """
    blocks_by_replica: list[list[ParamRows]] = []
    first_shard = grid.zero3_rank * grid.replicas
    for part in (layout.shard_range(first_shard + replica) for replica in range(grid.replicas)):
        blocks: list[ParamRows] = []
        for span in (overlap(slot, part).of_range for slot in layout.slots):
            if span.start >= span.stop:
                continue
            adjacent = bool(blocks) and blocks[-1].start + blocks[-1].length == span.start
            start = blocks.pop().start if adjacent else span.start
            blocks.append(ParamRows(start, 1, span.stop - start))
        blocks_by_replica.append(blocks)
    return blocks_by_replica


def residual_numel(layout: FlatLayout, grid: ShardGrid) -> int:
    """Return the number of elements in a rank's residual: one error for each element that the rank sends in hop 2."""
    return grid.numel(layout, Extent.ZERO3) - grid.numel(layout, Extent.ZERO1)


class PartsRun(NamedTuple):
    """Parts for adjacent replicas other than this one that have the same size and the same blocks."""

    replica: int  # the first of them
    parts: tuple[int, int]  # shape of these parts
    messages: tuple[int, int]  # shape of the encoded parts, with padding
    elements: slice  # these parts in the ZeRO-3 gradient shard
    nbytes: slice  # the encoded parts in the send buffer
    residual: slice  # the errors of these parts in the residual


@dataclass(frozen=True, eq=False)
class EncodedPartsSpec:
    """Codec, ranges and encoded sizes of each replica's part of a ZeRO-3 gradient shard."""

    codec: GatherCodec
    dtype: torch.dtype  # dtype in which parts are encoded, decoded and added
    replica: int  # of this rank
    numels: list[int]  # number of elements of each part
    blocks: list[list[ParamRows]]  # encoded elements of each part
    sizes: list[int]  # size of each encoded part, in bytes

    @classmethod
    def of(cls, codec: GatherCodec, layout: FlatLayout, grid: ShardGrid, dtype: torch.dtype) -> EncodedPartsSpec:
        """Return the spec for this rank's shard of a gradient of dtype `dtype`.

        Raises:
            TypeError: ``codec.nbytes`` does not return a number of bytes.
        """
        added_in, blocks = max(dtype, torch.float32, key=lambda each: each.itemsize), replica_param_ranges(layout, grid)
        numels = grid.replica_part_sizes(layout) or [layout.shard_numel] * grid.replicas
        sizes = [_encoded_nbytes(codec, each, added_in) for each in blocks]
        return cls(codec, added_in, grid.replica_rank, list(numels), blocks, sizes)

    @cached_property
    def widths(self) -> list[int]:
        """Size of each part in a message in bytes, rounded up so that the next part is aligned."""
        return [encoded_bytes([size]) for size in self.sizes]

    @cached_property
    def parts_codec(self) -> PartsCodec:
        """Codec that encodes and adds several parts at once."""
        return self.codec if isinstance(self.codec, PartsCodec) else _PartByPart(self.codec, self.dtype)

    @cached_property
    def to_each(self) -> list[int]:
        """Number of bytes sent to each replica."""
        return [0 if replica == self.replica else width for replica, width in enumerate(self.widths)]

    @cached_property
    def runs(self) -> list[PartsRun]:
        """Parts that are encoded together."""
        errors = [0 if replica == self.replica else numel for replica, numel in enumerate(self.numels)]
        starts = [list(accumulate(each, initial=0)) for each in (self.numels, self.to_each, errors)]
        found = []
        for (is_own, numel, blocks), group in groupby(
            range(len(self.numels)), lambda each: (each == self.replica, self.numels[each], self.blocks[each])
        ):
            first, *others = group
            count = 1 + len(others)
            if blocks and not is_own:
                ranges = [slice(each[first], each[first + count]) for each in starts]
                found.append(PartsRun(first, (count, numel), (count, self.widths[first]), *ranges))
        return found
