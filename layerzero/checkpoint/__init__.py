"""Sharded, durable checkpoints that contain no code and load on any number of ranks.

A checkpoint is a folder with one safetensors file per rank, ``contents.json`` and ``manifest.json``. The manifest
records the sizes and checksums of the other files. See docs/checkpoints.md.

Publication and folders:

- `publish`: publishes checkpoint folders and files atomically, and defines when a checkpoint exists
- `run_folder`: manages the folder that contains the checkpoints of one run, and resumes the run

Saves:

- `saving`: saves checkpoints, synchronously or in the background
- `collect_state`: collects the state that a save writes, as a document and tensors
- `checkpoint_writer`: contains the steps of a save on each rank
- `background`: writes copies of the state in host memory from a thread
- `rank_tree`: exchanges values between all ranks, also in background threads
- `preemption`: saves a checkpoint and exits after a preemption signal
- `buddy_snapshots`: takes snapshots in shared memory that survive the loss of a node

Loads:

- `loading`: loads a checkpoint from any source of tensors
- `restore`: plans a load, runs all checks before the first change, and commits the load
- `pretrained_weights`: loads full models from safetensors files into sharded models
- `rng_state`: saves and restores the states of random number generators

Checks:

- `checksums`: computes one checksum per chunk of a file
- `errors`: defines the errors of saves and loads
- `rank_agreement`: contains checks that saves and loads share

Formats:

- `manifest`: reads and writes ``manifest.json``
- `state_names`: defines the names in a checkpoint
- `contents`: reads, checks and writes ``contents.json``
- `json_codec`: encodes nested values as JSON and tensors
- `safetensors_files`: reads regions of tensors from safetensors files, and writes such files in a stream
- `dcp_storage`: reads checkpoints through torch.distributed.checkpoint (DCP)
- `dcp_interop`: loads DCP checkpoints, and reads layerzero checkpoints through DCP
- `whole_model_files`: exports, imports and inspects full models in one process

Other add-ons import names of this package and of `extend`.
"""

from layerzero.checkpoint.background import PendingSave
from layerzero.checkpoint.buddy_snapshots import Buddies
from layerzero.checkpoint.dcp_interop import load_dcp, reader
from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.preemption import LeaveRequest, on_signal
from layerzero.checkpoint.pretrained_weights import load_safetensors
from layerzero.checkpoint.rng_state import random_states, seed_random_states, set_random_states
from layerzero.checkpoint.run_folder import Resumed, latest, load_latest
from layerzero.checkpoint.saving import per_rank, save, save_async

__all__ = [
    "Buddies",
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
