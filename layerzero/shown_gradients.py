"""The ``.grad`` of sharded parameters: what is shown there, and what the user does to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerzero.gradients import GradientFlow
from layerzero.member import Member
from layerzero.sharded_tensor import RowShardedTensor, Watch, plain, sharded

__all__ = ["ShownGradients"]


class ShownGradients:
    """The ``.grad`` of each parameter of a handle, views of its gradient shard."""

    def __init__(self, members: Sequence[Member], flow: GradientFlow) -> None:
        self.members = members
        self.flow = flow
        self._watches = [Watch() for _ in members]
        self._gradients: dict[int, RowShardedTensor] = {}  # by slot
        # By slot, in a backward: there was a .grad, and why it was not to be read.
        self._withheld: list[tuple[bool, str | None]] = []

    def publish(self, used: Sequence[bool], *, agreed: bool) -> None:
        """Give each used sharded parameter its ``.grad``, a view of the gradient shard.

        While contributions still wait for an exchange, or the ranks have not `agreed` on what was used (one may hold
        rows that only another used), the ``.grad`` is there but refuses to be used. Until they agree, also what only
        another rank may have used has one: zero_grad must be noticed where the rows are.
        """
        flow = self.flow
        for slot, member in enumerate(self.members):
            if used[slot]:
                flow.contributed[slot] = True
            maybe = not agreed and not used[slot] and flow.holds_of_peers and member.leaf.requires_grad
            if flow.maybe_from_peers[slot] and not maybe and not used[slot]:
                member.parameter.grad = None
            flow.maybe_from_peers[slot] = maybe
            if (used[slot] or maybe) and not self._is_ours(slot, member.parameter.grad):
                member.parameter.grad = self._gradient_of(slot)
            self._watches[slot].forbidden = _UNREDUCED if flow.unreduced or not agreed else None

    def _is_ours(self, slot: int, gradient: Tensor | None) -> bool:
        """The parameter's ``.grad`` is the one that was published here."""
        return isinstance(gradient, RowShardedTensor) and gradient._local_tensor.watch is self._watches[slot]

    def heed_user(self) -> None:
        """Follow what the user did to ``.grad`` since it was published: set to None, zeroed too early, or replaced."""
        flow = self.flow
        if self._withheld:
            return
        dropped, replaced = [], []
        for slot, member in enumerate(self.members):
            watch, gradient = self._watches[slot], member.parameter.grad
            ours = self._is_ours(slot, gradient)
            if watch.zeroed:
                watch.zeroed = False
                if ours and flow.maybe_from_peers[slot]:
                    gradient = member.parameter.grad = None
                elif ours:
                    flow.zero(slot)
            if gradient is None:
                if flow.contributed[slot] or flow.maybe_from_peers[slot]:
                    dropped.append(slot)
            elif not ours:
                replaced.append((slot, member, gradient))
        if dropped:
            flow.drop(dropped)
        for slot, member, gradient in replaced:
            contributed = flow.contributed[slot]
            if (contributed or flow.maybe_from_peers[slot]) and flow.unreduced:
                raise RuntimeError(f".grad of {member.name!r} was replaced, but {_UNREDUCED}")
            if contributed:
                flow.shard.shown(slot).view(member.master.shape).copy_(plain(gradient))
            else:
                flow.add_rows(slot, plain(gradient))
            member.parameter.grad = self._gradient_of(slot)

    def withhold(self) -> None:
        """Let no parameter have a ``.grad`` during a backward, in which its place may hold something else.

        Autograd itself would add to it: a loss may use ``p.to_local()``, this rank's rows, such as for a penalty.
        """
        assert not self._withheld
        for member, watch in zip(self.members, self._watches, strict=True):
            has_gradient = member.parameter.grad is not None
            self._withheld.append((has_gradient, watch.forbidden))
            watch.forbidden = _IN_BACKWARD
            if has_gradient:
                member.parameter.grad = None

    def take_rows(self) -> None:
        """At the end of a backward: take the gradients that it gave to sharded parameters themselves."""
        for slot, member in enumerate(self.members):
            gradient = member.parameter.grad
            if gradient is not None:
                member.parameter.grad = None
                self.flow.add_rows(slot, plain(gradient))
        self.give_back()

    def give_back(self) -> None:
        """Undo :meth:`withhold`."""
        withheld, self._withheld = self._withheld, []
        for slot, (had_gradient, forbidden) in enumerate(withheld):
            self._watches[slot].forbidden = forbidden
            if had_gradient:
                self.members[slot].parameter.grad = self._gradient_of(slot)

    def _gradient_of(self, slot: int) -> RowShardedTensor:
        if slot not in self._gradients:
            member = self.members[slot]
            rows = self.flow.shard.shown(slot).view(member.master.shape)
            self._gradients[slot] = sharded(rows, member.span, self._watches[slot])
        return self._gradients[slot]


_UNREDUCED = (
    "gradients of a backward inside no_sync are not reduced yet: run the last backward outside no_sync, or call "
    "layerzero.clip_grad_norm_, optimizer.step() or optimizer.zero_grad() (under a GradScaler only the first helps)"
)
_IN_BACKWARD = "gradients are not final while a backward runs; read them after it"
