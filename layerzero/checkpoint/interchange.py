"""Our checkpoints, for torch.distributed.checkpoint."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.storage import StorageReader

from layerzero.checkpoint.files import Manifest
from layerzero.checkpoint.storage import Contents, Reader
from layerzero.checkpoint.values import Decoder

__all__ = ["reader"]


class _Placeholder(Tensor):
    """Stands for a tensor of the checkpoint while torch flattens names."""

    key: str

    @staticmethod
    def of(key: str) -> Tensor:
        placeholder = Tensor().as_subclass(_Placeholder)
        placeholder.key = key
        return placeholder


def reader(path: str | os.PathLike[str], *, verify: bool = True) -> StorageReader:
    """A checkpoint as ``torch.distributed.checkpoint.load`` wants it, for FSDP2 and for plain models.

    The names are those of ``{"model": model.state_dict(), "optimizer": optimizer_state, "extra": extra}`` flattened by
    torch, with the optimizer's state by parameter name, as ``torch.distributed.checkpoint.state_dict`` has it.

    Args:
        verify: compare the SHA-256 of all files first; each process that makes a reader reads them all.

    Raises:
        FileNotFoundError, CheckpointError: as :func:`load`.

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
    contents = Contents.read(manifest)
    tree: dict[str, Any] = Decoder(_Placeholder.of, rank=None).decode(dict(contents.document))
    flat, _ = flatten_state_dict({key: value for key, value in tree.items() if value is not None})
    names = {name: leaf.key for name, leaf in flat.items() if isinstance(leaf, _Placeholder)}
    values = {name: leaf for name, leaf in flat.items() if not isinstance(leaf, _Placeholder)}
    return Reader(manifest, contents, names=names, values=values)
