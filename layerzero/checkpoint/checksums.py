"""Compute one checksum per chunk of a file. A reader can verify the chunks that it reads without reading the full file.

[Note: Purpose of checksums]
Disks, networks and truncated copies change bytes by accident. Any good 128-bit hash detects such changes. XXH3-128,
from the xxhash package, is so fast that hashing takes negligible time compared with disk I/O. Checksums do not protect
against an attacker, who can also replace the checksums. A cryptographic hash would not protect against such an attack
either.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.checkpoint.errors import CheckpointError

CHUNK = 8 << 20  # size of a chunk in bytes; the checksums of a terabyte of files take 4 MB
_STEP = 512 << 10  # size in bytes of the pieces that are hashed while they are in the cache
_THREADS = 4  # number of threads that read and hash in parallel
_XXH3, _SHA256 = "xxh3-128", "sha256"
CHECKSUM_DIGITS = {_XXH3: 32, _SHA256: 64}  # number of hexadecimal digits per checksum


def _xxh3() -> Any:
    from xxhash import xxh3_128  # noqa: PLC0415 - an extra

    return xxh3_128()


@dataclass(frozen=True)
class ChecksumScheme:
    """Checksum algorithm and chunk size for the files of a checkpoint.

    Attributes:
        chunk: size of a chunk in bytes; the last chunk of a file may be shorter.
    """

    algorithm: str
    chunk: int

    @staticmethod
    @cache
    def best() -> ChecksumScheme:
        """Return the scheme with the fastest installed algorithm."""
        with suppress(ModuleNotFoundError):
            _xxh3()
            return ChecksumScheme(_XXH3, CHUNK)
        return ChecksumScheme(_SHA256, CHUNK)

    def hasher(self) -> Any:
        """Return a new hash object with ``update`` and ``hexdigest``."""
        if self.algorithm == _SHA256:
            return hashlib.sha256()
        try:
            return _xxh3()
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "the checkpoint has XXH3 checksums, but xxhash is not installed. Run: pip install xxhash"
            ) from error

    def of_chunk(self, sums: str, index: int) -> str:
        width = CHECKSUM_DIGITS[self.algorithm]
        return sums[index * width : (index + 1) * width]


class ChunkHasher:
    """Incremental hasher that computes one checksum per chunk of a file."""

    def __init__(self, scheme: ChecksumScheme) -> None:
        self.size = 0
        self._scheme = scheme
        self._done: list[str] = []
        self._hasher = scheme.hasher()

    def update(self, piece: Any) -> None:
        """Hash the next bytes of the file. `piece` is any object that supports the buffer protocol."""
        remaining = memoryview(piece)
        while remaining.nbytes:
            chunk_space = (len(self._done) + 1) * self._scheme.chunk - self.size
            part = remaining[:chunk_space]
            self._hasher.update(part)
            self.size += part.nbytes
            if part.nbytes == chunk_space:
                self._done.append(self._hasher.hexdigest())
                self._hasher = self._scheme.hasher()
            remaining = remaining[chunk_space:]

    def hexdigest(self) -> str:
        """Return the concatenated checksums of all chunks."""
        last = [] if self._done and self.size % self._scheme.chunk == 0 else [self._hasher.hexdigest()]
        return "".join([*self._done, *last])


@dataclass(frozen=True)
class ByteRange:
    """A byte range to be read from a file.

    Attributes:
        into: destination tensor on any device, with dtype uint8 and shape [stop - start]. If None, the bytes are
            verified but not copied.
    """

    start: int
    stop: int
    into: Tensor | None


@dataclass(frozen=True)
class FileRecord:
    """Name, size and checksums that one file of a checkpoint had when it was saved."""

    name: str
    size: int  # bytes
    sums: str  # concatenated hexadecimal checksums of all chunks of the file


def read_pieces(
    path: Path, pieces: Sequence[ByteRange], record: FileRecord | None = None, scheme: ChecksumScheme | None = None
) -> None:
    """Read byte ranges of a file and verify the checksums of all chunks that overlap these ranges.

    Args:
        pieces: byte ranges in file order. The ranges do not overlap.
        record, scheme: size and checksums of the file, and their scheme. If None, nothing is verified.

    Raises:
        CheckpointError: the file is damaged or cannot be read. The contents of the destinations are then undefined.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        chunk = CHUNK if scheme is None else scheme.chunk
        by_chunk = _split_at_chunks(pieces, chunk)
        with ThreadPoolExecutor(max(1, min(_THREADS, len(by_chunk)))) as pool:
            futures = [
                pool.submit(_read_chunk, descriptor, index * chunk, in_chunk, record, scheme)
                for index, in_chunk in by_chunk.items()
            ]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except _Damage as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    finally:
        os.close(descriptor)


class _Damage(Exception):
    """Error for a file whose contents differ from the data that was written."""


def _split_at_chunks(pieces: Sequence[ByteRange], chunk: int) -> dict[int, list[ByteRange]]:
    """Split byte ranges at the boundaries of chunks; return the parts in each chunk, by its index."""
    by_chunk: dict[int, list[ByteRange]] = {}
    for piece in pieces:
        for index in range(piece.start // chunk, -(-piece.stop // chunk)):
            start, stop = max(piece.start, index * chunk), min(piece.stop, (index + 1) * chunk)
            target = None if piece.into is None else piece.into[start - piece.start : stop - piece.start]
            by_chunk.setdefault(index, []).append(ByteRange(start, stop, target))
    return by_chunk


def _read_chunk(
    descriptor: int, start: int, pieces: Sequence[ByteRange], record: FileRecord | None, scheme: ChecksumScheme | None
) -> None:
    """Read byte ranges inside the chunk at `start`. If the file has checksums, also read and hash the other bytes."""
    scratch = bytearray(_STEP)
    if record is None or scheme is None:
        for piece in pieces:
            _read_and_hash(descriptor, piece.start, piece.stop, piece.into, scratch, None)
        return
    hasher, position, stop = scheme.hasher(), start, min(record.size, start + scheme.chunk)
    for piece in pieces:
        _read_and_hash(descriptor, position, piece.start, None, scratch, hasher)
        _read_and_hash(descriptor, piece.start, piece.stop, piece.into, scratch, hasher)
        position = piece.stop
    _read_and_hash(descriptor, position, stop, None, scratch, hasher)
    if hasher.hexdigest() != scheme.of_chunk(record.sums, start // scheme.chunk):
        raise _Damage(f"bytes {start:,} to {stop:,} do not match their recorded {scheme.algorithm} checksum")


def _read_and_hash(
    descriptor: int, start: int, stop: int, target: Tensor | None, scratch: bytearray, hasher: Any
) -> None:
    """Read bytes `start` to `stop` of a file, hash them unless `hasher` is None, and copy them to `target`, if any."""
    direct = target is not None and target.device.type == "cpu"
    for position in range(start, stop, _STEP):
        length = min(_STEP, stop - position)
        if direct:
            assert target is not None
            part = memoryview((ctypes.c_char * length).from_address(target.data_ptr() + position - start))
        else:
            part = memoryview(scratch)[:length]
        _read_exactly(descriptor, part, position)
        if hasher is not None:
            hasher.update(part)
        if target is not None and not direct:
            target[position - start : position - start + length].copy_(
                torch.frombuffer(scratch, dtype=torch.uint8, count=length)
            )


def _read_exactly(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < part.nbytes:
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if count == 0:
            raise _Damage(f"the file ends at byte {offset + done:,}")
        done += count
