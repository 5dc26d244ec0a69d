"""Which replica and rank owns each parameter that an optimizer needs whole, and the cuts that follow. Integers only.

A slot that is owned lies, in every ZeRO-3 shard that it touches, in the part of one replica. So the owner's node holds
all of its ZeRO-1 rows, and one rank of that node, which updates it, gets them without leaving the node. What a further
axis has cut is put together along that axis, too: each of its places has an equal part, at the same place of an equal
layout.

[Note: Owned cuts]
The parts of a ZeRO-3 shard stay in the order of the replicas. A slot that reaches from one ZeRO-3 shard into the next
is at the end of the first and at the start of the second. So the replicas of owned slots never decrease along a chain
of ZeRO-3 shards that such slots link: each replica has one run of the chain, perhaps an empty one, and the runs are
the whole plan. Other slots may be cut at any of their rows.

Runs are chosen so that what the replicas hold and what their ranks hold and what their optimizers compute is as equal
as it can be, by least squares: exactly for one chain where the others stay as they are, and over all chains by going
through them a few times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from layerzero.layout.flat_layout import FlatLayout, Slot

__all__ = ["JoinAxis", "OwnerLayouts", "ParamOwner", "plan_owners", "update_cost"]

_EFFORT = 200_000  # runs looked at in all, beyond the first time through
_ROUNDS = 6  # through all chains, at most
_INSIDE = 32  # places where a cut may fall in a layout, beside those between slots


class ParamOwner(NamedTuple):
    """The rank that updates a parameter."""

    r: int
    s: int
    axis: int | None = None  # the further one along which parts are put together, if there is one
    t: int = 0  # the place on it


class JoinAxis(NamedTuple):
    """A parameter is put together along a further axis."""

    axis: int
    size: int  # places on it
    shape: tuple[int, ...]  # of what is put together


@dataclass(frozen=True)
class OwnerLayouts:
    """The layouts with their new cuts, and the owner of each owned slot by name."""

    layouts: tuple[FlatLayout, ...]
    owners: dict[str, ParamOwner]


def update_cost(shape: Sequence[int]) -> int:
    """How a matrix optimizer's arithmetic grows with a parameter: by its shorter side times its elements.

    A stack of matrices counts as its matrices, a vector as its elements.
    """
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


def plan_owners(
    layouts: Sequence[FlatLayout],
    owned: Sequence[Collection[str]],
    *,
    replicas: int,
    zero3_size: int,
    across: Mapping[str, JoinAxis] = MappingProxyType({}),
) -> OwnerLayouts:
    """Cut `layouts` so that each slot that is named in `owned`, layout by layout, lies on one replica.

    Layouts of which nothing is owned are cut evenly. The result depends on the arguments alone.

    Args:
        across: by name, what is put together along a further axis.
    """
    work = partial(_work, across)
    chains = [
        chain
        for index, (layout, names) in enumerate(zip(layouts, owned, strict=True))
        if names and replicas > 1
        for chain in _chains(index, layout, names, replicas, zero3_size, work)
    ]
    runs = _balance(chains, replicas, zero3_size)
    cut = []
    for index, (layout, names) in enumerate(zip(layouts, owned, strict=True)):
        bounds = [0] * layout.num_shards if names and replicas > 1 else []
        for chain, ends in zip(chains, runs, strict=True):
            if chain.layout == index:
                _write_bounds(bounds, chain, ends, replicas)
        cut.append(replace(layout, bounds=(*bounds, layout.numel) if bounds else ()))
    return OwnerLayouts(tuple(cut), _owners(cut, owned, replicas, zero3_size, across))


def _work(across: Mapping[str, JoinAxis], slot: Slot) -> int:
    """Of the slot's owner; of what is put together, the share of each place."""
    put_together = across.get(slot.name)
    return update_cost(slot.shape) if put_together is None else update_cost(put_together.shape) // put_together.size


class _LinkedShards(NamedTuple):
    """ZeRO-3 shards of one layout that owned slots link; see [Note: Owned cuts]."""

    layout: int  # its index
    shards: range  # by s
    points: tuple[int, ...]  # flat places where a cut may fall, the first and the last included
    work: tuple[int, ...]  # of the owned slots before each point
    starts: tuple[int, ...]  # of the ZeRO-3 shards, and the end of the last


