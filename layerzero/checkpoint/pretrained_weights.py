"""Load full weights from safetensors files, such as those on the Hugging Face Hub, into sharded models."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import StoredTensor
from layerzero.checkpoint.loading import prepare_load_from
from layerzero.checkpoint.rank_agreement import PathLike
from layerzero.checkpoint.safetensors_files import FileTensor, iter_pieces, open_safetensors, tensors_in
from layerzero.dtensor.local_shard import LocalShard, plain

__all__ = ["find_safetensors", "load_safetensors"]

_INDEX = ".safetensors.index.json"
_SAMPLES, _SAMPLE = 16, 4096  # number of positions in a file, and number of bytes read at each position


def load_safetensors(
    source: PathLike | Sequence[PathLike],
    model: nn.Module,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Load the safetensors files of a full model into a sharded model, which may have been built on ``meta``.

    Each rank reads its own rows from the files, and ranks do not send each other values from the files. No rank
    allocates memory for the full model or for the full form of a sharded tensor. All data-parallel ranks must call this
    function with the same files. It is enough to store a tied parameter under one of its names. Files do not contain
    non-persistent buffers, such as rotary tables. The `param_init_fn` passed to :func:`layerzero.shard_model` must
    initialize these buffers.

    Args:
        source: folder that contains ``model.safetensors`` or an index of several files; path of an index file; or paths
            of the safetensors files.
        strict: if False, load the tensors that match and warn about the others.
        rename: function that maps a name in the files to the name in the model's ``state_dict()``.

    Raises:
        FileNotFoundError: `source` contains no safetensors files.
        CheckpointError: a file is incomplete or does not match the index; the message names the file.
        ValueError: names, shapes or dtypes do not match; the message lists or counts the mismatches. The model is
            unchanged.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        layerzero.shard_model(model, units="auto", param_init_fn=model._init_weights)
        layerzero.checkpoint.load_safetensors("Llama-3.1-8B", model)
    """
    description = ", ".join(
        os.fspath(path) for path in ([source] if isinstance(source, (str, os.PathLike)) else source)
    )
    prepare_load_from(
        lambda _: _FullFiles(find_safetensors(source), rename), description, model, None, strict=strict
    ).commit()


def find_safetensors(source: PathLike | Sequence[PathLike]) -> list[Path]:
    """Return the safetensors files of a full model.

    Raises:
        FileNotFoundError: a folder contains no model.
        ValueError: a folder contains more than one model.
        CheckpointError: an index is invalid.
    """
    if not isinstance(source, (str, os.PathLike)):
        return [path for each in source for path in find_safetensors(each)]
    path = Path(source)
    if not path.is_dir():
        return _files_in_index(path) if path.name.endswith(".json") else [path]
    for kind in (_INDEX, ".safetensors"):
        matches = sorted(path.glob(f"*{kind}"))
        files = [each for each in matches if each.name == f"model{kind}"] or matches
        if len(files) > 1:
            raise ValueError(
                f"{path} has several models or files: {', '.join(each.name for each in files)}. Pass the paths of the "
                "files to load"
            )
        if files:
            return find_safetensors(files[0])
    pickled = ". Its pickled weights are not read" if [*path.glob("*.bin"), *path.glob("*.pt*")] else ""
    raise FileNotFoundError(f"{path} has no model.safetensors and no model{_INDEX}{pickled}")


def _files_in_index(path: Path) -> list[Path]:
    try:
        named = json.loads(path.read_bytes())["weight_map"]
        by_file: dict[str, set[str]] = defaultdict(set)
        for name, file in named.items():
            by_file[file].add(name)
        if invalid := [file for file in by_file if Path(file).name != file or file in ("", "..")]:
            raise ValueError(f"{invalid[0]!r} is not a file name in the same folder")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error}") from None
    for file, names in by_file.items():
        with open_safetensors(path.parent / file) as tensors:
            if missing := sorted(names - set(tensors.keys())):
                raise CheckpointError(f"{path.parent / file} lacks the tensor {missing[0]} that {path.name} lists")
    return [path.parent / file for file in sorted(by_file)]


class _FullFiles:
    """A :class:`layerzero.checkpoint.loading.Source` that reads full tensors from safetensors files."""

    twice = True

    def __init__(self, files: Sequence[Path], rename: Callable[[str], str] | None) -> None:
        self._tensors = tensors_in(files, rename)
        stored = {
            key: StoredTensor(found.shape, found.dtype, ((found.path.name, (0,) * len(found.shape), found.shape),))
            for key, found in self._tensors.items()
        }
        document = {"model": {key: {"$tensor": key} for key in stored}, "optimizer": None, "extra": None}
        self.contents = CheckpointContents({}, document, stored)
        tensor_table = sorted((key, stored[key].shape, str(stored[key].dtype)) for key in stored)
        samples = [_size_and_sample_digest(path) for path in files]
        self.fingerprint: object = hashlib.sha256(repr((tensor_table, samples)).encode()).hexdigest()
        self._reread: dict[str, Tensor] = {}

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        self._reread = {key: tensor for key, tensor in tensors.items() if key in in_place}
        self._fill({key: tensor for key, tensor in tensors.items() if key not in in_place})

    def reread(self) -> None:
        self._fill(self._reread)

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for key, tensor in tensors.items():
                found = self._tensors[key]
                if found.path not in files:
                    files[found.path] = stack.enter_context(open_safetensors(found.path))
                for target, values in _iter_own_rows(files[found.path], found, tensor):
                    target.copy_(values)


def _size_and_sample_digest(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and a digest of samples of its contents.

    The samples suffice to distinguish files from two training runs of the same model.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            digest.update(file.read(_SAMPLE))
    return size, digest.hexdigest()


def _iter_own_rows(file: Any, found: FileTensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a slice of this rank's rows of `tensor` and the stored values for that slice."""
    memory = plain(tensor)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else None
    if not memory.numel():  # for instance a sharded scalar on ranks that do not hold it
        return
    box = local.spec.global_slices if isinstance(local, LocalShard) else ()
    start = 0
    for values in iter_pieces(file, found.name, found.shape, found.dtype, box=box):
        if not found.shape:
            yield memory, values
            return
        yield memory[start : start + len(values)], values
        start += len(values)
