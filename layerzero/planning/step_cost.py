"""Traffic and duration of a training step, in closed form.

[Note: Overlap]
A step is a series of forward and backward passes. Inside a pass, computation, the links inside nodes and the link
between nodes overlap fully, so a pass takes as long as the longest of the three. Nothing overlaps across passes.
Latencies, launches, the optimizer's update, codecs, and copies to and from the host take no time.

[Note: Traffic between nodes]
Ranks are numbered consecutively within a node. The data of a collective over entire nodes enters and leaves each node
once, as in a ring, regardless of the number of ranks per node. A collective over replicas runs in one replica group per
ZeRO-3 rank. All replica groups that have ranks on a node share the node's link.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from layerzero.planning.cluster import Cluster

MARGIN = 0.03  # steps whose durations differ by at most this fraction count as equally long
ASSUMPTIONS = (
    "Memory and traffic are computed; times are estimates. Within each forward and backward pass, computation, the "
    "links inside nodes and the link between nodes are assumed to overlap fully, and nothing to overlap across passes. "
    "Latencies, the optimizer's update, codecs, and copies to and from the host are not counted."
)


@dataclass(frozen=True)
class Pass:
    """Forward or backward passes of a step that all cost the same. The numbers are per pass and rank.

    Attributes:
        count: number of these passes in a step.
        compute: duration of the computation, in seconds.
        zero3: number of bytes sent inside the ZeRO-3 group.
        replica: number of bytes sent to other replicas.
    """

    count: int
    compute: float
    zero3: float = 0.0
    replica: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """Cost of a step on a cluster, for ZeRO-3 groups of `zero3_size` ranks. See [Note: Overlap]."""

    passes: tuple[Pass, ...]
    zero3_size: int
    cluster: Cluster

    @property
    def zero3(self) -> float:
        """Number of bytes that a rank sends per step inside its ZeRO-3 group."""
        return sum(each.count * each.zero3 for each in self.passes)

    @property
    def replica(self) -> float:
        """Number of bytes that a rank sends per step to other replicas."""
        return sum(each.count * each.replica for each in self.passes)

    @property
    def between(self) -> float:
        """Number of bytes that a rank sends per step to other nodes, on average over the ranks of a node."""
        return sum(each.count * self.node_bytes(each) for each in self.passes) / self.cluster.accelerators

    def seconds(self, link: float | None = None) -> float:
        """Return the duration of a step if a node sends `link` Gbit/s to other nodes; by default, as in the cluster."""
        speed = 1e9 / 8 * (link or self.cluster.node_link)
        return sum(each.count * max(self.local_seconds(each), self.node_bytes(each) / speed) for each in self.passes)

    @property
    def hidden_from(self) -> float:
        """Speed of the link between nodes, in Gbit/s per node, from which on it does not prolong a step."""
        return max(8e-9 * self.node_bytes(each) / self.local_seconds(each) for each in self.passes)

    def node_bytes(self, each: Pass) -> float:
        """Return the number of bytes that a node sends to other nodes in a pass.

        See [Note: Traffic between nodes].
        """
        node, size = self.cluster.accelerators, self.zero3_size
        return each.zero3 * (size > node) + each.replica * min(size, node) * (self.cluster.nodes > 1)

    def local_seconds(self, each: Pass) -> float:
        """Return the duration of a pass if the link between nodes takes no time."""
        one_rank_per_node = self.cluster.nodes > 1 and self.zero3_size >= self.cluster.accelerators
        inside = each.zero3 + each.replica * (not one_rank_per_node)
        return max(1e-12, each.compute, 1e-9 * inside / self.cluster.inside)


def paying_links(ours: StepCost, theirs: StepCost) -> tuple[float, float] | None:
    """Return the slowest and the fastest link at which a step of `ours` is shorter by more than `MARGIN`.

    The speeds are in Gbit/s per node. The first is 0, or the second infinite, if there is no bound. If there are
    several ranges, the result is the one with the fastest links. It is None if there is none.
    """
    # Durations are piecewise linear in the time that a bit takes. They bend where the link starts to prolong a pass.
    bends = sorted(
        cost.local_seconds(each) / (8e-9 * sent)
        for cost in (ours, theirs)
        for each in cost.passes
        if (sent := cost.node_bytes(each))
    ) or [1.0]
    times = [bends[0] / 2, *bends, 1e6 * bends[-1]]
    gains = [(1 - MARGIN) * theirs.seconds(1 / time) - ours.seconds(1 / time) for time in times]
    fastest = inf if gains[0] > 0 else None
    for (left, right), (before, after) in zip(pairwise(times), pairwise(gains), strict=True):
        if (before > 0) == (after > 0):
            continue
        crossing = 1 / (left + (right - left) * before / (before - after))
        if fastest is not None:
            return crossing, fastest
        fastest = crossing
    return None if fastest is None else (0.0, fastest)
