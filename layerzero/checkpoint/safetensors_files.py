"""Read and write safetensors files: regions of tensors are read, and tensors are written in a stream.

A rank reads only the bytes that it needs. If the files have checksums, the checksums of these bytes are verified.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.checksums import ByteRange, FileRecord
from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPES
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.publish import contiguous_on_cpu, tensor_bytes, write_file
from layerzero.extend import LocalShard, Progress, local_rows, size_text

_HEADER_BYTES = 100 << 20  # maximum size in bytes of the header of a safetensors file
_PIECE = 64 << 20  # maximum number of bytes of a tensor that `iter_rows` reads at once


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_items(folder: Path, rank: int, items: Sequence[WriteItem], planner: SavePlanner) -> FileRecord:
    """Write all items of a rank's save plan into one safetensors file."""
    item_of = {item.index.fqn: item for item in items}
    tensors = {key: _shape_and_dtype(item) for key, item in item_of.items()}
    path, shown = folder / rank_file(rank), rank == 0
    return write_safetensors(path, tensors, lambda key: [_resolve_rows(planner, item_of[key])], shown=shown)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
    content_of: Callable[[str], Iterable[Tensor]],
    *,
    shown: bool = True,
) -> FileRecord:
    """Write a safetensors file from a stream of tensors and hash the file while writing.

    The file consists of the length of the header (8 bytes), the header (JSON), and the bytes of the tensors.

    Args:
        tensors: shape and dtype of each tensor, by name.
        content_of: function that returns the values of a tensor as consecutive tensors on any device.
        shown: whether to print the progress of long writes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)  # aligns each tensor in the file
    for name in order:
        shape, dtype = tensors[name]
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} has dtype {dtype}, which the safetensors format does not support")
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with Progress(f"write of {path.name}", shown=shown) as progress:
        content = chain.from_iterable(map(content_of, order))
        return write_file(path, _safetensors_bytes(header_bytes, content, end, progress))


def _safetensors_bytes(header: bytes, content: Iterable[Tensor], size: int, progress: Progress) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    written = 0
    for piece in content:
        values = contiguous_on_cpu(piece)
        for part in tensor_bytes(values):
            yield part
            written += len(part)
            progress.update(f"{size_text(written)} of {size_text(size)}")


def _shape_and_dtype(item: WriteItem) -> tuple[Sequence[int], torch.dtype]:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype


def _resolve_rows(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return local_rows(tensor.detach())


class Region(NamedTuple):
    """Part of a stored tensor, and the memory for it.

    Attributes:
        box: one slice per dim of the full tensor.
        target: plain tensor with the shape of `box`, on any device.
    """

    key: str
    box: tuple[slice, ...]
    target: Tensor


class TensorFiles:
    """Tensors in safetensors files, as a source for a load; see [Note: Checks before changes] in restore.py.

    Subclasses define :meth:`path_of`, :meth:`read_ranges`, `contents` and `fingerprint`.

    Attributes:
        contents: names, shapes, dtypes and chunks of all tensors, and all other values.
        fingerprint: value that is the same on all ranks if they have opened the same files.
        twice: True, because the files can be read again.
    """

    contents: CheckpointContents
    fingerprint: object
    twice = True

    def __init__(self) -> None:
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        self._reread: dict[str, list[ByteRange]] = {}  # by file: byte ranges to be read in place

    def path_of(self, file: str) -> Path:
        """Return the path of a file that `contents` names."""
        raise NotImplementedError

    def read_ranges(self, file: str, ranges: Sequence[ByteRange]) -> None:
        """Read byte ranges of a file, in file order, and verify their checksums if the file has some."""
        raise NotImplementedError

    def name_in_file(self, key: str) -> str:
        """Return the name that the tensor `key` has in its files."""
        return key

    def files_of(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the files that contain a part of `tensors`."""
        return {part.file for region in self._regions(tensors) for part in self._parts(region)}

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        """Verify the stored bytes of all `tensors` and fill those whose keys are not in `in_place`.

        Raises:
            CheckpointError: a file is damaged; the message names the file.
        """
        self.read_regions(self._regions(tensors), in_place)

    def reread(self) -> None:
        """Fill the tensors that :meth:`read` only verified, because their keys were in its argument `in_place`.

        After a CheckpointError, the contents of these tensors are undefined.
        """
        for file, ranges in self._reread.items():
            self.read_ranges(file, ranges)

    def read_regions(self, regions: Sequence[Region], in_place: Container[str] = ()) -> None:
        """Fill the targets of `regions`. See :meth:`read` for `in_place`."""
        parts_of: dict[str, list[_Part]] = defaultdict(list)  # by file
        for region in regions:
            for part in self._parts(region):
                parts_of[part.file].append(part)
        for file, parts in parts_of.items():
            first_reads, second_reads = [], []
            starts = {id(part): self._start_of(part) for part in parts}
            for part in sorted(parts, key=lambda part: starts[id(part)]):
                start = starts[id(part)]
                byte_range = ByteRange(start, start + part.into.numel(), part.into)
                if part.key in in_place:
                    second_reads.append(byte_range)
                    byte_range = ByteRange(byte_range.start, byte_range.stop, None)
                first_reads.append(byte_range)
            if second_reads:
                self._reread[file] = second_reads
            self.read_ranges(file, first_reads)
            for part in parts:
                part.finish()

    def iter_rows(self, key: str) -> Iterator[Tensor]:
        """Yield the values of a full tensor in ranges of rows. Each range has a single row or at most 64 MiB."""
        stored = self.contents.tensors[key]
        shape = stored.shape or (1,)
        step = max(1, _PIECE // max(1, stored.dtype.itemsize * math.prod(shape[1:])))
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            box = (rows, *(slice(0, size) for size in shape[1:])) if stored.shape else ()
            target = torch.empty([each.stop - each.start for each in box], dtype=stored.dtype)
            self.read_regions([Region(key, box, target)])
            yield target

    def _regions(self, tensors: Mapping[str, Tensor]) -> list[Region]:
        """Return the regions of this rank's rows of `tensors`, or of full tensors that are not sharded."""
        regions = []
        for key, tensor in tensors.items():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else None
            shape = self.contents.tensors[key].shape
            box = tuple(slice(0, size) for size in shape)
            if isinstance(local, LocalShard) and shape:
                box = local.spec.global_slices
            regions.append(Region(key, box, local_rows(tensor)))
        return regions

    def header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Return the position of the first tensor in a safetensors file, and the entries of its header by name.

        Raises:
            CheckpointError: the file is no complete safetensors file.
        """
        if file not in self._headers:
            path = self.path_of(file)
            try:
                size = path.stat().st_size
                length = int.from_bytes(self._read_bytes(file, 0, min(8, size)), "little")
                if not 0 < length <= min(size - 8, _HEADER_BYTES):
                    raise ValueError(f"the header has the invalid length of {length:,} bytes")
                entries = json.loads(self._read_bytes(file, 8, 8 + length))
                entries.pop("__metadata__", None)
                if max((entry["data_offsets"][1] for entry in entries.values()), default=0) > size - 8 - length:
                    raise ValueError("the file is incomplete, because it ends before its last tensor")
            except FileNotFoundError:
                raise
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OSError) as error:
                raise CheckpointError(f"{path} is not a safetensors file: {type(error).__name__}: {error}") from None
            self._headers[file] = 8 + length, entries
        return self._headers[file]

    def _start_of(self, part: _Part) -> int:
        """Return the position of the bytes of a part in its file.

        Raises:
            CheckpointError: the header of the file does not match `contents`.
        """
        first, entries = self.header(part.file)
        dtype = self.contents.tensors[part.key].dtype
        nbytes, entry = dtype.itemsize * math.prod(part.sizes), entries.get(self.name_in_file(part.key), {})
        begin, end = entry.get("data_offsets", (0, 0))
        found = entry.get("dtype"), entry.get("shape"), end - begin
        if begin < 0 or found != (DTYPES[dtype], list(part.sizes), nbytes):
            raise CheckpointError(
                f"{self.path_of(part.file)} is not the file that contents.json describes: {part.key} has the dtype, "
                f"shape and size {found}, but {(DTYPES[dtype], list(part.sizes), nbytes)} are expected"
            )
        return int(first + begin + part.offset)

    def _read_bytes(self, file: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        buffer = torch.empty(stop - start, dtype=torch.uint8)
        self.read_ranges(file, [ByteRange(start, stop, buffer)])
        return buffer.numpy().tobytes()

    def _parts(self, region: Region) -> Iterator[_Part]:
        """Yield the parts of a region that are in different files."""
        key, box, target = region
        stored = self.contents.tensors[key]
        if not target.numel():  # for instance a sharded scalar on ranks that do not hold it
            return
        if not box:
            file, _, sizes = stored.chunks[0]
            stored_scalar = torch.empty(target.shape, dtype=stored.dtype, device="meta")
            yield _Part(file, key, sizes, 0, *_destination(target, stored_scalar, ()))
            return
        for file, offsets, sizes in stored.chunks:
            ranges = zip(box, offsets, sizes, strict=True)
            overlaps = [(max(wanted.start, at), min(wanted.stop, at + size)) for wanted, at, size in ranges]
            if not all(begin < end for begin, end in overlaps):
                continue
            start, stop = overlaps[0]
            offset = (start - offsets[0]) * stored.dtype.itemsize * math.prod(sizes[1:])
            stored_rows = torch.empty((stop - start, *sizes[1:]), dtype=stored.dtype, device="meta")
            part = target[_relative(overlaps, [each.start for each in box])]
            wanted = _relative(overlaps, (start, *offsets[1:]))
            yield _Part(file, key, sizes, offset, *_destination(part, stored_rows, wanted))


class CheckpointFiles(TensorFiles):
    """Tensors in the files of one checkpoint, which have checksums."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.contents = CheckpointContents.read(manifest)
        self.fingerprint = manifest.token
        self._manifest = manifest

    def path_of(self, file: str) -> Path:
        return self._manifest.path_of(file)

    def read_ranges(self, file: str, ranges: Sequence[ByteRange]) -> None:
        self._manifest.read_pieces(file, ranges)


class _Part(NamedTuple):
    """The bytes of a region that one file contains.

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
    finish: Callable[[], object]


def _destination(target: Tensor, stored_rows: Tensor, wanted: tuple[slice, ...]) -> tuple[Tensor, Callable[[], object]]:
    """Return the memory into which rows are read, and a function that then copies the wanted values to `target`.

    The memory is that of `target` if the stored bytes are its bytes.

    Args:
        stored_rows: tensor on ``meta`` with the shape and dtype of the rows.
        wanted: region of `stored_rows` that contains the wanted values.
    """
    has_stored_bytes = target.dtype == stored_rows.dtype and not (target.is_conj() or target.is_neg())
    if has_stored_bytes and target.shape == stored_rows.shape and target.is_contiguous():
        return _byte_view(target), lambda: None
    rows = torch.empty_like(stored_rows, device="cpu")
    return _byte_view(rows), partial(target.copy_, rows[wanted])


def _relative(ranges: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return slices that select `ranges`, one per dim, from a tensor whose first element is at `origin`."""
    return tuple(slice(begin - at, end - at) for (begin, end), at in zip(ranges, origin, strict=True))


def same_columns(box: Sequence[slice], at: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a stored chunk has the same columns as `box`.

    If it does, the rows of the chunk can be copied byte by byte.

    Args:
        box: region of the full tensor, one slice per dim.
        at, sizes: offsets and shape of the chunk in the full tensor.
    """
    return [(each.start, each.stop - each.start) for each in box[1:]] == list(zip(at[1:], sizes[1:], strict=True))


def _byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    # .data, because a read counts as no write for autograd; as_strided, because a dim of size 1 may have any stride
    return tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
