"""Predict the memory of full buffers by simulating training steps on the meta device.

The simulation gathers and frees units in the order in which they were registered, and nested units during the calls to
their parents. It gathers `prefetch` units ahead. As in training, a `FullBufferPool` allocates, caches and frees the
storages of full buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from layerzero.device.buffer_pools import FullBufferPool, max_gathered_bytes
from layerzero.estimates.specs import UnitSpec

_STEPS = 3  # the first forward pass has no recorded order and does not prefetch; the last step repeats the second


class FullBufferEstimate(NamedTuple):
    """Predicted number of bytes that full buffers use on the device."""

    idle: int  # number of bytes that are cached between two steps
    kept: int  # number of bytes that stay gathered between two steps
    peak: int  # maximum of the sum of allocated and cached bytes


def simulate_full_buffers(units: Sequence[UnitSpec], prefetch: int) -> FullBufferEstimate:
    """Return the memory of the full buffers of `units` in simulated steps with one forward and one backward pass.

    Args:
        units: units in the order of registration, which begins with the root.
    """
    pool = FullBufferPool(torch.device("meta"))
    pool.limit = max_gathered_bytes([unit.gathered_footprint for unit in units], prefetch)
    gathered = [_GatheredUnit(unit, pool) for unit in units]
    on_one_mesh = len({unit.over for unit in units}) == 1
    last_stays = on_one_mesh and units[-1].traits.on_device and units[-1].reshard_after_forward is True
    for step in range(_STEPS):
        stays = gathered[-1] if step and last_stays else None
        returned = _forward(gathered, prefetch if step else 0, stays)
        _backward(returned, prefetch)
        for unit in gathered:
            unit.free_at_step()
    return FullBufferEstimate(pool.cached_bytes, sum(unit.nbytes for unit in gathered), pool.most_bytes)


class _GatheredUnit:
    """Storages of one unit's full buffers, in a pool of the simulation."""

    def __init__(self, unit: UnitSpec, pool: FullBufferPool) -> None:
        self.spec = unit
        # For each handle: the full buffer, parameters that are not contiguous, encoded shards, the post-forward shard.
        self._handles = [
            (
                _Buffer(full, pool),
                [_Buffer(nbytes, pool) for nbytes in strided],
                _Buffer(unit.encoded_bytes_of(handle), pool),
                _Buffer(unit.post_forward_bytes_of(handle), pool),
            )
            for handle in unit.handles
            for full, *strided in (handle.gathered_sizes(unit.traits),)
        ]

    def encloses(self, other: _GatheredUnit) -> bool:
        outer = self.spec.name
        return self is not other and (not outer or other.spec.name.startswith(f"{outer}."))

    def gather(self) -> None:
        for full, _, encoded, kept in self._handles:
            decodes = not full.allocated and not kept.allocated
            full.allocate()
            if decodes:
                encoded.allocate()

    def wait(self) -> None:
        for _, strided, encoded, _ in self._handles:
            encoded.free()
            for buffer in strided:
                buffer.allocate()

    def free(self) -> None:
        for full, strided, *_ in self._handles:
            for buffer in (*strided, full):
                buffer.free()

    def free_at_step(self) -> None:
        """Free the buffers that the unit has kept, but not those of frozen parameters, which a step does not change."""
        for (full, strided, *_), handle in zip(self._handles, self.spec.handles, strict=True):
            for buffer in (*strided, full) if handle.trainable else ():
                buffer.free()

    @property
    def nbytes(self) -> int:
        """Number of bytes that are allocated for full buffers."""
        return sum(buffer.nbytes for full, strided, *_ in self._handles for buffer in (full, *strided))

    def free_after_forward(self) -> None:
        for *_, kept in self._handles:
            kept.allocate()
        self.free()

    def free_after_backward(self) -> None:
        if self.spec.reshard_after_backward:
            self.free()
        for *_, kept in self._handles:
            kept.free()


class _Buffer:
    def __init__(self, nbytes: int, pool: FullBufferPool) -> None:
        self._nbytes = nbytes
        self._pool = pool
        self._storage = torch.empty(0, device="meta").untyped_storage()

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    @property
    def allocated(self) -> bool:
        return self.nbytes > 0

    def allocate(self) -> None:
        if self._nbytes and not self.allocated:
            self._pool.allocate(self._storage, self._nbytes)

    def free(self) -> None:
        if self.allocated:
            self._pool.free(self._storage)


def _forward(units: Sequence[_GatheredUnit], prefetch: int, stays: _GatheredUnit | None) -> list[_GatheredUnit]:
    """Simulate a forward pass and return the units in the order in which their calls return."""
    calls: list[_GatheredUnit] = []
    returned: list[_GatheredUnit] = []

    def leave() -> None:
        unit = calls.pop()
        returned.append(unit)
        if not unit.spec.stays_gathered and unit is not stays:
            unit.free_after_forward()

    for index, unit in enumerate(units):
        while calls and not calls[-1].encloses(unit):
            leave()
        unit.gather()
        _prefetch(unit, units[index + 1 :], prefetch)
        unit.wait()
        calls.append(unit)
    while calls:
        leave()
    return returned


def _backward(returned: Sequence[_GatheredUnit], prefetch: int) -> None:
    for index in reversed(range(len(returned))):
        unit, later, earlier = returned[index], returned[index + 1 :], returned[:index][::-1]
        for enclosing in reversed(later):
            if enclosing.encloses(unit):
                enclosing.gather()
                enclosing.wait()
        unit.gather()
        has_ended = later and not later[0].encloses(unit)  # the backward pass of the next unit
        if not has_ended:
            _prefetch(unit, earlier, prefetch)
        unit.wait()
        if has_ended:
            later[0].free_after_backward()
            _prefetch(unit, earlier, prefetch)
    for unit in returned:
        unit.free_after_backward()


def _prefetch(unit: _GatheredUnit, upcoming: Iterable[_GatheredUnit], count: int) -> None:
    """Gather the next `count` units with the same traits, which a call to `unit` may prefetch."""
    on_mesh = (each for each in upcoming if each.spec.traits == unit.spec.traits)
    for each in islice(on_mesh, count):
        each.gather()
