"""Send refreshed weights as differences in 4 bits.

[Note: Lossy differences]
Each rank encodes the difference between the cast masters of its part and its previous compute weights. All replicas,
including the sender, add the decoded difference to the same previous weights in fp32 and round the sum. A decoded
difference is the product of a 4-bit integer and a bf16 scale, which fp32 represents exactly. The sum therefore has the
same bits on all ranks, even on processors that fuse multiplications with additions.

The error of a refresh is a part of the next difference, so no rank stores it. If the masters stop changing, each
refresh makes the largest difference of a block several times smaller, until the weights equal the cast masters.

A part with a non-finite difference is sent without encoding. Its weights are then the cast masters, so that a NaN is
visible on all ranks and disappears as soon as the masters are finite again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerzero.extend import ParamRows
from layerzero.slow_links.block_codecs import Int4Blocks

_AT_ONCE = 2**17  # weights that are encoded at once, a multiple of the block size of Int4Blocks


@dataclass(frozen=True)
class Int4Difference:
    """Codec that refreshes weights with 4-bit differences and one bf16 scale per block of 128 weights.

    Pass it as ``Codecs(refresh=Int4Difference())``. A refresh sends 4.125 bits per weight instead
    of 16. Compute weights then differ slightly from the cast masters: after a refresh, the error of a
    weight is at most 1/13 of the largest difference in its block, plus one rounding. The error is corrected by later
    refreshes and does not accumulate. All replicas have the same weights. Masters, optimizer state and checkpoints
    stay exact.

    The first refresh sends the weights themselves, and so do the refreshes after loads, writes by the user,
    :func:`layerzero.refresh`, and changes of shard boundaries. A rank also sends the weights themselves if a difference
    in its part is infinite or NaN. See ``docs/slow-links.md``.

    Example::

        codecs = layerzero.Codecs(refresh=layerzero.Int4Difference())
        model = layerzero.shard_model(model, mp_policy=bf16, codecs=codecs)
    """

    lossless: ClassVar[bool] = False
    predicts: ClassVar[bool] = False
    _blocks: ClassVar[Int4Blocks] = Int4Blocks(feedback=False)

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        """Encode the difference between `new` and `old`. See `DifferenceCodec` for the arguments."""
        size = self.message_bytes(len(new))
        is_encoded = size < new.nbytes
        for piece, rows, place in self._iter_pieces(len(new)) if is_encoded else ():
            difference = new[piece].float().sub_(old[piece])
            if not difference.abs().amax().isfinite():
                is_encoded = False
                break
            self._blocks.encode(difference, rows, out[place])
        if not is_encoded:
            out.copy_(new.view(torch.uint8))
            return out.numel()
        self.decode(out[:size], new.copy_(old))
        return size

    def decode(self, encoded: Tensor, weights: Tensor, last_change: Tensor | None = None) -> None:
        """Add the difference in a message to `weights`. See `DifferenceCodec` for the arguments."""
        if encoded.numel() == weights.nbytes:
            weights.view(torch.uint8).copy_(encoded)
            return
        if encoded.numel() != (expected := self.message_bytes(len(weights))):
            raise ValueError(
                f"a message of {encoded.numel()} bytes does not contain the {expected} bytes of the "
                f"differences of {len(weights)} weights. The message is damaged, or the sender has weights of another "
                "size"
            )
        encoded = encoded.clone()  # a clone is aligned
        for piece, rows, place in self._iter_pieces(len(weights)):
            total = torch.empty(len(weights[piece]), dtype=torch.float32)
            self._blocks.decode(encoded[place], rows, total)
            weights[piece] = total.add_(weights[piece])

    def message_bytes(self, numel: int) -> int:
        """Return the number of bytes of the differences of `numel` weights."""
        return self._blocks.nbytes([ParamRows(0, 1, numel)], torch.float32)

    def _iter_pieces(self, numel: int) -> Iterator[tuple[slice, list[ParamRows], slice]]:
        """For each piece, yield its weights, the rows to pass to the block codec, and its bytes in the message."""
        for first in range(0, numel, _AT_ONCE):
            stop = min(first + _AT_ONCE, numel)
            place = slice(self.message_bytes(first), self.message_bytes(stop))
            yield slice(first, stop), [ParamRows(0, 1, stop - first)], place
