"""Compress the differences between two versions of 16-bit weights, without loss.

[Note: Lossless differences]
An optimizer step changes most weights by a few units in the last place. The bit patterns of a bf16 weight before and
after the step therefore differ by a small integer, modulo 2^16. Optimizers with momentum repeat most of the previous
change, so sender and receiver may predict a difference: 7/8 of the last one. Only the error of the prediction is then
sent. Integers, unlike floating-point numbers, give the same prediction on all processors. The sign of each number is
moved to its lowest bit (zigzag encoding), so that the high bytes of most numbers are zero. The low bytes and the high
bytes are then compressed separately. The decoder adds the differences to the previous bit patterns. All bit patterns
are restored exactly, including those of NaN.

A message begins with two int32 numbers for each piece of `_AT_ONCE` weights: the sizes of its compressed low and high
bytes. A message that would not be smaller than the weights contains the weights themselves. The receiver recognizes
such a message by its size.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

COMPRESSIONS = ("zstd", "zlib")
_AT_ONCE = 2**17  # weights per piece, so that the planes of a piece fit into the cache of a core
_LEVEL = 1

_Compress = Callable[[Tensor], bytes]
_Decompress = Callable[[Tensor, int], bytes]


@dataclass(frozen=True)
class LosslessDifferences:
    """Codec for new versions of 16-bit weights whose previous versions the receivers have.

    See [Note: Lossless differences]. All methods may be called from several threads at once. They release the
    interpreter's lock while they compress.

    Args:
        compression: ``"zstd"``, which needs the package zstandard, or ``"zlib"``, which is a part of Python. zlib
            compresses as well as zstd but is several times slower.

    Example::

        codec = LosslessDifferences.best()
        out = torch.empty(new.nbytes, dtype=torch.uint8)
        encoded = out[: codec.encode(old, new, out)]
        codec.decode(encoded, old)  # old now equals new
    """

    compression: str
    lossless: ClassVar[bool] = True
    predicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r} is not supported. Use one of {COMPRESSIONS}")

    @classmethod
    def best(cls) -> LosslessDifferences:
        """Return the codec with the fastest compression that is installed."""
        try:
            import zstandard  # noqa: F401, PLC0415 - an optional package
        except ModuleNotFoundError:
            return cls("zlib")
        return cls("zstd")

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        """Encode `new` into the beginning of `out`, and return the size of the message in bytes.

        Args:
            old: previous weights, 1-D [n], in a 16-bit dtype and in host memory.
            new: weights to encode, with the dtype and shape of `old`.
            out: uint8 [2 n].
            last_change: int16 [n], differences of the previous message, which predict those of this message and are
                replaced by them. Zeros before the first message, and set to zeros by a message that contains the
                weights themselves. None: send the differences without a prediction.
        """
        compress = self._compressor()
        before, after = old.view(torch.int16), new.view(torch.int16)
        sizes: list[int] = []
        end = 8 * len(_piece_slices(len(new)))
        for piece in _piece_slices(len(new)):
            change = after[piece] - before[piece]
            if last_change is not None:
                prediction = _predict(last_change[piece])
                last_change[piece] = change
                change -= prediction
            sign = change >> 15
            change <<= 1
            change ^= sign  # zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
            # A conversion to uint8 keeps the low byte. Strided copies of bytes are eight times slower.
            for plane in (change.to(torch.uint8), change.bitwise_right_shift_(8).to(torch.uint8)):
                packed = compress(plane)
                if end + len(packed) >= out.numel():
                    out.copy_(new.view(torch.uint8))
                    if last_change is not None:
                        last_change.zero_()
                    return out.numel()
                out[end : end + len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                sizes.append(len(packed))
                end += len(packed)
        out[: 4 * len(sizes)] = torch.tensor(sizes, dtype=torch.int32).view(torch.uint8)
        return end

    def decode(self, encoded: Tensor, weights: Tensor, last_change: Tensor | None = None) -> None:
        """Replace the previous `weights`, 1-D [n], by the weights of the message `encoded`, 1-D uint8.

        `last_change` must be equal to that of :meth:`encode`, and changes in the same way.

        Raises:
            ValueError: the message is damaged, or was not encoded for `weights` of this size.
            ModuleNotFoundError: the message is compressed with zstd, and zstandard is not installed.
        """
        if encoded.numel() == weights.nbytes:
            weights.view(torch.uint8).copy_(encoded)
            if last_change is not None:
                last_change.zero_()
            return
        decompress, bits, pieces = self._decompressor(), weights.view(torch.int16), _piece_slices(len(weights))
        sizes = encoded[: 8 * len(pieces)].clone().view(torch.int32).tolist()  # a clone is aligned
        if 8 * len(pieces) + sum(sizes) != encoded.numel():
            raise ValueError(
                f"a message of {encoded.numel()} bytes does not contain the {len(pieces)} pieces of {len(weights)} "
                "weights. The message is damaged, or the sender has weights of another size"
            )
        packed = iter(torch.split(encoded[8 * len(pieces) :], sizes))
        for piece in pieces:
            low, high = self._unpack_planes(packed, decompress, len(bits[piece]))
            change = high.to(torch.int16)
            change <<= 8
            change |= low
            sign = (change & 1).neg_()
            change >>= 1
            change &= 0x7FFF
            change ^= sign
            if last_change is not None:
                change += _predict(last_change[piece])
                last_change[piece] = change
            bits[piece] += change

    @staticmethod
    def _unpack_planes(packed: Iterator[Tensor], decompress: _Decompress, numel: int) -> list[Tensor]:
        planes = [bytearray(decompress(next(packed), numel)) for _ in range(2)]
        if any(len(plane) != numel for plane in planes):
            raise ValueError(f"a piece of {numel} weights has planes of {[*map(len, planes)]} bytes. It is damaged")
        return [torch.frombuffer(plane, dtype=torch.uint8) for plane in planes]

    def _compressor(self) -> _Compress:
        if self.compression == "zstd":
            import zstandard  # noqa: PLC0415 - an optional package

            compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False)
            return lambda plane: compressor.compress(memoryview_of(plane))

        def compress(plane: Tensor) -> bytes:
            # Runs of zeros and a Huffman code; the default strategy is slower, and its messages are larger.
            deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
            return deflate.compress(memoryview_of(plane)) + deflate.flush()

        return compress

    def _decompressor(self) -> _Decompress:
        if self.compression == "zstd":
            return _zstd_decompressor()

        def decompress(packed: Tensor, size: int) -> bytes:
            try:
                # One byte more than expected, so that a longer piece is noticed and not merely cut.
                return zlib.decompressobj(-zlib.MAX_WBITS).decompress(memoryview_of(packed), size + 1)
            except zlib.error as error:
                raise ValueError(f"a piece cannot be decompressed: {error}") from error

        return decompress


def _predict(last_change: Tensor) -> Tensor:
    return last_change - (last_change >> 3)


def _zstd_decompressor() -> _Decompress:
    try:
        import zstandard  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the weights are compressed with zstd, but zstandard is not installed. Run `pip install zstandard` here, "
            "or uninstall it where the weights are sent, which then uses zlib"
        ) from error
    decompressor = zstandard.ZstdDecompressor()

    def decompress(packed: Tensor, size: int) -> bytes:
        try:
            content: bytes = decompressor.decompress(memoryview_of(packed), max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(f"a piece cannot be decompressed: {error}") from error
        return content

    return decompress


def _piece_slices(numel: int) -> list[slice]:
    return [slice(first, min(first + _AT_ONCE, numel)) for first in range(0, numel, _AT_ONCE)]


def memoryview_of(tensor: Tensor) -> memoryview:
    """Return a memoryview of a non-empty contiguous CPU tensor, without numpy. The tensor must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
