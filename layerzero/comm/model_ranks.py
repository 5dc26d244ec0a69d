"""Communicate between all ranks that hold parts of one model, along its data-parallel and model-parallel axes.

[Note: Control messages]
Control messages consist of a few bytes that the host of each rank must read. They are sent over gloo along one axis
after the other: first along the ZeRO-3 axis, then along the replica axis and the model-parallel axes. Therefore a rank
has S + R sockets and sends S + R messages. gloo connects all pairs of ranks when a group is created. A group of all D
ranks would need D sockets on each rank and reach the usual limit on file descriptors at D = 1024. Each rank would also
read the addresses of all D ranks from the rendezvous store, D^2 (154 + 8 D) bytes together. Therefore there is no group
of all ranks. Checkpoints, which send texts from separate threads, connect small groups in the form of a tree; see
:meth:`ModelRanks.new_control_comms` and layerzero/checkpoint/rank_tree.py.

A message along the second axis depends on the messages received along the first axis. If a rank must not wait for these
messages, :class:`DelayedRankMaximum` uses the messages of the previous round instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.agreement import require_equal
from layerzero.comm.collectives import Collective, Communicator, all_reduce, broadcast, connect
from layerzero.comm.gather_text import all_gather_text
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.process_groups import HeldGroup, ModelGroups, group_count_fields
from layerzero.comm.traffic_counters import TrafficCounters

# Minimum of timeouts while ranks write or read the files of a checkpoint, which may take one rank longer than others.
# Other waits have the timeout of the default group, so that a rank that does not take part is reported early.
_CHECKPOINT_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True, eq=False)
class ModelRanks:
    """Ranks of a model: the data-parallel ranks of its root module, at all model-parallel coordinates."""

    mesh_info: MeshInfo  # mesh of the root module's parameters
    ranks: tuple[int, ...]  # global ranks, ascending
    control_comms: tuple[Communicator, ...]  # used one after the other; see [Note: Control messages]
    model_parallel: tuple[Communicator, ...]  # communicators of this rank, one for each model-parallel axis

    @classmethod
    def connect(cls, mesh_info: MeshInfo, model_parallel_mesh: DeviceMesh | None) -> ModelRanks:
        """Find the ranks of a model and create their communicators. All of these ranks must call this method.

        Args:
            mesh_info: mesh of the data-parallel ranks of the root module.
            model_parallel_mesh: mesh of the model-parallel axes, or None if there are no such axes.

        Raises:
            ValueError: data-parallel groups at different model-parallel coordinates share a rank.
        """
        if model_parallel_mesh is None or model_parallel_mesh.size() == 1:
            return cls(mesh_info, mesh_info.ranks, mesh_info.control_comms, ())._with_model_communicators()
        like, counters = mesh_info.zero3_control_comm.group, mesh_info.counters
        axis_ranks = sorted(model_parallel_mesh.mesh.flatten().tolist())
        control_comm = Communicator.over(
            "model-parallel control", "control", _new_gloo_group(mesh_info.groups, axis_ranks, like), counters, "cpu"
        )
        rank_lists = all_gather_text(control_comm, json.dumps(mesh_info.ranks))
        ranks = sorted({rank for text in rank_lists for rank in json.loads(text)})
        if len(ranks) != mesh_info.data_parallel * model_parallel_mesh.size():
            raise ValueError(
                f"parameters are DTensors on the ranks {axis_ranks}, whose data-parallel ranks are {rank_lists}. These "
                f"must form {model_parallel_mesh.size()} disjoint groups"
            )
        comms = (*mesh_info.control_comms, control_comm)
        return cls(
            mesh_info, tuple(ranks), comms, _comms_along(model_parallel_mesh, mesh_info)
        )._with_model_communicators()

    def _with_model_communicators(self) -> ModelRanks:
        return replace(self, mesh_info=self.with_model_ranks(self.mesh_info))

    def with_model_ranks(self, mesh_info: MeshInfo) -> MeshInfo:
        """Return a copy of `mesh_info` whose `over_model` communicators together reach all ranks of the model."""
        return replace(mesh_info, over_model=self.communicators[::-1])

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Index of this rank in `ranks`."""
        return self.ranks.index(dist.get_rank())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Communicators in the order of a broadcast from the first rank. Reductions use the reverse order."""
        return *self.model_parallel, self.mesh_info.replica_comm, self.mesh_info.zero3_gather_comm

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor from the first rank of the model. All ranks must call this method."""
        broadcast_over(self.communicators, tensor)

    def all_reduce(self, number: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a small tensor in place over all ranks. All ranks must call this method."""
        all_reduce_over(self.mesh_info.over_model, number, op)

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of each rank, in the order of `ranks`. All ranks must call this method."""
        texts = {dist.get_rank(): text}
        for comm in self.control_comms:
            texts = {
                int(rank): peer_text
                for message in all_gather_text(comm, json.dumps(texts))
                for rank, peer_text in json.loads(message).items()
            }
        return [texts[rank] for rank in self.ranks]

    def broadcast_numbers(self, tensor: Tensor) -> None:
        """Broadcast a small CPU tensor from the first rank. All ranks must call this method."""
        for comm in reversed(self.control_comms):
            if tensor.numel():
                broadcast(comm, Collective.METADATA, tensor)

    def new_control_comms(
        self, subject: str, members: Sequence[Sequence[int]], groups: ModelGroups
    ) -> list[Communicator]:
        """Create gloo communicators for checkpoints, which separate threads use. All ranks must call this method.

        They are for transfers between two ranks, whose timeout is at least an hour.

        Args:
            subject: purpose, which starts the message if other ranks create other groups.
            members: global ranks of each communicator, which include this rank. Ranks must list shared communicators
                in one global order, because the members connect when a communicator is created.
            groups: owner of the new groups, which defers their creation.
        """
        require_equal(subject, {}, ranks=self.ranks, groups=group_count_fields(*members))
        like, counters = self.mesh_info.zero3_control_comm.group, TrafficCounters()  # which other threads may update
        new = [_new_gloo_group(groups, ranks, like, _CHECKPOINT_TIMEOUT) for ranks in members]
        groups.create_deferred()
        return [Communicator.over(subject, "control", group, counters, "cpu") for group in new]


@dataclass(frozen=True, eq=False)
class ModelParallelAxes:
    """Mesh and communicators of the model-parallel axes that complement a data-parallel mesh, for DTensors."""

    mesh: DeviceMesh
    communicators: tuple[Communicator, ...]  # one for each axis of `mesh`
    global_mesh: (
        DeviceMesh  # mesh that users see: model-parallel axes, then (zero3, replica); mesh order is the row order
    )

    @classmethod
    def of(cls, mesh_info: MeshInfo, model_parallel_mesh: DeviceMesh, model_ranks: ModelRanks) -> ModelParallelAxes:
        """Create the model-parallel axes. All ranks of the model must call this method for the same parameters."""
        flat_mesh_texts = dict(
            zip(
                model_ranks.ranks,
                model_ranks.all_gather_text(json.dumps(mesh_info.flat_mesh.mesh.tolist())),
                strict=True,
            )
        )
        table = [json.loads(flat_mesh_texts[rank]) for rank in model_parallel_mesh.mesh.flatten().tolist()]
        return cls._over(mesh_info, model_parallel_mesh, table, _comms_along(model_parallel_mesh, mesh_info))

    @classmethod
    def derived(cls, mesh_info: MeshInfo, model_parallel_mesh: DeviceMesh) -> ModelParallelAxes:
        """Derive the axes, without communicators, from the mesh whose slices both meshes are. Ranks do not communicate.

        Raises:
            ValueError: no mesh contains the data-parallel and the model-parallel axes.
        """
        whole: list[int] = model_parallel_mesh._get_root_mesh().mesh.flatten().tolist()
        flat, axes = mesh_info.flat_mesh.mesh.flatten().tolist(), model_parallel_mesh.mesh.flatten().tolist()
        table: list[list[int]] = []
        if {*whole} >= {*flat}:
            # The position of a rank is the sum of its coordinates, each times the stride of its axis.
            own = whole.index(dist.get_rank())
            places = [[whole.index(axis) + whole.index(rank) - own for rank in flat] for axis in axes]
            table = [[whole[place] for place in row if 0 <= place < len(whole)] for row in places]
        if len({rank for row in table for rank in row}) != len(flat) * len(axes):
            raise ValueError(
                f"parameters are DTensors on a mesh of the ranks {axes}, and no mesh has these ranks and the "
                f"data-parallel ranks {flat} as axes. Take both from one mesh: init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp'))['tp'], or use layerzero.shard_model"
            )
        return cls._over(mesh_info, model_parallel_mesh, table, ())

    @classmethod
    def _over(
        cls, mesh_info: MeshInfo, model_parallel_mesh: DeviceMesh, table: object, comms: tuple[Communicator, ...]
    ) -> ModelParallelAxes:
        """Return the axes for the ranks `table` of the flat meshes, one for each rank of `model_parallel_mesh`."""
        flat, names = mesh_info.flat_mesh, model_parallel_mesh.mesh_dim_names
        global_mesh = DeviceMesh.from_group(
            [*model_parallel_mesh.get_all_groups(), *flat.get_all_groups()],
            mesh_info.mesh.device_type,
            mesh=torch.tensor(table, device="cpu").view(*model_parallel_mesh.mesh.shape, *flat.mesh.shape),
            mesh_dim_names=(*(names or map(str, range(model_parallel_mesh.ndim))), *(flat.mesh_dim_names or ())),
        )
        return cls(model_parallel_mesh, comms, global_mesh)


class DelayedRankMaximum:
    """Elementwise maximum of a few bytes over all ranks. No message depends on another message of the same round.

    Each round sends the maximum along one more axis. With K axes, each round therefore completes the maximum of the
    inputs that were sent K - 1 rounds earlier. All ranks obtain it in the same round. See [Note: Control messages].

    Args:
        axes: number of communicators along which messages are sent.
        numel: number of bytes in a message.
    """

    def __init__(self, axes: int, numel: int) -> None:
        self._known = [torch.zeros(numel, dtype=torch.uint8, device="cpu") for _ in range(axes)]  # by axis

    def outgoing(self, own: Tensor) -> list[Tensor]:
        """Return the message for each communicator, uint8 [numel]. The first message is `own`."""
        return [own, *self._known[:-1]]

    def receive(self, messages: Iterable[Tensor]) -> Tensor:
        """Store the messages received over each communicator, and return the maximum over all ranks, uint8 [numel].

        Args:
            messages: messages of all ranks for each communicator, uint8 [ranks, numel].
        """
        self._known = [message.amax(dim=0) for message in messages]
        return self._known[-1]


def all_reduce_over(
    comms: Sequence[Communicator],
    number: Tensor,
    op: dist.ReduceOp.RedOpType,
    collective: Collective = Collective.SCALAR_REDUCE,
) -> None:
    """Reduce a small tensor in place, along one communicator after the other, and wait for the result."""
    for comm in comms:
        if comm.size > 1:
            all_reduce(comm, collective, number, op).wait()


def broadcast_over(comms: Sequence[Communicator], tensor: Tensor) -> None:
    """Broadcast a tensor from the first rank along one communicator after the other."""
    for comm in comms if tensor.numel() else ():
        if comm.size > 1:
            broadcast(comm, Collective.BROADCAST, tensor)


def _comms_along(model_parallel_mesh: DeviceMesh, mesh_info: MeshInfo) -> tuple[Communicator, ...]:
    counters, kind = mesh_info.counters, mesh_info.mesh.device_type
    groups = enumerate(model_parallel_mesh.get_all_groups())
    comms = tuple(
        Communicator.over(f"across {axis}", "model_parallel", group, counters, kind) for axis, group in groups
    )
    for comm in comms:
        connect(comm, mesh_info.device)
    return comms


def _new_gloo_group(
    groups: ModelGroups, ranks: Sequence[int], like: dist.ProcessGroup, transfer_timeout: timedelta | None = None
) -> HeldGroup:
    backend = dist.get_backend_config(like).split(",")[0].split(":")[1]
    return groups.new(ranks, like=like, device_type="cpu", backend=backend, transfer_timeout=transfer_timeout)
