"""Accumulate the gradients of one handle in a buffer, and track the state of each slot.

[Note: Write rules of gradient buffers]
The first write to a slot overwrites the contents, and later writes add to them. Sealing the buffer fills unwritten
slots with zeros. Therefore the memory need not be cleared in advance. Only this module applies these rules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from torch import Tensor

from layerzero.comm.collectives import PendingReduction
from layerzero.device.accumulate import accumulate_parts
from layerzero.engine.gradient_storage import GradientStorage
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent, ShardGrid, overlap
from layerzero.utils.torch_compat import foreach_copy_

_MOST_TENSORS = 8  # number of flat tensors whose views are cached; exceeds the number of buffers of one size in use


class SlotState(enum.IntEnum):
    """State of one slot of a gradient buffer.

    - :meth:`GradientBuffer.expose` changes EMPTY to EXPOSED, and :meth:`GradientBuffer.withdraw` changes it back.
    - A write changes EMPTY or EXPOSED to WRITTEN.
    - :meth:`GradientBuffer.clear` and :meth:`GradientBuffer.seal` change any state to EMPTY.
    """

    EMPTY = 0  # unspecified contents
    EXPOSED = 1  # zeros, or gradients that a kernel has added but not yet reported
    WRITTEN = 2


class GradientBuffer:
    """Accumulated gradients of one handle over one extent; see [Note: Write rules of gradient buffers].

    Args:
        extent: ZERO1, ZERO3 or FULL; determines which elements of `layout` the buffer covers on this rank.
        place: memory of the buffer, with as many elements as the extent.
    """

    def __init__(
        self,
        layout: FlatLayout,
        grid: ShardGrid,
        extent: Extent,
        place: GradientStorage,
        *,
        rounds_once: bool = False,  # True if reductions are added in fp32 and rounded once, as in a bf16 accumulator
    ) -> None:
        assert place.numel == grid.numel(layout, extent)
        self.storage = place
        self._rounds_once = rounds_once
        flat = grid.range_of(layout, extent)
        self._names = tuple(slot.name for slot in layout.slots)
        self._ranges = tuple(overlap(slot, flat).of_range for slot in layout.slots)
        self._shapes = tuple((len(layout.rows_in(slot, flat)), *slot.shape[1:]) for slot in layout.slots)
        self._states = bytearray(len(layout.slots))  # a SlotState for each slot
        self._parts: dict[int, list[Tensor]] = {}  # views by slot, keyed by the address of the flat tensor
        self._opened: tuple[Tensor, list[Tensor]] | None = None  # flat tensor and its views, as long as they are valid

    # State and contents

    @property
    def empty(self) -> bool:
        """True if no slot is written."""
        return SlotState.WRITTEN not in self._states

    @property
    def untouched(self) -> bool:
        """True if no slot is written or exposed. The contents are then not needed."""
        return not any(self._states)

    def part(self, slot: int) -> Tensor:
        """Return a view ``[rows, *rest]`` of the rows of one slot, in the memory that stores them between passes."""
        return self._parts_of(self.storage.stored_tensor())[slot]

    def filled_parts(self) -> list[tuple[int, Tensor]]:
        """Return a (slot, view) pair for each written slot. The caller must not modify the views."""
        if self.empty:
            return []
        _, parts = self._opened or self._open_storage()
        return [(slot, parts[slot]) for slot, state in enumerate(self._states) if state == SlotState.WRITTEN]

    # Writes

    def add(self, slot: int, values: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times `values` to one slot.

        `values` has the shape ``[rows, *rest]`` and any floating-point dtype.
        """
        target = (self._opened or self._open_storage())[1][slot]
        accumulate_parts(target, (values,), overwrite=self._states[slot] != SlotState.WRITTEN, scale=scale)
        self._states[slot] = SlotState.WRITTEN

    def add_all(self, gradients: Mapping[int, Tensor], scale: float = 1.0) -> None:
        """Add `scale` times each tensor in `gradients`, by slot. The tensors are like those of :meth:`add`."""
        _, parts = self._opened or self._open_storage()
        copied: dict[int, Tensor] = {}
        for slot, gradient in gradients.items():
            # A subclass of Tensor may support copy_, but not the copy of several tensors.
            if scale == 1.0 and self._states[slot] != SlotState.WRITTEN and gradient.__class__ is Tensor:
                copied[slot] = gradient
            else:
                self.add(slot, gradient, scale)
        if copied:
            foreach_copy_([parts[slot] for slot in copied], list(copied.values()))
            for slot in copied:
                self._states[slot] = SlotState.WRITTEN

    def add_reduction(self, pending: PendingReduction, *, scale: float) -> None:
        """Add `scale` times the result of a finished reduce-scatter to all slots."""
        holds = not self.empty
        target, parts = self._opened or self._open_storage()
        if holds:
            self._fill_holes(parts)
        pending.add_to(target, overwrite=not holds, scale=scale, rounds_once=self._rounds_once)
        self._states = bytearray([SlotState.WRITTEN]) * len(self._states)

    def add_buffer(self, other: GradientBuffer) -> None:
        """Add the contents of another buffer of the same extent to this buffer, and then discard the other buffer."""
        for slot, part in other.filled_parts():
            self.add(slot, part)
        other.discard()

    def overwrite(self, slot: int, values: Tensor) -> None:
        """Replace the contents of one slot."""
        self.clear([slot])
        self.add(slot, values)

    def zero(self, slot: int) -> None:
        """Fill one slot with zeros and mark it as written."""
        self._open_storage()[1][slot].zero_()
        self._states[slot] = SlotState.WRITTEN

    def clear(self, slots: Iterable[int] | None = None) -> None:
        """Mark `slots` as empty; None means all slots."""
        for slot in range(len(self._states)) if slots is None else slots:
            self._states[slot] = SlotState.EMPTY

    # Kernels that accumulate into the buffer themselves

    def expose(self, slot: int) -> Tensor:
        """Return the memory of one slot, to which a kernel may add a gradient. If the slot is empty, zero it first.

        Call :meth:`mark_written` after the kernel has added its gradient.
        """
        part = self._open_storage()[1][slot]
        if self._states[slot] == SlotState.EMPTY:
            part.zero_()
            self._states[slot] = SlotState.EXPOSED
        return part

    def mark_written(self, slot: int) -> None:
        """Record that a kernel has added to an exposed slot.

        Raises:
            RuntimeError: the slot has not been exposed since it was last sealed or cleared.
        """
        if self._states[slot] == SlotState.EMPTY:
            raise RuntimeError(
                f"main_grad of {self._names[slot]!r} was read in a forward, but its contents have been reduced or "
                "zeroed since then. Read main_grad in the backward"
            )
        self._states[slot] = SlotState.WRITTEN

    def withdraw(self, slots: Iterable[int]) -> None:
        """Mark each exposed slot in `slots` as empty, which discards the gradients that kernels have added to it."""
        for slot in slots:
            if self._states[slot] == SlotState.EXPOSED:
                self._states[slot] = SlotState.EMPTY

    # Sealing and memory

    def seal(self) -> None:
        """Fill unwritten slots with zeros, and then mark all slots as empty. The values stay in memory.

        Raises:
            RuntimeError: a kernel wrote to an exposed slot without reporting it.
        """
        _, parts = self._opened or self._open_storage()
        if SlotState.EXPOSED in self._states:
            self._require_claimed(parts)
        self._fill_holes(parts)
        self._states = bytearray(len(self._states))
        if not self.storage.fixed:
            self._forget_views()

    def close_until_write(self) -> None:
        """Close the memory until the next write. Keep the contents if any slot is written or exposed."""
        if not self.storage.fixed:
            self.storage.close(keep=not self.untouched)
            self._forget_views()

    def discard(self) -> None:
        """Mark all slots as empty and release the memory."""
        self.clear()
        self.storage.close(keep=False)
        self._forget_views()

    # Buffers whose memory is a part of another buffer; see gradient_storage.py

    def set_aside(self) -> None:
        """Move the contents to separate memory before the aliased memory is reused."""
        if not self.storage.fixed:
            self.storage.set_aside(keep=not self.empty)
            self._opened = None

    def restore(self) -> None:
        """Move the contents back to the aliased memory."""
        if not self.storage.fixed:
            self.storage.restore(keep=not self.empty)
            self._opened = None

    def _forget_views(self) -> None:
        self._opened = None
        if self.storage.returns_memory:  # views would keep the memory allocated
            self._parts.clear()

    def _require_claimed(self, parts: list[Tensor]) -> None:
        for slot, state in enumerate(self._states):
            if state == SlotState.EXPOSED and parts[slot].any():
                raise RuntimeError(
                    f"main_grad of {self._names[slot]!r} was written, but autograd received no gradient. The kernel "
                    "must set grad_added_to_main_grad and return a gradient with arbitrary values"
                )

    def _fill_holes(self, parts: list[Tensor]) -> None:
        if self._states.count(SlotState.WRITTEN) < len(self._states):
            for slot, state in enumerate(self._states):
                if state != SlotState.WRITTEN:
                    parts[slot].zero_()

    def _open_storage(self) -> tuple[Tensor, list[Tensor]]:
        tensor = self.storage.open(keep=not self.untouched)
        opened = tensor, self._parts_of(tensor)
        if self.storage.lasting:
            self._opened = opened
        return opened

    def _parts_of(self, tensor: Tensor) -> list[Tensor]:
        key = tensor.data_ptr()  # the cached views keep the memory alive, so the address stays unique
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) == _MOST_TENSORS:
                self._parts.clear()
            slot_specs = zip(self._ranges, self._shapes, strict=True)
            parts = self._parts[key] = [tensor[flat_range].view(shape) for flat_range, shape in slot_specs]
        return parts
