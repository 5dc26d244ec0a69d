"""Check the arguments of saves and loads, and check that all ranks agree and raise the same kind of error."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed.checkpoint.api import CheckpointException

from layerzero.checkpoint.errors import CheckpointError, PathTakenError, UnsupportedFormatError
from layerzero.comm.agreement import require_equal
from layerzero.comm.gather_text import require_numpy
from layerzero.engine.param_view import ParamView
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer

__all__ = ["PathLike", "agree_or_raise", "check_checkpoint_arguments", "convert_dcp_exception"]

PathLike = str | os.PathLike[str]


_KINDS = {
    "CheckpointError": CheckpointError,
    "UnsupportedFormatError": UnsupportedFormatError,
    "FileExistsError": FileExistsError,
    "PathTakenError": FileExistsError,
    "FileNotFoundError": FileNotFoundError,
    "NotADirectoryError": NotADirectoryError,
}


def agree_or_raise(
    subject: str, lz_state: LayerZeroState, fields: Mapping[str, object], failure: Exception | None
) -> None:
    try:
        require_equal(subject, fields, ranks=lz_state.ranks.ranks, failure=failure)
    except RuntimeError as error:
        for name, kind in _KINDS.items():  # so that all ranks can try another checkpoint or another path
            if failure is None and f"failed with {name}:" in str(error):
                raise kind(str(error)) from None
        raise


def check_checkpoint_arguments(lz_state: LayerZeroState, optimizer: object) -> None:
    require_numpy("a checkpoint")
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        way_out = "Pass the optimizer that layerzero.shard_optimizer returned"
        if isinstance(optimizer, (list, tuple)):
            way_out = "Pass one optimizer (Muon, if there is one). The state_dict() of the others can be saved in extra"
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. {way_out}")
    if optimizer is not None and optimizer not in lz_state.optimizers:
        raise ValueError(
            "the optimizer belongs to another model. Pass the optimizer that layerzero.shard_optimizer returned for "
            "this model"
        )
    if ParamView.UNSHARDED in lz_state.status.active_views:
        raise RuntimeError("a checkpoint cannot be saved or loaded inside layerzero.unsharded. Leave the context first")


def convert_dcp_exception(participle: str, path: PathLike, error: CheckpointException) -> Exception:
    """Return the error to raise for an exception of DCP. `participle` is "written" or "read"."""
    if path_taken := [failure for failure, _ in error.failures.values() if isinstance(failure, PathTakenError)]:
        return FileExistsError(*path_taken[0].args)
    reasons = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
    return CheckpointError(f"{os.fspath(path)} could not be {participle}: {reasons}")
