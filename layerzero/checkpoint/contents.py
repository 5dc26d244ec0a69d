"""Read, check and write ``contents.json``: the table of tensors, all other values, and the numbers of ranks.

[Note: Checks of the table of tensors]
A matching checksum proves that a file has not changed since it was written. It does not prove that the table covers all
rows. Rows that are missing from all files would be loaded as uninitialized memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.checkpoint.checksums import FileRecord
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPES, Decoder, StoredTensor, dtype_named, merge_ranks
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.publish import write_file

CONTENTS = "contents.json"

Chunk = tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]  # key, dtype, full shape, offsets, sizes


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a checkpoint, except for the values of its tensors.

    Attributes:
        topology: numbers of ranks in the run that saved the checkpoint. The keys are ``data_parallel`` and
            ``zero3_size``, and also ``ranks`` if the total number of ranks was larger than ``data_parallel``.
        document: model, optimizer and ``extra``, as encoded by :class:`layerzero.checkpoint.json_codec.Encoder`.
        tensors: by key, the tensors that `document` refers to.
    """

    topology: Mapping[str, int]
    document: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def of_ranks(
        cls,
        topology: Mapping[str, int],
        document: Any,
        owns: Sequence[Sequence[Any]],
        chunks_of_files: Iterable[tuple[str, Iterable[Chunk]]],
    ) -> tuple[CheckpointContents, list[list[int]]]:
        """Merge the parts that the ranks save, and check that their chunks cover each tensor exactly.

        Args:
            document: document of the first rank.
            owns: own values of each rank; see :class:`layerzero.checkpoint.json_codec.Encoder`.
            chunks_of_files: name and chunks of each file. A chunk that several files have belongs to the first of them.

        Returns:
            The contents, and for each file the indices of the chunks that belong to it.

        Raises:
            ValueError: the chunks of a tensor do not cover it exactly.
        """
        entries: dict[str, tuple[str, Sequence[int], dict[tuple[int, ...], Any]]] = {}
        kept: list[list[int]] = []
        for file, chunks in chunks_of_files:
            kept.append([])
            for index, (key, dtype, shape, offsets, sizes) in enumerate(chunks):
                _, _, pieces = entries.setdefault(key, (dtype, shape, {}))
                piece = file, tuple(offsets), tuple(sizes)
                if pieces.setdefault(piece[1], piece) is piece:
                    kept[-1].append(index)
        tensors = {
            key: StoredTensor(tuple(shape), dtype_named(dtype), tuple(pieces.values()))
            for key, (dtype, shape, pieces) in entries.items()
        }
        check_chunks(tensors)
        return cls(topology, merge_ranks(document, owns), tensors), kept

    @classmethod
    def read(cls, manifest: Manifest) -> CheckpointContents:
        """Read and check ``contents.json``. Raises CheckpointError if the file is missing or invalid."""
        path = manifest.path_of(CONTENTS)
        text = manifest.read_bytes(CONTENTS)
        try:
            content = json.loads(text)
            tensors = {
                key: StoredTensor(
                    tuple(shape),
                    dtype_named(dtype),
                    tuple((file, tuple(offsets), tuple(sizes)) for file, offsets, sizes in chunks),
                )
                for key, (dtype, shape, chunks) in content["tensors"].items()
            }
            check_chunks(tensors)
            for key, tensor in tensors.items():
                if unlisted := [file for file, *_ in tensor.chunks if file not in manifest.files]:
                    raise ValueError(f"{key} is in the file {unlisted[0]!r}, which is not in the manifest")
            contents = cls(content["topology"], content["document"], tensors)
            if not _are_sizes([num_saving_ranks(contents.topology), contents.topology["zero3_size"]]):
                raise ValueError(f"the topology {contents.topology!r} has no numbers of ranks")
            values = contents.values(None)
            optimizer = values["optimizer"] or {"state": {}, "param_groups": []}
            tables = [values["model"], optimizer["state"], *optimizer["state"].values(), *optimizer["param_groups"]]
            if not all(type(table) is dict for table in tables):
                raise ValueError("the model, an optimizer state or a parameter group is not an object")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} was not written by layerzero: {type(error).__name__}: {error}") from None
        return contents

    def values(self, rank: int | None) -> dict[str, Any]:
        """Return the decoded document for `rank`; see :class:`layerzero.checkpoint.json_codec.Decoder`."""
        decoder = Decoder(self.tensors, rank)
        return {part: decoder.decode(self.document[part]) for part in ("model", "optimizer", "extra")}

    def write(self, folder: Path) -> FileRecord:
        """Write ``contents.json`` into `folder`, and return its size and checksums.

        Raises:
            OSError: the file cannot be written, for instance because the disk is full.
        """
        tensors = {
            key: [str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.chunks]
            for key, tensor in sorted(self.tensors.items())
        }
        content = {"topology": self.topology, "document": self.document, "tensors": tensors}
        return write_file(folder / CONTENTS, [json.dumps(content).encode()])


def num_saving_ranks(topology: Mapping[str, int]) -> int | None:
    """Return the number of ranks that saved the checkpoint, including model-parallel ranks; None if unknown."""
    return topology.get("ranks", topology.get("data_parallel"))


def check_chunks(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError, which names the tensor, unless the chunks of each tensor cover it without gaps or overlap."""
    for key, tensor in tensors.items():
        if not _are_sizes(tensor.shape) or math.prod(max(1, size) for size in tensor.shape) >= 2**60:
            raise ValueError(f"{key} has the invalid shape {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{key} has the dtype {tensor.dtype}, which safetensors files do not support")
        for _, offsets, sizes in tensor.chunks:
            if not _are_sizes([*offsets, *sizes]) or not len(offsets) == len(sizes) == len(tensor.shape):
                raise ValueError(f"{key} has an invalid chunk of shape {list(sizes)} at {list(offsets)}")
        if not _cover(tensor.shape, [chunk[1:] for chunk in tensor.chunks if all(chunk[2])]):
            raise ValueError(f"{key} of shape {list(tensor.shape)} is not covered exactly by its chunks")


def _cover(shape: Sequence[int], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether `chunks`, (offsets, sizes) each, cover `shape` without gaps or overlap.

    Chunks may split one dim, and each range of this dim may be split further along the dims before it.
    """
    if not shape:
        return len(chunks) == 1
    if not all(shape):
        return True
    by_range: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for offsets, sizes in chunks:
        by_range.setdefault((offsets[-1], sizes[-1]), []).append((offsets[:-1], sizes[:-1]))
    end = 0
    for start, size in sorted(by_range):
        if start != end:
            return False
        end += size
    return end == shape[-1] and all(_cover(shape[:-1], inner) for inner in by_range.values())


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
