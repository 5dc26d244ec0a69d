"""Parameters that one rank updates whole: how it gets them, steps them, and gives their rows back.

[Note: Rounds of owners]
All ZeRO-1 rows of an owned parameter lie in one node (layout/owners.py), on several of its ranks. In each round every
rank of the node gets one of the parameters that it owns, the heaviest first: the others send it their rows of the
master and of the final gradient, all at once, it steps, and sends the rows of the master back. So all ranks compute at
the same time, each has one whole parameter and its gradient, and nothing leaves the node. A parameter whose rows are
all on their owner is where it should be, and is stepped together with what is element-wise.

Who owns what, who has a gradient and the order are the same on all ranks of a node, and so are the exchanges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from layerzero.comm.collectives import Exchange, all_reduce, send_pieces
from layerzero.comm.topology import Topology
from layerzero.engine.member import Member
from layerzero.layout.owners import Owner, work_of
from layerzero.optimizers.turns import Turn, step_in_turns
from layerzero.storage.buffers import BufferPool, Size
from layerzero.tensors.rows import RowSpan

__all__ = ["Owned", "buffers_of_rounds", "step_owned"]


@dataclass(frozen=True, eq=False)
class Owned:
    """One parameter that its owner updates whole."""

    member: Member
    owner: Owner
    group: MutableMapping[str, Any]  # of the inner optimizer
    master: Tensor  # what the inner optimizer has in its group: this rank's rows, and the whole while the owner steps

    @property
    def is_mine(self) -> bool:
        grid = self.member.span.topology.grid
        return (grid.r, grid.s) == self.owner

    @property
    def is_at_home(self) -> bool:
        """All rows are on the owner."""
        return self.numel_on(self.owner.s) == self.numel

    @property
    def weight(self) -> tuple[int, str]:
        """Its place in the order: the heaviest first."""
        return -work_of(self.member.span.shape), self.member.name

    @property
    def numel(self) -> int:
        return int(torch.Size(self.member.span.shape).numel())

    def numel_on(self, s: int) -> int:
        """Elements of the rows that rank s of the owner's node has."""
        span = self.member.span
        k = s * span.topology.replicas + self.owner.r
        rows = span.bounds[k + 1] - span.bounds[k]
        return rows * int(torch.Size(span.shape[1:]).numel())

    def span_of(self, shape: Sequence[int]) -> RowSpan:
        """How a tensor of the optimizer's state is spread: all rows are on the owner."""
        topology = self.member.span.topology
        k = self.owner.s * topology.replicas + self.owner.r
        bounds = (0,) * (k + 1) + (shape[0],) * (topology.data_parallel - k)
        return RowSpan(self.member.name, tuple(shape), bounds, topology)


def buffers_of_rounds(owned: Iterable[Owned], topology: Topology) -> Counter[Size]:
    """What the rounds of these parameters borrow at once, by size; see :func:`_largest`."""
    counts: Counter[Size] = Counter()
    for dtype, (whole, rows) in _largest(owned, topology).items():
        counts.update([(whole, dtype), (whole, dtype), (rows, dtype)])
    return counts


def _largest(owned: Iterable[Owned], topology: Topology) -> dict[torch.dtype, tuple[int, int]]:
    """By dtype: elements of the largest parameter that this rank gets whole, and the most rows that it sends at once.

    Whichever take part in a step, so that each step borrows the same.
    """
    away = [each for each in owned if each.owner.r == topology.grid.r and not each.is_at_home]
    found = {}
    for dtype in {each.member.master.dtype for each in away}:
        whole, rows = 0, [0] * topology.zero3_size  # rows: by owner
        for each in away:
            if each.member.master.dtype == dtype:
                whole = max(whole, each.numel if each.is_mine else 0)
                rows[each.owner.s] = max(rows[each.owner.s], each.numel_on(topology.grid.s))
        found[dtype] = whole, sum(rows)
    return found


def step_owned(
    inner: Optimizer, owned: Sequence[Owned], topology: Topology, pool: BufferPool, take_step: Callable[[], Any]
) -> None:
    """Step what has a gradient, the `owned` ones whole. The ranks of a node must call this together.

    Args:
        inner: its groups hold this rank's rows, with their final gradients.
        pool: lends memory for a whole parameter and its gradient.
    """
    _require_gradients_alike([each for each in owned if each.owner.r == topology.grid.r], topology)
    away: list[tuple[Owned, Tensor]] = []  # in this node, with this rank's rows of the gradient
    for each in owned:
        gradient = each.master.grad
        if gradient is None or (each.is_mine and each.is_at_home):
            continue
        each.master.grad = None
        if each.owner.r == topology.grid.r and not each.is_at_home:
            away.append((each, gradient))
    step_in_turns(inner, take_step, _turns(away, _largest(owned, topology), topology, pool))