def _chains(
    index: int,
    layout: FlatLayout,
    names: Collection[str],
    replicas: int,
    zero3_size: int,
    work_of_slot: Callable[[Slot], int],
) -> list[_LinkedShards]:
    owned = [slot for slot in layout.slots if slot.name in names and slot.numel]
    starts = [s * replicas * layout.shard_numel for s in range(zero3_size + 1)]
    linked = {start for start in starts for slot in owned if slot.offset < start < slot.end}
    ends = [start for start in starts if start not in linked]
    places = {
        *starts,
        *(slot.offset for slot in layout.slots),
        *(place for slot in layout.slots if slot.name not in names for place in _inside(slot, layout.used)),
    }
    legal = sorted(p for p in places if not any(slot.offset < p < slot.end for slot in owned))
    chains = []
    for start, stop in pairwise(ends):
        points = tuple(p for p in legal if start <= p <= stop)
        work = tuple(sum(work_of_slot(s) for s in owned if start <= s.offset and s.end <= p) for p in points)
        shards = range(starts.index(start), starts.index(stop))
        chains.append(_LinkedShards(index, shards, points, work, tuple(starts[shards.start : shards.stop + 1])))
    return chains


def _inside(slot: Slot, used: int) -> list[int]:
    """Places between rows of a slot, at about equal distances."""
    pieces = min(slot.rows, 1 + _INSIDE * slot.numel // max(used, 1))
    return [slot.offset + slot.rows * i // pieces * slot.row_numel for i in range(1, pieces)] if slot.numel else []


class _OwnerLoads:
    """What has been given to each replica and rank so far, as shares of what each would have if all were equal."""

    def __init__(self, chains: Sequence[_LinkedShards], replicas: int, zero3_size: int) -> None:
        self.elements = [[0.0] * zero3_size for _ in range(replicas)]  # by r and s
        self.work = [0.0] * replicas
        numel = sum(chain.points[-1] - chain.points[0] for chain in chains)
        work = sum(chain.work[-1] for chain in chains)
        self._per_element = replicas / max(numel, 1)
        self._per_work = replicas / max(work, 1)
        self._zero3_size = zero3_size

    def give(self, chain: _LinkedShards, ends: Sequence[int], sign: int) -> None:
        """Add the runs that end at these points to the loads, or take them back."""
        for r, (i, j) in enumerate(pairwise((0, *ends))):
            self.work[r] += sign * (chain.work[j] - chain.work[i]) * self._per_work
            for s, share in self._shares(chain, i, j):
                self.elements[r][s] += sign * share

    def _shares(self, chain: _LinkedShards, i: int, j: int) -> list[tuple[int, float]]:
        start, stop = chain.points[i], chain.points[j]
        pieces = (
            (s, min(stop, b) - max(start, a)) for s, (a, b) in zip(chain.shards, pairwise(chain.starts), strict=True)
        )
        return [(s, piece * self._per_element) for s, piece in pieces if piece > 0]

    def best(self, chain: _LinkedShards, replicas: int) -> list[int]:
        """Where the runs of the replicas end, so that the squares of all loads grow least."""
        count = len(chain.points)
        shares = {(i, j): self._shares(chain, i, j) for i in range(count) for j in range(i + 1, count)}
        totals = [sum(row) for row in self.elements]
        least = [0.0] + [float("inf")] * (count - 1)  # by point: of the replicas so far, up to there
        chosen: list[list[int]] = []
        for r in range(replicas):
            before, from_point = least, list(range(count))  # an empty run costs nothing
            least = list(before)
            for j in range(1, count):
                for i in range(j):
                    if before[i] < least[j]:
                        cost = before[i] + self._growth(r, totals[r], chain.work[j] - chain.work[i], shares[i, j])
                        if cost < least[j]:
                            least[j], from_point[j] = cost, i
            chosen.append(from_point)
        ends, at = [], count - 1
        for from_point in reversed(chosen):
            ends.append(at)
            at = from_point[at]
        return ends[::-1]

    # What a replica holds counts twice: the slow link carries it.
    def _growth(self, r: int, total: float, work: int, shares: Sequence[tuple[int, float]]) -> float:
        size, effort = sum(share for _, share in shares), work * self._per_work
        growth = 2 * size * (2 * total + size) + effort * (2 * self.work[r] + effort)
        ranks = self.elements[r]
        return growth + self._zero3_size * sum(share * (2 * ranks[s] + share) for s, share in shares)


def _balance(chains: Sequence[_LinkedShards], replicas: int, zero3_size: int) -> list[list[int]]:
    """By chain: the points at which the runs of the replicas end."""
    loads = _OwnerLoads(chains, replicas, zero3_size)
    runs: list[list[int]] = [[] for _ in chains]
    order = sorted(range(len(chains)), key=lambda i: chains[i].points[0] - chains[i].points[-1])
    looked_at = 0
    for _ in range(_ROUNDS):
        changed = False
        for index in order:
            chain = chains[index]
            looked_at += replicas * len(chain.points) ** 2 // 2
            if runs[index] and looked_at > _EFFORT:
                continue  # as it is
            if runs[index]:
                loads.give(chain, runs[index], -1)
            ends = loads.best(chain, replicas)
            changed = changed or ends != runs[index]
            runs[index] = ends
            loads.give(chain, ends, 1)
        if not changed:
            break
    return runs


def _write_bounds(bounds: list[int], chain: _LinkedShards, ends: Sequence[int], replicas: int) -> None:
    for s, (start, stop) in zip(chain.shards, pairwise(chain.starts), strict=True):
        for r in range(replicas):
            begins = chain.points[0 if r == 0 else ends[r - 1]]
            bounds[s * replicas + r] = min(max(begins, start), stop)


def _owners(
    layouts: Sequence[FlatLayout],
    owned: Sequence[Collection[str]],
    replicas: int,
    zero3_size: int,
    across: Mapping[str, JoinAxis],
) -> dict[str, ParamOwner]:
    """Inside each node, the heaviest first: to the rank that has most of its rows, or has least of all so far.

    Of the ranks beside it on a further axis, to the one that has least so far.
    """
    of_node: list[list[tuple[FlatLayout, Slot]]] = [[] for _ in range(replicas)]
    for layout, names in zip(layouts, owned, strict=True):
        for slot in layout.slots:
            if slot.name in names:
                of_node[_holders(layout, slot)[0] % replicas].append((layout, slot))
    owners = {}
    for r, slots in enumerate(of_node):
        numel = max(1, sum(slot.numel for _, slot in slots))
        work = max(1, sum(_work(across, slot) for _, slot in slots))
        loads = [_OwnerLoad()] * zero3_size
        beside: defaultdict[tuple[int, int, int], _OwnerLoad] = defaultdict(_OwnerLoad)  # by s, axis and place on it

        def weight(slot: Slot, numel: int = numel, work: int = work) -> _OwnerLoad:
            return _OwnerLoad(slot.numel / numel, _work(across, slot) / work)

        for layout, slot in sorted(slots, key=lambda each: (-max(weight(each[1])), each[1].name)):
            own = weight(slot)
            rows = [len(layout.rows_in(slot, layout.zero3_range(s, zero3_size))) for s in range(zero3_size)]
            after = [max(loads[s].plus(own)) for s in range(zero3_size)]
            allowed = max(min(after), 1 / zero3_size)  # up to its share, a rank may have what is mostly there already
            s = min(range(zero3_size), key=lambda s: (after[s] > allowed, -rows[s], after[s], s))
            loads[s] = loads[s].plus(own)
            owners[slot.name] = ParamOwner(r, s)
            if (put_together := across.get(slot.name)) is not None:
                axis, size, _ = put_together
                t = min(range(size), key=lambda t: (max(beside[s, axis, t].plus(own)), t))
                beside[s, axis, t] = beside[s, axis, t].plus(own)
                owners[slot.name] = ParamOwner(r, s, axis, t)
    return owners


class _OwnerLoad(NamedTuple):
    """Of one owner, as shares of what its node has."""

    elements: float = 0.0
    work: float = 0.0

    def plus(self, more: _OwnerLoad) -> _OwnerLoad:
        return _OwnerLoad(self.elements + more.elements, self.work + more.work)


def _holders(layout: FlatLayout, slot: Slot) -> list[int]:
    """The ZeRO-1 shards that have rows of a slot; of one without rows, the first."""
    holders = [k for k in range(layout.num_shards) if len(layout.rows_in(slot, layout.shard_range(k)))]
    return holders or [0]
