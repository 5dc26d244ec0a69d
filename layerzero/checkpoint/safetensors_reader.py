"""Read checkpoint files. Each rank reads its own rows and verifies the checksums of the bytes that it reads."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.checksums import ByteRange
from layerzero.checkpoint.contents import CONTENTS, CheckpointContents
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPES, StoredTensor
from layerzero.checkpoint.manifest import Manifest
from layerzero.dtensor.local_shard import LocalShard, plain

__all__ = ["CheckpointFiles", "same_columns"]

_HEADER_BYTES = 100 << 20  # maximum size in bytes of the header of a safetensors file


class CheckpointFiles:
    """Source of tensors that reads the files of one checkpoint; see [Note: Checks before changes] in restore.py.

    Attributes:
        fingerprint: value that is the same on all ranks if they have opened the same checkpoint.
        twice: True, because the files can be read again.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.contents = CheckpointContents.read(manifest)
        self.fingerprint: object = manifest.identity
        self.twice = True
        self._manifest = manifest
        self._reread: dict[str, list[ByteRange]] = {}  # by file: byte ranges to be read in place

    def files_of(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the files that contain a part of `tensors`."""
        table = self.contents.tensors
        return {part.file for key, tensor in tensors.items() for part in _iter_parts(key, tensor, table[key])}

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        """Verify the stored bytes of all `tensors` and fill those whose keys are not in `in_place`.

        Raises:
            CheckpointError: a file is damaged; the message names the file.
        """
        file_parts: dict[str, list[_Part]] = defaultdict(list)  # by file
        for key, tensor in tensors.items():
            for part in _iter_parts(key, tensor, self.contents.tensors[key]):
                file_parts[part.file].append(part)
        for file, parts in file_parts.items():
            begins = self._tensor_offsets(file, parts)
            first_reads, second_reads = [], []
            for part in sorted(parts, key=lambda part: begins[part.key]):
                start = begins[part.key] + part.offset
                byte_range = ByteRange(start, start + part.into.numel(), part.into)
                if part.key in in_place:
                    second_reads.append(byte_range)
                    byte_range = ByteRange(byte_range.start, byte_range.stop, None)
                first_reads.append(byte_range)
            if second_reads:
                self._reread[file] = second_reads
            self._read(file, first_reads)
            for part in parts:
                part.finish()

    def reread(self) -> None:
        """Fill the tensors that :meth:`read` only verified, because their keys were in its argument `in_place`.

        After a CheckpointError, the contents of these tensors are undefined.
        """
        for file, pieces in self._reread.items():
            self._read(file, pieces)

    def _read(self, file: str, pieces: list[ByteRange]) -> None:
        self._manifest.read_pieces(file, pieces)

    def _tensor_offsets(self, file: str, parts: Iterable[_Part]) -> dict[str, int]:
        """Return the byte offset, in the safetensors file, of each tensor to which one of `parts` belongs.

        Raises:
            CheckpointError: the header of the file is invalid or does not match ``contents.json``.
        """
        path, size = self._manifest.path_of(file), self._manifest.files[file].size
        length = int.from_bytes(self._read_bytes(file, 0, min(8, size)), "little")
        try:
            if not 0 < length <= min(size - 8, _HEADER_BYTES):
                raise ValueError(f"the header has the invalid length of {length:,} bytes")
            entries = json.loads(self._read_bytes(file, 8, 8 + length))
            for part in parts:
                stored = self.contents.tensors[part.key]
                entry, expected = entries[part.key], (DTYPES[stored.dtype], list(part.sizes))
                if (entry["dtype"], entry["shape"]) != expected:
                    raise ValueError(
                        f"{part.key} is {entry['dtype']} {entry['shape']}, but {CONTENTS} lists {expected}"
                    )
                begin, end = entry["data_offsets"]
                if end - begin != stored.dtype.itemsize * math.prod(part.sizes):
                    raise ValueError(
                        f"{part.key} of shape {list(part.sizes)} has the wrong size of {end - begin} bytes"
                    )
            return {part.key: 8 + length + entries[part.key]["data_offsets"][0] for part in parts}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is not the safetensors file that {CONTENTS} describes: {reason}") from None

    def _read_bytes(self, file: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        buffer = torch.empty(stop - start, dtype=torch.uint8)
        self._read(file, [ByteRange(start, stop, buffer)])
        return buffer.numpy().tobytes()


def _columns(rows: Tensor, column_ranges: Sequence[tuple[int, int]], starts: Sequence[int]) -> Tensor:
    """Return a view of some columns of `rows`.

    Args:
        column_ranges: for each dim except the first, the range (begin, end) of the wanted columns in the full tensor.
        starts: for each dim except the first, the index that the first column of `rows` has in the full tensor.
    """
    column_slices = (
        slice(begin - origin, end - origin) for (begin, end), origin in zip(column_ranges, starts, strict=True)
    )
    index = (slice(None), *column_slices)
    return rows[index]


def same_columns(box: Sequence[slice], at: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a stored chunk has the same columns as `box`.

    If it does, the rows of the chunk can be copied byte by byte.

    Args:
        box: region of the full tensor, one slice per dim.
        at, sizes: offsets and shape of the chunk in the full tensor.
    """
    return [(each.start, each.stop - each.start) for each in box[1:]] == list(zip(at[1:], sizes[1:], strict=True))


class _Part(NamedTuple):
    """The bytes of a tensor that one file contains.

    Attributes:
        sizes: shape of the chunk in the file.
        offset: byte offset of the wanted bytes within the chunk.
        into: destination tensor of the read, with dtype uint8.
        finish: function that copies the bytes from `into` to their destination.
    """

    file: str
    key: str
    sizes: tuple[int, ...]
    offset: int
    into: Tensor
    finish: Callable[[], object] = lambda: None


def _iter_parts(key: str, tensor: Tensor, stored: StoredTensor) -> Iterator[_Part]:
    """Yield the stored parts of this rank's rows of `tensor`, or of the full tensor if it is not sharded."""
    memory, target_rows = _byte_view(plain(tensor)), plain(tensor)
    if not stored.shape:
        file, _, sizes = stored.chunks[0]
        if memory.numel():  # only one rank stores a sharded scalar
            yield _Part(file, key, sizes, 0, memory)
        return
    local = tensor._local_tensor if isinstance(tensor, DTensor) else None
    box = local.spec.global_slices if isinstance(local, LocalShard) else tuple(slice(0, size) for size in stored.shape)
    first, last = box[0].start, box[0].stop
    for file, offsets, sizes in stored.chunks:
        row_nbytes = stored.dtype.itemsize * math.prod(sizes[1:])  # bytes
        start, stop = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
        if not (start < stop and row_nbytes and memory.numel()):
            continue
        offset, nbytes = (start - offsets[0]) * row_nbytes, (stop - start) * row_nbytes
        if same_columns(box, offsets, sizes):
            yield _Part(file, key, sizes, offset, memory[(start - first) * row_nbytes :][:nbytes])
            continue
        overlaps = [(max(b.start, a), min(b.stop, a + size)) for b, a, size in zip(box, offsets, sizes, strict=True)][
            1:
        ]
        if all(begin < end for begin, end in overlaps):
            stored_rows = torch.empty((stop - start, *sizes[1:]), dtype=stored.dtype)
            source = _columns(stored_rows, overlaps, offsets[1:])
            target = _columns(target_rows[start - first : stop - first], overlaps, [each.start for each in box[1:]])
            yield _Part(file, key, sizes, offset, _byte_view(stored_rows), partial(target.copy_, source))


def _byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    offset = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), offset, (tensor.nbytes,))  # type: ignore[call-overload, no-any-return]