def _require_gradients_alike(owned: Sequence[Owned], topology: Topology) -> None:
    """Raise RuntimeError where the ranks of the node would send each other the rows of different parameters."""
    lane = topology.node_control
    if lane.size == 1 or not owned:
        return
    there = torch.tensor([each.master.grad is not None for each in owned], dtype=torch.int32)
    all_reduce(lane, Exchange.AGREE, there, dist.ReduceOp.SUM).wait()
    for each, ranks in zip(owned, there.tolist(), strict=True):
        if ranks not in (0, lane.size):
            raise RuntimeError(
                f"{each.member.name!r} is updated whole, and has a gradient on {ranks} of the {lane.size} ranks of its "
                "node: set .grad to None, or to a tensor, on all of them"
            )


def _turns(
    away: Sequence[tuple[Owned, Tensor]],
    largest: Mapping[torch.dtype, tuple[int, int]],
    topology: Topology,
    pool: BufferPool,
) -> Iterator[Turn]:
    """See [Note: Rounds of owners]."""
    for dtype in sorted({gradient.dtype for _, gradient in away}, key=str):
        by_owner: list[list[tuple[Owned, Tensor]]] = [[] for _ in range(topology.zero3_size)]
        for each, gradient in sorted(away, key=lambda one: one[0].weight):
            if gradient.dtype == dtype:
                by_owner[each.owner.s].append((each, gradient))
        rounds = [_Round(chosen, topology) for chosen in zip_longest(*by_owner)]
        most, most_sent = largest[dtype]
        whole, gradient, rows = (pool.take(numel, dtype) for numel in (most, most, most_sent))
        try:
            for played in rounds:
                yield from played.play(whole, gradient, rows)
        finally:
            for buffer in (whole, gradient, rows):
                pool.give(buffer)


class _Round:
    """One parameter for each rank of the node, or none.

    Args:
        chosen: by the owner's s: the parameter, and this rank's rows of its gradient.
    """

    def __init__(self, chosen: Sequence[tuple[Owned, Tensor] | None], topology: Topology) -> None:
        s = topology.grid.s
        own = chosen[s]
        self._chosen = [each for each in chosen if each is not None]
        self._mine = None if own is None else own[0]
        self._to_each = [0 if each is None else each[0].numel_on(s) for each in chosen]
        self._from_each = [0 if own is None else own[0].numel_on(other) for other in range(topology.zero3_size)]
        self._lane = topology.zero3_gather
        self.sent, self.received = sum(self._to_each), sum(self._from_each)

    def play(self, whole: Tensor, gradient: Tensor, rows: Tensor) -> Iterator[Turn]:
        """Have this rank's parameter whole for a while; the tensors are memory for it."""
        whole, gradient, rows = whole[: self.received], gradient[: self.received], rows[: self.sent]
        self._collect(whole, rows, [each.member.master for each, _ in self._chosen])
        self._collect(gradient, rows, [part for _, part in self._chosen])
        if self._mine is not None:
            member, master = self._mine.member, self._mine.master
            master.data, master.grad = whole.view(member.span.shape), gradient.view(member.span.shape)
            try:
                yield self._mine.group, master
            finally:
                master.grad = None
                master.data = member.master
        name = "" if self._mine is None else self._mine.member.name
        splits = {"from_each": self._to_each, "to_each": self._from_each}
        send_pieces(self._lane, Exchange.HAND_BACK, rows, whole, **splits, name=name).wait()
        for part, (each, _) in zip(self._pieces(rows), self._chosen, strict=True):
            each.member.master.copy_(part.view(each.member.master.shape))

    def _collect(self, whole: Tensor, rows: Tensor, parts: Sequence[Tensor]) -> None:
        for place, part in zip(self._pieces(rows), parts, strict=True):
            place.copy_(part.reshape(-1))
        name = "" if self._mine is None else self._mine.member.name
        splits = {"from_each": self._from_each, "to_each": self._to_each}
        send_pieces(self._lane, Exchange.COLLECT, whole, rows, **splits, name=name).wait()

    def _pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """Of this rank's rows: those of each parameter of the round."""
        s = self._lane.rank
        return torch.split(rows, [each.numel_on(s) for each, _ in self._chosen])
