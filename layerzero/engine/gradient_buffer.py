"""Memory in which gradients of one handle are summed up, and what each slot of it holds.

[Note: Three rules of a sum]
The first write overwrites. Later ones add. Where nothing was written, a sum that is handed over holds zeros. They are
followed here and nowhere else; memory is therefore never cleared in advance.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torch import Tensor

from layerzero.comm.collectives import PendingReduction
from layerzero.device.accumulate import accumulate_parts
from layerzero.device.gradient_storage import GradientStorage
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid, overlap

__all__ = ["GradientBuffer", "SlotState"]

_MOST_TENSORS = 8  # flat tensors whose parts are kept: more than there are buffers of one size in use


class SlotState(enum.IntEnum):
    """What a sum holds for one slot.

    EMPTY -> OFFERED by :meth:`GradientBuffer.expose`, back by :meth:`GradientBuffer.withdraw`; both -> FILLED by a
    write; all -> EMPTY by :meth:`GradientBuffer.clear` and :meth:`GradientBuffer.seal`.
    """

    EMPTY = 0  # unspecified contents
    EXPOSED = 1  # zeros, to which a kernel may have added
    WRITTEN = 2


class GradientBuffer:
    """Sums of gradients of one handle over one extent; see [Note: Three rules of a sum].

    Args:
        extent: RANK, NODE or WHOLE: which elements of `layout` it covers on this rank.
        place: its memory, of as many elements.
    """

    def __init__(self, layout: FlatLayout, grid: ShardGrid, extent: Extent, place: GradientStorage) -> None:
        assert place.numel == grid.numel(layout, extent)
        self.extent = extent
        self.storage = place
        flat = grid.range_of(layout, extent)
        self._names = tuple(slot.name for slot in layout.slots)
        self._ranges = tuple(overlap(slot, flat).of_range for slot in layout.slots)
        self._shapes = tuple((len(layout.rows_in(slot, flat)), *slot.shape[1:]) for slot in layout.slots)
        self._states = bytearray(len(layout.slots))  # a Holding for each slot
        self._parts: dict[int, list[Tensor]] = {}  # by address of a flat tensor: its parts by slot
        self._opened: tuple[Tensor, list[Tensor]] | None = None  # the memory and its parts, while they stay as they are

    # What it holds

    def __getitem__(self, slot: int) -> SlotState:
        return SlotState(self._states[slot])

    @property
    def empty(self) -> bool:
        """No slot is filled."""
        return SlotState.WRITTEN not in self._states

    @property
    def untouched(self) -> bool:
        """No slot is filled or offered: its contents are of no interest."""
        return not any(self._states)

    def part(self, slot: int) -> Tensor:
        """The rows of one slot that it covers, ``[rows, *rest]``, where they lie between passes."""
        return self._parts_of(self.storage.home())[slot]

    def filled_parts(self) -> list[tuple[int, Tensor]]:
        """What it holds, by slot; to be looked at only."""
        if self.empty:
            return []
        _, parts = self._opened or self._open()
        return [(slot, parts[slot]) for slot, holding in enumerate(self._states) if holding == SlotState.WRITTEN]

    # Writes

    def add(self, slot: int, values: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times the values ``[rows, *rest]``, of any floating dtype."""
        target = (self._opened or self._open())[1][slot]
        accumulate_parts(target, (values,), overwrite=self._states[slot] != SlotState.WRITTEN, scale=scale)
        self._states[slot] = SlotState.WRITTEN

    def add_exchange(self, pending: PendingReduction, *, scale: float) -> None:
        """Add `scale` times what an exchange that was waited for has brought, for all slots."""
        holds = not self.empty
        target, parts = self._opened or self._open()
        if holds:
            self._fill_holes(parts)
        pending.add_to(target, overwrite=not holds, scale=scale)
        self._states = bytearray([SlotState.WRITTEN]) * len(self._states)

    def overwrite(self, slot: int, values: Tensor) -> None:
        """Replace what it holds for one slot."""
        self.clear([slot])
        self.add(slot, values)

    def zero(self, slot: int) -> None:
        """Let it hold zeros for one slot."""
        self._open()[1][slot].zero_()
        self._states[slot] = SlotState.WRITTEN

    def clear(self, slots: Iterable[int] | None = None) -> None:
        """Hold nothing for some slots; None: for any."""
        for slot in range(len(self._states)) if slots is None else slots:
            self._states[slot] = SlotState.EMPTY

    # Kernels that add for themselves

    def expose(self, slot: int) -> Tensor:
        """One slot's memory, zeros if it held nothing, for somebody to add to; :meth:`take` makes it count."""
        part = self._open()[1][slot]
        if self._states[slot] == SlotState.EMPTY:
            part.zero_()
            self._states[slot] = SlotState.EXPOSED
        return part

    def mark_written(self, slot: int) -> None:
        """Somebody has added to what was offered.

        Raises:
            RuntimeError: nothing was offered since the sum was last handed over or forgotten.
        """
        if self._states[slot] == SlotState.EMPTY:
            raise RuntimeError(
                f"main_grad of {self._names[slot]!r} was kept from a forward, and its contents were "
                "reduced or zeroed since; take it in the backward"
            )
        self._states[slot] = SlotState.WRITTEN

    def withdraw(self, slots: Iterable[int]) -> None:
        """What may have been added to offered slots does not count."""
        for slot in slots:
            if self._states[slot] == SlotState.EXPOSED:
                self._states[slot] = SlotState.EMPTY

    # Handing over

    def seal(self) -> None:
        """Leave all of it in its place, with zeros where nothing was written; the sum holds nothing from here on.

        Raises:
            RuntimeError: somebody wrote to an offered slot, and never said so.
        """
        _, parts = self._opened or self._open()
        if SlotState.EXPOSED in self._states:
            self._refuse_unclaimed(parts)
        self._fill_holes(parts)
        self._states = bytearray(len(self._states))
        if not self.storage.fixed:
            self._opened = None

    def rest(self) -> None:
        """Nothing more will be added for now."""
        if not self.storage.fixed:
            self.storage.close(keep=not self.untouched)
            self._opened = None

    def discard(self) -> None:
        """Hold nothing, and need no memory for now."""
        self.clear()
        self.storage.close(keep=False)
        self._opened = None

    # Of a sum that rests inside another one; see gradient_storage.py

    def vacate(self) -> None:
        """Something else is about to be summed up there."""
        if not self.storage.fixed:
            self.storage.set_aside(keep=not self.empty)
            self._opened = None

    def settle(self) -> None:
        """It can come back."""
        if not self.storage.fixed:
            self.storage.restore(keep=not self.empty)
            self._opened = None

    def _refuse_unclaimed(self, parts: list[Tensor]) -> None:
        for slot, holding in enumerate(self._states):
            if holding == SlotState.EXPOSED and parts[slot].any():
                raise RuntimeError(
                    f"main_grad of {self._names[slot]!r} was written to, but its gradient never came: the kernel "
                    "must set grad_added_to_main_grad and return a gradient, of any contents"
                )

    def _fill_holes(self, parts: list[Tensor]) -> None:
        if self._states.count(SlotState.WRITTEN) < len(self._states):
            for slot, holding in enumerate(self._states):
                if holding != SlotState.WRITTEN:
                    parts[slot].zero_()

    def _open(self) -> tuple[Tensor, list[Tensor]]:
        tensor = self.storage.open(keep=not self.untouched)
        opened = tensor, self._parts_of(tensor)
        if self.storage.lasting:
            self._opened = opened
        return opened

    def _parts_of(self, tensor: Tensor) -> list[Tensor]:
        key = tensor.data_ptr()  # the parts keep the memory, so that no other tensor comes to lie there
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) == _MOST_TENSORS:
                self._parts.clear()
            places = zip(self._ranges, self._shapes, strict=True)
            parts = self._parts[key] = [tensor[place].view(shape) for place, shape in places]
        return parts
