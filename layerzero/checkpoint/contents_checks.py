"""Validate ``contents.json`` before its contents are used.

[Note: Validation of contents]
A matching checksum proves that a file has not changed since it was written, but not that layerzero wrote it. Rows that
are missing from all files would be loaded as uninitialized memory, and wrong sizes could cause allocations that exceed
the available memory. Therefore the table of tensors is compared with all references to it and with the file sizes
before any allocation.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.checkpoint.json_codec import DEPTH, Decoder, is_deeper, references

__all__ = ["StoredTensor", "check_document", "check_tensors", "check_topology", "num_saving_ranks"]


@dataclass(frozen=True)
class StoredTensor:
    """One full tensor of a checkpoint and the chunks that it was split into.

    Attributes:
        chunks: (file, offsets, sizes) of every chunk.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def check_topology(topology: Mapping[str, Any]) -> None:
    """Raise ValueError unless all sizes in `topology` are positive integers."""
    for name in ("data_parallel", "zero3_size", *(["ranks"] if "ranks" in topology else [])):
        if type(topology[name]) is not int or topology[name] < 1:
            raise ValueError(f"{name} must be a positive integer, got {topology[name]!r}")


def num_saving_ranks(topology: Mapping[str, int]) -> int | None:
    """Return the number of ranks that saved the checkpoint, including model-parallel ranks; None if unknown."""
    return topology.get("ranks", topology.get("data_parallel"))


def check_tensors(tensors: Mapping[str, StoredTensor], file_sizes: Mapping[str, int]) -> None:
    """Check that chunks cover each tensor without gaps, and that each file is large enough for its chunks.

    Chunks are consecutive ranges of rows. A tensor may first be split along one more dim. Each part is then split into
    rows.

    Raises:
        ValueError: a check fails; the message names the tensor or the file.
    """
    file_nbytes: Counter[str] = Counter()  # number of bytes per file
    for key, tensor in tensors.items():
        shape = tensor.shape
        if not _are_sizes(shape) or tensor.dtype.itemsize * math.prod(max(1, size) for size in shape) >= 2**63:
            raise ValueError(f"{key} has the invalid shape {list(shape)}")
        if not shape and len(tensor.chunks) != 1:
            raise ValueError(f"{key} is a scalar, but has {len(tensor.chunks)} chunks instead of one")
        columns: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # number of rows so far
        for file, offsets, sizes in sorted(tensor.chunks, key=lambda chunk: chunk[1:]):
            if file not in file_sizes:
                raise ValueError(f"{key} is in the file {file!r}, which is not in the manifest")
            if not _are_sizes(offsets) or not _are_sizes(sizes) or len(offsets) != len(shape):
                raise ValueError(f"{key} has an invalid chunk of shape {list(sizes)} at {list(offsets)}")
            if len(sizes) != len(shape):
                raise ValueError(_NOT_BY_ROWS.format(key))
            column = offsets[1:], sizes[1:]
            num_rows = columns.get(column, 0)
            if shape and (offsets[0] != num_rows or sizes[0] > shape[0] - num_rows):
                raise ValueError(
                    f"{key} has a chunk of {sizes[0]} rows at row {offsets[0]}, but row {num_rows} of {shape[0]} is "
                    "next"
                )
            columns[column] = num_rows + (sizes[0] if shape else 0)
            file_nbytes[file] += tensor.dtype.itemsize * torch.Size(sizes).numel()
        if columns and not _chunks_cover(sorted(columns), shape[1:]):
            raise ValueError(_NOT_BY_ROWS.format(key))
        num_rows = min(columns.values(), default=0)
        if shape and num_rows != shape[0] and all(shape):
            raise ValueError(f"{key} has {shape[0]} rows, but only {num_rows} rows are in files")
    for file, nbytes in file_nbytes.items():
        if nbytes > file_sizes[file]:
            raise ValueError(f"{file} has {file_sizes[file]} bytes, but its tensors need {nbytes} bytes")


_NOT_BY_ROWS = "{} is not sharded by rows and at most one more dim"


