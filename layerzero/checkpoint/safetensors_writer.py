"""Write tensors, or the items in a rank's save plan, to safetensors files in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPES
from layerzero.checkpoint.manifest import FileRecord
from layerzero.checkpoint.publish import contiguous_on_cpu, tensor_bytes, write_file
from layerzero.dtensor.local_shard import plain

__all__ = ["rank_file", "write_items", "write_safetensors"]


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
