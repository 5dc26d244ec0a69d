"""Describe the gradient reduction of a handle statically: its buffers, and the collectives between them.

This module needs neither tensors nor processes. See [Note: Three extents] in layout/shard_grid.py.

[Note: Reduction stages]
Hop 1 runs on the zero3 axis, usually inside a node. Hop 2 runs on the replica axis, between nodes.

    case                     incoming  accumulator  stages
    D = 1                    ZERO1     ZERO1        none
    S = 1, R > 1             FULL      FULL         hop 2
    full,    S > 1, R = 1    FULL      FULL         hop 1
    full,    S > 1, R > 1    FULL      FULL         hop 1, hop 2
    sharded, S > 1, R = 1    FULL      ZERO1        hop 1
    sharded, S > 1, R > 1    FULL      ZERO3        hop 1, hop 2
    local,   S = 1, R > 1    FULL      ZERO1        hop 2
    local,   S > 1, R = 1    FULL      ZERO1        hop 1
    local,   S > 1, R > 1    FULL      ZERO1        hop 1, hop 2

"full", "sharded" and "local" are the settings of gradient accumulation. Rows without a setting apply to "full" and
"sharded". A backward pass inside no_sync reduces incoming gradients into the accumulator. Any other backward pass
reduces them into the final gradient (ZERO1). A step after no_sync reduces the accumulator into the final gradient. With
"local", the accumulator is the final gradient, so every backward pass communicates over all ranks.

[Note: Separate accumulators]
With `accumulation_dtype`, an accumulator that is not the final gradient is separate from the buffers of reductions.
Only backward passes inside no_sync write to it. Each of them adds its gradients in fp32 and rounds the sum to the
accumulator's dtype once. A reduction over all ranks runs in scratch buffers in the dtype of the masters. The
accumulator is added to them before they are sent. Therefore the last micro-batch of a step is not rounded, and a step
with one micro-batch gives the same bits as without the setting.

[Note: Dtype of full gradients]
Autograd produces gradients in the compute dtype. The full gradient keeps the compute dtype if each backward pass
sends its gradients ("sharded" and "local") and the receiving rank adds the parts of the first hop in fp32 (on gloo, in
shared memory, or with `fp32_accumulation`). The sum is bitwise identical to a sum of fp32 messages,
but requires half the memory and half the traffic. If the backend adds the messages, they are sent in the dtype of the
addition. A gradient may arrive in several parts, as with reentrant checkpoints. The parts are then added in the compute
dtype. Autograd does the same for a parameter with several uses.

[Note: Division of gradients]
Contributions are summed. The sum is divided once, by D or by the user's factor, when it is added to the final gradient.
The range of fp16 is 6e-8 to 65504. With fp16, the division is therefore split, so that the values in messages are about
as large as the gradient of one rank. The factor is the product of one factor per hop. If hop 2 sends fp16, the ZeRO-3
gradient shards are divided in fp32 by the factor of hop 1 before hop 2, and sent as means. If a backend adds in the
dtype of the messages, its sums may be large. Before each hop, gradients are then divided by about the square root of
the hop's factor. After the hop, they are divided by the rest of the factor, as in FSDP. All scales except the last are
powers of two and are therefore exact outside of fp16. If there are no collectives, gradients are divided when they
arrive.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from layerzero.comm.codecs import EncodedPartsSpec, GatherCodec
from layerzero.comm.collectives import Collective, encoded_buffer_sizes
from layerzero.config import Offload, Precision
from layerzero.device.buffer_pools import Size
from layerzero.engine.rank_traits import RankTraits
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid


class BufferUse(enum.Enum):
    """Period in which a reduction uses a scratch buffer."""

    LAUNCH = enum.auto()  # during the launch of the first collective, which sends a rounded copy
    FIRST = enum.auto()  # during the first collective
    BETWEEN = enum.auto()  # from the result of the first collective until the launch of the second
    SECOND = enum.auto()  # from the result of the first collective, or the launch of the second, until its end
    RESULT = enum.auto()  # while the final gradient is computed, before it is copied to the host


# For each stage: use of a source that is sent as a rounded copy, and of all other buffers.
_USES = ((BufferUse.LAUNCH, BufferUse.FIRST), (BufferUse.BETWEEN, BufferUse.SECOND))


@dataclass(frozen=True)
class ReductionStage:
    """One reduce-scatter over the ranks of a mesh axis."""

    source: Extent
    target: Extent
    collective: Collective  # HOP1 runs on the zero3 axis, HOP2 on the replica axis
    wire_dtype: torch.dtype
    scale: float  # factor applied to the received sum
    codec: GatherCodec | None = None  # encodes the messages, which then have the dtype of the source


@dataclass(frozen=True)
class ReductionSpec:
    """Extents, dtypes and stages of the gradient reduction of one handle; see [Note: Reduction stages]."""

    incoming_extent: Extent
    accumulator_extent: Extent
    stages: tuple[ReductionStage, ...]
    incoming_dtype: torch.dtype
    incoming_scale: float  # factor applied to incoming gradients; see [Note: Division of gradients]
    # Dtype of an accumulator that is separate from the buffers of reductions, or None if there is none.
    separate_dtype: torch.dtype | None = None
    # Returns this spec with another divisor, which is the argument `divide_factor`.
    replan: Callable[..., ReductionSpec] | None = field(default=None, compare=False, repr=False)

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
        hop2_codec: GatherCodec | None = None,
    ) -> ReductionSpec:
        """Return the reduction spec of a handle.

        Args:
            accumulation: ``"sharded"``, ``"full"`` or ``"local"``.
            divide_factor: divisor of the sum over all ranks.
            adds_hop1: True if each rank receives the parts of all ranks in hop 1 and adds them in fp32. If False, the
                backend adds them in the dtype of the messages.
            adds_hop2: the same as `adds_hop1`, for hop 2.
            hop2_codec: codec of the messages of hop 2. Each rank then decodes the parts and adds them in fp32.
        """
        replan = functools.partial(
            cls.plan,
            grid,
            precision,
            accumulation=accumulation,
            adds_hop1=adds_hop1,
            adds_hop2=adds_hop2,
            hop2_codec=hop2_codec,
        )
        if grid.data_parallel == 1:
            return cls(Extent.ZERO1, Extent.ZERO1, (), precision.master, 1.0 / divide_factor, replan=replan)
        factor1, factor2 = _divide_factors(grid, divide_factor)
        hops = []
        if grid.zero3_size > 1:
            hops.append(_Hop(Collective.HOP1, precision.reduce, adds_hop1, factor1))
        if grid.replicas > 1 and hop2_codec is not None:
            hops.append(_Hop(Collective.HOP2, precision.master, True, factor2, hop2_codec))
        elif grid.replicas > 1:
            hops.append(_Hop(Collective.HOP2, precision.replica_reduce, adds_hop2, factor2))
        sends_each = not accumulates_full_gradients(accumulation, grid.zero3_size)  # in every backward
        if sends_each and hops[0].adds and precision.compute.itemsize < hops[0].wire_dtype.itemsize:
            hops[0] = hops[0]._replace(wire_dtype=precision.compute)  # see [Note: Dtype of full gradients]
        stages = _stages(hops, divide_factor)
        accumulator, incoming_dtype = Extent.FULL, precision.master
        if sends_each:
            accumulator = Extent.ZERO1 if accumulation == "local" else stages[0].target
            incoming_dtype = hops[0].wire_dtype
        separate = None if accumulator is Extent.ZERO1 else precision.accumulator
        return cls(Extent.FULL, accumulator, stages, incoming_dtype, 1.0 / hops[0].divisor, separate, replan)

    def with_divide_factor(self, divide_factor: float) -> ReductionSpec:
        """Return this spec with another divisor. Extents and dtypes do not change."""
        assert self.replan is not None
        return self.replan(divide_factor=divide_factor)

    @functools.cached_property
    def accumulating_stages(self) -> tuple[ReductionStage, ...]:
        """Stages that reduce incoming gradients into the accumulator, in a backward pass inside no_sync."""
        return tuple(stage for stage in self.stages if stage.target >= self.accumulator_extent)

    def stages_of_pass(self, *, across_replicas: bool) -> tuple[ReductionStage, ...]:
        """Return the stages that a backward pass runs, outside no_sync if `across_replicas` is True."""
        return self.stages if across_replicas else self.accumulating_stages

    @property
    def remaining_stages(self) -> tuple[ReductionStage, ...]:
        """Stages that reduce the accumulator into the final gradient."""
        return self.stages[len(self.accumulating_stages) :]

    def buffers(
        self, layout: FlatLayout, traits: RankTraits, *, master: torch.dtype, offload: Offload
    ) -> Iterator[tuple[Size, BufferUse]]:
        """Yield the sizes of all scratch buffers that a reduction over all ranks uses, and when it uses them.

        Args:
            master: dtype of the masters.
        """
        if offload.optimizer:
            yield (traits.grid.numel(layout, Extent.ZERO1), master), BufferUse.RESULT
        for number in range(len(self.stages)):
            yield from self._stage_buffers(number, layout, traits, master, leaves_device=offload.grads)

    def _stage_buffers(
        self, number: int, layout: FlatLayout, traits: RankTraits, master: torch.dtype, *, leaves_device: bool
    ) -> Iterator[tuple[Size, BufferUse]]:
        """Yield the scratch buffers of the stage with index `number`, and when they are in use.

        Args:
            leaves_device: True if accumulators are kept in host memory.
        """
        stage, (until_launch, during) = self.stages[number], _USES[number]
        dtype = master if number else self.incoming_dtype
        numel, is_rounded = traits.grid.numel(layout, stage.source), dtype != stage.wire_dtype
        is_read_in_place = stage.collective is Collective.HOP1 and traits.transport.shares_memory
        if stage.source is self.accumulator_extent and self.separate_dtype is None:
            leaves_slab = leaves_device and (is_read_in_place or number > 0)
            sends_copy = leaves_slab or (is_rounded and not is_read_in_place)
        else:
            sends_copy = is_rounded
            yield (numel, dtype), until_launch if is_rounded else during
        if sends_copy:
            yield (numel, stage.wire_dtype), during
        for size in () if is_read_in_place else _receive_sizes(stage, layout, traits):
            yield size, during

    def fits_final(self, layout: FlatLayout, grid: ShardGrid, master: torch.dtype) -> bool:
        """Return whether the final gradient may be a part of the accumulator, if both stay on the device.

        See [Note: The final gradient inside the ZeRO-3 gradient shard] in gradient_storage.py.
        """
        final, accumulator = (grid.numel(layout, extent) for extent in (Extent.ZERO1, Extent.ZERO3))
        fits = final * master.itemsize <= accumulator * (self.separate_dtype or master).itemsize
        return self.accumulator_extent is Extent.ZERO3 and fits

    @property
    def sends_accumulator(self) -> bool:
        """True if the buffer in which gradients arrive is the accumulator, and the first stage sends it."""
        return self.incoming_extent is self.accumulator_extent and self.separate_dtype is None

    @property
    def accumulator_is_reduced(self) -> bool:
        """True if the accumulator includes contributions of other ranks of the ZeRO-3 group."""
        return self.accumulator_extent is not self.incoming_extent


def accumulates_full_gradients(accumulation: str, zero3_size: int) -> bool:
    """Return whether full gradients, which ``main_grad`` shows, are accumulated over micro-batches."""
    return accumulation == "full" or (accumulation == "sharded" and zero3_size == 1)


class _Hop(NamedTuple):
    """Reduction along one axis of the mesh."""

    collective: Collective
    wire_dtype: torch.dtype
    adds: bool  # False if the backend adds messages in their dtype; see ReductionSpec.plan
    factor: float  # factor by which the hop is expected to increase the sum
    codec: GatherCodec | None = None

    @property
    def divisor(self) -> float:
        """Part of the factor by which gradients are divided before the hop; see [Note: Division of gradients]."""
        if self.adds or self.wire_dtype is not torch.float16:
            return 1.0
        return _power_of_two(math.sqrt(max(1.0, self.factor)))


def _stages(hops: Sequence[_Hop], divide_factor: float) -> tuple[ReductionStage, ...]:
    """Return the stages of one or two hops, which together divide the sum by `divide_factor`."""
    first, last = hops[0], hops[-1]
    scale = 1.0
    if first is not last and last.wire_dtype is torch.float16:
        scale = 1.0 / _power_of_two(first.factor * last.divisor / first.divisor)
    last_source = Extent.FULL if first is last else Extent.ZERO3
    last_scale = first.divisor / (divide_factor * scale)
    stage = ReductionStage(last_source, Extent.ZERO1, last.collective, last.wire_dtype, last_scale, last.codec)
    if first is last:
        return (stage,)
    return ReductionStage(Extent.FULL, Extent.ZERO3, first.collective, first.wire_dtype, scale), stage


def _receive_sizes(stage: ReductionStage, layout: FlatLayout, traits: RankTraits) -> list[Size]:
    """Return the size of a stage's receive buffer or, with a codec, the sizes of all buffers that the stage needs.

    If this rank adds the parts of all ranks, the receive buffer holds all of these parts. Otherwise it holds their sum.
    """
    grid = traits.grid
    if stage.collective is Collective.HOP1:
        received = Extent.FULL if traits.transport.sums_locally else Extent.ZERO3
        return [(grid.numel(layout, received), stage.wire_dtype)]
    if stage.codec is not None:
        return encoded_buffer_sizes(EncodedPartsSpec.of(stage.codec, layout, grid, stage.wire_dtype))
    own = grid.numel(layout, Extent.ZERO1)
    sums_locally = traits.adds_hop2 or grid.replica_part_sizes(layout) is not None
    return [(grid.replicas * own if sums_locally else own, stage.wire_dtype)]


def _divide_factors(grid: ShardGrid, divide_factor: float) -> tuple[float, float]:
    """Return the divisors of hop 1 and hop 2. Each is the factor by which the hop is expected to increase the sum."""
    if grid.replicas == 1:
        return divide_factor, 1.0
    factor1 = min(float(grid.zero3_size), max(1.0, divide_factor))
    return factor1, divide_factor / factor1


def _power_of_two(least: float) -> float:
    """Return the smallest power of two (at least 1) that is not less than `least`."""
    return 2.0 ** math.ceil(math.log2(max(1.0, least)))
