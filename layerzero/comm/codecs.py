"""What travels in a gather instead of the weights: :class:`GatherCodec`, and one in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Float8Rows", "GatherCodec", "RowBlock"]


class RowBlock(NamedTuple):
    """The rows of one parameter in a ZeRO-3 shard."""

    start: int  # element of the shard
    rows: int
    length: int  # elements of a row

    @property
    def numel(self) -> int:
        return self.rows * self.length

    def of(self, shard: Tensor) -> Tensor:
        """Its part of a shard, ``[rows, length]``."""
        return shard[self.start : self.start + self.numel].view(self.rows, self.length)


class GatherCodec(Protocol):
    """Encodes ZeRO-3 shards in bf16 or fp16 for a gather: ``shard_model(gather_codec=...)``.

    It has no state: what is decoded follows from the bytes alone, on every rank alike. `blocks` are the rows of each
    parameter in the shard, ``block.of(shard)`` is ``[rows, length]``; what lies between them is padding.
    """

    def nbytes(self, blocks: Sequence[RowBlock], dtype: torch.dtype) -> int:
        """Of an encoded shard, known before it has values."""

    def encode(self, shard: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
        """Write a shard, 1-D, to `out`, uint8 ``[nbytes]``, which begins at a multiple of 16 bytes."""

    def decode(self, encoded: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
        """Write the blocks of `out`, 1-D, from uint8 ``[nbytes]``."""


@dataclass(frozen=True)
class Float8Rows:
    """float8_e4m3fn with an fp32 scale for each row: ``shard_model(gather_codec=layerzero.Float8Rows())``.

    About half the bytes of bf16. A weight differs by no more than 2^-4 of the largest one of its row (each by 2^-4 of
    itself, but for the least). Rows of fewer than 16 elements (biases, norms) travel as they are.

    Example::

        model = layerzero.shard_model(model, mp_policy=bf16, gather_codec=layerzero.Float8Rows())
    """

    _SHORT = 16  # elements of a row that do not pay for a scale
    _MOST = 448.0  # of float8_e4m3fn
    _LEAST_SCALE = 2.0**-120  # so that nothing is divided by zero, nor by a denormal number
    _AT_ONCE = 2**22  # elements, or one row: scratch is for so many

    def nbytes(self, blocks: Sequence[RowBlock], dtype: torch.dtype) -> int:
        return sum(b.numel * dtype.itemsize if b.length < self._SHORT else b.numel + 4 * b.rows for b in blocks)

    def encode(self, shard: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
        for rows, scales, numbers in self._places(shard, blocks, out):
            if scales is None:
                numbers.copy_(rows)
                continue
            # A number that is not finite makes its row NaN: as with the weights themselves, nothing is hidden.
            torch.clamp_min(rows.abs().amax(1, keepdim=True).float() / self._MOST, self._LEAST_SCALE, out=scales)
            numbers.copy_(rows / scales)

    def decode(self, encoded: Tensor, blocks: Sequence[RowBlock], out: Tensor) -> None:
        for rows, scales, numbers in self._places(out, blocks, encoded):
            rows.copy_(numbers)  # exact: bf16 and fp16 have every number of float8_e4m3fn
            if scales is not None:
                rows.mul_(scales)

    def _places(
        self, weights: Tensor, blocks: Sequence[RowBlock], encoded: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Some rows, their scales, if they have any, ``[rows, 1]``, and their numbers. In the bytes all scales come
        first, then short rows, then numbers in 8 bits.
        """
        long = [block for block in blocks if block.length >= self._SHORT]
        short = [block for block in blocks if block.length < self._SHORT]
        scale, plain = 0, 4 * sum(block.rows for block in long)
        byte = plain + weights.itemsize * sum(block.numel for block in short)
        for block in short:
            end = plain + block.numel * weights.itemsize
            yield block.of(weights), None, encoded[plain:end].view(weights.dtype).view(block.rows, block.length)
            plain = end
        for block in long:
            scales = encoded[scale : scale + 4 * block.rows].view(torch.float32).view(block.rows, 1)
            numbers = encoded[byte : byte + block.numel].view(torch.float8_e4m3fn).view(block.rows, block.length)
            scale, byte = scale + 4 * block.rows, byte + block.numel
            some = max(1, self._AT_ONCE // block.length)
            rows = block.of(weights)
            for part in (slice(first, first + some) for first in range(0, block.rows, some)):
                yield rows[part], scales[part], numbers[part]
