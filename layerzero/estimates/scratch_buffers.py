"""Predict the number of scratch buffers of each size that reductions use at the same time.

[Note: Number of scratch buffers]
Handles are reduced one after the other, and reduction_queue.py limits the number of in-flight reductions. At most
`IN_FLIGHT` reductions are in each hop. One more reduction is launched before the host waits for the oldest reduction.
Units receive gradients one after the other. The units that contain the current unit also receive gradients, and they
complete last. Units that are reduced together with an enclosing unit count as one unit. Therefore the number of buffers
of each size follows from the layouts. All buffers of a size are allocated when the first of them is used, so the memory
of a model does not depend on the speed of collectives. If the backward passes of units interleave, additional buffers
are allocated when they are needed.

On a device, streams wait for reductions instead of the host. A unit needs its buffers from the arrival of its gradients
until its reduction has completed. At most two units have buffers at the same time, in addition to the units that
contain them: one unit is reduced while the next one receives gradients. See [Note: Scratch memory on a device] in
device/buffer_pools.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from layerzero.comm.codecs import EncodedPartsSpec
from layerzero.comm.collectives import Collective, encoded_buffer_sizes
from layerzero.comm.refreshers import REFRESHES_IN_FLIGHT, refresh_buffer_sizes
from layerzero.comm.transport.base import BufferDemand
from layerzero.config import LayerZeroConfig
from layerzero.device.buffer_pools import Size, bytes_of_buffers
from layerzero.engine.reduction_queue import IN_FLIGHT
from layerzero.engine.unit import Unit
from layerzero.estimates.specs import HandleSpec, RankTraits, specs_of
from layerzero.layout.shard_grid import Extent

__all__ = ["ScratchBuffers", "buffer_demand", "plan_scratch", "scratch_of"]

_BUFFERS_STILL_READ = 2  # number of buffers of a size that may still be read when the next gradients arrive


class ScratchBuffers(NamedTuple):
    """Number of scratch buffers that are in use at the same time, by size."""

    scratch: Counter[Size]
    outgoing: Counter[Size]  # transport buffers from which hop 1 sends; empty if hop 1 sends from scratch buffers
    nbytes: int  # bytes of `scratch` in use at the same time; on a device, at most the sum over all sizes

    def plus(self, more: ScratchBuffers) -> ScratchBuffers:
        """Return the sum of these buffers and `more`, the buffers of handles on another mesh."""
        return ScratchBuffers(self.scratch + more.scratch, self.outgoing + more.outgoing, self.nbytes + more.nbytes)


def scratch_of(units: Iterable[Unit], config: LayerZeroConfig) -> ScratchBuffers:
    """Return the number of scratch buffers that the units of a model use with their current layouts."""
    total, planned = ScratchBuffers(Counter(), Counter(), 0), specs_of(units)
    for over in dict.fromkeys(unit.over for unit in planned):
        on_mesh = [unit for unit in planned if unit.over is over]
        total = total.plus(plan_scratch([each for unit in on_mesh for each in unit.handles], config, on_mesh[0].traits))
    return total


def plan_scratch(handles: Sequence[HandleSpec], config: LayerZeroConfig, where: RankTraits) -> ScratchBuffers:
    """Return the number of scratch buffers that handles on one mesh use; see [Note: Number of scratch buffers]."""
    if where.on_device:
        return _plan_on_device(handles, config, where)
    in_place = not where.transport.receives_copies  # peers read the buffers from which hop 1 sends
    first, second = (limit + 1 for limit in IN_FLIGHT)
    trained = [handle for handle in handles if handle.trainable and handle.reduction_spec.stages]
    hop1 = [handle for handle in trained if handle.reduction_spec.stages[0].collective is Collective.HOP1]
    plan = ScratchBuffers(Counter(), Counter(), 0)
    outgoing = plan.outgoing if in_place else plan.scratch
    # Incoming gradients that are sent from the buffer in which they arrive.
    arriving = [handle for handle in trained if not handle.reduction_spec.sends_accumulator]
    incoming = [handle for handle in arriving if handle.incoming_size == handle.sent_size]
    for size, members in _group_by_size(incoming, lambda handle: handle.incoming_size).items():
        in_flight = _max_receiving_at_once(members, handles) + first - 1
        outgoing[size] += (
            min(len(members) + 1, in_flight + _BUFFERS_STILL_READ) if in_place else min(len(members), in_flight)
        )
    # Incoming gradients that are rounded to the wire dtype, in buffers that are released before the copies are sent.
    for size, members in _group_by_size(
        [handle for handle in arriving if handle not in incoming], lambda handle: handle.incoming_size
    ).items():
        plan.scratch[size] += _max_receiving_at_once(members, handles)
    # Copies of gradients that cannot be sent in place, and receive buffers.
    for size, members in _group_by_size(
        [handle for handle in trained if handle not in incoming], lambda handle: handle.sent_size
    ).items():
        copied = [handle for handle in members if not _is_sent_in_place(handle, config, where, is_hop1=handle in hop1)]
        if in_place and members[0] in hop1:
            outgoing[size] += min(len(copied) + 1, first + _BUFFERS_STILL_READ) if copied else 0
        else:
            plan.scratch[size] += min(len(copied), first)
    received = [handle for handle in trained if not (in_place and handle in hop1)]
    plan.scratch.update(_max_buffers_in_use([_receive_sizes(handle, 0, where) for handle in received], first))
    # Hop 2.
    two_stage = [handle for handle in trained if len(handle.reduction_spec.stages) == 2]
    zero3 = {id(handle): where.grid.numel(handle.layout, Extent.ZERO3) for handle in two_stage}
    transient = [
        handle
        for handle in two_stage
        if handle.reduction_spec.accumulator_extent is not Extent.ZERO3 or handle.reduction_spec.separate_dtype
    ]
    for size, members in _group_by_size(transient, lambda handle: (zero3[id(handle)], handle.precision.master)).items():
        unrounded = [
            handle for handle in members if handle.reduction_spec.stages[1].wire_dtype == handle.precision.master
        ]
        plan.scratch[size] += min(len(unrounded), second) + (len(unrounded) < len(members))
    rounded = [
        handle
        for handle in two_stage
        if handle.reduction_spec.stages[1].wire_dtype != handle.precision.master
        or (handle not in transient and config.offload.grads)
    ]
    for size, members in _group_by_size(
        rounded, lambda handle: (zero3[id(handle)], handle.reduction_spec.stages[1].wire_dtype)
    ).items():
        plan.scratch[size] += min(len(members), second)
    plan.scratch.update(_max_buffers_in_use([_receive_sizes(handle, 1, where) for handle in two_stage], second))
    encoded = [
        refresh_buffer_sizes(
            where.grid.numel(handle.layout, Extent.ZERO1),
            where.grid.numel(handle.layout, Extent.ZERO3),
            handle.precision.compute,
        )
        for handle in handles
        if handle.encodes_refresh
    ]
    plan.scratch.update(_max_buffers_in_use(encoded, REFRESHES_IN_FLIGHT))
    if config.offload.optimizer:  # final gradients, which are summed before they are copied
        final = [handle for handle in handles if handle.trainable]
        rank = {id(handle): where.grid.numel(handle.layout, Extent.ZERO1) for handle in final}
        for size, members in _group_by_size(final, lambda handle: (rank[id(handle)], handle.precision.master)).items():
            plan.scratch[size] += 1 if members[0].reduction_spec.stages else _max_receiving_at_once(members, handles)
    if where.weights_in_host:  # refreshed weights, which are gathered before they are copied
        fresh = [handle for handle in handles if handle.trainable and not handle.encodes_refresh]
        for size in _group_by_size(fresh, lambda handle: _new_weights_size(handle, where)):
            plan.scratch[size] += 1
    return ScratchBuffers(+plan.scratch, +plan.outgoing, bytes_of_buffers(plan.scratch))


def _plan_on_device(handles: Sequence[HandleSpec], config: LayerZeroConfig, traits: RankTraits) -> ScratchBuffers:
    units: dict[str, Counter[Size]] = {}  # scratch buffers of each unit's reductions, in the order of registration
    incoming: dict[str, Counter[Size]] = {}  # those of the buffers above in which gradients arrive
    for handle in handles:
        if handle.trainable:
            units.setdefault(handle.unit, Counter()).update(_sizes_on_device(handle, config, traits))
            incoming.setdefault(handle.unit, Counter()).update(_incoming_sizes(handle, config, traits))
    scratch, nbytes = Counter[Size](), 0
    # A backward pass starts with the last unit, and reaches a unit after the units inside it.
    order = list(reversed(units))
    for preceding, unit in zip(order[:1] + order, order, strict=False):
        together = units[unit] + (units[preceding] if preceding != unit else Counter())
        for enclosing in units.keys() - {preceding}:
            if _encloses(enclosing, unit):
                together += incoming[enclosing]
        scratch |= together
        nbytes = max(nbytes, bytes_of_buffers(together))
    if traits.weights_in_host:  # refreshed weights, which are gathered on the device before they are copied to the host
        fresh = Counter(_new_weights_size(handle, traits) for handle in handles if handle.trainable)
        scratch |= Counter({size: min(count, _BUFFERS_STILL_READ) for size, count in fresh.items()})
        nbytes = max(nbytes, *(bytes_of_buffers({size: 1}) for size in fresh), 0)
    return ScratchBuffers(scratch, Counter(), nbytes)


def _sizes_on_device(handle: HandleSpec, config: LayerZeroConfig, traits: RankTraits) -> list[Size]:
    """Return the sizes of the scratch buffers that the reduction of a handle on a device uses."""
    spec, master, sizes = handle.reduction_spec, handle.precision.master, []
    if config.offload.optimizer:  # the final gradient, which is summed on the device before it is copied to the host
        sizes.append((traits.grid.numel(handle.layout, Extent.ZERO1), master))
    for index, stage in enumerate(spec.stages):
        sent_size = traits.grid.numel(handle.layout, stage.source), stage.wire_dtype
        dtype = spec.incoming_dtype if stage.source is spec.incoming_extent else master
        is_scratch = stage.source is not spec.accumulator_extent or spec.separate_dtype is not None
        if is_scratch:
            sizes.append((sent_size[0], dtype))
        if dtype != stage.wire_dtype or (index and not is_scratch and config.offload.grads):
            sizes.append(sent_size)
        sizes += _receive_sizes(handle, index, traits)
    return sizes


def _incoming_sizes(handle: HandleSpec, config: LayerZeroConfig, traits: RankTraits) -> list[Size]:
    """Return the sizes of the scratch buffers in which the gradients of a handle on a device arrive."""
    if not handle.reduction_spec.stages:
        return _sizes_on_device(handle, config, traits)
    return [] if handle.reduction_spec.sends_accumulator else [handle.incoming_size]


def _new_weights_size(handle: HandleSpec, traits: RankTraits) -> Size:
    return traits.grid.numel(handle.layout, Extent.ZERO3), handle.precision.compute


def buffer_demand(handles: Sequence[HandleSpec], config: LayerZeroConfig, where: RankTraits) -> BufferDemand:
    """Return the buffers that handles on one mesh request from a transport with the traits ``where.transport``."""
    gradients = [(handle.layout.numel, handle.precision.master) for handle in handles]
    return BufferDemand(
        full_buffers=tuple(
            (handle.layout.numel, handle.precision.compute) for handle in handles if handle.extension is None
        ),
        send_scratch=plan_scratch(handles, config, where).outgoing,
        accumulators=tuple(
            size
            for size, handle in zip(gradients, handles, strict=True)
            if handle.has_persistent_send_buffer(config) and handle.trainable
        ),
        gradients=tuple(gradients),
    )


def _is_sent_in_place(handle: HandleSpec, config: LayerZeroConfig, traits: RankTraits, *, is_hop1: bool) -> bool:
    """Return whether the first stage sends the accumulator in place, without copying it to the wire dtype."""
    if is_hop1 and traits.transport.rounds_on_read:
        return handle.has_persistent_send_buffer(config)
    return handle.reduction_spec.stages[0].wire_dtype == handle.reduction_spec.incoming_dtype


def _max_receiving_at_once(members: Sequence[HandleSpec], handles: Sequence[HandleSpec]) -> int:
    """Return the number of `members` that receive gradients at the same time.

    These are the handles of one unit and of the units that contain it.
    """
    counts = Counter(handle.unit for handle in members)
    return max(
        sum(count for name, count in counts.items() if name == unit or _encloses(name, unit))
        for unit in {handle.unit for handle in handles}
    )


def _encloses(outer: str, inner: str) -> bool:
    return outer != inner and (not outer or inner.startswith(f"{outer}."))


def _receive_sizes(handle: HandleSpec, stage: int, traits: RankTraits) -> list[Size]:
    """Return the size of a stage's receive buffer or, with a codec, the sizes of all buffers that the stage needs.

    If this rank adds the parts of all ranks, the receive buffer holds all of these parts. Otherwise it holds their sum.
    """
    numel, reduction_stage, grid = handle.layout.numel, handle.reduction_spec.stages[stage], traits.grid
    if reduction_stage.collective is Collective.HOP1:
        return [(numel if traits.transport.sums_locally else numel // grid.zero3_size, reduction_stage.wire_dtype)]
    numel = grid.numel(handle.layout, Extent.ZERO3)
    parts = grid.replica_part_sizes(handle.layout) or (numel // grid.replicas,) * grid.replicas
    if reduction_stage.codec is not None:
        encoded = EncodedPartsSpec.of(reduction_stage.codec, handle.layout, grid, reduction_stage.wire_dtype)
        return encoded_buffer_sizes(encoded, parts, grid.replica_rank)
    own_numel = parts[grid.replica_rank]
    sums_locally = traits.adds_hop2 or grid.replica_part_sizes(handle.layout) is not None
    return [(grid.replicas * own_numel if sums_locally else own_numel, reduction_stage.wire_dtype)]


def _max_buffers_in_use(buffers: Sequence[Sequence[Size]], at_once: int) -> Counter[Size]:
    """Return the largest number of buffers, by size, that any `at_once` reductions use together.

    Args:
        buffers: sizes of the buffers that each reduction uses.
    """
    counts_by_size: dict[Size, list[int]] = {}
    for sizes in buffers:
        for size, count in Counter(sizes).items():
            counts_by_size.setdefault(size, []).append(count)
    return Counter({size: sum(sorted(counts)[-at_once:]) for size, counts in counts_by_size.items()})


def _group_by_size(
    handles: Sequence[HandleSpec], size_of: Callable[[HandleSpec], Size]
) -> dict[Size, list[HandleSpec]]:
    handles_by_size: dict[Size, list[HandleSpec]] = {}
    for handle in handles:
        handles_by_size.setdefault(size_of(handle), []).append(handle)
    return handles_by_size
