"""The way of a handle's gradients down the ladder: where they land, where they wait, and the exchanges in between.

Pure: no tensors, no processes. See [Note: The ladder] in layout/shard_grid.py.

[Note: Six routes]
    case                     lands   waits   legs
    D = 1                    RANK    RANK    none
    S = 1, R > 1             WHOLE   WHOLE   hop 2
    full,    S > 1, R = 1    WHOLE   WHOLE   hop 1
    full,    S > 1, R > 1    WHOLE   WHOLE   hop 1, hop 2
    sharded, S > 1, R = 1    WHOLE   RANK    hop 1
    sharded, S > 1, R > 1    WHOLE   NODE    hop 1, hop 2

A backward inside no_sync carries what has landed to where it waits; one that reduces, to the final gradient (RANK); a
step after no_sync carries what waits to the final gradient.

[Note: What lands as it is]
A gradient comes from autograd in the compute dtype. Where hop 1 is added up here, in fp32 (on gloo, or by reading the
memory of the node), a landing sum that is sent at once ("sharded") keeps it so: the sum has the bits that fp32 on the
wire would give it, and takes half the memory and half the bytes. A backend that adds up what it carries gets what it is
to add in. (A gradient that comes in several portions, as out of reentrant checkpoints, is put together in the compute
dtype then, as autograd itself does where a parameter is used several times.)

[Note: Where the mean is taken]
Contributions are summed and divided once, by D or by the user's factor, when they enter the final gradient. fp16 has a
range of 6e-8 to 65504, so for fp16 the division is split and messages stay about as large as one rank's gradient. The
factor is the product of one factor per hop. If hop 2 sends fp16, the factor of hop 1 is divided out before it: node
sums are scaled in fp32, and sent as means. A backend that adds in the dtype of the messages produces large sums. There
about the square root of a hop's factor is divided out before that hop, and the rest after it, as in FSDP. All scales
but the last are powers of two, and so exact outside fp16. Without collectives, gradients are divided when they arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from layerzero.comm.collectives import Collective
from layerzero.config import Precision
from layerzero.layout.shard_grid import Extent, ShardGrid

__all__ = ["ReductionSpec", "ReductionStage"]


@dataclass(frozen=True)
class ReductionStage:
    """One exchange: the sum over the ranks of an axis, of which this rank gets its part."""

    source: Extent
    target: Extent
    collective: Collective  # HOP1 runs on the zero3 axis, HOP2 on the replica axis
    wire_dtype: torch.dtype
    scale: float  # by which the sum is multiplied when it arrives


@dataclass(frozen=True)
class ReductionSpec:
    """How gradients of one handle become the final gradient; see [Note: Six routes]."""

    incoming_extent: Extent
    accumulator_extent: Extent
    stages: tuple[ReductionStage, ...]
    incoming_dtype: torch.dtype
    incoming_scale: float  # by which a contribution is multiplied when it lands; see [Note: Where the mean is taken]

    @classmethod
    def plan(
        cls,
        grid: ShardGrid,
        precision: Precision,
        *,
        accumulation: str,
        divide_factor: float,
        adds_hop1: bool,
        adds_hop2: bool,
    ) -> ReductionSpec:
        """The route of a handle.

        Args:
            accumulation: ``"sharded"`` or ``"full"``.
            divide_factor: what the sum over all ranks is divided by.
            adds_hop1: hop 1 receives the parts of all ranks and adds them in fp32; otherwise the backend adds, in the
                dtype of the messages.
            adds_hop2: the same for hop 2.
        """
        if grid.data_parallel == 1:
            return cls(Extent.ZERO1, Extent.ZERO1, (), precision.master, 1.0 / divide_factor)
        sharded, landing = accumulation == "sharded" and grid.zero3_size > 1, precision.reduce
        if sharded and adds_hop1 and precision.compute.itemsize < landing.itemsize:
            landing = precision.compute  # see [Note: What lands as it is]
        factor1, factor2 = _factors(grid, divide_factor)
        first, second = (
            _before(factor1, landing, adds=adds_hop1),
            _before(factor2, precision.replica_reduce, adds=adds_hop2),
        )
        hop1, hop2 = (Collective.HOP1, landing), (Collective.HOP2, precision.replica_reduce)
        if grid.zero3_size == 1:
            first = second
            legs: tuple[ReductionStage, ...] = (
                ReductionStage(Extent.FULL, Extent.ZERO1, *hop2, first / divide_factor),
            )
        elif grid.replicas == 1:
            legs = (ReductionStage(Extent.FULL, Extent.ZERO1, *hop1, first / divide_factor),)
        else:
            between = 1.0
            if precision.replica_reduce is torch.float16:
                between = 1.0 / _power_of_two(factor1 * second / first)
            last = first / (divide_factor * between)
            legs = (
                ReductionStage(Extent.FULL, Extent.ZERO3, *hop1, between),
                ReductionStage(Extent.ZERO3, Extent.ZERO1, *hop2, last),
            )
        if sharded:
            return cls(Extent.FULL, legs[0].target, legs, landing, 1.0 / first)
        return cls(Extent.FULL, Extent.FULL, legs, precision.master, 1.0 / first)

    def between(self, start: Extent, stop: Extent) -> tuple[ReductionStage, ...]:
        """The legs that lead from one extent down to another."""
        return tuple(leg for leg in self.stages if leg.source <= start and leg.target >= stop)

    @property
    def accumulator_is_reduced(self) -> bool:
        """What waits holds contributions of other ranks of the node already."""
        return self.accumulator_extent is not self.incoming_extent


def _factors(grid: ShardGrid, divide_factor: float) -> tuple[float, float]:
    """Return the divisors of hop 1 and hop 2, by which their sums are expected to grow."""
    if grid.replicas == 1:
        return divide_factor, 1.0
    factor1 = min(float(grid.zero3_size), max(1.0, divide_factor))
    return factor1, divide_factor / factor1


def _before(factor: float, wire: torch.dtype, *, adds: bool) -> float:
    """Return the part of a hop's factor that is divided out before it; see [Note: Where the mean is taken]."""
    return 1.0 if adds or wire is not torch.float16 else _power_of_two(math.sqrt(max(1.0, factor)))


def _power_of_two(least: float) -> float:
    """Return the smallest power of two, 1 included, that is not less than `least`."""
    return 2.0 ** math.ceil(math.log2(max(1.0, least)))
