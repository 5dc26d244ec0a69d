"""Assign owners to parameters that an optimizer needs in full, and set shard boundaries accordingly.

The code needs neither torch nor processes. All parts of an owned slot, in whichever ZeRO-3 shards they lie, belong to
one replica. Therefore all ZeRO-1 rows of the slot are in one ZeRO-3 group. The owner, one rank of this group, gathers
the rows inside the group and updates the parameter. If the parameter is split along a model-parallel axis, the parts
are also joined along that axis. All ranks on the axis have equal layouts, with parts of equal size at the same
position.

[Note: Shard boundaries with owners]
The parts of a ZeRO-3 shard are in the order of the replicas. A slot that extends from one ZeRO-3 shard into the next is
at the end of the first shard and at the start of the second shard. Such slots link ZeRO-3 shards into a chain. The
replica indices of owned slots never decrease along a chain. Therefore each replica has one contiguous run of the chain,
which may be empty. The runs define the shard boundaries. Other slots may be split at any row boundary.

Runs are chosen to balance three loads by least squares: the elements of each replica, the elements of each rank, and
the optimizer work of each replica. The choice for one chain is exact if the other chains are fixed. Several rounds over
all chains approximate the joint optimum.
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

from layerzero.extend import FlatLayout, Slot

_EFFORT = 200_000  # number of tried runs after which chains keep the runs of earlier rounds
_ROUNDS = 6  # maximum number of rounds over all chains
_INSIDE = 32  # number of candidate cuts inside the slots of a layout, in addition to those between slots


class ParamOwner(NamedTuple):
    """Coordinates of the rank that updates a parameter."""

    r: int  # coordinate on the replica axis
    s: int  # coordinate on the zero3 axis
    axis: int | None = None  # model-parallel axis along which the parts are joined, or None if they are not joined
    t: int = 0  # coordinate on that axis


class JoinAxis(NamedTuple):
    """Model-parallel axis along which the parts of a parameter are joined."""

    axis: int
    size: int  # number of ranks on the axis
    shape: tuple[int, ...]  # shape of the joined parameter


@dataclass(frozen=True)
class OwnerLayouts:
    """Layouts with new shard boundaries, and the owner of each owned parameter, by parameter name."""

    layouts: tuple[FlatLayout, ...]
    owners: dict[str, ParamOwner]


def update_cost(shape: Sequence[int]) -> int:
    """Return the relative cost of updating a parameter with a matrix optimizer.

    The cost of a matrix is its number of elements times the length of its shorter side. The cost of a stack of matrices
    is the sum of the costs of the matrices. The cost of a vector is its number of elements.
    """
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


def plan_owners(
    layouts: Sequence[FlatLayout],
    owned: Sequence[Collection[str]],
    *,
    replicas: int,
    zero3_size: int,
    join_axes_of: Mapping[str, JoinAxis] = MappingProxyType({}),
) -> OwnerLayouts:
    """Assign owners, and set the shard boundaries of `layouts` so that each owned slot is on one replica.

    Layouts without owned slots have equal shards. The result depends only on the arguments.

    Args:
        layouts: layouts with equal shards.
        owned: names of the owned slots of each layout.
        replicas: number of replicas, R.
        zero3_size: number of ranks in a ZeRO-3 group, S.
        join_axes_of: model-parallel axes along which the parts of parameters are joined, by parameter name.
    """
    work = partial(_slot_cost, join_axes_of)
    chains = [
        chain
        for index, (layout, names) in enumerate(zip(layouts, owned, strict=True))
        if names and replicas > 1
        for chain in _linked_shards(index, layout, names, replicas, zero3_size, work)
    ]
    runs = _balance_runs(chains, replicas, zero3_size)
    cut = []
    for index, (layout, names) in enumerate(zip(layouts, owned, strict=True)):
        bounds = [0] * layout.num_shards if names and replicas > 1 else []
        for chain, ends in zip(chains, runs, strict=True):
            if chain.layout == index:
                _write_bounds(bounds, chain, ends, replicas)
        cut.append(replace(layout, bounds=(*bounds, layout.numel) if bounds else ()))
    return OwnerLayouts(tuple(cut), _assign_owners(cut, owned, replicas, zero3_size, join_axes_of))


def _slot_cost(join_axes_of: Mapping[str, JoinAxis], slot: Slot) -> int:
    """Return the update cost of a slot. For a joined parameter, return the share of each rank on the axis."""
    join_axis = join_axes_of.get(slot.name)
    return update_cost(slot.shape) if join_axis is None else update_cost(join_axis.shape) // join_axis.size


class _LinkedShards(NamedTuple):
    """Chain of ZeRO-3 shards in one layout that owned slots link; see [Note: Shard boundaries with owners]."""

    layout: int  # index of the layout
    shards: range  # range of s, the index of the ZeRO-3 shard
    points: tuple[int, ...]  # flat positions where a cut may fall, including both ends of the chain
    work: tuple[int, ...]  # update cost of the owned slots before each point
    starts: tuple[int, ...]  # start of each ZeRO-3 shard in the chain, and the end of the last one


def _linked_shards(
    index: int,
    layout: FlatLayout,
    names: Collection[str],
    replicas: int,
    zero3_size: int,
    work_of_slot: Callable[[Slot], int],
) -> list[_LinkedShards]:
    """Return the chains of a layout with the passed index.

    Args:
        names: names of the owned slots of the layout.
    """
    owned = [slot for slot in layout.slots if slot.name in names and slot.numel]
    starts = [s * replicas * layout.shard_numel for s in range(zero3_size + 1)]
    inside = [cut for slot in layout.slots if slot.name not in names for cut in _cuts_inside(slot, layout.used)]
    candidates = {*starts, *(slot.offset for slot in layout.slots), *inside}
    legal = sorted(p for p in candidates if not any(slot.offset < p < slot.end for slot in owned))
    chains = []
    for start, stop in pairwise(s for s in starts if s in legal):
        points = tuple(p for p in legal if start <= p <= stop)
        work = tuple(sum(work_of_slot(s) for s in owned if start <= s.offset and s.end <= p) for p in points)
        shards = range(starts.index(start), starts.index(stop))
        chains.append(_LinkedShards(index, shards, points, work, tuple(starts[shards.start : shards.stop + 1])))
    return chains


def _cuts_inside(slot: Slot, used: int) -> list[int]:
    """Return candidate cuts between the rows of a slot, at approximately equal distances."""
    pieces = min(slot.rows, 1 + _INSIDE * slot.numel // max(used, 1))
    return [slot.offset + slot.rows * i // pieces * slot.row_numel for i in range(1, pieces)] if slot.numel else []


class _OwnerLoads:
    """Loads assigned to replicas and ranks so far, relative to an equal distribution over replicas."""

    def __init__(self, chains: Sequence[_LinkedShards], replicas: int, zero3_size: int) -> None:
        self.elements = [[0.0] * zero3_size for _ in range(replicas)]  # indexed by r and s
        self.work = [0.0] * replicas
        numel = sum(chain.points[-1] - chain.points[0] for chain in chains)
        work = sum(chain.work[-1] for chain in chains)
        self._per_element = replicas / max(numel, 1)
        self._per_work = replicas / max(work, 1)
        self._zero3_size = zero3_size

    def add_runs(self, chain: _LinkedShards, ends: Sequence[int], sign: int) -> None:
        """Add the elements and the update cost of each replica's run of `chain` to the loads.

        Args:
            chain: chain that the replicas divide.
            ends: for each replica, the index in ``chain.points`` at which its run ends.
            sign: 1 to add the runs, or -1 to remove them.
        """
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

    def choose_runs(self, chain: _LinkedShards, replicas: int) -> list[int]:
        """Choose the runs of `chain` that increase the squared loads least.

        Return, for each replica, the index of the point at which its run ends.
        """
        count = len(chain.points)
        shares = {(i, j): self._shares(chain, i, j) for i in range(count) for j in range(i + 1, count)}
        totals = [sum(row) for row in self.elements]
        least = [0.0] + [float("inf")] * (count - 1)  # lowest cost of the replicas so far, by the point where they end
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

    # The elements of a replica count twice, because they are sent over the slower link.
    def _growth(self, r: int, total: float, work: int, shares: Sequence[tuple[int, float]]) -> float:
        size, effort = sum(share for _, share in shares), work * self._per_work
        growth = 2 * size * (2 * total + size) + effort * (2 * self.work[r] + effort)
        ranks = self.elements[r]
        return growth + self._zero3_size * sum(share * (2 * ranks[s] + share) for s, share in shares)


def _balance_runs(chains: Sequence[_LinkedShards], replicas: int, zero3_size: int) -> list[list[int]]:
    """Return, for each chain, the indices of the points at which the runs of the replicas end."""
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
                continue  # keep the runs of this chain
            if runs[index]:
                loads.add_runs(chain, runs[index], -1)
            ends = loads.choose_runs(chain, replicas)
            changed = changed or ends != runs[index]
            runs[index] = ends
            loads.add_runs(chain, ends, 1)
        if not changed:
            break
    return runs


def _write_bounds(bounds: list[int], chain: _LinkedShards, ends: Sequence[int], replicas: int) -> None:
    for s, (start, stop) in zip(chain.shards, pairwise(chain.starts), strict=True):
        for r in range(replicas):
            begins = chain.points[0 if r == 0 else ends[r - 1]]
            bounds[s * replicas + r] = min(max(begins, start), stop)


def _assign_owners(
    layouts: Sequence[FlatLayout],
    owned: Sequence[Collection[str]],
    replicas: int,
    zero3_size: int,
    join_axes_of: Mapping[str, JoinAxis],
) -> dict[str, ParamOwner]:
    """Assign owners inside each ZeRO-3 group, starting with the heaviest slots.

    Among the ranks whose load allows another slot, the rank that stores the most rows of the slot becomes the owner.
    Along a model-parallel axis, the least loaded rank becomes the owner of a joined parameter.
    """
    of_replica: list[list[tuple[FlatLayout, Slot]]] = [[] for _ in range(replicas)]
    for layout, names in zip(layouts, owned, strict=True):
        for slot in layout.slots:
            if slot.name in names:
                of_replica[_shards_with_rows(layout, slot)[0] % replicas].append((layout, slot))
    owners = {}
    for r, slots in enumerate(of_replica):
        numel = max(1, sum(slot.numel for _, slot in slots))
        work = max(1, sum(_slot_cost(join_axes_of, slot) for _, slot in slots))
        loads = [_OwnerLoad()] * zero3_size
        shared_loads: defaultdict[tuple[int, int, int], _OwnerLoad] = defaultdict(
            _OwnerLoad
        )  # by s, axis and coordinate on it

        def weight(slot: Slot, numel: int = numel, work: int = work) -> _OwnerLoad:
            return _OwnerLoad(slot.numel / numel, _slot_cost(join_axes_of, slot) / work)

        for layout, slot in sorted(slots, key=lambda each: (-max(weight(each[1])), each[1].name)):
            slot_load = weight(slot)
            rows = [len(layout.rows_in(slot, layout.zero3_range(s, zero3_size))) for s in range(zero3_size)]
            loads_after = [max(loads[s].plus(slot_load)) for s in range(zero3_size)]
            allowed = max(
                min(loads_after), 1 / zero3_size
            )  # up to an equal share, a rank may own slots of which it stores most rows
            s = min(range(zero3_size), key=lambda s: (loads_after[s] > allowed, -rows[s], loads_after[s], s))
            loads[s] = loads[s].plus(slot_load)
            owners[slot.name] = ParamOwner(r, s)
            if (join_axis := join_axes_of.get(slot.name)) is not None:
                axis, size, _ = join_axis
                t = min(range(size), key=lambda t: (max(shared_loads[s, axis, t].plus(slot_load)), t))
                shared_loads[s, axis, t] = shared_loads[s, axis, t].plus(slot_load)
                owners[slot.name] = ParamOwner(r, s, axis, t)
    return owners


class _OwnerLoad(NamedTuple):
    """Load of one owner, as fractions of the total load of its ZeRO-3 group."""

    elements: float = 0.0
    work: float = 0.0

    def plus(self, more: _OwnerLoad) -> _OwnerLoad:
        return _OwnerLoad(self.elements + more.elements, self.work + more.work)


def _shards_with_rows(layout: FlatLayout, slot: Slot) -> list[int]:
    """Return the indices of the ZeRO-1 shards that contain rows of a slot, or [0] if the slot has no rows."""
    holders = [k for k in range(layout.num_shards) if len(layout.rows_in(slot, layout.shard_range(k)))]
    return holders or [0]
