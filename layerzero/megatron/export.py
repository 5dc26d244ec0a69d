"""Export a checkpoint of :func:`layerzero.megatron.save` to one file, in a single process without Megatron."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.extend import CheckpointFiles, Manifest, Region, model_keys, write_model_file
from layerzero.megatron.global_names import layer_of, module_name

_MARKER = "complete"

_MOST_CHUNKS = 1000  # maximum number of chunks per rank that is accepted from an untrusted checkpoint


def is_megatron_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a checkpoint folder that :func:`layerzero.megatron.save` wrote."""
    return (Path(path) / _MARKER).exists() and any(Path(path).glob("layout-*"))


class _StoredRows(NamedTuple):
    """Rows `first` to `stop` (exclusive) of a tensor that is stored in one part of a checkpoint."""

    files: CheckpointFiles
    key: str
    first: int
    stop: int


@dataclass
class _FullTensorPlan:
    """A tensor of the full model, built from rows of stored tensors.

    Attributes:
        shape: shape of the full tensor.
        dtype: dtype of the full tensor.
        pieces: stored rows of each piece, keyed by the piece's offset in the full tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], _StoredRows] = field(default_factory=dict)

    def build(self) -> Tensor:
        full = torch.empty(self.shape, dtype=self.dtype)
        filled = 0
        for offset, (files, key, first, stop) in self.pieces.items():
            shape = files.contents.tensors[key].shape
            box = tuple(slice(0, size) for size in shape)
            if shape:
                box = (slice(first, min(stop, shape[0])), *box[1:])
            sizes = [each.stop - each.start for each in box]
            target = full[tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))]
            files.read_regions([Region(key, box, target)])
            filled += target.numel()  # not the elements of a piece that is outside of the tensor
        if filled != math.prod(self.shape):
            raise CheckpointError(f"the parts contain only {filled} of {math.prod(self.shape)} elements of a tensor")
        return full


def export_parts(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    averages: bool = False,
) -> None:
    """Write the parts of all tensor-parallel ranks and pipeline stages to one safetensors file.

    Names and shapes are the same as in Megatron's model on a single rank, with the padded vocabulary. Only one full
    tensor is in memory at a time.

    Args:
        path: checkpoint folder that :func:`layerzero.megatron.save` wrote.
        out: path of the file to write.
        dtype: dtype to which floating-point tensors are cast. If None, the stored dtypes are kept. Trained parameters
            are stored in fp32.
        averages: if True, write the moving average (EMA) of each weight that has one, instead of the weight.

    Raises:
        FileExistsError: `out` already exists.
        FileNotFoundError, CheckpointError: parts are missing or damaged; the message names these parts.
        ValueError: the checkpoint lacks the positions of its parameters in the full model, or has no averages.
    """
    tensors: dict[str, _FullTensorPlan] = {}
    for part in _list_parts(Path(path)):
        _add_part(tensors, part, dtype, averages=averages)
    header = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    write_model_file(out, header, lambda name: [tensors[name].build()])


def _list_parts(folder: Path) -> Iterator[Path]:
    parts = sorted(folder.glob("layout-*"))
    if not parts:
        raise FileNotFoundError(f"{folder} contains no parts of a checkpoint written by layerzero.megatron.save")
    for part in parts:
        if part.name.partition("-tensor-")[0] != parts[0].name.partition("-tensor-")[0]:
            raise CheckpointError(f"{folder} contains parts of two layouts: {parts[0].name} and {part.name}")
    tensor, stages = (int(size) for size in parts[0].name.split("-")[1:3])
    missing = [
        f"tensor-{rank:03d}-stage-{stage:03d}"
        for rank in range(tensor)
        for stage in range(stages)
        if not any(f"-tensor-{rank:03d}-stage-{stage:03d}-" in part.name for part in parts)
    ]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
    yield from parts


def _read_places(part: Path, extra: object) -> dict[str, Any]:
    """Return the positions in the full model that a part of a checkpoint has stored, by parameter name."""
    if not isinstance(extra, dict):
        raise ValueError(f"{part} was not saved by layerzero.megatron.save")
    stem, count = part.name.rpartition("-")[0], extra.get("chunks", 0)
    if not isinstance(count, int) or not 0 <= count < _MOST_CHUNKS:
        raise CheckpointError(f"{part} has the invalid number of chunks {count!r}")
    chunks = [part.with_name(f"{stem}-{chunk:03d}") for chunk in range(count)]
    if missing := [chunk.name for chunk in chunks if not chunk.is_dir()]:
        raise CheckpointError(f"{part.parent} lacks {', '.join(missing)}")
    places: dict[str, Any] = extra.get("places", {"because": "it was saved by an older version"})
    if "because" in places:
        raise ValueError(f"{part} lacks the positions of its parameters in the full model: {places['because']}")
    return places


def _add_part(tensors: dict[str, _FullTensorPlan], part: Path, dtype: torch.dtype | None, *, averages: bool) -> None:
    files = CheckpointFiles(Manifest.read(part))
    contents = files.contents
    places = _read_places(part, contents.document["extra"])
    renamed = {layer_of(name): layer_of(position["name"]) for name, position in places.items() if layer_of(name)}
    for name, key in model_keys(contents, averages=averages).items():
        tensor = contents.tensors[key]
        own = module_name(name)
        layer = layer_of(own)
        # Buffers have no entry in `places`, because they are the same on all tensor-parallel ranks.
        position = places.get(own) or {
            "name": renamed.get(layer, layer) + own.removeprefix(layer),
            "shape": tensor.shape,
            "pieces": [[0, tensor.shape[0] if tensor.shape else 1, [0] * len(tensor.shape)]],
        }
        whole_name, shape, rows = (position[what] for what in ("name", "shape", "pieces"))
        cast = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        full = tensors.setdefault(whole_name, _FullTensorPlan(tuple(shape), cast))
        if full.shape != tuple(shape):
            raise CheckpointError(
                f"{part}: {own} is a part of a tensor of shape {list(shape)}, but of {list(full.shape)} in other parts"
            )
        for first, stop, offset in rows:
            full.pieces.setdefault(tuple(offset), _StoredRows(files, key, first, stop))
