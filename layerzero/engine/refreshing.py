"""When masters are carried to the compute weights of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.comm.agreement import agree
from layerzero.comm.everyone import Everyone
from layerzero.engine.handle import Handle

__all__ = ["Refreshes"]

_ALL_ALIKE = (
    "change them on every rank, to the same values (layerzero.load_full_state_dict takes the first rank's), or call "
    "layerzero.refresh(model) on every rank afterwards"
)


class Refreshes:
    """Launches the refresh of handles; it is awaited where each is next gathered.

    Attributes:
        deferred: a step leaves the refresh to :meth:`launch_due`, which a pipeline's schedule calls.
    """

    def __init__(self, handles: Sequence[Handle], everyone: Everyone) -> None:
        self.deferred = False
        self._comes_first = True  # a forward of which all ranks know; before it nobody reads what others write
        self._steps = 0  # of optimizers, since the last forward
        self._expected_steps = 1  # as many as there were between the two forwards before
        self._handles = handles
        self._hand_over = next((handle.shared.hand_over for handle in handles if handle.shared is not None), None)
        self._everyone = everyone

    def launch(self, handles: Sequence[Handle] | None = None) -> None:
        """The refresh of `handles`; None: of all. Every rank must call this."""
        handles = self._handles if handles is None else handles
        for handle in handles:
            handle.reshard()
        if handles and self._hand_over is not None and not self._comes_first:
            self._hand_over.come()
        for handle in handles:
            handle.launch_refresh()
        if handles and self._hand_over is not None:
            self._hand_over.end_round()

    def before_write(self, handles: Sequence[Handle] | None = None) -> None:
        """The masters of `handles` (None: of all) are about to be written, and then launched; on every rank."""
        for handle in self._handles if handles is None else handles:
            handle.finish_refresh()  # it may read what is written
            if handle.shared is not None and handle.shares_master:
                handle.watch.edit()

    def before_step(self) -> None:
        """An optimizer is about to update masters."""
        if self._hand_over is not None:
            self.before_write([handle for handle in self._handles if handle.shares_master and handle.may_be_updated])

    def after_step(self) -> None:
        """The refresh of what an optimizer may have updated: one for all that step before the next forward."""
        self._steps += 1
        updated = [handle for handle in self._handles if handle.may_be_updated or handle.outdated]
        if not self.deferred and self._steps >= self._expected_steps:
            self.launch(updated)
            return
        for handle in updated:
            handle.outdate()

    def launch_due(self) -> None:
        """The refresh that a step has left."""
        self.launch([handle for handle in self._handles if handle.outdated])

    def launch_edited(self) -> None:
        """The refresh of masters that were edited outside of a step; an error where ranks edited different ones."""
        edited = [handle for handle in self._handles if handle.watch.edited]
        if edited:
            self._agree(f"refresh of parameters that were changed outside optimizer.step(); {_ALL_ALIKE}", edited)
            self.launch(edited)

    def before_forward(self) -> None:
        """What is left, at the latest."""
        self._expected_steps, self._steps = self._steps or self._expected_steps, 0
        self.launch_due()
        if self._comes_first:
            edited = [handle for handle in self._handles if handle.watch.edited]
            self._agree(f"first forward; if parameters are changed before it, {_ALL_ALIKE}", edited)
            self.launch(edited)
            self._comes_first = False
            for handle in self._handles:
                handle.order_writes()
        self.launch_edited()

    def _agree(self, subject: str, edited: Sequence[Handle]) -> None:
        changed = [handle.name for handle in edited]
        told: dict[tuple[int, ...], dict[str, object]] = {self._everyone.ranks: {"changed": changed}}
        for handle in edited:
            fields = told.setdefault(handle.sharers(self._everyone), {})
            fields |= {f"digest of the whole tensor for {name!r}": said for name, said in handle.watch.loaded.items()}
        for ranks, fields in told.items():
            agree(subject, fields, ranks=ranks)
