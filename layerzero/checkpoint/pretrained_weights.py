"""Load full weights from safetensors files, such as those on the Hugging Face Hub, into sharded models."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from layerzero.checkpoint.checksums import ByteRange, read_pieces
from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import DTYPE_NAMED, StoredTensor
from layerzero.checkpoint.loading import prepare_load_from
from layerzero.checkpoint.rank_agreement import PathLike
from layerzero.checkpoint.safetensors_files import TensorFiles

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
        lambda: FullFiles(find_safetensors(source), rename), description, model, None, strict=strict
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
        if missing := sorted(names - FullFiles([path.parent / file]).contents.tensors.keys()):
            raise CheckpointError(f"{path.parent / file} lacks the tensor {missing[0]} that {path.name} lists")
    return [path.parent / file for file in sorted(by_file)]


class FullFiles(TensorFiles):
    """Full tensors in safetensors files, which have no checksums.

    Args:
        rename: function that maps a name in the files to the name in the model's ``state_dict()``.

    Raises:
        ValueError: two tensors have the same name.
        CheckpointError: a file is no complete safetensors file, or a tensor has an unsupported dtype.
    """

    def __init__(self, files: Sequence[Path], rename: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self._names: dict[str, str] = {}  # in the files, by key
        stored: dict[str, StoredTensor] = {}
        for path in map(os.fspath, files):
            for name, entry in self.header(path)[1].items():
                key = rename(name) if rename is not None else name
                if key in stored:
                    raise ValueError(
                        f"{path} has a tensor {name!r} for {key!r} that an earlier file has as well. Pass files "
                        "without duplicate tensors"
                    )
                if entry["dtype"] not in DTYPE_NAMED:
                    raise CheckpointError(f"{path}: {name} has the unsupported dtype {entry['dtype']}")
                shape = tuple(entry["shape"])
                stored[key] = StoredTensor(shape, DTYPE_NAMED[entry["dtype"]], ((path, (0,) * len(shape), shape),))
                self._names[key] = name
        document = {"model": {key: {"$tensor": key} for key in stored}, "optimizer": None, "extra": None}
        self.contents = CheckpointContents({}, document, stored)
        tensor_table = sorted((key, tensor.shape, str(tensor.dtype)) for key, tensor in stored.items())
        samples = [_size_and_sample_digest(path) for path in files]
        self.fingerprint = hashlib.sha256(repr((tensor_table, samples)).encode()).hexdigest()

    def path_of(self, file: str) -> Path:
        return Path(file)

    def read_ranges(self, file: str, ranges: Sequence[ByteRange]) -> None:
        read_pieces(Path(file), [each for each in ranges if each.into is not None])

    def name_in_file(self, key: str) -> str:
        return self._names[key]


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
