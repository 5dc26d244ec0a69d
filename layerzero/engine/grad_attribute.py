"""Manage the ``.grad`` of sharded parameters: publish final gradients and apply changes that the user has made.

``.grad`` shows this rank's rows of the final gradient, in the dtype of the masters: the mean over all data-parallel
ranks, or their sum divided by the user's factor. It may be read after a backward pass outside no_sync. During a
backward pass it is None, and after a backward pass inside no_sync, access to its values raises an error until the
gradients are reduced. Reads that have to wait for other ranks are in dtensor/lazy_grad.py. See [Note: Division of
gradients] in reduction_spec.py for how gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.dtensor.full_tensor import rows_of
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import RowShardedTensor, sharded
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.managed_param import ManagedParam
from layerzero.layout.grad_usage import GradUsage


class GradAttribute:
    """``.grad`` of the parameters of one handle. Each ``.grad`` is a view of the final gradient."""

    def __init__(self, members: Sequence[ManagedParam], gradients: HandleGradients) -> None:
        self.members = members
        self.gradients = gradients
        self._trackers = [MutationTracker() for _ in members]
        # By slot, during a backward pass: True if the parameter had a .grad before the pass, and the error message for
        # reads of this .grad, or None if it could be read.
        self._hidden: list[tuple[bool, str | None]] = []

    def publish(self, *, agreed: bool) -> None:
        """Set the ``.grad`` of each used sharded parameter to a view of the final gradient.

        Access to ``.grad`` raises while contributions are unreduced, or while `agreed` is False. In the latter case,
        ``.grad`` is also set on parameters that may have been used only by another rank. This rank may store rows of
        their gradients, and must therefore detect zero_grad().

        Args:
            agreed: True if the ranks have agreed on the used parameters.
        """
        gradients = self.gradients
        if min(gradients.usage, default=GradUsage.PUBLISHED) < GradUsage.PUBLISHED:
            guesses = not agreed and gradients.may_have_peer_contributions
            trained = {slot for slot, member in enumerate(self.members) if guesses and member.gathered.requires_grad}
            gradients.record_unused(unknown=trained)
        forbidden = _UNREDUCED if gradients.has_unreduced or not agreed else None
        if forbidden is None:  # otherwise, the host reads them only after a later call
            gradients.final.storage.wait_for_host()
        self.forbid_access(forbidden)
        for slot, (member, use) in enumerate(zip(self.members, gradients.usage, strict=True)):
            final = self._published[slot] if use else None  # None: no other rank has contributed either
            if member.sharded.grad is not final:
                member.sharded.grad = final
        if agreed and not any(gradients.usage):  # only zeros (or errors of a codec) were reduced
            gradients.drop(())

    def _is_ours(self, slot: int, gradient: Tensor) -> bool:
        """Return whether this object has published `gradient` for the parameter at `slot`."""
        return isinstance(gradient, RowShardedTensor) and gradient._local_tensor.tracker is self._trackers[slot]

    def is_published(self, gradient: Tensor) -> bool:
        """Return whether this object has published `gradient` for any of its parameters."""
        return any(self._is_ours(slot, gradient) for slot in range(len(self.members)))

    def apply_user_grads(self, *, failed: bool = False) -> None:
        """Apply the user's changes to published ``.grad`` attributes.

        A ``.grad`` may have been set to None, zeroed before it was final, or replaced.

        Args:
            failed: True after a failed backward pass. A ``.grad`` that was zeroed is then dropped.

        Raises:
            RuntimeError: a ``.grad`` was replaced although it has unreduced contributions.
        """
        if self._hidden:
            return
        dropped, replaced = [], []
        for slot, (member, tracker) in enumerate(zip(self.members, self._trackers, strict=True)):
            if tracker.was_zeroed or tracker.zero_requested:
                self._apply_zeros(slot, drops=failed)
            gradient = member.sharded.grad
            if gradient is not None and not self._is_ours(slot, gradient):
                replaced.append((slot, gradient))
            elif gradient is None and self.gradients.usage[slot]:
                dropped.append(slot)
        if dropped:
            self.gradients.drop(dropped)
        for slot, gradient in replaced:
            self._apply_replacement(slot, gradient)

    def _apply_zeros(self, slot: int, *, drops: bool) -> None:
        """Apply calls of ``zero_()`` on the published ``.grad`` of a parameter, before or after it was final."""
        tracker, sharded_parameter = self._trackers[slot], self.members[slot].sharded
        was_zeroed, tracker.was_zeroed = tracker.was_zeroed, False
        is_requested, tracker.zero_requested = tracker.zero_requested, False
        if sharded_parameter.grad is None or not self._is_ours(slot, sharded_parameter.grad):
            return
        if was_zeroed:
            self.gradients.record_drop([slot])
        if is_requested and (drops or self.gradients.usage[slot] == GradUsage.UNKNOWN):
            sharded_parameter.grad = None
        elif is_requested:
            self.gradients.zero(slot)

    def _apply_replacement(self, slot: int, gradient: Tensor) -> None:
        """Take the rows of a gradient that the user has assigned to a parameter."""
        gradients, member = self.gradients, self.members[slot]
        if gradients.usage[slot] and gradients.has_unreduced:
            raise RuntimeError(f".grad of {member.name!r} was replaced, but {_UNREDUCED}")
        rows = _rows_of(gradient, member.spec)
        if gradients.is_used(slot):
            gradients.replace_rows(slot, rows)
        else:
            gradients.add_rows(slot, rows)
        member.sharded.grad = self._published[slot]

    def hide(self) -> None:
        """Remove the ``.grad`` of all parameters until the end of a backward pass, because its memory may be reused.

        A loss may use ``p.to_local()`` (this rank's rows), for example in a penalty. Autograd would then add to
        ``.grad`` if it were still set.
        """
        assert not self._hidden
        for member, tracker in zip(self.members, self._trackers, strict=True):
            has_gradient = member.sharded.grad is not None
            self._hidden.append((has_gradient, tracker.access_error))
            tracker.access_error = _IN_BACKWARD
            if has_gradient:
                member.sharded.grad = None

    def collect_local_grads(self) -> None:
        """Add the gradients that a backward pass wrote directly to sharded parameters, and then undo :meth:`hide`."""
        for slot, member in enumerate(self.members):
            gradient = member.sharded.grad
            if gradient is not None and not self._is_ours(slot, gradient):
                member.sharded.grad = None
                self.gradients.add_rows(slot, plain(gradient))
        self.unhide()

    def unlock(self) -> None:
        """Allow access to all published gradients.

        The values of these gradients are final, even if the ranks have not yet agreed on which other parameters have a
        gradient.
        """
        self.gradients.final.storage.wait_for_host()
        self.forbid_access(None)

    def unhide(self) -> None:
        """Restore each ``.grad`` that :meth:`hide` has removed."""
        hidden, self._hidden = self._hidden, []
        for slot, (had_gradient, forbidden) in enumerate(hidden):
            self._trackers[slot].access_error = forbidden
            if had_gradient:
                self.members[slot].sharded.grad = self._published[slot]

    def mark_incomplete(self) -> set[ManagedParam]:
        """Undo :meth:`hide` after a failed backward pass, and forbid access to each ``.grad``.

        Also set ``.grad`` of the trained parameters that had none, so that zero_grad() removes it. Return these
        parameters.
        """
        self.unhide()
        self.forbid_access(INCOMPLETE)
        added = set()
        for slot, member in enumerate(self.members):
            if member.sharded.grad is None and member.gathered.requires_grad:
                member.sharded.grad = self._published[slot]
                added.add(member)
        return added

    def forbid_access(self, reason: str | None) -> None:
        """Make access to the values of each published ``.grad`` raise an error with the message `reason`.

        If `reason` is None, allow access again.
        """
        for tracker in self._trackers:
            tracker.access_error = reason

    @cached_property
    def _published(self) -> list[RowShardedTensor]:
        """Views of the final gradient to which ``.grad`` is set, by slot."""
        final, members = self.gradients.final, zip(self.members, self._trackers, strict=True)
        return [sharded(final.part(slot), member.spec, tracker) for slot, (member, tracker) in enumerate(members)]


def _rows_of(gradient: Tensor, spec: RowShardSpec) -> Tensor:
    """Return this rank's rows of a gradient that the user has assigned.

    Rows of other bounds may have a shape that broadcasts, and would be added to the wrong rows.
    """
    assigned = getattr(gradient._local_tensor, "spec", None) if isinstance(gradient, DTensor) else None
    if assigned is not None and assigned.same_sharding(spec):
        return plain(gradient)
    return rows_of(gradient, spec)


_UNREDUCED = (
    "gradients of a backward inside no_sync are not reduced yet. Run the last backward outside no_sync, or call "
    "layerzero.clip_grad_norm_, optimizer.step() or optimizer.zero_grad(). With a GradScaler, run the last backward "
    "outside no_sync"
)
INCOMPLETE = (
    "the last backward raised an exception, and its gradients are incomplete. Call zero_grad() of the model, and run "
    "another backward"
)
_IN_BACKWARD = "gradients are not final while a backward runs. Read .grad after the backward"
