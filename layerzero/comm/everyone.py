"""All ranks that hold a part of one model: the data-parallel ones, and those of further axes beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import Exchange, Lane, all_reduce, broadcast
from layerzero.comm.process_groups import HeldGroup, ModelGroups
from layerzero.comm.texts import share_texts
from layerzero.comm.topology import Topology

__all__ = ["Beside", "Everyone", "broadcast_over", "reduce_over"]


@dataclass(frozen=True, eq=False)
class Everyone:
    """The ranks of a model: the root's data-parallel ones, and those that are beside each of them on further axes."""

    topology: Topology  # of the root's parameters
    ranks: tuple[int, ...]  # global, ascending
    control: Lane  # over all of them: gloo, for a few bytes that the CPU must read
    across: tuple[Lane, ...]  # of this rank: one for each further axis

    @classmethod
    def around(cls, topology: Topology, further: DeviceMesh | None) -> Everyone:
        """The ranks of `topology`, and those beside them on the `further` axes. All of them must call this.

        Raises:
            ValueError: the ranks at different places of the further axes are not apart.
        """
        if further is None or further.size() == 1:
            return cls(topology, topology.ranks, topology.control, ())._known()
        like, ledger = topology.control.group, topology.ledger
        places = sorted(further.mesh.flatten().tolist())
        beside = Lane.over("control", "control", _gloo(topology.groups, places, like), ledger, "cpu")
        told = share_texts(beside, json.dumps(topology.ranks))
        ranks = sorted({rank for text in told for rank in json.loads(text)})
        if len(ranks) != topology.data_parallel * further.size():
            raise ValueError(
                f"parameters are DTensors on the ranks {places}, whose data-parallel ranks are {told}: these must be "
                f"{further.size()} groups that have no rank in common"
            )
        control = Lane.over("control", "control", _gloo(topology.groups, ranks, like), ledger, "cpu")
        return cls(topology, tuple(ranks), control, _lanes_along(further, topology))._known()

    def _known(self) -> Everyone:
        return replace(self, topology=self.seen_from(self.topology))

    def seen_from(self, topology: Topology) -> Topology:
        """One of the model's topologies, which knows from now on how to reach all ranks of it."""
        return replace(topology, over_model=self.lanes[::-1])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def places_of(self, ranks: Sequence[int]) -> list[int] | slice:
        """Some ranks, counted among all."""
        return slice(None) if tuple(ranks) == self.ranks else [self.ranks.index(rank) for rank in ranks]

    @property
    def is_first(self) -> bool:
        return self.control.rank == 0

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """On which a tensor comes from the first rank to all; in reverse, a number from all to all."""
        return *self.across, self.topology.replica, self.topology.zero3_gather

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks what the first one has. All of them must call this."""
        broadcast_over(self.lanes, tensor)

    def reduce(self, number: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a small tensor in place, each rank's once. All of them must call this."""
        reduce_over(self.topology.over_model, number, op)

    def new_control_group(self, groups: ModelGroups | None = None) -> HeldGroup:
        """Make another gloo group of all ranks, for a thread of its own. All of them must call this.

        Args:
            groups: owner of the new group; None: the model.
        """
        return _gloo(groups or self.topology.groups, list(self.ranks), self.control.group)


@dataclass(frozen=True, eq=False)
class Beside:
    """The further axes around one data-parallel mesh, on which parameters are DTensors."""

    mesh: DeviceMesh
    lanes: tuple[Lane, ...]  # one for each of its axes
    shown: DeviceMesh  # of what users see: the further axes, then (zero3, replica); mesh order is the order of rows

    @classmethod
    def of(cls, topology: Topology, further: DeviceMesh, everyone: Everyone) -> Beside:
        """All ranks of the model must call this, for the same parameters."""
        flat, names = topology.flat_mesh, further.mesh_dim_names
        told = dict(zip(everyone.ranks, share_texts(everyone.control, json.dumps(flat.mesh.tolist())), strict=True))
        table = torch.tensor([json.loads(told[rank]) for rank in further.mesh.flatten().tolist()])
        shown = DeviceMesh.from_group(
            [*further.get_all_groups(), *flat.get_all_groups()],
            topology.mesh.device_type,
            mesh=table.view(*further.mesh.shape, *flat.mesh.shape),
            mesh_dim_names=(*(names or map(str, range(further.ndim))), *(flat.mesh_dim_names or ())),
        )
        return cls(further, _lanes_along(further, topology), shown)


def reduce_over(lanes: Sequence[Lane], number: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce a small tensor in place along one axis after the other."""
    for lane in lanes:
        if lane.size > 1:
            all_reduce(lane, Exchange.NORM, number, op).wait()


def broadcast_over(lanes: Sequence[Lane], tensor: Tensor) -> None:
    """Give what the first rank of some axes has to all of them."""
    for lane in lanes if tensor.numel() else ():
        if lane.size > 1:
            broadcast(lane, Exchange.BROADCAST, tensor)


def _lanes_along(further: DeviceMesh, topology: Topology) -> tuple[Lane, ...]:
    ledger, kind = topology.ledger, topology.mesh.device_type
    groups = enumerate(further.get_all_groups())
    return tuple(Lane.over(f"across {axis}", "across", group, ledger, kind) for axis, group in groups)


def _gloo(groups: ModelGroups, ranks: list[int], like: dist.ProcessGroup) -> HeldGroup:
    backend = dist.get_backend_config(like).split(",")[0].split(":")[1]
    return groups.new(ranks, like=like, device_type="cpu", backend=backend)
