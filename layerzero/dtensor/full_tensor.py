"""Copy rows between sharded and full tensors, and define placements that describe uneven sharding.

[Note: Copies from full tensors]
``p.copy_(full)``, and therefore ``load_state_dict`` with plain tensors, copies this rank's rows of the full tensor
without a collective. Each row of a parameter is in one ZeRO-1 shard, and the refresh sends the row to all replicas.
Therefore the replicas always agree. However, if ranks pass different values, the parameter becomes a mixture of these
values. To detect this error, each rank stores a digest of the full tensor, and the ranks compare their digests before
the refresh.

[Note: Row bounds of other libraries]
To load into a parameter, libraries split rows themselves and construct a DTensor from them with the parameter's mesh
and placements. torch.distributed.checkpoint.state_dict reads the start of each piece from our placements. Other
libraries (PEFT, through transformers) split rows like `torch.chunk`, but still use our placements. A rank cannot
distinguish the two cases from its own row count alone. Therefore the row counts of all ranks are all-gathered. Equal
counts in the same order mean equal bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from layerzero.comm.collectives import Collective, all_gather
from layerzero.dtensor.row_shard_spec import RowShardSpec


class UnevenShard(Shard):
    """``Shard(0)`` with uneven pieces, which compares equal to torch's ``Shard(0)``.

    ``torch.distributed.checkpoint.state_dict`` reads the size and offset of each piece from this class and splits the
    tensors that it broadcasts accordingly.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__(0)
        self.starts = tuple(
            starts
        )  # first row of each piece along one axis of the mesh, followed by the end of the last piece

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        if curr_local_size != self.starts[-1] - self.starts[0]:  # torch would select the wrong rows
            raise ValueError(
                f"the tensor has {curr_local_size} rows, but the parameter, or the piece of it, has "
                f"{self.starts[-1] - self.starts[0]} rows. Pass a tensor with as many rows"
            )
        return self.starts[rank + 1] - self.starts[rank], self.starts[rank]


def rows_of(value: Tensor, spec: RowShardSpec) -> Tensor:
    """Return this rank's rows of a full tensor.

    If `value` is a DTensor with a different sharding, every rank must call this function.

    Raises:
        ValueError: the shape of `value` is not the shape of the full parameter. A 0-dim parameter also accepts [1].
    """
    shape = spec.full_shape
    if tuple(value.shape) not in (shape, shape or (1,)):
        raise ValueError(
            f"{spec.name!r} has shape {list(shape)}, got a tensor of shape {list(value.shape)}. Pass a tensor of the "
            "full shape"
        )
    if spec.model_parallel is not None:
        part = spec.model_parallel.part_of(value)
    elif isinstance(value, DTensor) and _is_foreign_row_sharding(value, spec):
        return _rows_of_foreign(value, spec)
    else:
        part = value.full_tensor() if isinstance(value, DTensor) else value
    return part.reshape(spec.stored_shape)[spec.rows.start : spec.rows.stop]


def _is_foreign_row_sharding(value: DTensor, spec: RowShardSpec) -> bool:
    """Return whether `value` is sharded by rows on the mesh of `spec` but was not created by layerzero."""
    is_row_sharded = value.device_mesh == spec.mesh_info.flat_mesh and all(
        each == Shard(0) for each in value._spec.placements
    )
    return is_row_sharded and not hasattr(value._local_tensor, "spec")


def _rows_of_foreign(value: DTensor, spec: RowShardSpec) -> Tensor:
    """Return this rank's rows of a DTensor for which :func:`_is_foreign_row_sharding` is true.

    See [Note: Row bounds of other libraries]. Every data-parallel rank must call this function.

    Raises:
        ValueError: the row counts match neither layerzero's row bounds nor the row bounds of `torch.chunk`. All ranks
            raise the error.
    """
    local, mesh_info = value.to_local().detach(), spec.mesh_info
    counts = torch.tensor([local.shape[0]])
    for comm in mesh_info.control_comms:
        gathered_counts = torch.empty(comm.size * counts.numel(), dtype=torch.int64)
        all_gather(comm, Collective.METADATA, gathered_counts, counts).wait()
        counts = gathered_counts
    sizes = counts.view(mesh_info.replicas, mesh_info.zero3_size).T.flatten().tolist()  # by k = s * R + r
    if sizes == list(spec.row_counts):
        return local
    lengths = spec.torch_row_counts
    if sizes != list(lengths):
        raise ValueError(
            f"{spec.name!r} was given a DTensor of which the ranks have {sizes} of {spec.num_rows} rows, which matches "
            "neither layerzero's row bounds nor torch's. Pass the full tensor on all ranks, or load through "
            "layerzero.load_full_state_dict"
        )
    full = replace(spec, bounds=tuple(accumulate(lengths, initial=0))).gather(local)
    return full.view(spec.stored_shape)[spec.rows.start : spec.rows.stop]
