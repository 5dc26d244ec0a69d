"""Names of checkpoints on which other add-ons are built, such as Megatron's checkpoints of several parts."""

from __future__ import annotations

from layerzero.checkpoint.contents import num_saving_ranks
from layerzero.checkpoint.errors import PathTakenError, escape_unprintable
from layerzero.checkpoint.json_codec import MergeableValue
from layerzero.checkpoint.loading import prepare_load
from layerzero.checkpoint.manifest import Manifest
from layerzero.checkpoint.publish import (
    make_folder,
    new_token,
    partial_path,
    publish_folder,
    remove,
    write_file,
)
from layerzero.checkpoint.run_folder import clear_leftovers
from layerzero.checkpoint.safetensors_files import CheckpointFiles, Region
from layerzero.checkpoint.saving import save_with_rank_local_names
from layerzero.checkpoint.state_names import RankLocalNames
from layerzero.checkpoint.whole_model_files import (
    export_model,
    import_model,
    inspect,
    model_keys,
    write_model_file,
)

__all__ = [
    "CheckpointFiles",
    "Manifest",
    "MergeableValue",
    "PathTakenError",
    "RankLocalNames",
    "Region",
    "clear_leftovers",
    "escape_unprintable",
    "export_model",
    "import_model",
    "inspect",
    "make_folder",
    "model_keys",
    "new_token",
    "num_saving_ranks",
    "partial_path",
    "prepare_load",
    "publish_folder",
    "remove",
    "save_with_rank_local_names",
    "write_file",
    "write_model_file",
]
