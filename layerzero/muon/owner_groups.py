"""Owner groups: the ranks whose rows together form an owned parameter.

[Note: Owner groups]
One rank, the owner, updates an owned parameter in full. All ZeRO-1 rows of the parameter are on the ranks of one ZeRO-3
group. With model parallelism, this applies to each model-parallel part. If a model-parallel axis splits the matrices,
as in tensor parallelism, the other parts are in the corresponding ZeRO-3 groups along this axis. The ranks in all of
these groups form the parameter's owner group. They send their rows to the owner in one collective. If the ranks along a
model-parallel axis have copies, or different matrices from one stack, the parts are not joined along this axis. The
parameter then has one owner for each coordinate on the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from layerzero.extend import Communicator, MeshInfo, ModelParallelSpec


@dataclass(frozen=True, eq=False)
class OwnerGroup:
    """Ranks that assemble an owned parameter, and their communicator; see [Note: Owner groups]."""

    mesh_info: MeshInfo
    axis: int | None  # model-parallel axis along which parts are joined
    communicator: Communicator
    order: tuple[tuple[int, int], ...]  # for each rank of the communicator: (ZeRO-3 rank, coordinate on the axis)

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.communicator.group)

    @property
    def place(self) -> tuple[int, int]:
        """Position of this rank: (rank in the ZeRO-3 group, coordinate on the model-parallel axis)."""
        return self.order[self.communicator.rank]


def owner_group_of(mesh_info: MeshInfo) -> OwnerGroup:
    """Return this rank's ZeRO-3 group as an owner group."""
    order = tuple((s, 0) for s in range(mesh_info.zero3_size))
    return OwnerGroup(mesh_info, None, mesh_info.zero3_gather_comm, order)


def positions_across(mesh_info: MeshInfo, model_parallel: ModelParallelSpec, axis: int) -> dict[int, tuple[int, int]]:
    """Return the positions of the ranks in this rank's ZeRO-3 group and in the corresponding groups along an axis.

    Args:
        axis: index of the model-parallel axis in `model_parallel`.

    Returns:
        A dict from global rank to position: (rank in the ZeRO-3 group, coordinate on the axis).
    """
    grid = mesh_info.grid
    table = model_parallel.global_mesh.mesh  # ranks, indexed by coordinates on the model-parallel axes, s, perhaps r
    for mesh_axis in reversed(range(model_parallel.mesh.ndim)):
        if mesh_axis != axis:
            table = table.select(mesh_axis, model_parallel.coordinate_on(mesh_axis))
    table = table.reshape(len(table), grid.zero3_size, grid.replicas)
    ranks_by_axis = table[..., grid.replica_rank].tolist()  # ranks, indexed by coordinate on the axis, s
    return {rank: (s, t) for t, zero3_ranks in enumerate(ranks_by_axis) for s, rank in enumerate(zero3_ranks)}


def owner_group_across(mesh_info: MeshInfo, axis: int, places: Mapping[int, tuple[int, int]]) -> OwnerGroup:
    """Create an owner group from the result of :func:`positions_across`.

    All ranks of the model must call this function.
    """
    ranks = sorted(places)
    kind = mesh_info.mesh.device_type
    group = mesh_info.groups.new(ranks, like=mesh_info.zero3_gather_comm.group, device_type=kind)
    comm = Communicator.over("owners", "model_parallel", group, mesh_info.counters, kind)
    return OwnerGroup(mesh_info, axis, comm, tuple(places[rank] for rank in ranks))


def sharded_axes(model_parallel: ModelParallelSpec | None, *, joined: int | None = None) -> dict[int, int]:
    """Return the sharded dim by model-parallel axis, without the axis along which the parts are `joined`."""
    if model_parallel is None:
        return {}
    dims = {axis: model_parallel.sharded_dim(axis) for axis in range(model_parallel.mesh.ndim) if axis != joined}
    return {axis: dim for axis, dim in dims.items() if dim is not None}


def axis_to_join(name: str, model_parallel: ModelParallelSpec, *, matrices_separately: bool) -> int | None:
    """Return the model-parallel axis along which a parameter's parts must be joined, or None if no axis is needed.

    Args:
        matrices_separately: whether the optimizer updates each matrix in a stack of matrices separately.

    Raises:
        ValueError: parts would have to be joined along several axes.
    """
    cut = sharded_axes(model_parallel)
    if matrices_separately and len(model_parallel.shape) > 2:
        cut = {axis: dim for axis, dim in cut.items() if dim > 0}
    if len(cut) > 1:
        raise ValueError(
            f"the optimizer needs full parameters, but {name!r} is sharded along {len(cut)} model-parallel axes, and "
            "layerzero can join its parts along only one. Use an element-wise optimizer for it"
        )
    return next(iter(cut), None)
