"""Predict the number of scratch buffers of each size that reductions use at the same time.

[Note: Number of scratch buffers]
Handles are reduced one after the other, and reduction_queue.py limits the number of in-flight reductions. At most
`IN_FLIGHT` reductions are in each hop. One more reduction is launched before the host waits for the oldest reduction.
A reduction needs no buffers before its launch, which copies the gradients of the handle to the buffer that is sent.
Therefore the number of buffers of each size follows from the layouts. All buffers of a size are allocated when the
first of them is used, so the memory of a model does not depend on the speed of collectives. If a reentrant checkpoint
produces a gradient in several parts, additional buffers are allocated when they are needed.

On a device, streams wait for reductions instead of the host. At most two units have buffers at the same time: one unit
is reduced while the reduction of the next one is launched. Units that are reduced together with an enclosing unit count
as one unit. See [Note: Scratch memory on a device] in device/buffer_pools.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from layerzero.comm.refreshers import REFRESHES_IN_FLIGHT, refresh_buffer_sizes
from layerzero.comm.transport.base import BufferDemand
from layerzero.config import LayerZeroConfig
from layerzero.device.buffer_pools import Size, bytes_of_buffers
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.reduction_queue import IN_FLIGHT
from layerzero.engine.reduction_spec import BufferUse
from layerzero.engine.unit import Unit
from layerzero.estimates.specs import HandleSpec, UnitSpec, specs_of
from layerzero.layout.shard_grid import Extent

_BUFFERS_STILL_READ = 2  # number of buffers of a size that may still be read at the next launch
_ENCODED_REFRESH, _NEW_WEIGHTS = "encoded refresh", "refreshed weights before they are copied to the host"


class ScratchBuffers(NamedTuple):
    """Number of scratch buffers that are in use at the same time, by size."""

    scratch: Counter[Size]
    outgoing: Counter[Size]  # transport buffers from which hop 1 sends; empty if hop 1 sends from scratch buffers
    nbytes: int  # bytes of `scratch` in use at the same time; on a device, at most the sum over all sizes


def scratch_of(units: Iterable[Unit], config: LayerZeroConfig) -> ScratchBuffers:
    """Return the number of scratch buffers that the units of a model use with their current layouts."""
    return count_scratch(specs_of(units), config)


def count_scratch(units: Sequence[UnitSpec], config: LayerZeroConfig) -> ScratchBuffers:
    """Return the number of scratch buffers that units use; see [Note: Number of scratch buffers]."""
    total = ScratchBuffers(Counter(), Counter(), 0)
    for over in dict.fromkeys(unit.over for unit in units):
        on_mesh = [unit for unit in units if unit.over == over]
        handles, traits = [handle for unit in on_mesh for handle in unit.handles], on_mesh[0].traits
        more = (_count_on_device if traits.on_device else _count_on_cpu)(handles, config, traits)
        total.scratch.update(more.scratch)
        total.outgoing.update(more.outgoing)
        total = total._replace(nbytes=total.nbytes + more.nbytes)
    return total


def buffer_demand(handles: Sequence[HandleSpec], config: LayerZeroConfig, traits: RankTraits) -> BufferDemand:
    """Return the buffers that handles on one mesh request from a transport with the traits ``traits.transport``."""
    gradients = [(handle.layout.numel, handle.precision.master) for handle in handles]
    return BufferDemand(
        full_buffers=tuple(
            (handle.layout.numel, handle.precision.compute) for handle in handles if handle.extension is None
        ),
        send_scratch=_count_on_cpu(handles, config, traits).outgoing,
        accumulators=tuple(
            size
            for size, handle in zip(gradients, handles, strict=True)
            if handle.has_persistent_send_buffer(config) and handle.trainable
        ),
        gradients=tuple(gradients),
    )


def _buffers(handle: HandleSpec, config: LayerZeroConfig, traits: RankTraits) -> Iterator[tuple[Size, Hashable]]:
    """Yield the sizes of all scratch buffers that the reduction and the refresh of a handle use, and their uses."""
    master, compute, grid = handle.precision.master, handle.precision.compute, traits.grid
    if handle.trainable:
        yield from handle.reduction_spec.buffers(handle.layout, traits, master=master, offload=config.offload)
        if traits.weights_in_host and (traits.on_device or not handle.encodes_refresh):
            yield (grid.numel(handle.layout, Extent.ZERO3), compute), _NEW_WEIGHTS
    if handle.encodes_refresh and not traits.on_device:
        own, zero3 = (grid.numel(handle.layout, extent) for extent in (Extent.ZERO1, Extent.ZERO3))
        for size in refresh_buffer_sizes(own, zero3, compute):
            yield size, _ENCODED_REFRESH


def _count_on_cpu(handles: Sequence[HandleSpec], config: LayerZeroConfig, traits: RankTraits) -> ScratchBuffers:
    users: dict[tuple[Size, Hashable], list[HandleSpec]] = {}  # a handle occurs once per buffer
    for handle in handles:
        for buffer in _buffers(handle, config, traits):
            users.setdefault(buffer, []).append(handle)
    first, second = (limit + 1 for limit in IN_FLIGHT)
    scratch, outgoing = Counter[Size](), Counter[Size]()
    for (size, use), members in users.items():
        at_once = {BufferUse.FIRST: first, BufferUse.SECOND: second, _ENCODED_REFRESH: REFRESHES_IN_FLIGHT}.get(use, 1)
        if use is BufferUse.FIRST and traits.transport.shares_memory:  # sent in place
            outgoing[size] += min(len(members) + 1, at_once + _BUFFERS_STILL_READ)
        else:
            buffers_by_handle = Counter(map(id, members)).values()
            scratch[size] += sum(sorted(buffers_by_handle)[-at_once:])
    return ScratchBuffers(scratch, outgoing, bytes_of_buffers(scratch))


def _count_on_device(handles: Sequence[HandleSpec], config: LayerZeroConfig, traits: RankTraits) -> ScratchBuffers:
    units: dict[str, Counter[Size]] = {}  # scratch buffers of each unit's reductions, in the order of registration
    new_weights = Counter[Size]()
    for handle in handles:
        for size, use in _buffers(handle, config, traits):
            if use is _NEW_WEIGHTS:
                new_weights[size] += 1
            else:
                units.setdefault(handle.unit, Counter())[size] += 1
    scratch, nbytes = Counter[Size](), 0
    by_unit = list(units.values())  # the reductions of a unit and of the one before it may be in flight together
    for buffers, preceding in zip(by_unit, [*by_unit[1:], Counter()], strict=False):
        together = buffers + preceding
        scratch |= together
        nbytes = max(nbytes, bytes_of_buffers(together))
    scratch |= Counter({size: min(count, _BUFFERS_STILL_READ) for size, count in new_weights.items()})
    nbytes = max(nbytes, *(bytes_of_buffers({size: 1}) for size in new_weights), 0)
    return ScratchBuffers(scratch, Counter(), nbytes)