def _chunks_cover(columns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Return whether chunks, in ascending order, cover `shape` without gaps along one dim and span all other dims."""
    if len(columns) == 1:
        return columns[0] == ((0,) * len(shape), shape)
    starts, sizes = zip(*columns, strict=True)
    sharded_dims = [dim for dim in range(len(shape)) if len({start[dim] for start in starts}) > 1]
    if len(sharded_dims) != 1:
        return False
    (dim,), end = sharded_dims, 0
    for start, size in columns:
        spans_dims = [
            (start[other_dim], size[other_dim]) == (0, shape[other_dim])
            for other_dim in range(len(shape))
            if other_dim != dim
        ]
        if start[dim] != end or not all(spans_dims):
            return False
        end += size[dim]
    return end == shape[dim] and all(size[dim] for size in sizes)


def check_document(document: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, ranks: int | None) -> None:
    """Check that the document has all required parts and that :class:`Decoder` can decode each part.

    Args:
        ranks: number of ranks that saved the checkpoint. Each :func:`layerzero.checkpoint.per_rank` entry must have
            this many values.

    Raises:
        ValueError, TypeError, KeyError: a part is missing or cannot be decoded.
    """
    if is_deeper(document, DEPTH):
        raise ValueError(f"values are nested more than {DEPTH} levels deep")
    model, optimizer = document["model"], document["optimizer"]
    _check_value(document["extra"], tensors, ranks)
    _check_names(model, "model")
    _check_value(model, tensors, ranks)
    if optimizer is None:
        return
    _check_names(optimizer["state"], "optimizer.state")
    for name, values in optimizer["state"].items():
        _check_names(values, name)
    shared = optimizer.get("shared_state", {})
    if not isinstance(shared, dict) or any(name.startswith("$") and name != "$dict" for name in shared):
        raise ValueError("optimizer.shared_state is not an object")
    for group in optimizer["param_groups"]:
        _check_names(group, "a parameter group")
        if not isinstance(group["params"], list) or not all(type(name) is str for name in group["params"]):
            raise ValueError(f"params of a parameter group must be a list of names, got {group['params']!r}")
    if type(optimizer.get("class", "")) is not str:
        raise ValueError(f"the class of the optimizer must be a string, got {optimizer['class']!r}")
    _check_value(optimizer, tensors, ranks)


def _check_names(value: Any, subject: str) -> None:
    if not isinstance(value, dict) or any(name.startswith("$") for name in value):
        raise ValueError(f"{subject} is not an object with valid names")


def _check_value(value: Any, tensors: Mapping[str, StoredTensor], ranks: int | None) -> None:
    """Raise ValueError unless :class:`Decoder` can decode the JSON `value`."""
    if isinstance(value, list):
        for item in value:
            _check_value(item, tensors, ranks)
    elif isinstance(value, dict):
        tags = [key for key in value if key.startswith("$")]
        if tags:
            if len(value) != 1 and list(value) != ["$sharded", "like"]:
                raise ValueError(f"an encoded value has the unexpected keys {list(value)[:4]}")
            _check_tagged(tags[0], value[tags[0]], value, tensors, ranks)
        else:
            for item in value.values():
                _check_value(item, tensors, ranks)


def _check_tagged(
    tag: str, content: Any, value: Mapping[str, Any], tensors: Mapping[str, StoredTensor], ranks: int | None
) -> None:
    if tag in ("$tensor", "$sharded", "$ndarray"):
        if type(content) is not str or content not in tensors or type(value.get("like", "")) is not str:
            raise ValueError(f"the document refers to a tensor {content!r} that is not in the table of tensors")
        if tag == "$ndarray":
            torch.empty(0, dtype=tensors[content].dtype).numpy()
        parameter = tensors.get(f"model.{value.get('like')}", tensors[content])  # rows of a 0-dim parameter are 0-dim
        if tag == "$sharded" and ("like" not in value or (parameter.shape and not tensors[content].shape)):
            raise ValueError(f"the sharded tensor {content!r} has no `like`, or has fewer dims than its parameter")
        return
    if tag in ("$bytes", "$float", "$dtype"):
        if type(content) is not str:
            raise ValueError(f"{tag} must be a string, got {content!r}")
        if tag == "$bytes":
            base64.b64decode(content, validate=True)
        else:
            _PLAIN.decode(value)
        return
    if not isinstance(content, list):
        raise ValueError(f"{tag} must be a list, got {content!r}")
    if tag == "$per_rank":
        if len(content) != ranks:
            raise ValueError(f"a per_rank entry has {len(content)} values for {ranks} ranks")
    elif tag in ("$dict", "$ordered", "$counter"):
        for key, _ in content:
            if next(references(key, rank=0), None) is not None:
                raise ValueError("a key of a dict is a tensor")
            _check_value(key, tensors, ranks)
            hash(_PLAIN.decode(key))
    elif tag != "$tuple":
        _PLAIN.decode(value)  # raises an error for an unknown tag
    _check_value(content, tensors, ranks)


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _refuse_tensor(key: str) -> torch.Tensor:
    raise ValueError(f"the tensor {key!r} is not allowed here")


_PLAIN = Decoder(_refuse_tensor, rank=None)
