"""Write and open safetensors files, in pieces that need little memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPE_NAMED, DTYPES
from layerzero.checkpoint.manifest import FileRecord
from layerzero.checkpoint.publish import contiguous_on_cpu, tensor_bytes, write_file
from layerzero.dtensor.local_shard import plain

__all__ = [
    "FileTensor",
    "check_stored_tensor",
    "iter_pieces",
    "open_safetensors",
    "rank_file",
    "tensors_in",
    "write_items",
    "write_safetensors",
]

_PIECE = 64 << 20  # maximum number of bytes of a tensor that are in memory at the same time during a read


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_items(folder: Path, rank: int, items: Sequence[WriteItem], planner: SavePlanner) -> FileRecord:
    """Write all items of a rank's save plan into one safetensors file."""
    items = sorted(
        items, key=lambda item: -_shape_and_dtype(item)[1].itemsize
    )  # this order aligns each tensor in the file
    return write_safetensors(
        folder / rank_file(rank),
        {item.index.fqn: _shape_and_dtype(item) for item in items},
        ((_resolve_rows(planner, item),) for item in items),
    )


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], content: Iterable[Iterable[Tensor]]
) -> FileRecord:
    """Write a safetensors file from a stream of tensors and hash the file while writing.

    The file consists of the length of the header (8 bytes), the header (JSON), and the bytes of the tensors.

    Args:
        tensors: shape and dtype of each tensor, by name, in file order.
        content: for each entry of `tensors`, the values of the tensor as consecutive tensors on any device.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} has dtype {dtype}, which the safetensors format does not support")
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    return write_file(path, _safetensors_bytes(header_bytes, content))


def _safetensors_bytes(header: bytes, content: Iterable[Iterable[Tensor]]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    for pieces in content:
        for piece in pieces:
            values = contiguous_on_cpu(piece)
            yield from tensor_bytes(values)


def _shape_and_dtype(item: WriteItem) -> tuple[Sequence[int], torch.dtype]:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype


def _resolve_rows(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return plain(tensor.detach())


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; return the context manager of ``safetensors.safe_open``."""
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only loads need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("loading a checkpoint requires safetensors. Run: pip install safetensors") from error
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def check_stored_tensor(
    path: Path, tensors: Any, names: Container[str], key: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise CheckpointError unless the opened file at `path` contains the tensor that ``contents.json`` describes.

    Args:
        tensors: the opened file; see :func:`open_safetensors`.
        names: names of all tensors in the file.
        key, shape, dtype: the tensor that ``contents.json`` describes.
    """
    entry = tensors.get_slice(key) if key in names else None
    if entry is None or list(entry.get_shape()) != list(shape) or entry.get_dtype() != DTYPES.get(dtype):
        actual = "no tensor" if entry is None else f"{entry.get_dtype()} {entry.get_shape()}"
        raise CheckpointError(f"{path} has {actual} as {key}, but contents.json lists {dtype} {list(shape)}")


def iter_pieces(
    tensors: Any, key: str, shape: Sequence[int], dtype: torch.dtype, *, box: Sequence[slice] = ()
) -> Iterator[Tensor]:
    """Yield a tensor of an opened file, or only the region `box` of the tensor, in ranges of rows.

    Each range has a single row or at most 64 MiB.

    Args:
        tensors: the opened file; see :func:`open_safetensors`.
        shape, dtype: shape and dtype of the tensor in the file.
    """
    if not shape:
        yield tensors.get_tensor(key)
        return
    step = max(1, _PIECE // max(1, torch.Size(shape[1:]).numel() * dtype.itemsize))  # rows
    source, rows = tensors.get_slice(key), range(shape[0])[box[0] if box else slice(None)]
    for start in rows[::step]:
        index = (slice(start, min(start + step, rows.stop)), *box[1:])
        yield source[index]


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def tensors_in(files: Iterable[Path], rename: Callable[[str], str] | None = None) -> dict[str, FileTensor]:
    """Return the tensors of several safetensors files by name, or by the name that `rename` returns.

    Raises:
        ValueError: two tensors have the same name.
        CheckpointError: a file is no safetensors file, or a tensor has an unsupported dtype.
    """
    found: dict[str, FileTensor] = {}
    for path in files:
        with open_safetensors(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                key, entry = name if rename is None else rename(name), tensors.get_slice(name)
                if key in found:
                    raise ValueError(
                        f"{path} has a tensor {name!r} for {key}, but {found[key].path} has a tensor for it as well. "
                        "Pass files without duplicate tensors"
                    )
                dtype = DTYPE_NAMED.get(entry.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{path}: {name} has the unsupported dtype {entry.get_dtype()}")
                found[key] = FileTensor(path, name, tuple(entry.get_shape()), dtype)
    return found
