"""The ``.grad`` of sharded parameters: what is shown there, and what the user does to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerzero.dtensor.row_shard_spec import MutationTracker
from layerzero.dtensor.sharded_tensor import RowShardedTensor, plain, sharded
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.managed_param import ManagedParam
from layerzero.layout.usage import GradUsage

__all__ = ["GradAttribute"]


class GradAttribute:
    """The ``.grad`` of each parameter of a handle, views of its final gradient."""

    def __init__(self, members: Sequence[ManagedParam], gradients: HandleGradients) -> None:
        self.members = members
        self.gradients = gradients
        self._watches = [MutationTracker() for _ in members]
        self._shown: dict[int, RowShardedTensor] = {}  # by slot
        # By slot, in a backward: there was a .grad, and why it was not to be read.
        self._withheld: list[tuple[bool, str | None]] = []

    def publish(self, *, agreed: bool) -> None:
        """Give each used sharded parameter its ``.grad``, a view of the final gradient.

        While contributions still wait for an exchange, or the ranks have not `agreed` on what was used (one may hold
        rows that only another used), the ``.grad`` is there but refuses to be used. Until they agree, also what only
        another rank may have used has one: zero_grad must be noticed where the rows are.
        """
        usage = self.gradients.usage
        self.gradients.final.storage.wait_for_host()
        guesses = not agreed and self.gradients.slots_of_peers
        forbidden = _UNREDUCED if self.gradients.unreduced or not agreed else None
        for slot, member in enumerate(self.members):
            if usage[slot] < GradUsage.SEEN:
                maybe = guesses and member.gathered.requires_grad
                if usage[slot] == GradUsage.MAYBE and not maybe:
                    member.sharded.grad = None
                usage[slot] = GradUsage.MAYBE if maybe else GradUsage.NONE
            if usage[slot] and not self._is_ours(slot, member.sharded.grad):
                member.sharded.grad = self._gradient_of(slot)
            self._watches[slot].access_error = forbidden
        if agreed and not any(usage):  # the zeros that were sent are nobody's gradient
            self.gradients.drop(())

    def _is_ours(self, slot: int, gradient: Tensor | None) -> bool:
        """The parameter's ``.grad`` is the one that was published here."""
        return isinstance(gradient, RowShardedTensor) and gradient._local_tensor.tracker is self._watches[slot]

    def apply_user_grads(self) -> None:
        """Follow what the user did to ``.grad`` since it was published: set to None, zeroed too early, or replaced."""
        gradients = self.gradients
        if self._withheld:
            return
        dropped, replaced = [], []
        for slot, member in enumerate(self.members):
            watch, gradient = self._watches[slot], member.sharded.grad
            ours = self._is_ours(slot, gradient)
            if watch.zero_requested:
                watch.zero_requested = False
                if ours and gradients.usage[slot] == GradUsage.MAYBE:
                    gradient = member.sharded.grad = None
                elif ours:
                    gradients.zero(slot)
            if gradient is None:
                if gradients.usage[slot]:
                    dropped.append(slot)
            elif not ours:
                replaced.append((slot, member, gradient))
        if dropped:
            gradients.drop(dropped)
        for slot, member, gradient in replaced:
            if gradients.usage[slot] and gradients.unreduced:
                raise RuntimeError(f".grad of {member.name!r} was replaced, but {_UNREDUCED}")
            if gradients.is_used(slot):
                gradients.replace(slot, plain(gradient))
            else:
                gradients.add_rows(slot, plain(gradient))
            member.sharded.grad = self._gradient_of(slot)

    def hide(self) -> None:
        """Let no parameter have a ``.grad`` during a backward, in which its place may hold something else.

        Autograd itself would add to it: a loss may use ``p.to_local()``, this rank's rows, such as for a penalty.
        """
        assert not self._withheld
        for member, watch in zip(self.members, self._watches, strict=True):
            has_gradient = member.sharded.grad is not None
            self._withheld.append((has_gradient, watch.access_error))
            watch.access_error = _IN_BACKWARD
            if has_gradient:
                member.sharded.grad = None

    def collect_local_grads(self) -> None:
        """At the end of a backward: take the gradients that it gave to sharded parameters themselves."""
        for slot, member in enumerate(self.members):
            gradient = member.sharded.grad
            if gradient is not None and not self._is_ours(slot, gradient):
                member.sharded.grad = None
                self.gradients.add_rows(slot, plain(gradient))
        self.unhide()

    def unlock(self) -> None:
        """What there is is final, though others may be found to have gradients, too: a ``.grad`` of before shows it."""
        self.gradients.final.storage.wait_for_host()
        for watch in self._watches:
            watch.access_error = None

    def unhide(self) -> None:
        """Undo :meth:`withhold`."""
        withheld, self._withheld = self._withheld, []
        for slot, (had_gradient, forbidden) in enumerate(withheld):
            self._watches[slot].access_error = forbidden
            if had_gradient:
                self.members[slot].sharded.grad = self._gradient_of(slot)

    def _gradient_of(self, slot: int) -> RowShardedTensor:
        if slot not in self._shown:
            member = self.members[slot]
            self._shown[slot] = sharded(self.gradients.final.part(slot), member.spec, self._watches[slot])
        return self._shown[slot]


_UNREDUCED = (
    "gradients of a backward inside no_sync are not reduced yet: run the last backward outside no_sync, or call "
    "layerzero.clip_grad_norm_, optimizer.step() or optimizer.zero_grad() (under a GradScaler only the first helps)"
)
_IN_BACKWARD = "gradients are not final while a backward runs; read them after it"
