"""The ranks that put whole parameters together.

[Note: Cells]
All ZeRO-1 rows of an owned parameter, or of the part of it that the data-parallel ranks share, lie in one node: on the
ranks of a ZeRO-3 group. Where a further axis has cut the matrices (tensor parallel), the other parts are on the ZeRO-3
groups beside it. All of these are the parameter's cell: its ranks send their rows to the owner, in one exchange. A
further axis on which ranks have copies, or other matrices of one stack, puts nothing together: at each of its places
there is an owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from layerzero.comm.collectives import Communicator
from layerzero.comm.mesh_info import MeshInfo
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec
from layerzero.layout.owner_layout import JoinAxis

__all__ = ["OwnerGroup", "across", "owner_group_across", "owner_group_of", "places_across"]


@dataclass(frozen=True, eq=False)
class OwnerGroup:
    """See [Note: Cells]."""

    mesh_info: MeshInfo
    axis: int | None  # the further one that is put together
    communicator: Communicator
    order: tuple[tuple[int, int], ...]  # by rank of the lane: s, and the place on the axis

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.communicator.group)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's."""
        return self.order[self.communicator.rank]


def owner_group_of(topology: MeshInfo) -> OwnerGroup:
    """A ZeRO-3 group alone."""
    order = tuple((s, 0) for s in range(topology.zero3_size))
    return OwnerGroup(topology, None, topology.zero3_gather_comm, order)


def places_across(topology: MeshInfo, face: ModelParallelSpec, axis: int) -> dict[int, tuple[int, int]]:
    """A ZeRO-3 group and those beside it on an axis of `face`. By rank: s, and the place on the axis."""
    grid = topology.grid
    table = face.global_mesh.mesh  # by places on the further axes, s, r
    for at in reversed(range(face.mesh.ndim)):
        if at != axis:
            table = table.select(at, face.place_on(at))
    of_node = table[..., grid.replica_rank].tolist()  # by the place on the axis, s
    return {rank: (s, t) for t, node in enumerate(of_node) for s, rank in enumerate(node)}


def owner_group_across(topology: MeshInfo, axis: int, places: Mapping[int, tuple[int, int]]) -> OwnerGroup:
    """Of the ranks of :func:`places_across`. All ranks of the model must call this."""
    ranks = sorted(places)
    kind = topology.mesh.device_type
    group = topology.groups.new(ranks, like=topology.zero3_gather_comm.group, device_type=kind)
    lane = Communicator.over("owners", "across", group, topology.counters, kind)
    return OwnerGroup(topology, axis, lane, tuple(places[rank] for rank in ranks))


def across(name: str, face: ModelParallelSpec | None, *, stacks_apart: bool) -> JoinAxis | None:
    """Along which further axis a parameter is put together; None: along none.

    Args:
        stacks_apart: the optimizer treats each matrix of such a parameter, a stack, by itself.

    Raises:
        ValueError: along several.
    """
    if face is None:
        return None
    cut = {axis: dim for axis in range(face.mesh.ndim) if (dim := face.sharded_dim(axis)) is not None}
    if stacks_apart and len(face.shape) > 2:
        cut = {axis: dim for axis, dim in cut.items() if dim > 0}
    if len(cut) > 1:
        raise ValueError(
            f"the optimizer needs whole parameters, and {name!r} is cut along {len(cut)} axes beside the data-parallel "
            "ones, of which one can be put together: use an element-wise optimizer for it"
        )
    return next((JoinAxis(axis, face.mesh.size(axis), face.joined_shape(axis)) for axis in cut), None)
