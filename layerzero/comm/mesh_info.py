"""Create meshes, and store the coordinates and communicators of this rank among the data-parallel ranks.

With R replicas of S ranks, the rank in replica r with ZeRO-3 coordinate s has the index r * S + s. The index of its
ZeRO-1 shard in the flat order is k = s * R + r. The ZeRO-1 shard therefore lies inside ZeRO-3 shard s, and every
collective runs along one axis.

[Note: One process group per communicator]
A backend matches the collectives of a group by their order. The groups of a mesh may be shared by the user's
collectives (for example token dispatch to experts), by several meshes and by several models. The order of layerzero's
collectives relative to these may depend on timing and on the parameters that a rank has used. Therefore each
communicator has a separate process group. Communicators along model-parallel axes are an exception, because their
collectives run between passes, at fixed points in the program. The mesh's own groups may remain unused. gloo connects
the ranks of a group when the group is created, even if it is never used. Other backends connect on first use.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.agreement import agreed
from layerzero.comm.collectives import Communicator, Message, backend_of, connect
from layerzero.comm.process_groups import ModelGroups, group_count_fields, mesh_group, option_values
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.device.accelerator import compute_device, default_device_type
from layerzero.layout.shard_grid import ShardGrid
from layerzero.utils.torch_compat import copy_options

AXES = ("replica", "zero3")
_NOT_DATA_PARALLEL = {"tp", "pp", "ep", "tensor", "pipeline", "expert"}


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """Mesh sizes, coordinates and communicators of this rank. Created by :meth:`from_mesh`."""

    mesh: DeviceMesh  # ("replica", "zero3"), shape (R, S)
    # The same ranks as ("zero3", "replica"), or the mesh of `from_mesh` if that has one axis. Mesh order equals flat
    # order, for DTensors.
    flat_mesh: DeviceMesh
    ranks: tuple[int, ...]  # global ranks, by r * S + s
    grid: ShardGrid  # coordinates of this rank
    device: torch.device
    counters: TrafficCounters
    groups: ModelGroups  # owner of the communicators' process groups, and of other groups of the model
    # Gathers and reductions use separate communicators, so neither waits for the other. The order of collectives on
    # each communicator depends only on the program; see "Training step" in docs/architecture.md.
    zero3_gather_comm: Communicator
    zero3_reduce_comm: Communicator
    replica_comm: Communicator
    # On gloo, for a few bytes that the host must read. See [Note: Control messages] in model_ranks.py.
    zero3_control_comm: Communicator
    replica_control_comm: Communicator
    # Collectives along these communicators, in this order, reduce over all ranks of the model. Empty until
    # ModelRanks sets them.
    over_model: tuple[Communicator, ...] = ()
    subgroup_comms: dict[int, Communicator] = field(default_factory=dict)  # by number of ranks; see subgroup_comm

    @property
    def zero3_size(self) -> int:
        return self.grid.zero3_size

    @property
    def replicas(self) -> int:
        return self.grid.replicas

    @property
    def data_parallel(self) -> int:
        return self.grid.data_parallel

    @property
    def control_comms(self) -> tuple[Communicator, ...]:
        """Control communicators with more than one rank. Together they connect all data-parallel ranks."""
        return tuple(comm for comm in (self.zero3_control_comm, self.replica_control_comm) if comm.size > 1)

    @property
    def on_gloo(self) -> bool:
        """True if gloo reduces the gradients. A wait for a reduction then blocks the calling thread."""
        return self.zero3_reduce_comm.is_gloo and self.replica_comm.is_gloo

    @property
    def shard_index(self) -> int:
        """Index k of this rank's ZeRO-1 shard in the flat order."""
        return self.grid.shard_index

    def subgroup_comm(self, ranks: int) -> Communicator:
        """Return the communicator for gathers within this rank's block of `ranks` consecutive ZeRO-3 ranks.

        The first call with a given value of `ranks` creates the communicator. All ranks must make that call.
        """
        if ranks not in self.subgroup_comms:
            first = self.grid.zero3_rank // ranks * ranks
            block = slice(first, first + ranks)
            self.subgroup_comms[ranks] = self._comm_like(self.zero3_gather_comm, f"zero3 gather of {ranks}", block)
            self._connect(self.subgroup_comms[ranks])
        return self.subgroup_comms[ranks]

    def connect(self) -> None:
        """Connect the communicators that collectives of a step use. All ranks of the mesh must call this method."""
        self._connect(self.zero3_gather_comm, self.zero3_reduce_comm, self.replica_comm, *self.subgroup_comms.values())

    def _connect(self, *comms: Communicator) -> None:
        for comm in () if self.groups.deferred else comms:
            connect(comm, self.device, [Message("all_gather")])  # other operations: sharding/connections.py

    def new_refresh_comm(self) -> Communicator:
        """Create a communicator along the replica axis for encoded refreshes. All ranks must call this method."""
        return self._comm_like(self.replica_comm, "replica refresh", slice(None))

    def _comm_like(self, comm: Communicator, name: str, members: slice) -> Communicator:
        """Create a communicator of some of the ranks of `comm`, along the same axis."""
        ranks, kind = comm.held_group.ranks[members], self.mesh.device_type
        group = self.groups.new(ranks, like=self.mesh.get_group(comm.axis), device_type=kind)
        return Communicator.over(name, comm.axis, group, self.counters, kind)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        counters: TrafficCounters | None = None,
        groups: ModelGroups | None = None,
        *,
        sums_locally: bool = False,
    ) -> MeshInfo:
        """Create the communicators of a mesh, and return its mesh info. All ranks of the mesh must call this method.

        If the groups are deferred, this method does not communicate.

        Args:
            mesh: see :func:`as_data_parallel`.
            counters: traffic counters of the model, if the model already has other meshes.
            groups: process groups of the model, if the model already has other meshes.
            sums_locally: if True, ranks add the parts of reductions themselves, on every backend.
        """
        given, mesh, counters = mesh, as_data_parallel(mesh), counters or TrafficCounters()
        groups = groups or ModelGroups()
        zero3, replica = mesh.get_group("zero3"), mesh.get_group("replica")
        ranks = mesh.mesh.flatten().tolist()
        kind = mesh.device_type
        row, column = dist.get_process_group_ranks(zero3), dist.get_process_group_ranks(replica)
        backend = "fake" if backend_of(zero3, kind) == "fake" else "gloo"

        def comm_of(
            name: str, axis: str, members: list[int], like: dist.ProcessGroup, *, sums: bool = False
        ) -> Communicator:
            """Create a communicator; see [Note: One process group per communicator]."""
            is_control = axis == "control"
            group = groups.new(members, like=like, device_type=kind, backend=backend if is_control else "")
            return Communicator.over(name, axis, group, counters, "cpu" if is_control else kind, sums_locally=sums)

        mesh_info = cls(
            mesh=mesh,
            flat_mesh=given if given.ndim == 1 else _transpose_mesh(mesh, zero3, replica),
            ranks=tuple(ranks),
            grid=ShardGrid.of_rank(ranks.index(dist.get_rank()), data_parallel=len(ranks), zero3_size=mesh.size(1)),
            device=compute_device(mesh.device_type),
            counters=counters,
            groups=groups,
            zero3_gather_comm=comm_of("zero3 gather", "zero3", row, zero3),
            zero3_reduce_comm=comm_of("zero3 reduce", "zero3", row, zero3, sums=sums_locally),
            replica_comm=comm_of("replica", "replica", column, replica, sums=sums_locally),
            zero3_control_comm=comm_of("zero3 control", "control", row, zero3),
            replica_control_comm=comm_of("replica control", "control", column, zero3),
        )
        mesh_info.connect()
        return mesh_info


