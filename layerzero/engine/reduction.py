"""The order in which gradients are reduced, and the reductions in flight.

[Note: One order on all ranks]
Collectives of one lane must be issued in the same order everywhere, but the moment at which a handle's last gradient
arrives may differ between ranks (unused parameters, data-dependent paths). Handles are therefore started in one fixed
order, and in each backward that exchanges anything every handle is started exactly once: early where it is ready and
its predecessors have started, at the end of the pass otherwise, with zeros for what never arrived.

[Note: Who may ask whether an exchange is done]
How fast an exchange is differs between ranks. gloo has threads for each group, so hop 2 may be launched wherever hop 1
is found done: the order on each lane is all that counts. Other backends want one order over all lanes, and may hang
without it. There hop 2 of a handle is launched just before hop 1 of the next one, or at the end of the pass: the order
is hop 1, hop 2, hop 1, hop 2, whenever gradients arrive and whoever waits for whom in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from layerzero.engine.gradients import Carry, Gradients

__all__ = ["ReductionQueue"]

# Reductions that may wait for their first and for their second exchange before the oldest is waited for. Each holds a
# unit's gradients, whole for the first and a node's part for the second, twice on gloo.
# With more than one first exchange, ranks whose slabs (slabs.py) are both in use could launch in other orders.
_IN_FLIGHT = {1: 1, 2: 4}


class ReductionQueue:
    """Starts the reductions of `order` in that order, and carries them on behind the backward."""

    def __init__(self, order: Sequence[Gradients]) -> None:
        self.order = list(order)
        self._next = 0  # in order: the first one not started in this pass
        self._running: deque[Carry] = deque()
        # See [Note: Who may ask whether an exchange is done].
        topology = order[0].topology if order else None  # the same for all
        self._polls = topology is None or topology.reduce.is_gloo

    def start_ready(self, *, across_replicas: bool) -> None:
        """Start every handle whose gradients are complete and whose predecessors have started; carry on what is done.

        Nothing is waited for, and no later handle's hop 2 passes an earlier one's.
        """
        while self._next < len(self.order) and self.order[self._next].round.complete:
            for due in self._due_before_the_next():
                self._step(due)
            self._step(self._next_carry(across_replicas=across_replicas))
        ahead = None
        for carry in list(self._running) if self._polls else ():
            if (ahead is not None and ahead.launched <= carry.launched) or not carry.done:
                ahead = carry
            else:
                self._step(carry)
                ahead = carry if carry in self._running else ahead

    def finish(self, *, across_replicas: bool) -> None:
        """Start what is left, wait for everything; ends the pass."""
        while self._next < len(self.order):
            for due in self._due_before_the_next():
                self._step(due)
            self._step(self._next_carry(across_replicas=across_replicas))
        self.settle()
        self._next = 0
        if any(gradients.round.begun for gradients in self.order):
            # A reentrant checkpoint delivers a shared parameter's gradient in several portions.
            self.finish(across_replicas=across_replicas)

    def finish_rest(self) -> None:
        """Reduce what backwards inside no_sync have left behind."""
        for gradients in self.order:
            for due in self._due_before_the_next():
                self._step(due)
            self.make_way_for(gradients)
            self._step(self._entered(gradients.carry_rest()))
        self.settle()

    def settle(self) -> None:
        """Wait for everything in flight."""
        while self._running:
            self._step(self._least_advanced())

    def make_way_for(self, gradients: Gradients) -> None:
        """Wait until `gradients` can be added to."""
        while gradients.blocked and self._running:
            self._step(self._least_advanced())

    def abandon(self) -> None:
        """End the pass after a backward that failed.

        What was started is carried to its end: how far it has come is a matter of timing and differs between ranks,
        and their lanes must stay in step.
        """
        self.settle()
        self._next = 0

    def _next_carry(self, *, across_replicas: bool) -> Carry | None:
        """The next handle's gradients, about to set out; None if they have nowhere to go."""
        gradients = self.order[self._next]
        self._next += 1
        self.make_way_for(gradients)
        return self._entered(gradients.carry(across_replicas=across_replicas))

    def _entered(self, carry: Carry | None) -> Carry | None:
        if carry is not None:
            self._running.append(carry)
        return carry

    def _due_before_the_next(self) -> list[Carry]:
        """Whose second exchange comes before the first one of the next handle; see the note above."""
        return [] if self._polls else [carry for carry in self._running if carry.launched < carry.last]

    def _step(self, carry: Carry | None) -> None:
        """Carry one on, and what must make room for it."""
        while carry is not None:
            goes_on = False
            try:
                goes_on = carry.step()
            finally:
                if not goes_on:
                    self._running.remove(carry)
            carry = self._overdue(carry.launched) if goes_on else None

    def _least_advanced(self) -> Carry:
        # So that the next hop 2 is on its way before an earlier one is waited for.
        return min(self._running, key=lambda carry: carry.launched)

    def _overdue(self, launched: int) -> Carry | None:
        """The oldest of those that wait for such an exchange, if they are too many."""
        waiting = [carry for carry in self._running if carry.launched == launched]
        return waiting[0] if len(waiting) > _IN_FLIGHT[launched] else None
