"""Load checkpoints of torch.distributed.checkpoint (DCP), and read layerzero checkpoints through DCP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.storage import StorageReader

from layerzero import ShardedOptimizer
from layerzero.checkpoint.contents import CheckpointContents
from layerzero.checkpoint.dcp_storage import SafetensorsReader
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.json_codec import Encoder, StoredRef, StoredTensor
from layerzero.checkpoint.loading import Source, prepare_load_from
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.safetensors_files import CheckpointFiles
from layerzero.checkpoint.state_names import StateNames, rename_params
from layerzero.extend import LayerZeroState, get_state, torch_compat


def load_dcp(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
    strict: bool = True,
) -> None:
    """Load a checkpoint that ``torch.distributed.checkpoint.save`` wrote for an FSDP2, DDP or sharded model.

    torch unpickles the metadata and all values that are not tensors, and it does not detect damaged files. Use this
    function only for files that you trust.

    Args:
        path: folder that contains a ``.metadata`` file.
        model_key, optimizer_key: keys under which the state dicts of the model and the optimizer were saved. The
            optimizer state dict may be keyed by parameter name, as returned by
            ``torch.distributed.checkpoint.state_dict.get_state_dict``, and flattened. It may also be the result of
            ``optimizer.state_dict()``, as in :meth:`ShardedOptimizer.load_state_dict`.
        strict: as in :func:`layerzero.checkpoint.load`.

    Raises:
        ValueError: names, shapes or dtypes do not match; the message lists or counts the mismatches. The model and the
            optimizer are unchanged.

    Example::

        model_state, optimizer_state = get_state_dict(fsdp_model, fsdp_optimizer)       # in the old job
        torch.distributed.checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

        layerzero.checkpoint.load_dcp(path, model, optimizer)                           # in the new one
    """

    def open_source() -> Source:
        source = FileSystemReader(path)
        metadata = source.read_metadata()
        tree = _read_tree(source, metadata, (model_key, optimizer_key))
        saved = tree.get(optimizer_key)
        document = {
            "model": tree.get(model_key, {}),
            "optimizer": None if saved is None else _nested_optimizer(_named(saved, optimizer, get_state(model))),
            "extra": None,
        }
        tensors = {
            key: StoredTensor(tuple(entry.size), entry.properties.dtype, ())
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        names = {key: str(entry) for key, entry in metadata.state_dict_metadata.items()}
        return _DcpSource(CheckpointContents({}, document, tensors), names, source)

    prepare_load_from(open_source, os.fspath(path), model, optimizer, strict=strict).commit()


@dataclass
class _DcpSource:
    """A :class:`layerzero.checkpoint.loading.Source` that reads a DCP checkpoint through torch."""

    contents: CheckpointContents
    fingerprint: object
    storage: FileSystemReader
    twice: bool = False

    def read(self, tensors: Mapping[str, Tensor], in_place: Container[str]) -> None:
        _read(self.storage, dict(tensors))

    def reread(self) -> None:
        """Do nothing, because no tensor is read in place."""


def _read_tree(source: FileSystemReader, metadata: Metadata, top_keys: tuple[str, str]) -> dict[str, Any]:
    """Return the values under the `top_keys` keys, nested as in the checkpoint. Tensors are replaced by references."""
    paths = metadata.planner_data or {key: tuple(key.split(".", 1)) for key in metadata.state_dict_metadata}
    entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if paths[key][0] in top_keys}
    values: dict[str, Any] = {key: None for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}
    _read(source, values)
    encoder = Encoder(0, name_of=lambda rows: rows.spec.name)
    leaves: dict[str, Any] = {
        key: encoder.encode(values[key], key) if key in values else {"$tensor": key} for key in entries
    }
    return torch_compat.unflatten_state_dict(leaves, paths)


def _read(storage: FileSystemReader, values: dict[str, Any]) -> None:
    """Fill `values` on this rank, without communication.

    Raises:
        CheckpointError: a value cannot be read.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            read_tensors(values, storage_reader=storage, planner=planner, no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{os.fspath(storage.path)} could not be read: {reasons}") from None


def reader(path: str | os.PathLike[str], *, verify: bool = True) -> StorageReader:
    """Return a ``StorageReader`` that lets ``torch.distributed.checkpoint.load`` read a layerzero checkpoint.

    The checkpoint can be loaded into FSDP2 models and plain models.

    The names are the same as in ``{"model": model.state_dict(), "optimizer": optimizer_state, "extra": extra}``,
    flattened by torch. The optimizer state is keyed by parameter name, as in
    ``torch.distributed.checkpoint.state_dict``.

    Args:
        verify: whether to verify the checksums of all files first. If True, each process that creates a reader reads
            all files.

    Raises:
        FileNotFoundError, CheckpointError: see :func:`load`.

    Example::

        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model_state, optimizer_state = get_state_dict(fsdp_model, fsdp_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        torch.distributed.checkpoint.load(state, storage_reader=layerzero.checkpoint.reader(path))
        set_state_dict(fsdp_model, fsdp_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    """
    manifest = Manifest.read(path)
    if verify:
        manifest.verify()
    files = CheckpointFiles(manifest)
    keys: dict[Tensor, str] = {}

    def stand_in(ref: StoredRef) -> Tensor:  # torch flattens a list only if it contains tensors
        tensor = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        keys[tensor] = ref.key
        return tensor

    tree = torch_compat.tree_map_only(StoredRef, stand_in, files.contents.values(None))
    flat, _ = torch_compat.flatten_state_dict({key: value for key, value in tree.items() if value is not None})
    names = {name: keys[leaf] for name, leaf in flat.items() if isinstance(leaf, Tensor)}
    values = {name: leaf for name, leaf in flat.items() if not isinstance(leaf, Tensor)}
    return SafetensorsReader(files, names, values)


def _named(saved: dict[str, Any], optimizer: ShardedOptimizer | None, lz_state: LayerZeroState) -> dict[str, Any]:
    """Return an optimizer state dict whose parameters have names if they have numbers in `saved`."""
    numbers = {str(n): n for group in saved.get("param_groups", ()) for n in group["params"] if isinstance(n, int)}
    if optimizer is None or not numbers:
        return saved
    state = {numbers.get(key, key): values for key, values in saved.get("state", {}).items()}  # torch saves strings
    by_name = optimizer.to_model_names({**saved, "state": state})
    state, groups = rename_params(by_name, StateNames(lz_state).to_stored)
    return {**by_name, "state": state, "param_groups": groups}


def _nested_optimizer(saved: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer state dict in nested form; the keys of `saved` may be flattened (``state.NAME.KEY``)."""
    nested = {key: value for key, value in saved.items() if "." not in key}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in saved.items():
        kind, dot, param_path = path.partition(".")
        name, _, key = param_path.rpartition(".")
        if not dot:
            continue
        if kind == "state":
            nested.setdefault("state", {}).setdefault(name, {})[key] = value
        else:
            groups.setdefault(name, {"params": [name]})[key] = value
    all_groups = [*nested.get("param_groups", []), *groups.values()]
    listed = {name for group in all_groups for name in group["params"]}
    state = dict(nested.get("state", {}))
    shared = {key: state.pop(key) for key in list(state) if key not in listed}
    return {**nested, "state": state, "shared_state": shared, "param_groups": all_groups}