def init_mesh(
    zero3_size: int | None = None, device_type: str | None = None, *, pg_options: Mapping[str, Any] | None = None
) -> DeviceMesh:
    """Create a mesh of all ranks with axes ``("replica", "zero3")``.

    Args:
        zero3_size: number S of consecutive ranks over which the compute weights are sharded, usually the number of
            ranks per node. The value 1 means ZeRO-1, and the world size means ZeRO-3. S must divide the world size. If
            `zero3_size` is None, S is the number of ranks per node, which torchrun sets as ``LOCAL_WORLD_SIZE``.
        device_type: ``"cuda"``, ``"cpu"``, ...; by default the accelerator if there is one, otherwise the CPU.
        pg_options: torch's options of process groups by axis, such as ``{"replica": ProcessGroupNCCL.Options()}``. The
            groups of models on this mesh get copies. The timeout is that of the default group. By default, the options
            are those of the default group.

    Raises:
        TypeError: `zero3_size` is not an int.
        ValueError: `zero3_size` does not divide the world size, ranks pass different values, `zero3_size` is None
            and ``LOCAL_WORLD_SIZE`` is not set or does not divide the world size, or `pg_options` do not fit the
            backend or the axes.
        RuntimeError: torch.distributed is not initialized.

    Example::

        torch.distributed.init_process_group()
        mesh = layerzero.init_mesh(zero3_size=8)
        model = layerzero.shard_model(model, mesh=mesh, units={Block})
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized. Call torch.distributed.init_process_group() first")
    kind = device_type or default_device_type()
    return mesh_of_ranks(range(dist.get_world_size()), zero3_size, kind, pg_options=pg_options)


def mesh_of_ranks(
    ranks: Sequence[int],
    zero3_size: int | None,
    device_type: str,
    *,
    caller: str = "init_mesh",
    pg_options: Mapping[str, Any] | None = None,
) -> DeviceMesh:
    """Create a mesh of the given `ranks`, which must be in ascending order; see :func:`init_mesh`.

    All of these ranks must call this function. Messages name `caller`, the public function that needs the mesh.
    """
    world = len(ranks)
    fields: dict[str, object] = {"device_type": device_type}
    groups: dict[str, dict[str, object]] = {}
    with agreed(caller, fields, ranks=ranks, groups=groups):
        size = _resolve_zero3_size(zero3_size, world)
        table = torch.tensor(ranks).view(world // size, size)
        row, column = _row_and_column_ranks(table)
        fields["zero3_size"] = repr(size)
        options = _copied_options(pg_options or {}, device_type)
        fields["pg_options"] = {axis: option_values(each) for axis, each in options.items()}
        groups |= group_count_fields(row, column)
    world_group = dist.group.WORLD
    assert world_group is not None
    zero3_group = mesh_group(row, like=world_group, device_type=device_type, options=options.get("zero3"))
    return _mesh_over(table, zero3_group, device_type, options.get("replica") or copy_options(world_group, device_type))


def _copied_options(pg_options: Mapping[str, Any], device_type: str) -> dict[str, Any]:
    """Return copies of the options by axis.

    Raises:
        ValueError: the mesh has no such axis, or the backend has other options or none.
    """
    if not isinstance(pg_options, Mapping) or not pg_options.keys() <= set(AXES):
        raise ValueError(f"pg_options must map axes of the mesh, {AXES}, to options, got {pg_options!r}")
    world_group = dist.group.WORLD
    assert world_group is not None
    for axis, options in pg_options.items():
        backend = backend_of(world_group, device_type)
        if backend == "gloo" or getattr(options, "backend", "") != backend:
            raise ValueError(
                f"pg_options[{axis!r}] is of the type {type(options).__name__}, but groups on {device_type} have the "
                f"backend {backend}{', which has no options' if backend == 'gloo' else ''}. Pass options of that "
                "backend (for nccl, torch.distributed.ProcessGroupNCCL.Options()), or leave them out"
            )
    return {axis: copy.deepcopy(options) for axis, options in pg_options.items()}


def _resolve_zero3_size(zero3_size: int | None, world: int) -> int:
    if zero3_size is None and world == 1:
        return 1
    if zero3_size is None:
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local_world_size.isdigit() or int(local_world_size) == 0 or world % int(local_world_size):
            raise ValueError(
                "neither zero3_size nor mesh is set, so zero3_size is the number of ranks of a node. torchrun sets "
                f"this number in LOCAL_WORLD_SIZE, which is {local_world_size or 'not set'} here, with {world} ranks. "
                f"Set zero3_size to one of {_divisors(world)}"
            )
        return int(local_world_size)
    if not isinstance(zero3_size, int) or isinstance(zero3_size, bool):
        raise TypeError(f"zero3_size must be an int, got {zero3_size!r}")
    if zero3_size < 1 or world % zero3_size:
        raise ValueError(
            f"zero3_size={zero3_size} does not divide the {world} data-parallel ranks; use one of {_divisors(world)}"
        )
    return zero3_size


def mesh_from_groups(zero1_group: dist.ProcessGroup, zero3_group: dist.ProcessGroup) -> DeviceMesh:
    """Create a mesh from two existing process groups of a framework.

    Every member of `zero1_group` must call this function. The function creates one process group for each set of ranks
    that differ only in the replica coordinate.

    Args:
        zero1_group: group of all data-parallel ranks.
        zero3_group: group of consecutive members of `zero1_group`, including this rank. The compute weights are sharded
            over this group.

    Raises:
        ValueError: `zero3_group` is not a block of consecutive members of `zero1_group`, or the blocks of different
            ranks differ in size.
    """
    ranks = sorted(dist.get_process_group_ranks(zero1_group))
    block = sorted(dist.get_process_group_ranks(zero3_group))
    size, world = len(block), len(ranks)
    fields = {"zero1_group": ranks, "size of zero3_group": size}
    groups: dict[str, dict[str, object]] = {}
    with agreed("mesh_from_groups", fields, ranks=ranks, groups=groups):
        if world % size:
            raise ValueError(
                f"zero3_group {block} has {size} ranks, which do not divide the {world} ranks of zero1_group {ranks}"
            )
        if not set(block) <= set(ranks):
            raise ValueError(f"zero3_group {block} is not a part of zero1_group {ranks}")
        if ranks.index(block[0]) % size or ranks[ranks.index(block[0]) :][:size] != block:
            starts = [ranks[i : i + size] for i in range(0, world, size)]
            raise ValueError(f"zero3_group {block} is not one of the blocks of consecutive ranks {starts}")
        table = torch.tensor(ranks).view(-1, size)
        groups |= group_count_fields(_row_and_column_ranks(table)[1])

    device_type = default_device_type()
    if f"{device_type}:" not in dist.get_backend_config(zero3_group):
        device_type = "cpu"
    return _mesh_over(table, zero3_group, device_type, copy_options(zero1_group, device_type))


def _mesh_over(
    table: torch.Tensor, zero3_group: dist.ProcessGroup, device_type: str, replica_options: Any
) -> DeviceMesh:
    """Create the mesh of the ranks in `table` [R, S], with a process group for this rank's column."""
    _, column = _row_and_column_ranks(table)
    replica_group = mesh_group(column, like=zero3_group, device_type=device_type, options=replica_options)
    return DeviceMesh.from_group([replica_group, zero3_group], device_type, mesh=table, mesh_dim_names=AXES)


