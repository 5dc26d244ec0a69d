"""Describe which rows of a parameter each rank has.

The data-parallel ranks form a grid of R replicas with S ranks each. The rank with the coordinates (r, s) is at flat
position k = s * R + r, and has the contiguous rows ``[bounds[k], bounds[k + 1])``, possibly none. layout/flat_layout.py
chooses the bounds, so that no row is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import Collective, Communicator, all_gather, broadcast
from layerzero.comm.mesh_info import MeshInfo
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec


def refuse_rank_local(what: str, specs: Iterable[RowShardSpec], num_model_ranks: int) -> None:
    """Raise ValueError if any name in `specs` refers to different parameters on different ranks of the model.

    Args:
        what: name of the function that raises the error.
        specs: sharding of each parameter.
        num_model_ranks: number of ranks that have a part of the model.
    """
    if rank_local_names := [spec.name for spec in specs if spec.num_holders < num_model_ranks]:
        raise ValueError(
            f"{what}: parameter {rank_local_names[0]!r} ({len(rank_local_names)} like it) is sharded over only some "
            "ranks, and other ranks have a different parameter of that name. One state dict cannot contain both. Make "
            "them one DTensor before shard_model, with Shard(0) on the axis along which they differ (expert parallel)"
        )


def _chunk_sizes(rows: int, pieces: int) -> list[int]:
    """Return the number of rows in each piece that `torch.chunk` would return."""
    max_rows = -(-rows // pieces)
    return [max(0, min(max_rows, rows - i * max_rows)) for i in range(pieces)]


@dataclass(frozen=True, eq=False)
class RowShardSpec:
    """Row bounds of one parameter, or of its model-parallel part, on the data-parallel ranks."""

    name: str
    shape: tuple[int, ...]  # shape of all rows
    bounds: Sequence[int]  # the rank at flat position k has rows [bounds[k], bounds[k + 1])
    mesh_info: MeshInfo
    model_parallel: ModelParallelSpec | None = None  # None without model-parallel axes

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape that the full parameter has in one process."""
        return self.shape if self.model_parallel is None else self.model_parallel.shape

    @property
    def is_fully_local(self) -> bool:
        """True if this rank has all elements of the parameter."""
        return self.mesh_info.data_parallel == 1 and (self.model_parallel is None or not self.model_parallel.is_sharded)

    @property
    def num_holders(self) -> int:
        """Number of ranks that have this parameter or a part of it."""
        return self.mesh_info.data_parallel * (1 if self.model_parallel is None else self.model_parallel.mesh.size())

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the DTensor that users see."""
        return self.mesh_info.flat_mesh if self.model_parallel is None else self.model_parallel.global_mesh

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Slices of this rank's rows in the full parameter. A 0-dim parameter counts as one row."""
        rows, inner = self.rows, () if self.model_parallel is None else self.model_parallel.global_slices
        if not inner:
            return slice(rows.start, rows.stop), *(slice(0, size) for size in self.shape[1:])
        return slice(inner[0].start + rows.start, inner[0].start + rows.stop), *inner[1:]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in which the parameter is stored by rows: `shape`, or (1,) for a 0-dim parameter."""
        return self.shape or (1,)

    @property
    def num_rows(self) -> int:
        """Total number of rows on all data-parallel ranks."""
        return self.bounds[-1]

    @property
    def rows(self) -> range:
        """Range of this rank's rows in the parameter, or in its model-parallel part."""
        k = self.mesh_info.shard_index
        return range(self.bounds[k], self.bounds[k + 1])

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Number of rows on each data-parallel rank, by flat position."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    @cached_property
    def torch_row_counts(self) -> tuple[int, ...]:
        """Number of rows on each data-parallel rank in torch's own sharding, which DTensor expects."""
        zero3_size, replicas = self.mesh_info.zero3_size, self.mesh_info.replicas
        return tuple(rows for each in _chunk_sizes(self.num_rows, zero3_size) for rows in _chunk_sizes(each, replicas))

    def same_sharding(self, other: RowShardSpec) -> bool:
        """Return whether every rank has the same rows of both parameters.

        Equal bounds are not sufficient, because the rank at flat position k depends on the ZeRO-3 size S.
        """
        if (self.model_parallel is None) is not (other.model_parallel is None):
            return False
        is_equal = (
            self.model_parallel is None
            or other.model_parallel is None
            or self.model_parallel.same_sharding(other.model_parallel)
        )
        return is_equal and self.bounds == other.bounds and self.mesh_info.zero3_size == other.mesh_info.zero3_size

    def gather_full(self, local: Tensor) -> Tensor:
        """Gather the full parameter. Every rank that has a part of the parameter must call this method."""
        part = self.gather(local)
        return part if self.model_parallel is None else self.model_parallel.gather_global(part)

    def gather(self, local: Tensor) -> Tensor:
        """Gather the rows of all data-parallel ranks into one tensor of shape `shape` on the device.

        `local` contains this rank's rows. Every data-parallel rank must call this method.
        """
        mesh_info, replicas = self.mesh_info, self.mesh_info.replicas
        full = torch.empty(self.stored_shape, dtype=local.dtype, device=mesh_info.device)
        full[self.rows.start : self.rows.stop] = local  # from host memory with Offload(optimizer=True)
        first = mesh_info.grid.zero3_rank * replicas  # k = s * R + r: the replica axis is the inner one
        self._gather_along(mesh_info.replica_comm, full, self.bounds[first : first + replicas + 1])
        self._gather_along(mesh_info.zero3_gather_comm, full, self.bounds[::replicas])
        return full.view(self.shape)

    def _gather_along(self, comm: Communicator, full: Tensor, bounds: Sequence[int]) -> None:
        """Gather rows of `full` in place. Rank i of `comm` has the rows ``[bounds[i], bounds[i + 1])``."""
        out, pieces = full[bounds[0] : bounds[-1]], [full[start:stop] for start, stop in pairwise(bounds)]
        if comm.size == 1 or not out.numel():
            return
        parts = [piece.numel() for piece in pieces]
        if comm.size * max(parts) > 2 * out.numel():  # in an all-to-all, a few ranks would send most of the bytes
            for rank, piece in enumerate(pieces):
                if piece.numel():
                    broadcast(comm, Collective.UNSHARD, piece, from_rank=rank)
            return
        own, unequal = pieces[comm.rank].view(-1), None if len(set(parts)) == 1 else parts
        gathering = all_gather(
            comm, Collective.UNSHARD, out.view(-1), own, name=self.name, only_reads_shard=True, parts=unequal
        )
        gathering.wait()
