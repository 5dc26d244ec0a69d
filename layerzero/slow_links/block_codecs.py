"""Encode messages in 8 or 4 bits: two codecs for gradients between nodes, and one for gathered weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerzero.extend import ParamRows


class _IntegerBlocks:
    """Codec that encodes blocks of 128 elements as integers with one bf16 scale per block.

    An encoded shard consists of all scales, followed by the integers. Operations write to existing tensors instead of
    returning new ones (``to``, ``+``). A chunk then needs no other temporary memory, and the emulated device of the
    tests, tests/support/late_device.py, can run the operations late on a stream.

    [Note: Exact sums of decoded parts]
    A device adds many parts in one kernel, in an order that depends on the device and on the number of parts. The sum
    is therefore exact, so that it does not depend on the order. Let t be the largest scale of all parts of a block,
    rounded down to a power of two. Each scale is rounded to a multiple of 2^-28 t, or of twice this number, which
    changes no scale above 2^-20 t. An integer times such a scale, and any sum of these products over up to 2^16 parts,
    is a multiple of 2^-28 t below 2^25 t, which fp64 represents exactly. The sum is added to this rank's own part in
    fp64 and then rounded to the dtype of this part. A single part needs no fp64.
    """

    _BLOCK = 128  # elements that share a scale
    _BITS: ClassVar[int]
    _MOST: ClassVar[float]  # largest integer
    _LEAST_SCALE = 2.0**-120  # avoids divisions by zero and by denormal numbers
    _ROUNDING = 2.0**24  # adding and subtracting this multiple of a scale rounds to 2^-28 times its power of two
    _AT_ONCE = 2**17  # elements that are converted at once on a CPU, so that they fit into the cache of a core
    _AT_ONCE_ON_DEVICE = 2**22  # enough to fill a device; temporary memory of 69 MiB or less for fp32

    def _packed_nbytes(self, width: int) -> int:
        """Return the number of bytes of the integers of a block of `width` elements."""
        return -(-width * self._BITS // 8)

    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        """Write integers, given as floating-point numbers ``[m, n, width]``, to `packed`, int8 ``[m, n, size]``.

        With 4 bits, a byte holds two integers a and b of a block, from its first and its second half, as a + 16 b.
        """
        size = packed.size(-1)
        first, second = integers[..., :size], integers[..., size:]
        packed.copy_(first)
        if self._BITS == 4:
            packed[..., : second.size(-1)].add_(torch.empty_like(second, dtype=torch.int8).copy_(second), alpha=16)

    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
        return sum(
            (block.numel // self._BLOCK) * self._packed_nbytes(self._BLOCK)
            + self._packed_nbytes(block.numel % self._BLOCK)
            + 2 * -(-block.numel // self._BLOCK)
            for block in blocks
        )

    def encode(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        self.encode_parts(shard[None], blocks, _as_row(out))

    def encode_with_feedback(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor, residual: Tensor) -> None:
        """Encode ``shard + residual`` into `out`, and store the error of the encoding in `residual`.

        A block with a non-finite element gets a residual of zero.
        """
        self.encode_parts(shard[None], blocks, _as_row(out), residual[None])

    def encode_parts(
        self, parts: Tensor, blocks: Sequence[ParamRows], out: Tensor, residuals: Tensor | None = None
    ) -> None:
        for elements, scales, packed in self._iter_chunks(blocks, out):
            shape = (*scales.shape[:2], -1)
            exact = parts[:, elements].view(shape)
            errors = None if residuals is None else residuals[:, elements].view(shape)
            dtype = max(exact.dtype, torch.float32, key=lambda each: each.itemsize)
            if errors is not None or exact.dtype is not dtype:
                exact = torch.empty_like(exact, dtype=dtype).copy_(exact)
            integers = torch.empty_like(exact)
            if errors is None:
                self._quantize(exact, integers, scales, packed)
                continue
            self._quantize(exact.add_(errors), integers, scales, packed)
            rounded = torch.empty_like(scales, dtype=exact.dtype).copy_(scales)
            errors.copy_(exact.addcmul_(integers, rounded, value=-1).nan_to_num_())

    def decode(self, encoded: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        for block in blocks:
            out[block.start : block.start + block.numel].zero_()
        self.add_decoded(_as_row(encoded), blocks, out)

    def add_decoded(self, encoded: Tensor, blocks: Sequence[ParamRows], total: Tensor) -> None:
        """Add the decoded parts to `total`; see [Note: Exact sums of decoded parts]."""
        for elements, scales, packed in self._iter_chunks(blocks, encoded):
            target, (parts, count, size) = total[elements].view(scales.size(1), -1), packed.shape
            wide = torch.float64 if parts > 1 else max(total.dtype, torch.float32, key=lambda each: each.itemsize)
            weights = torch.empty_like(scales, dtype=wide).copy_(scales)
            if parts > 1:
                largest = torch.amax(scales, 0, out=torch.empty_like(scales[0]))
                weights.add_(largest, alpha=self._ROUNDING).sub_(largest, alpha=self._ROUNDING)
            products = torch.empty((parts, count, size * 8 // self._BITS), dtype=wide, device=total.device)
            products[..., :size].copy_(packed)
            if self._BITS == 4:
                shifted = torch.add(packed, 8, out=torch.empty_like(packed))
                torch.bitwise_right_shift(shifted, 4, out=products[..., size:])
            products.mul_(weights)
            sums = products[0]
            if parts > 1:
                sums = torch.sum(products, 0, out=torch.empty_like(sums))
            if self._BITS == 4:
                sums[:, :size].sub_(sums[:, size:], alpha=16)
            target.add_(sums[:, : target.size(1)])

    def _quantize(self, values: Tensor, integers: Tensor, scales: Tensor, packed: Tensor) -> None:
        """Write the scales, the integers as floating-point numbers, and the packed integers of some blocks.

        Scales are rounded by at most 2^-9, so no integer exceeds the largest one. The integers of a block with a
        non-finite element are arbitrary, because its scale is NaN.
        """
        largest, rounded = (torch.empty_like(scales, dtype=values.dtype) for _ in range(2))
        torch.amax(torch.abs(values, out=integers), -1, keepdim=True, out=largest)
        torch.sub(largest, largest, out=rounded)  # NaN if the block has a non-finite element, otherwise 0
        # A division by a number would be a multiplication by its reciprocal on some devices, with other bits.
        largest.mul_(1 / self._MOST).clamp_min_(self._LEAST_SCALE).add_(rounded)
        scales.copy_(largest)
        rounded.copy_(scales).reciprocal_()
        self._pack(torch.mul(values, rounded, out=integers).round_(), packed)

    def _iter_chunks(self, blocks: Sequence[ParamRows], encoded: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield chunks of n blocks of each of the m messages in `encoded`, uint8 ``[m, nbytes]``.

        A chunk consists of (elements of the shard, scales ``[m, n, 1]``, packed integers ``[m, n, size]``).
        """
        messages = len(encoded)
        at_once = self._AT_ONCE if encoded.device.type == "cpu" else self._AT_ONCE_ON_DEVICE
        at_once = max(1, at_once // messages // self._BLOCK) * self._BLOCK
        scale, byte = 0, 2 * sum(-(-block.numel // self._BLOCK) for block in blocks)
        for block in blocks:
            for first in range(block.start, block.start + block.numel, at_once):
                stop = min(first + at_once, block.start + block.numel)
                full_end = stop - (stop - first) % self._BLOCK
                for start, end, width in ((first, full_end, self._BLOCK), (full_end, stop, stop - full_end)):
                    if start == end:
                        continue
                    count, size = (end - start) // width, self._packed_nbytes(width)
                    yield (
                        slice(start, end),
                        encoded[:, scale : scale + 2 * count].view(torch.bfloat16).view(messages, count, 1),
                        encoded[:, byte : byte + count * size].view(torch.int8).view(messages, count, size),
                    )
                    scale, byte = scale + 2 * count, byte + count * size


def _as_row(message: Tensor) -> Tensor:
    """Return a message as a row, whose stride allows views in other dtypes."""
    return message.as_strided((1, len(message)), (0, 1))


@dataclass(frozen=True)
class Int8Blocks(_IntegerBlocks):
    """Codec that encodes gradients between nodes as int8 values with one bf16 scale per block of 128 elements.

    Pass it as ``Codecs(hop2=Int8Blocks())``. A part of a gradient takes 1.016 bytes per element
    instead of 4 in fp32. Each rank sends its parts with one all-to-all. The receiver of a part adds the exact sum of
    the decoded parts to its own exact part, and rounds once. The number of kernels does not depend on the number of
    replicas.

    The error of an element is at most 1/250 of the largest absolute element in its block, or 2^-121 if that is larger.
    A block with a non-finite element is decoded as NaN, so that a skipped step is skipped on all ranks.

    Example::

        model = layerzero.shard_model(model, codecs=layerzero.Codecs(hop2=layerzero.Int8Blocks()))
    """

    _BITS, _MOST = 8, 127.0


@dataclass(frozen=True)
class Int4Blocks(_IntegerBlocks):
    """Codec that encodes gradients between nodes as 4-bit integers with one bf16 scale per block of 128 elements.

    Pass it as ``Codecs(hop2=Int4Blocks())``. A part of a gradient takes 4.125 bits per element.
    Messages are exchanged and added as those of :class:`Int8Blocks`.

    The error of an element is at most 1/13 of the largest absolute element in its block. With `feedback`, each rank
    stores the error of the parts that it has sent, and adds it to the parts that it sends next (error feedback, Seide
    et al. 2014; LoCo, arXiv:2407.04480). The error of the sum over many steps then stays as small as that of one step.
    The errors take 2 bytes per element of this rank's ZeRO-3 gradient shard, except its own part; see
    ``layerzero.memory``. They are multiplied by the coefficient of :func:`layerzero.clip_grad_norm_`. They are set to
    zero if a step is skipped, if weights are loaded or edited, and if training resumes from a checkpoint.

    Args:
        feedback: if True, add the error of each message to the next message.

    Example::

        model = layerzero.shard_model(model, codecs=layerzero.Codecs(hop2=layerzero.Int4Blocks()))
    """

    feedback: bool = True

    _BITS, _MOST = 4, 7.0


@dataclass(frozen=True)
class Float8Rows:
    """Codec that encodes weights as float8_e4m3fn values with one fp32 scale per row.

    Pass it as ``Codecs(gather=Float8Rows())``.

    An encoded gather sends about half the bytes of a bf16 gather. The error of a weight is at most 2^-4 times the
    largest absolute weight of its row and, except for the smallest weights, at most 2^-4 times the weight itself. Rows
    of fewer than 16 elements, such as biases and norms, are not encoded.

    Example::

        model = layerzero.shard_model(model, mp_policy=bf16, codecs=layerzero.Codecs(gather=layerzero.Float8Rows()))
    """

    _SHORT = 16  # elements; in shorter rows, a scale takes too much of the saving
    _MOST = 448.0  # maximum of float8_e4m3fn
    _LEAST_SCALE = 2.0**-120  # avoids divisions by zero and by denormal numbers
    _AT_ONCE = 2**22  # elements (at least one row) that are converted at once, to bound the scratch memory

    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
        return sum(b.numel * dtype.itemsize if b.length < self._SHORT else b.numel + 4 * b.rows for b in blocks)

    def encode(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        for rows, scales, numbers in self._iter_chunks(shard, blocks, out):
            if scales is None:
                numbers.copy_(rows)
                continue
            # A non-finite weight turns its row into NaN, so that the error stays visible.
            torch.clamp_min(rows.abs().amax(1, keepdim=True).float() / self._MOST, self._LEAST_SCALE, out=scales)
            numbers.copy_(rows / scales)

    def decode(self, encoded: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        for rows, scales, numbers in self._iter_chunks(out, blocks, encoded):
            rows.copy_(numbers)  # exact: bf16 and fp16 represent every float8_e4m3fn number
            if scales is not None:
                rows.mul_(scales)

    def _iter_chunks(
        self, weights: Tensor, blocks: Sequence[ParamRows], encoded: Tensor
    ) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield (rows, scales ``[rows, 1]``, encoded values) for each chunk of rows. Short rows have None as scales.

        An encoded shard consists of all scales, followed by the short rows and then the 8-bit values.
        """
        long = [block for block in blocks if block.length >= self._SHORT]
        short = [block for block in blocks if block.length < self._SHORT]
        scale, raw_byte = 0, 4 * sum(block.rows for block in long)
        byte = raw_byte + weights.itemsize * sum(block.numel for block in short)
        for block in short:
            end = raw_byte + block.numel * weights.itemsize
            yield block.of(weights), None, encoded[raw_byte:end].view(weights.dtype).view(block.rows, block.length)
            raw_byte = end
        for block in long:
            scales = encoded[scale : scale + 4 * block.rows].view(torch.float32).view(block.rows, 1)
            numbers = encoded[byte : byte + block.numel].view(torch.float8_e4m3fn).view(block.rows, block.length)
            scale, byte = scale + 4 * block.rows, byte + block.numel
            rows_at_once = max(1, self._AT_ONCE // block.length)
            rows = block.of(weights)
            for part in (slice(row, row + rows_at_once) for row in range(0, block.rows, rows_at_once)):
                yield rows[part], scales[part], numbers[part]