def _row_and_column_ranks(table: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the ranks in this rank's row and the ranks in this rank's column of `table`, [R, S]."""
    ((r, s),) = (table == dist.get_rank()).nonzero().tolist()
    return table[r].tolist(), table[:, s].tolist()


def as_data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Convert `mesh` to a mesh with the axes ``("replica", "zero3")``.

    Args:
        mesh: result of :func:`init_mesh` or :func:`mesh_from_groups`, or a DeviceMesh with one or two data-parallel
            axes. With one axis, the weights are sharded over it. With two axes, the first is the replica axis, and the
            weights are sharded over the second.

    Raises:
        TypeError: `mesh` is not a DeviceMesh. Raised on this rank only.
        ValueError: `mesh` has other axes, does not contain this rank, or its ranks do not ascend row by row. Raised on
            this rank only.
    """
    check_mesh(mesh)
    if mesh.mesh_dim_names == AXES:
        return mesh
    ranks = mesh.mesh
    zero3 = mesh.get_group(mesh.ndim - 1)
    if mesh.ndim == 2:
        replica = mesh.get_group(0)
    else:
        own_ranks, kind = [dist.get_rank()], mesh.device_type
        replica, ranks = mesh_group(own_ranks, like=zero3, device_type=kind), ranks.view(1, -1)
    return DeviceMesh.from_group([replica, zero3], mesh.device_type, mesh=ranks, mesh_dim_names=AXES)


def check_mesh(mesh: DeviceMesh) -> None:
    """Check that `mesh` can be used for sharding.

    The mesh must have one or two axes, all of them data-parallel, with the replica axis first. Its ranks must be in
    ascending order and include this rank.

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: `mesh` does not meet one of these conditions.
    """
    if not isinstance(mesh, DeviceMesh):
        way_out = "create it with layerzero.init_mesh, layerzero.mesh_from_groups or torch's init_device_mesh"
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}; {way_out}")
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    others = sorted({*(names or ())} & _NOT_DATA_PARALLEL)
    if mesh.ndim > 2 or others:
        raise ValueError(
            f"mesh has axes {names} of {shape}{f', of which {others} are not data-parallel' if others else ''}. Pass "
            'the axes along which batches differ: one axis, mesh["dp"], or two, mesh["dp_replicate", "dp_shard"]'
        )
    if names == AXES[::-1]:
        raise ValueError(f"mesh has axes {names}, but the first axis must be the replica axis: expected {AXES}")
    ranks = mesh.mesh.flatten()
    if (ranks.diff() <= 0).any():
        blocks = sorted(ranks.tolist())
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.tolist()}, which do not ascend row by row. The layout of rows requires "
            "this order: ranks of a ZeRO-3 group must be neighbors among the data-parallel ranks. Use "
            f"{[blocks[i : i + shape[-1]] for i in range(0, len(blocks), shape[-1])]}, as layerzero.init_mesh makes it"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.tolist()} without rank {dist.get_rank()}, which therefore cannot store a "
            "part of the model. Pass a mesh with this rank, or call shard_model on the ranks of the mesh only"
        )


def _transpose_mesh(mesh: DeviceMesh, zero3: dist.ProcessGroup, replica: dist.ProcessGroup) -> DeviceMesh:
    table = mesh.mesh.t()
    table = table.reshape(-1).view(table.shape)  # contiguous() might keep odd strides of size-1 axes, which torch reads
    return DeviceMesh.from_group([zero3, replica], mesh.device_type, mesh=table, mesh_dim_names=("zero3", "replica"))


def _divisors(world: int) -> list[int]:
    return [d for d in range(1, world + 1) if world % d == 0]
