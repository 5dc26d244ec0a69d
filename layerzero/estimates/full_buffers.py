"""Predict the memory of full buffers by simulating training steps on the meta device.

The simulation gathers and frees units in the order in which they were registered, and nested units during the calls to
their parents. It gathers `prefetch` units ahead. As in training, a `FullBufferPool` allocates, caches and frees the
storages of full buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import UntypedStorage

from layerzero.device.buffer_pools import FullBufferPool, max_gathered_bytes
from layerzero.estimates.specs import UnitSpec

__all__ = ["FullBufferEstimate", "simulate_full_buffers"]

_STEPS = 3  # the first forward pass has no recorded order and does not prefetch; the last step repeats the second


class FullBufferEstimate(NamedTuple):
    """Predicted number of bytes that full buffers use on the device."""

    idle: int  # number of bytes that are cached between two steps
    peak: int  # maximum of the sum of allocated and cached bytes


def simulate_full_buffers(units: Sequence[UnitSpec], prefetch: int) -> FullBufferEstimate:
    """Return the memory of the full buffers of `units` in simulated steps with one forward and one backward pass.

    The root must be the first of `units`.
    """
    stage = _StepSimulation(units, prefetch)
    for step in range(_STEPS):
        stage.prefetch = prefetch if step else 0
        stage.order_is_known = step > 0
        stage.forward()
        stage.prefetch = prefetch
        stage.backward()
    return FullBufferEstimate(stage.pool.cached_bytes, stage.pool.most_bytes)


class _StepSimulation:
    def __init__(self, units: Sequence[UnitSpec], prefetch: int) -> None:
        self.pool = FullBufferPool(torch.device("meta"))
        self.pool.limit = max_gathered_bytes([unit.gathered_footprint for unit in units], prefetch)
        self.prefetch = 0
        self.order_is_known = False
        self._inner = _nested_units(units)
        self._returned = {unit: self._in_return_order(unit) for unit in units}  # nested units first, then the unit
        self._order = [unit for unit in units if unit.name == ""] + [unit for unit in units if unit.name]
        on_one_mesh = len({unit.over for unit in units}) == 1
        self._last = self._order[-1] if on_one_mesh and units[0].traits.on_device else None  # called last
        self._place = {unit: index for index, unit in enumerate(self._order)}
        self._storages = {
            unit: [_storages(handle.gathered_sizes(unit.traits)) for handle in unit.handles] for unit in units
        }
        self._coded = {unit: _storages([unit.encoded_bytes_of(handle) for handle in unit.handles]) for unit in units}
        self._kept = {
            unit: _storages([unit.post_forward_bytes_of(handle) for handle in unit.handles]) for unit in units
        }

    def forward(self) -> None:
        for unit in self._outermost_units():
            self._call_unit(unit)

    def backward(self) -> None:
        returned = [unit for outermost in self._outermost_units() for unit in self._returned[outermost]]
        for index in reversed(range(len(returned))):
            unit = returned[index]
            for enclosing in reversed(returned[index + 1 :]):
                if unit in self._returned[enclosing]:
                    self._gather(enclosing)
                    self._wait(enclosing)
            self._gather(unit)
            following = returned[index + 1] if index + 1 < len(returned) else None
            if following is None or unit in self._returned[following]:
                self._prefetch_before(returned, index)
            self._wait(unit)
            if following is not None and unit not in self._returned[following]:
                self._release(following)
                self._prefetch_before(returned, index)
        for unit in returned:
            self._release(unit)

    def _prefetch_before(self, returned: Sequence[UnitSpec], index: int) -> None:
        earlier = _on_mesh_of(returned[index], reversed(returned[:index]))
        for unit in islice(earlier, self.prefetch):
            self._gather(unit)

    def _call_unit(self, unit: UnitSpec) -> None:
        self._gather(unit)
        next_index = self._place[unit] + 1
        for upcoming in islice(_on_mesh_of(unit, self._order[next_index:]), self.prefetch):
            self._gather(upcoming)
        self._wait(unit)
        for nested in self._inner[unit]:
            self._call_unit(nested)
        stays = self.order_is_known and unit is self._last and unit.reshard_after_forward is True
        if not unit.stays_gathered and not stays:
            for storage, nbytes in self._kept[unit]:
                self._allocate(storage, nbytes)
            self._free(unit)

    def _outermost_units(self) -> Iterator[UnitSpec]:
        nested = {child for children in self._inner.values() for child in children}
        return (unit for unit in self._order if unit not in nested)

    def _in_return_order(self, unit: UnitSpec) -> list[UnitSpec]:
        return [descendant for child in self._inner[unit] for descendant in self._in_return_order(child)] + [unit]

    def _gather(self, unit: UnitSpec) -> None:
        storages = zip(self._storages[unit], self._coded[unit], self._kept[unit], strict=True)
        for (full, *_), coded, (post_forward, _) in storages:
            decodes = not full[0].nbytes() and not post_forward.nbytes()
            self._allocate(*full)
            if decodes:
                self._allocate(*coded)

    def _wait(self, unit: UnitSpec) -> None:
        for (_, *strided), (coded, _) in zip(self._storages[unit], self._coded[unit], strict=True):
            if coded.nbytes():
                self.pool.free(coded)
            for storage, nbytes in strided:
                self._allocate(storage, nbytes)

    def _allocate(self, storage: UntypedStorage, nbytes: int) -> None:
        if nbytes and not storage.nbytes():
            self.pool.allocate(storage, nbytes)

    def _free(self, unit: UnitSpec) -> None:
        for full, *strided in self._storages[unit]:
            for storage, _ in (*strided, full):
                if storage.nbytes():
                    self.pool.free(storage)

    def _release(self, unit: UnitSpec) -> None:
        self._free(unit)
        for storage, _ in self._kept[unit]:
            if storage.nbytes():
                self.pool.free(storage)


def _on_mesh_of(unit: UnitSpec, candidates: Iterable[UnitSpec]) -> Iterator[UnitSpec]:
    """Yield the units in `candidates` that a call to `unit` may prefetch, which have the same traits as `unit`."""
    return (candidate for candidate in candidates if candidate.traits == unit.traits)


def _storages(sizes: Sequence[int]) -> list[tuple[UntypedStorage, int]]:
    return [(torch.empty(0, device="meta").untyped_storage(), size) for size in sizes]


def _nested_units(units: Sequence[UnitSpec]) -> dict[UnitSpec, list[UnitSpec]]:
    """Return the units that are directly nested in each unit, in order."""
    children: dict[UnitSpec, list[UnitSpec]] = {unit: [] for unit in units}
    for unit in units:
        enclosing = [other for other in units if other is not unit and _encloses(other.name, unit.name)]
        if enclosing:
            children[max(enclosing, key=lambda other: len(other.name))].append(unit)
    return children


def _encloses(outer: str, name: str) -> bool:
    return not outer or name.startswith(f"{outer}.")
