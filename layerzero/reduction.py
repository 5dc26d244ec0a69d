"""The order in which gradients are reduced, and the reductions in flight.

[Note: One order on all ranks]
Collectives of one lane must be issued in the same order everywhere, but the moment at which a handle's last gradient
arrives may differ between ranks (unused parameters, data-dependent paths). Handles are therefore started in one fixed
order, and in each backward that exchanges anything every handle is started exactly once: early where it is ready and
its predecessors have started, at the end of the pass otherwise, with zeros for what never arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from layerzero.collectives import PendingSum
from layerzero.gradients import GradientFlow, Phases
from layerzero.handle import Handle

__all__ = ["ReductionQueue"]

# Reductions that may wait for their first and for their second exchange before the oldest is waited for. Each holds a
# unit's gradients, whole for the first and a node's part for the second, twice on gloo.
# With more than one first exchange, ranks whose slabs (accumulator.py) are both in use could launch in other orders.
_IN_FLIGHT = {1: 1, 2: 4}


class _Running:
    """A reduction under way: its phases, the exchange it waits for, and how many exchanges it has launched."""

    __slots__ = ("launched", "pending", "phases")

    def __init__(self, phases: Phases, pending: PendingSum) -> None:
        self.phases = phases
        self.pending = pending
        self.launched = 1


class ReductionQueue:
    """Starts the reductions of `order` in that order, and carries them on behind the backward."""

    def __init__(self, order: Sequence[Handle]) -> None:
        self.order = list(order)
        self._next = 0  # in order: the first handle not started in this pass
        self._running: deque[_Running] = deque()

    def reorder(self, order: Sequence[Handle]) -> None:
        assert not self._next and not self._running
        assert set(order) == set(self.order)
        self.order = list(order)

    def start_ready(self, *, across_replicas: bool) -> None:
        """Start every handle whose gradients are complete and whose predecessors have started."""
        while self._next < len(self.order) and _flow(self.order[self._next]).round.complete:
            self._start(self.order[self._next], across_replicas=across_replicas)
        self.advance()

    def finish(self, *, across_replicas: bool) -> None:
        """Start what is left, wait for everything; ends the pass."""
        while self._next < len(self.order):
            self._start(self.order[self._next], across_replicas=across_replicas)
        self.settle()
        self._next = 0
        if any(_flow(handle).round.begun for handle in self.order):
            # A reentrant checkpoint delivers a shared parameter's gradient in several portions.
            self.finish(across_replicas=across_replicas)

    def finish_rest(self) -> None:
        """Reduce what backwards inside no_sync have left behind."""
        for handle in self.order:
            flow = _flow(handle)
            self._run(flow, flow.reduce_rest())
        self.settle()

    def settle(self) -> None:
        """Wait for everything in flight."""
        while self._running:
            self._carry_on()

    def make_way_for(self, flow: GradientFlow) -> None:
        """Wait until `flow` can take gradients."""
        while flow.blocked and self._running:
            self._carry_on()

    def advance(self) -> None:
        """Carry on what is done, without waiting, and without letting a later handle's hop 2 pass an earlier one's."""
        ahead = None
        for running in list(self._running):
            if (ahead is not None and ahead.launched <= running.launched) or not running.pending.done():
                ahead = running
                continue
            self._step(running)
            ahead = running if running in self._running else ahead

    def abandon(self) -> None:
        """End the pass after a backward that failed.

        What was started is carried to its end: how far it has come is a matter of timing and differs between ranks,
        and their lanes must stay in step.
        """
        self.settle()
        self._next = 0

    def _start(self, handle: Handle, *, across_replicas: bool) -> None:
        self._next += 1
        flow = _flow(handle)
        self._run(flow, flow.reduce(across_replicas=across_replicas))

    def _carry_on(self) -> None:
        # The least advanced first, so that the next hop 2 is on its way before an earlier one is waited for.
        self._step(min(self._running, key=lambda running: running.launched))

    def _run(self, flow: GradientFlow, phases: Phases) -> None:
        self.make_way_for(flow)
        pending = next(phases, None)
        if pending is None:
            return
        self._running.append(_Running(phases, pending))
        self._make_room(1)

    def _step(self, running: _Running) -> None:
        pending = next(running.phases, None)
        if pending is None:
            self._running.remove(running)
        else:
            running.pending = pending
            running.launched += 1
            self._make_room(running.launched)

    def _make_room(self, launched: int) -> None:
        waiting = [running for running in self._running if running.launched == launched]
        if len(waiting) > _IN_FLIGHT[launched]:
            self._step(waiting[0])


def _flow(handle: Handle) -> GradientFlow:
    assert handle.flow is not None, f"{handle.name} is frozen"
    return handle.flow
