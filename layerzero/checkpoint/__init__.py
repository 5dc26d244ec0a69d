"""Sharded, durable checkpoints that contain no code and load on any number of ranks.

A checkpoint is a folder with one safetensors file per rank, ``contents.json`` and ``manifest.json``. The manifest
records the sizes and checksums of the other files. See docs/checkpoints.md.

Publication and folders:

- `atomic_files`: atomic publication of checkpoint folders and files, and durable writes
- `run_folder`: folder with the checkpoints of one run
- `resuming`: resume from the newest checkpoint that can be loaded

Saves:

- `saving`: synchronous and background saves
- `collect_state`: collection of the state that a save writes, and agreement of all ranks
- `staging`: host memory for copies of the state in background saves
- `preemption`: save and exit after a preemption signal
- `buddy_snapshots`: in-memory snapshots that survive the loss of a node
- `snapshot_files`: files of these snapshots in shared memory

Loads:

- `loading`: load of a checkpoint from any source of tensors
- `restore`: plan and commit of a load
- `pretrained_weights`: load of full models from safetensors files into sharded models
- `rng_state`: states of random number generators

Checks:

- `checksums`: checksums per chunk of a file
- `contents_checks`: validation of ``contents.json``
- `optimizer_compat`: check that an optimizer can continue from a checkpoint
- `rank_agreement`: checks and errors that saves and loads share
- `run_digest`: digests that show that a resumed run equals an uninterrupted run
- `safe_json`: limits for untrusted JSON

Formats:

- `manifest`: ``manifest.json``
- `state_names`: names in a checkpoint, and the document of a model and an optimizer
- `json_codec`: encoding of nested values as JSON and tensors
- `subclass_tensors`: tensor subclasses as plain tensors
- `safetensors_reader`: reader of checkpoint files, which verifies checksums
- `safetensors_writer`: streaming writer of safetensors files
- `dcp_storage`: storage for torch.distributed.checkpoint (DCP)
- `dcp_interop`: conversion between layerzero checkpoints and DCP
- `whole_model_files`: export, import and inspection of full models in one process
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
