"""The order in which gradients are reduced, and the reductions in flight.

[Note: One order on all ranks]
All ranks must launch collectives in one order, over all communicators together: backends that run one collective at a
time deadlock otherwise. The time at which a handle's last gradient arrives may differ between ranks (unused parameters,
data-dependent paths). Two rules make the order independent of it:

- Reductions are launched in one fixed order of handles. In each backward that reduces, every handle is launched
  exactly once, with zeros for gradients that never arrived.
- They are launched only between the backwards of two calls of units, before the gather for the next one. These are the
  handles of units without a remaining call. The rest is launched at the end of the backward. An arriving gradient
  launches nothing.

When a handle is started, all of its reduction is handed to the streams: hop 1, adding up, hop 2, adding up. So
each lane has one order of launches, whenever gradients arrive and however long exchanges take, and lanes overlap as
they can; on a device all launches have one order: hop 1, hop 2, hop 1, hop 2 by handle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from layerzero.device.streams import ReductionStreams, Waitable
from layerzero.engine.handle_gradients import HandleGradients, HandleReduction

__all__ = ["IN_FLIGHT", "ReductionQueue"]

# Reductions that may wait for their first and for their second exchange before the host waits for the oldest. Each
# holds a unit's gradients, whole for the first and a node's part for the second, twice on gloo.
# With more than one first exchange, ranks whose slabs (gradient_offload.py) are both in use could launch in another
# order.
IN_FLIGHT = (1, 2)


class ReductionQueue:
    """Starts the reductions of `order` in that order, on `streams`."""

    def __init__(self, order: Sequence[HandleGradients], streams: ReductionStreams) -> None:
        self.order = list(order)
        self.streams = streams
        self._next = 0  # in order: the first one not started in this pass
        self._carried: list[HandleGradients] = []  # started in this pass
        self._landings: list[deque[Waitable]] = [deque() for _ in IN_FLIGHT]  # first and second ones, oldest first

    def start_ready(self, *, across_replicas: bool) -> None:
        """Start every handle that is ready and whose predecessors have started."""
        order = self.order
        while self._next < len(order) and order[self._next].pending_slots.ready:
            self._start(self._next_carry(across_replicas=across_replicas))

    def finish(self, *, across_replicas: bool) -> None:
        """Start what is left, wait for everything; ends the pass."""
        while self._next < len(self.order):
            self._start(self._next_carry(across_replicas=across_replicas))
        self.settle()
        self._next = 0
        if any(gradients.pending_slots.has_begun for gradients in self.order):
            # A reentrant checkpoint delivers a shared parameter's gradient in several portions.
            self.finish(across_replicas=across_replicas)
        for gradients in self.order:  # a call that ends after its reduction was launched has closed the next round
            gradients.pending_slots.end()

    def finish_rest(self) -> None:
        """Reduce what backwards inside no_sync have left behind."""
        for gradients in self.order:
            self.wait_until_writable(gradients)
            self._carried.append(gradients)
            self._start(gradients.start_rest())
        self.settle()

    def settle(self) -> None:
        """What follows comes after everything in flight."""
        try:
            self.streams.synchronize(self._landings)
        finally:
            if not any(self._landings):  # else it was interrupted, and left in flight
                while self._carried:
                    self._carried.pop().reduction = None

    def wait_until_writable(self, gradients: HandleGradients) -> None:
        """Wait until `gradients` can be added to."""
        if gradients.reduction is not None:
            gradients.reduction.wait()
            gradients.reduction = None
        for landings in self._landings:  # of others, which hold what it needs
            while gradients.is_blocked and landings:
                landings.popleft().wait()

    def abandon(self) -> None:
        """End the pass of a failed backward, and order later work after the gradients that have arrived.

        What was started is carried to its end: how far it has come is a matter of timing and differs between ranks,
        and their lanes must stay in step. What else has failed follows from it, or is told by the next exchange.
        """
        with suppress(Exception):
            self.settle()
        self.streams.gradients_ready().wait()
        self._next = 0

    def _next_carry(self, *, across_replicas: bool) -> HandleReduction | None:
        """The next handle's gradients, about to set out; None if they have nowhere to go."""
        gradients = self.order[self._next]
        self._next += 1
        self.wait_until_writable(gradients)
        self._carried.append(gradients)
        return gradients.start_reduction(across_replicas=across_replicas)

    def _start(self, carry: HandleReduction | None) -> None:
        if carry is not None:
            self.streams.check()
            carry.add_on(self.streams)
            for landings, landed, most in zip(self._landings, carry.buffers_written, IN_FLIGHT, strict=False):
                landings.append(landed)
                self.streams.limit_in_flight(landings, most)
