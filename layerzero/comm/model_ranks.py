"""All ranks that hold a part of one model: the data-parallel ones, and those of further axes beside them.

[Note: Control messages]
A few bytes that the CPU of each rank must read go over gloo, along one axis after the other: to the ranks of the ZeRO-3
group, then to the other replicas, then along further axes. So a rank has S + R sockets and sends S + R messages. gloo
connects all ranks of a group with each other when the group is made. A group of all D ranks would therefore cost D
sockets on each rank, which meets common limits of descriptors at D = 1024. Only checkpoints need one, for
``torch.distributed.checkpoint``; it is made at the first save or load.

A message along the second axis depends on what has come along the first. Where a rank must not wait for it,
:class:`LateMaximum` sends what came with the call before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.agreement import require_equal
from layerzero.comm.collectives import Collective, Communicator, all_reduce, broadcast, connect
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.process_groups import HeldGroup, ModelGroups, groups_so_far
from layerzero.comm.texts import all_gather_text

__all__ = ["LateMaximum", "ModelParallelAxes", "ModelRanks", "broadcast_over", "reduce_over"]


@dataclass(frozen=True, eq=False)
class ModelRanks:
    """The ranks of a model: the root's data-parallel ones, and those that are beside each of them on further axes."""

    mesh_info: MeshInfo  # of the root's parameters
    ranks: tuple[int, ...]  # global, ascending
    control_comms: tuple[Communicator, ...]  # that reach all of them, one after the other; see [Note: Control messages]
    model_parallel: tuple[Communicator, ...]  # of this rank: one for each further axis
    _control_group: list[HeldGroup] = field(default_factory=list)  # of all ranks: none until it is needed

    @classmethod
    def around(cls, topology: MeshInfo, further: DeviceMesh | None) -> ModelRanks:
        """The ranks of `topology`, and those beside them on the `further` axes. All of them must call this.

        Raises:
            ValueError: the ranks at different places of the further axes are not apart.
        """
        if further is None or further.size() == 1:
            return cls(topology, topology.ranks, topology.control_comms, ())._known()
        like, ledger = topology.zero3_control_comm.group, topology.counters
        places = sorted(further.mesh.flatten().tolist())
        beside = Communicator.over("further control", "control", _gloo(topology.groups, places, like), ledger, "cpu")
        told = all_gather_text(beside, json.dumps(topology.ranks))
        ranks = sorted({rank for text in told for rank in json.loads(text)})
        if len(ranks) != topology.data_parallel * further.size():
            raise ValueError(
                f"parameters are DTensors on the ranks {places}, whose data-parallel ranks are {told}: these must be "
                f"{further.size()} groups that have no rank in common"
            )
        lanes = (*topology.control_comms, beside)
        return cls(topology, tuple(ranks), lanes, _lanes_along(further, topology))._known()

    def _known(self) -> ModelRanks:
        return replace(self, mesh_info=self.seen_from(self.mesh_info))

    def seen_from(self, topology: MeshInfo) -> MeshInfo:
        """One of the model's topologies, which knows from now on how to reach all ranks of it."""
        return replace(topology, over_model=self.communicators[::-1])

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Place of this rank among all."""
        return self.ranks.index(dist.get_rank())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """On which a tensor comes from the first rank to all; in reverse, a number from all to all."""
        return *self.model_parallel, self.mesh_info.replica_comm, self.mesh_info.zero3_gather_comm

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks what the first one has. All of them must call this."""
        broadcast_over(self.communicators, tensor)

    def reduce(self, number: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a small tensor in place, each rank's once. All of them must call this."""
        reduce_over(self.mesh_info.over_model, number, op)

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of each rank, in the order of `ranks`. All of them must call this."""
        known = {dist.get_rank(): text}
        for lane in self.control_comms:
            known = {
                int(rank): said for told in all_gather_text(lane, json.dumps(known)) for rank, said in _items(told)
            }
        return [known[rank] for rank in self.ranks]

    def broadcast_numbers(self, tensor: Tensor) -> None:
        """Copy a small tensor of the CPU from the first rank to all. All of them must call this."""
        for lane in reversed(self.control_comms):
            if tensor.numel():
                broadcast(lane, Collective.METADATA, tensor)

    def control_group(self) -> dist.ProcessGroup:
        """Return the gloo group of all ranks; the first call makes it. All ranks must call this."""
        if not self._control_group:
            require_equal(
                "process group for torch.distributed.checkpoint", {}, ranks=self.ranks, groups=groups_so_far(self.ranks)
            )
            self._control_group.append(self.new_control_group())
        return self._control_group[0].group

    def new_control_group(self, groups: ModelGroups | None = None) -> HeldGroup:
        """Make another gloo group of all ranks, for a thread of its own. All of them must call this.

        Args:
            groups: owner of the new group; None: the model.
        """
        return _gloo(groups or self.mesh_info.groups, list(self.ranks), self.mesh_info.zero3_control_comm.group)


@dataclass(frozen=True, eq=False)
class ModelParallelAxes:
    """The further axes around one data-parallel mesh, on which parameters are DTensors."""

    mesh: DeviceMesh
    communicators: tuple[Communicator, ...]  # one for each of its axes
    global_mesh: (
        DeviceMesh  # of what users see: the further axes, then (zero3, replica); mesh order is the order of rows
    )

    @classmethod
    def of(cls, topology: MeshInfo, further: DeviceMesh, everyone: ModelRanks) -> ModelParallelAxes:
        """All ranks of the model must call this, for the same parameters."""
        flat, names = topology.flat_mesh, further.mesh_dim_names
        told = dict(zip(everyone.ranks, everyone.all_gather_text(json.dumps(flat.mesh.tolist())), strict=True))
        table = torch.tensor([json.loads(told[rank]) for rank in further.mesh.flatten().tolist()])
        shown = DeviceMesh.from_group(
            [*further.get_all_groups(), *flat.get_all_groups()],
            topology.mesh.device_type,
            mesh=table.view(*further.mesh.shape, *flat.mesh.shape),
            mesh_dim_names=(*(names or map(str, range(further.ndim))), *(flat.mesh_dim_names or ())),
        )
        return cls(further, _lanes_along(further, topology), shown)


class LateMaximum:
    """Elementwise maximum over all ranks of a few bytes, for callers that do not wait for a message they just sent.

    Each exchange carries the maximum one axis further. So with K axes, an exchange completes the maximum of what ranks
    gave to the one K - 1 before, on all ranks at the same time. See [Note: Control messages].

    Args:
        axes: number of lanes along which messages are sent.
        numel: bytes in a message.
    """

    def __init__(self, axes: int, numel: int) -> None:
        self._known = [torch.zeros(numel, dtype=torch.uint8, device="cpu") for _ in range(axes)]  # by axis

    def outgoing(self, own: Tensor) -> list[Tensor]:
        """Return the message for each lane, uint8 [numel]; `own` is the first one."""
        return [own, *self._known[:-1]]

    def receive(self, messages: Iterable[Tensor]) -> Tensor:
        """Take what came along each lane, uint8 [ranks of the lane, numel]; return the maximum over all ranks."""
        self._known = [message.amax(dim=0) for message in messages]
        return self._known[-1]


def reduce_over(
    lanes: Sequence[Communicator],
    number: Tensor,
    op: dist.ReduceOp.RedOpType,
    exchange: Collective = Collective.SCALAR_REDUCE,
) -> None:
    """Reduce a small tensor in place along one axis after the other."""
    for lane in lanes:
        if lane.size > 1:
            all_reduce(lane, exchange, number, op).wait()


def broadcast_over(lanes: Sequence[Communicator], tensor: Tensor) -> None:
    """Give what the first rank of some axes has to all of them."""
    for lane in lanes if tensor.numel() else ():
        if lane.size > 1:
            broadcast(lane, Collective.BROADCAST, tensor)


def _lanes_along(further: DeviceMesh, topology: MeshInfo) -> tuple[Communicator, ...]:
    ledger, kind = topology.counters, topology.mesh.device_type
    groups = enumerate(further.get_all_groups())
    lanes = tuple(Communicator.over(f"across {axis}", "across", group, ledger, kind) for axis, group in groups)
    for lane in lanes:
        connect(lane, topology.device)
    return lanes


def _items(text: str) -> Iterable[tuple[str, str]]:
    table: dict[str, str] = json.loads(text)
    return table.items()


def _gloo(groups: ModelGroups, ranks: list[int], like: dist.ProcessGroup) -> HeldGroup:
    backend = dist.get_backend_config(like).split(",")[0].split(":")[1]
    return groups.new(ranks, like=like, device_type="cpu", backend=backend)
