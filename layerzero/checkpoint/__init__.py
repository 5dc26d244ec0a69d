"""Sharded, durable checkpoints that contain no code and load on any number of ranks.

A checkpoint is a folder with one safetensors file per rank, ``contents.json`` and ``manifest.json``. The manifest
records the sizes and checksums of the other files. See docs/checkpoints.md.
"""

from layerzero.checkpoint.atomic_files import CheckpointError
from layerzero.checkpoint.buddy_snapshots import Buddies
from layerzero.checkpoint.dcp_interop import load_dcp, reader
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.preemption import LeaveRequest, on_signal
from layerzero.checkpoint.pretrained_weights import load_safetensors
from layerzero.checkpoint.resuming import Resumed, load_latest
from layerzero.checkpoint.rng_state import random_states, seed_random_states, set_random_states
from layerzero.checkpoint.run_digest import Chain
from layerzero.checkpoint.run_folder import latest
from layerzero.checkpoint.saving import PendingSave, per_rank, save, save_async

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
