"""Which gradients of a handle a backward still waits for."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Round"]


class Round:
    """The gradients that make a handle complete, once in each backward, and those that have come."""

    def __init__(self, slots: int) -> None:
        self._awaited = [True] * slots  # is trainable
        self._arrived = [False] * slots
        self._missing = slots  # awaited and not arrived

    @property
    def complete(self) -> bool:
        return self._missing == 0

    @property
    def begun(self) -> bool:
        return any(self._arrived)

    def arrive(self, slot: int) -> None:
        self._missing -= not self._arrived[slot]
        self._arrived[slot] = True

    def expect(self, coming: Sequence[bool]) -> None:
        """Of the awaited gradients, only those that are `coming` in this pass make the round complete."""
        slots = zip(self._awaited, coming, self._arrived, strict=True)
        self._missing = sum(awaited and comes and not arrived for awaited, comes, arrived in slots)

    def end(self) -> None:
        """The pass needs no more of this handle: the next arrival starts a new round."""
        self._arrived = [False] * len(self._arrived)
        self._missing = sum(self._awaited)

    def await_only(self, awaited: Sequence[bool]) -> None:
        """From the next round on, expect gradients of these slots."""
        self._awaited = list(awaited)
        self.end()
