"""Export, import and inspect full models in one process, without a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.json_codec import StoredRef, StoredTensor, is_subclass_entry
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.pretrained_weights import FullFiles, find_safetensors
from layerzero.checkpoint.publish import make_folder, new_token, partial_path, publish, publish_file, remove
from layerzero.checkpoint.run_folder import next_sequence
from layerzero.checkpoint.safetensors_files import CheckpointFiles, TensorFiles, rank_file, write_safetensors


def inspect(path: str | os.PathLike[str]) -> tuple[Manifest, CheckpointContents]:
    """Verify all files of a checkpoint and return its manifest and contents.

    Raises:
        FileNotFoundError, CheckpointError: see :func:`layerzero.checkpoint.load`.
    """
    manifest = Manifest.read(path)
    manifest.verify()
    return manifest, CheckpointContents.read(manifest)


def export_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    averages: bool = False,
) -> None:
    """Write the model in a checkpoint to one safetensors file, with the names of the unsharded ``state_dict()``.

    Tied parameters are written under each of their names. Module states that are not tensors are omitted. Tensors are
    copied in pieces of at most 64 MiB or one row. Only a tensor that was saved in columns, as with tensor parallelism,
    is copied as a whole.

    Args:
        dtype: dtype to which floating-point tensors are cast. If None, the stored dtypes are kept (fp32 for trained
            parameters).
        averages: if True, write the averages that were saved as ``extra={"ema": ema.state_dict()}`` instead of the
            parameters that were averaged.

    Raises:
        FileExistsError: `out` already exists.
        FileNotFoundError, CheckpointError: see :func:`layerzero.checkpoint.load`.
        ValueError: `averages` is True but the checkpoint has no averages, or the model has tensor subclasses.
    """
    files = CheckpointFiles(Manifest.read(path))
    keys = model_keys(files.contents, averages=averages)
    header = {
        name: (files.contents.tensors[key].shape, _cast(files.contents.tensors[key].dtype, dtype))
        for name, key in keys.items()
    }
    write_model_file(out, header, lambda name: _iter_cast(files, keys[name], header[name][1]))


def write_model_file(
    out: str | os.PathLike[str],
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
    content_of: Callable[[str], Iterable[Tensor]],
) -> None:
    """Write one safetensors file, which appears at its path only when it is complete.

    Args:
        tensors: shape and dtype of each tensor, by name.
        content_of: function that returns the values of a tensor as consecutive tensors; see :func:`write_safetensors`.

    Raises:
        FileExistsError: `out` already exists.
    """
    target = Path(out).absolute()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} already exists. Use another path")
    partial = partial_path(target, new_token())
    try:
        write_safetensors(partial, tensors, content_of)
        publish_file(partial, target)
    except BaseException:
        remove(partial)
        raise


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _iter_cast(files: TensorFiles, key: str, dtype: torch.dtype) -> Iterator[Tensor]:
    for rows in files.iter_rows(key):
        yield rows.to(dtype)


def model_keys(contents: CheckpointContents, *, averages: bool) -> dict[str, str]:
    """Return the key of each model tensor, or of its average, keyed by name; see :func:`export_model`."""
    values = contents.values(None)
    model = values["model"]
    if classes := [
        name for name, entry in model.items() if is_subclass_entry(entry) and not name.endswith("_extra_state")
    ]:
        raise ValueError(
            f"{classes[0]} is a tensor subclass (one of {len(classes)}) and cannot be stored in a file of plain "
            "tensors. Load the checkpoint into the model, and save layerzero.full_state_dict(model, "
            "trainable_only=True)"
        )
    keys = _keys(model)
    if not averages:
        return keys
    extra = values["extra"]
    ema = extra.get("ema") if isinstance(extra, dict) else None
    if not isinstance(ema, dict) or not isinstance(ema.get("averages"), dict):
        raise ValueError(
            'the checkpoint has no averages. Export it without them, or save with extra={"ema": ema.state_dict(), ...}'
        )
    stored = _keys(ema["averages"])
    of_parameter = {ema["averages"][name].like: key for name, key in stored.items()}
    tied = {key: of_parameter[name] for name, key in keys.items() if name in of_parameter}
    return {name: tied.get(key, key) for name, key in keys.items()}


def _keys(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value.key for name, value in values.items() if isinstance(value, StoredRef)}


def import_model(
    files: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Create a checkpoint, without an optimizer, from the safetensors files of a full model.

    Args:
        files: files that together contain the model's ``state_dict()``, or folders or indexes of such files.
        dtype: dtype to which floating-point tensors are cast. A cast is not needed for training, because a load
            converts bf16 values to fp32 masters.

    Raises:
        FileExistsError: `path` already exists.
        ValueError: two files contain a tensor with the same name.
        CheckpointError: a file is not a safetensors file.
    """
    target = Path(path).absolute()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} already exists and is not overwritten. Use another path")
    sources = FullFiles(find_safetensors(files), "model.{}".format)
    header = {key: (tensor.shape, _cast(tensor.dtype, dtype)) for key, tensor in sources.contents.tensors.items()}
    token = new_token()
    partial = partial_path(target, token)
    make_folder(target.parent)
    partial.mkdir()
    try:
        record = write_safetensors(partial / rank_file(0), header, lambda key: _iter_cast(sources, key, header[key][1]))
        stored = {
            key: StoredTensor(shape, cast, ((record.name, (0,) * len(shape), shape),))
            for key, (shape, cast) in header.items()
        }
        model = {key.removeprefix("model."): {"$tensor": key} for key in header}
        document = {"model": model, "optimizer": None, "extra": None}
        written = CheckpointContents({"data_parallel": 1, "zero3_size": 1}, document, stored).write(partial)
        publish(partial, target, [record, written], sequence=next_sequence(target.parent), token=token)
    except BaseException:
        remove(partial)
        raise
