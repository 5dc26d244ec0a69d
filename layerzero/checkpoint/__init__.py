"""Checkpoints: sharded, durable, free of code, and for any number of ranks.

A checkpoint is a folder: one safetensors file a rank, ``contents.json``, and ``manifest.json`` with the sizes and
checksums of the others. See docs/checkpoints.md.
"""

from layerzero.checkpoint.api import PendingSave, per_rank, save, save_async
from layerzero.checkpoint.files import CheckpointError
from layerzero.checkpoint.folder import latest
from layerzero.checkpoint.interchange import load_dcp, reader
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.pretrained import load_safetensors

__all__ = [
    "CheckpointError",
    "PendingSave",
    "latest",
    "load",
    "load_dcp",
    "load_safetensors",
    "per_rank",
    "reader",
    "save",
    "save_async",
]
