"""Which rows of a parameter each rank holds, and what has happened to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import Exchange, all_gather, broadcast
from layerzero.comm.mesh_info import MeshInfo
from layerzero.dtensor.lazy_grad import LazyGrad
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec

__all__ = ["MutationTracker", "RowShardSpec", "refuse_apart"]


def refuse_apart(what: str, spans: Iterable[RowShardSpec], everyone: int) -> None:
    """Raise ValueError if some of these parameters are others on other ranks of the model, under the same names."""
    if apart := [span.name for span in spans if span.holders < everyone]:
        raise ValueError(
            f"{what}: parameter {apart[0]!r} ({len(apart)} like it) is sharded over some ranks only, and others have "
            "another one of that name, which one state cannot hold. Make them one parameter before shard_model: a "
            "DTensor, Shard(0) on the axis along which they differ (expert parallel)"
        )


class MutationTracker:
    """What has happened to the storage behind some :class:`LocalShard`."""

    __slots__ = ("before_edit", "edited", "edits", "empty", "forbidden", "gradients_due", "loaded", "zeroed")

    def __init__(self) -> None:
        self.edited = False
        self.empty = False  # empty_like made the storage, and nobody has written it since
        self.edits = 0  # so far, for who compares what is at rest
        self.before_edit: Callable[[], None] | None = None  # to be called before the first edit since the last refresh
        self.gradients_due: LazyGrad | None = None  # to be looked at before .grad is read or set
        self.forbidden: str | None = None  # while set, using the values raises RuntimeError with this text
        self.loaded: dict[str, str] = {}  # by name: digests of whole tensors of which rows were taken
        self.zeroed = False  # zero_() was called while `forbidden` was set, the one use that needs no values

    def moved(self, reason: str) -> MutationTracker:
        """The rows are elsewhere from here on: the watch over them there. Using the old ones raises with `reason`."""
        self.forbidden = reason
        new = MutationTracker()
        new.before_edit, new.gradients_due = self.before_edit, self.gradients_due
        return new

    def edit(self) -> None:
        """The storage is about to be written."""
        if not self.edited and self.before_edit is not None:
            self.before_edit()
        self.empty = False
        self.edits += 1
        self.edited = True


@dataclass(frozen=True, eq=False)
class RowShardSpec:
    """Which rows of one parameter, or of the part of it that they share, the data-parallel ranks hold."""

    name: str
    shape: tuple[int, ...]  # of all rows
    bounds: tuple[int, ...]  # the rank at flat position k holds rows [bounds[k], bounds[k + 1])
    topology: MeshInfo
    face: ModelParallelSpec | None = None  # what the parameter is beyond these rows; None: nothing

    @property
    def true_shape(self) -> tuple[int, ...]:
        """Of the whole parameter, as one process would have it."""
        return self.shape if self.face is None else self.face.shape

    @property
    def is_whole_here(self) -> bool:
        """No other rank holds anything of it."""
        return self.topology.data_parallel == 1 and (self.face is None or not self.face.is_cut)

    @property
    def holders(self) -> int:
        """Ranks that have this parameter, or a part of it."""
        return self.topology.data_parallel * (1 if self.face is None else self.face.mesh.size())

    @property
    def mesh(self) -> DeviceMesh:
        """Of what users see."""
        return self.topology.flat_mesh if self.face is None else self.face.shown

    @property
    def box(self) -> tuple[slice, ...]:
        """Where this rank's rows lie in the whole parameter, of a 0-dim one in its one row."""
        rows, inner = self.rows, () if self.face is None else self.face.box
        if not inner:
            return slice(rows.start, rows.stop), *(slice(0, size) for size in self.shape[1:])
        return slice(inner[0].start + rows.start, inner[0].start + rows.stop), *inner[1:]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape by rows: a 0-dim parameter is one row of one number."""
        return self.shape or (1,)

    @property
    def count(self) -> int:
        """Rows of the whole parameter."""
        return self.bounds[-1]

    @property
    def rows(self) -> range:
        """This rank's rows."""
        k = self.topology.shard_index
        return range(self.bounds[k], self.bounds[k + 1])

    def cut_like(self, other: RowShardSpec) -> bool:
        """Every rank holds the same rows of both. Equal bounds are not enough: S decides whose is flat position k."""
        if (self.face is None) is not (other.face is None):
            return False
        alike = self.face is None or other.face is None or self.face.cut_like(other.face)
        return alike and self.bounds == other.bounds and self.topology.zero3_size == other.topology.zero3_size

    def undress(self, gradient: Tensor) -> Tensor:
        """What of a gradient the data-parallel ranks sum up."""
        return gradient if self.face is None else self.face.undress(gradient)

    def gather_whole(self, local: Tensor) -> Tensor:
        """The whole parameter, as one process would have it; every rank that holds something of it must call this."""
        part = self.gather(local)
        return part if self.face is None else self.face.whole(part)

    def gather(self, local: Tensor) -> Tensor:
        """All rows, from every rank's rows `local`, on the device; every data-parallel rank must call this."""
        local = local.to(self.topology.device)  # where the host updates, they are there
        longest = max(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))
        evenly = self.topology.data_parallel * longest <= 2 * self.count
        whole = self._gather_padded(local, longest) if evenly else self._gather_from_holders(local)
        return whole.view(self.shape)

    def _gather_padded(self, local: Tensor, longest: int) -> Tensor:
        topology, rest = self.topology, self.stored[1:]
        pieces = local.new_zeros(1, longest, *rest)
        pieces[0, : local.shape[0]] = local
        for lane in (topology.replica, topology.zero3_gather):  # k = s * R + r: the replica axis is the inner one
            if lane.size > 1 and pieces.numel():
                wider = local.new_empty(lane.size * pieces.shape[0], longest, *rest)
                all_gather(lane, Exchange.UNSHARD, wider.view(-1), pieces.view(-1), name=self.name).wait()
                pieces = wider
            elif lane.size > 1:
                pieces = pieces.new_zeros(lane.size * pieces.shape[0], longest, *rest)
        held = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        if all(rows == longest for rows in held):
            return pieces.view(self.stored)
        return torch.cat([piece[:rows] for piece, rows in zip(pieces, held, strict=True)])

    def _gather_from_holders(self, local: Tensor) -> Tensor:
        """For a few ranks that hold most rows, where equal pieces would be mostly padding."""
        topology = self.topology
        whole = local.new_empty(self.stored)
        whole[self.rows.start : self.rows.stop] = local
        for k in range(topology.data_parallel):
            piece = whole[self.bounds[k] : self.bounds[k + 1]]
            s, r = divmod(k, topology.replicas)
            if topology.replicas > 1 and topology.grid.s == s and piece.numel():
                broadcast(topology.replica, Exchange.UNSHARD, piece, from_rank=r)
            if topology.zero3_size > 1 and piece.numel():
                broadcast(topology.zero3_gather, Exchange.UNSHARD, piece, from_rank=s)
        return whole
