"""Send refreshed weights as differences in 4 bits.

[Note: Lossy differences]
Each rank encodes the difference between the cast masters of its part and its previous compute weights. All replicas,
including the sender, add the decoded difference to the same previous weights in fp32 and round the sum.

The error of a refresh is a part of the next difference, so no rank stores it. If the masters stop changing, each
refresh makes the largest difference of a block several times smaller, until the weights equal the cast masters.

A block of 128 weights with a non-finite difference is decoded as infinite or NaN weights, which all ranks see. The next
difference is taken from zero for weights that are not finite, so the block recovers as soon as the masters are finite.

[Note: Same bits on all devices]
The same operations of torch run on CPUs and on devices, and each is one kernel. Where a kernel multiplies and adds, its
product is exact, so a processor that fuses both gives the same bits: the largest difference of a block has at most 11
significant bits and `_SEVENTH` has 13, a decoded difference is the product of a 4-bit integer and a bf16 scale, and the
other factors are powers of two. A division by a number would be a multiplication by its reciprocal on some devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

_BLOCK = 128  # weights that share a scale
_BLOCK_BYTES = 2 + _BLOCK // 2  # a bf16 scale and 4-bit integers
_AT_ONCE = 2**17  # weights that are converted at once on a CPU, so that they fit into the cache of a core
_AT_ONCE_ON_DEVICE = 2**22  # temporary memory of 32 MiB or less
_SEVENTH = 4681 / 2**15  # the largest integer is 7
# Avoids divisions by zero. Kernels on any device receive a 0-dim CPU tensor as a number.
_LEAST_SCALE = torch.tensor(2.0**-120, dtype=torch.float32, device="cpu")
_ROUNDS = 2.0**23 + 8  # adding this number rounds x to an integer; the lowest bits of the sum are x + 8


class _Piece(NamedTuple):
    """Some blocks of the m messages and weights."""

    weights: slice
    scales: Tensor  # bf16 [m, n, 1]
    packed: Tensor  # uint8 [m, n, 64]; x + 8 for each integer x, from the first and the second half of a block


@dataclass(frozen=True)
class Int4Difference:
    """Codec that refreshes weights with 4-bit differences and one bf16 scale per block of 128 weights.

    Pass it as ``Codecs(refresh=Int4Difference())``. A refresh sends 4.125 bits per weight instead
    of 16. Compute weights then differ slightly from the cast masters: after a refresh, the error of a
    weight is at most 1/13 of the largest difference in its block, plus one rounding. The error is corrected by later
    refreshes and does not accumulate. All replicas have the same weights. Masters, optimizer state and checkpoints
    stay exact.

    The first refresh sends the weights themselves, and so do the refreshes after loads, writes by the user,
    :func:`layerzero.refresh`, and changes of shard boundaries. See ``docs/slow-links.md``.

    Example::

        codecs = layerzero.Codecs(refresh=layerzero.Int4Difference())
        model = layerzero.shard_model(model, mp_policy=bf16, codecs=codecs)
    """

    lossless: ClassVar[bool] = False
    predicts: ClassVar[bool] = False

    def message_bytes(self, numel: int) -> int:
        """Return the number of bytes of a message for `numel` weights. A few weights are sent without encoding."""
        return min(-(-numel // _BLOCK) * _BLOCK_BYTES, 2 * numel)

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        """Encode the difference between `new` and `old`. See `DifferenceCodec` for the arguments."""
        size = self.message_bytes(len(new))
        self.write(old, new, out[:size])
        self.decode(out[:size], new.copy_(old))
        return size

    def write(self, old: Tensor, new: Tensor, message: Tensor) -> None:
        """Write the message for `new`, 1-D [n], to `message`. Weights in `old` that are not finite become zero."""
        if message.numel() == new.nbytes:
            message.copy_(new.view(torch.uint8))
            return
        old.nan_to_num_(0.0, 0.0, 0.0)
        for piece in _iter_pieces(message[None], len(new)):
            before, after = old[piece.weights], new[piece.weights]
            difference = torch.empty(piece.packed.shape[1] * _BLOCK, dtype=torch.float32, device=new.device)
            torch.sub(after, before, out=difference[: len(after)])  # rounded to the dtype of the weights
            if len(after) < len(difference):
                difference[len(after) :].zero_()
            blocks = difference.view(-1, _BLOCK)
            largest = torch.empty(len(blocks), 1, dtype=torch.float32, device=new.device)
            if new.device.type == "cpu":  # two fast operations instead of one slow operation
                torch.amax(torch.abs(blocks, out=torch.empty_like(blocks)), 1, keepdim=True, out=largest)
            else:
                torch.linalg.vector_norm(blocks, math.inf, 1, keepdim=True, out=largest)
            torch.add(_LEAST_SCALE, largest, alpha=_SEVENTH, out=piece.scales[0])
            first, second = blocks.div_(piece.scales[0]).add_(_ROUNDS).view(torch.int32).chunk(2, 1)
            torch.add(first, second, alpha=16, out=piece.packed[0])  # the conversion to uint8 keeps the lowest byte

    def decode(self, encoded: Tensor, weights: Tensor, last_change: Tensor | None = None) -> None:
        """Add the difference in a message to `weights`. See `DifferenceCodec` for the arguments."""
        if encoded.numel() not in (weights.nbytes, expected := self.message_bytes(len(weights))):
            raise ValueError(
                f"a message of {encoded.numel()} bytes does not contain the {expected} bytes of the "
                f"differences of {len(weights)} weights. The message is damaged, or the sender has weights of another "
                "size"
            )
        self.decode_parts(encoded[None], weights[None])

    def decode_parts(self, messages: Tensor, weights: Tensor) -> None:
        """Add the differences in `messages`, uint8 ``[m, size]``, to the same rows of `weights` ``[m, n]``."""
        if messages.shape[1] == weights.shape[1] * weights.itemsize:
            weights.view(torch.uint8).copy_(messages)
            return
        weights.nan_to_num_(0.0, 0.0, 0.0)
        for piece in _iter_pieces(messages, weights.shape[1]):
            part, size = weights[:, piece.weights], piece.packed.shape[2]
            values = torch.empty(*piece.packed.shape[:2], _BLOCK, dtype=torch.float32, device=weights.device)
            torch.bitwise_and(piece.packed, 15, out=values[..., :size])
            torch.bitwise_right_shift(piece.packed, 4, out=values[..., size:])
            values.sub_(8).mul_(piece.scales)
            torch.add(part, values.flatten(1)[:, : part.shape[1]], out=part)


def _iter_pieces(messages: Tensor, numel: int) -> Iterator[_Piece]:
    """Divide messages, uint8 ``[m, size]``, and their `numel` weights. A message has all scales before the integers."""
    count = -(-numel // _BLOCK)
    scales = messages[:, : 2 * count].view(torch.bfloat16).unsqueeze(2)
    packed = messages[:, 2 * count :].unflatten(1, (count, _BLOCK // 2))
    at_once = _AT_ONCE if messages.device.type == "cpu" else _AT_ONCE_ON_DEVICE
    at_once = max(1, at_once // len(messages) // _BLOCK)
    for first in range(0, count, at_once):
        blocks = slice(first, min(first + at_once, count))
        yield _Piece(slice(first * _BLOCK, min(blocks.stop * _BLOCK, numel)), scales[:, blocks], packed[:, blocks])
