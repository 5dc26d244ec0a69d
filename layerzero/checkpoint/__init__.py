"""Checkpoints: sharded, durable, free of code, and for any number of ranks.

A checkpoint is a folder: one safetensors file a rank, ``contents.json``, and ``manifest.json`` with the sizes and
checksums of the others. See docs/checkpoints.md.
"""

from layerzero.checkpoint.api import PendingSave, per_rank, save, save_async
from layerzero.checkpoint.buddies import Buddies
from layerzero.checkpoint.chain import Chain
from layerzero.checkpoint.files import CheckpointError
from layerzero.checkpoint.folder import latest
from layerzero.checkpoint.interchange import load_dcp, reader
from layerzero.checkpoint.leaving import LeaveRequest, on_signal
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.pretrained import load_safetensors
from layerzero.checkpoint.randomness import random_states, seed_random_states, set_random_states
from layerzero.checkpoint.resuming import Resumed, load_latest

__all__ = [
    "Buddies",
    "Chain",
    "CheckpointError",
    "LeaveRequest",
    "PendingSave",
    "Resumed",
    "latest",
    "load",
    "load_dcp",
    "load_latest",
    "load_safetensors",
    "on_signal",
    "per_rank",
    "random_states",
    "reader",
    "save",
    "save_async",
    "seed_random_states",
    "set_random_states",
]
