"""Define :class:`StepObserver`, which is told of the events of training steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from layerzero.comm.collectives import PendingCollective


class StepObserver:
    """Object that is told of the events of one model's training steps. By default, each method does nothing.

    ``layerzero.extend.attach(model, observer)`` attaches an observer. For each event, observers are called in the order
    in which they were attached. All methods are called on the main thread, except :meth:`launched` and :meth:`done`,
    which are called on the thread that launches or waits, possibly one of the engine. An error that a method raises is
    raised in the training loop.

    The model refers to its observers. An observer that refers to the model keeps it alive until it is detached.

    Attributes:
        hears_collectives: whether :meth:`launched` and :meth:`done` are called.
        hears_parts: whether :meth:`begun` and :meth:`ended` are called, which takes some microseconds for each unit.
    """

    hears_collectives = True
    hears_parts = False
    attached_to: weakref.ref[Any] | None = None  # state of the model to which the observer is attached

    def detach(self) -> None:
        """End the calls of the other methods. Do nothing if the observer is not attached."""
        if self.attached_to is not None and (lz_state := self.attached_to()) is not None:
            lz_state.detach(self)

    def launched(self, works: PendingCollective) -> None:
        """Record that a collective was launched. All ranks of its communicator launch it at the same position.

        Args:
            works: collective in flight. ``works.launched`` has its `collective` (its purpose), `name` (of the unit),
                `communicator` and `number`. ``works.records[self]`` may store a value until :meth:`done`.
        """

    def done(self, works: PendingCollective) -> None:
        """Record that the wait for a collective has returned or failed.

        The collective may have been launched before the observer was attached. If the program drops a collective
        without a wait, this method is not called.
        """

    def begun(self, phase: str, name: str) -> None:
        """Record that ``"forward"`` or ``"backward"`` of unit `name`, or ``"update"`` of ``"optimizer"``, begins."""

    def ended(self, phase: str, name: str) -> None:
        """Record that the part of the step that :meth:`begun` has announced ends."""

    def gradients_final(self, optimizer: Optimizer) -> None:
        """Use or change the final gradients before `optimizer` steps. All ranks call this method."""

    def before_update(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` may update its parameters. All ranks must return the same value.

        Decide from values that are equal on all ranks, for instance after an all-reduce. If an observer returns False,
        the optimizer skips its update, and observers that were attached later are not asked.
        """
        return True

    def after_update(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` has updated its parameters."""

    def refreshed(self, names: Sequence[str]) -> None:
        """Record that refreshes of the weights of these units' handles were launched."""

    def layout_changed(self) -> None:
        """Update all references to layouts and rows after shard boundaries have moved."""

    def failed(self, error: RuntimeError) -> None:
        """Record the first collective error of the model."""

    def kept_bytes(self) -> Mapping[str, int]:
        """Return the size in bytes of the memory that the observer keeps on this rank, by kind.

        ``layerzero.memory`` reports the sizes. A kind that begins with ``"host_"`` is in host memory.
        """
        return {}

    def close(self) -> None:
        """Finish work and release resources, because the model is closed. May be called several times."""
