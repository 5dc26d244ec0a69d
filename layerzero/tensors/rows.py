"""Which rows of a parameter each rank holds, and what has happened to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.comm.collectives import Exchange, all_gather, broadcast
from layerzero.comm.topology import Topology

__all__ = ["RowSpan", "Watch"]


class Watch:
    """What has happened to the storage behind some :class:`LocalRows`."""

    __slots__ = ("before_edit", "edited", "edits", "forbidden", "loaded", "zeroed")

    def __init__(self) -> None:
        self.edited = False
        self.edits = 0  # so far, for who compares what is at rest
        self.before_edit: Callable[[], None] | None = None  # to be called before the first edit since the last refresh
        self.forbidden: str | None = None  # while set, using the values raises RuntimeError with this text
        self.loaded: dict[str, str] = {}  # by name: digests of whole tensors of which rows were taken
        self.zeroed = False  # zero_() was called while `forbidden` was set, the one use that needs no values

    def moved(self, reason: str) -> Watch:
        """The rows are elsewhere from here on: the watch over them there. Using the old ones raises with `reason`."""
        self.forbidden = reason
        new = Watch()
        new.before_edit = self.before_edit
        return new

    def edit(self) -> None:
        """The storage is about to be written."""
        if not self.edited and self.before_edit is not None:
            self.before_edit()
        self.edits += 1
        self.edited = True


@dataclass(frozen=True, eq=False)
class RowSpan:
    """Which rows of one parameter each rank holds."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    bounds: tuple[int, ...]  # the rank at flat position k holds rows [bounds[k], bounds[k + 1])
    topology: Topology

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

    def cut_like(self, other: RowSpan) -> bool:
        """Every rank holds the same rows of both. Equal bounds are not enough: S decides whose is flat position k."""
        return self.bounds == other.bounds and self.topology.zero3_size == other.topology.zero3_size

    def gather(self, local: Tensor) -> Tensor:
        """The whole parameter, from every rank's rows `local`, on the device; every rank must call this."""
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
