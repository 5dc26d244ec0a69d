"""Order gradient reductions, and limit the number of in-flight reductions.

[Note: Launch order of reductions]
All ranks must launch collectives in the same order across all communicators. Otherwise backends that run one
collective at a time would deadlock. The time at which the last gradient of a handle arrives may differ between ranks,
for example because of unused parameters or data-dependent paths. Two rules make the launch order independent of this
time:

- Reductions are launched in one fixed order of handles. In each backward pass that reduces gradients, the reduction of
  every handle is launched once, with zeros in place of missing gradients. The passes inside a reentrant checkpoint
  launch further ones, so they need the same calls of units on all ranks.
- Reductions are launched only between the backward passes of two unit calls, before the gather for the next call. At
  this point, the reductions of handles whose units have no remaining calls are launched. All other reductions are
  launched at the end of the backward pass. The arrival of a gradient does not trigger a launch.

A launch submits the complete reduction of a handle to the streams: hop 1, accumulation, hop 2, accumulation. Therefore
each communicator has one order of launches, which does not depend on when gradients arrive or how long collectives
take. Hop 1 and hop 2 of different handles overlap. On a device, the host enqueues all collectives in a single
sequence, in which hop 1 and hop 2 alternate, handle by handle.

[Note: Reductions on several meshes]
Ranks may call different experts, in different orders, or no experts. The point at which the calls of an expert end then
differs between ranks. If it launched a reduction, the reduction would precede a gather or a collective of the user's
program on some ranks and follow it on others, and the ranks would wait for each other. Therefore reductions are
launched where all ranks that take part in them are at the same point of the program:

- A unit is common if the unit and all units that contain it are on the root's mesh. All ranks call the common units in
  the same order. Only their calls launch the reductions of common units.
- The reduction of any other unit is launched together with the reduction of a common unit, just before it. This is the
  innermost common unit that contains the other unit and has trainable parameters. When its calls have ended, the calls
  inside it have ended, too, on every rank. Without such a unit, the reduction is launched at the end of the pass.
- If the mesh of the other unit has one replica, only the ranks of one ZeRO-3 group take part, and they call the same
  units in the same order. The end of the unit's calls then launches its reduction, before those that precede it in the
  order of handles.

[Note: End of a backward pass inside no_sync]
On a device, the computation does not wait for the reductions of a backward pass inside no_sync. The next reduction of a
handle runs on the same streams, and therefore adds to the accumulator after the earlier reductions. Buffers are
protected by the events of their pool. In the middle of the next forward pass, the stream that owns scratch memory waits
for the reductions that use it. They have usually completed by then. The memory is returned to the allocator before the
activations reach their maximum. The middle is found by counting the calls of units between two backward passes, so it
is also found if units are skipped or called directly. If a forward pass ends before the middle, the next reductions
reuse the memory. `HandleGradients.reduction` remains set: code that uses the buffers on the compute stream waits for
it. Several handles share the device slabs and the host accumulators. If a model uses either, every backward pass waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from weakref import WeakSet

from layerzero.device.streams import ReductionStreams, Waitable
from layerzero.engine.gradient_storage import GradientStorage
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.reduction_spec import ReductionStage

# Maximum number of reductions that may be in their first and in their second collective. At the maximum, the host waits
# for the oldest reduction. Each reduction keeps the gradients of a unit in memory: full gradients in the first
# collective, a ZeRO-3 gradient shard in the second, and twice that amount on gloo. A first collective may use one of
# the two slabs (gradient_offload.py). The next launch needs the other slab. Therefore the host waits after each launch
# until only one first collective is in flight.
IN_FLIGHT = (1, 2)


class ReductionQueue:
    """Queue that starts the reductions of the handles in `order` on `streams`, one after the other.

    Args:
        inner: handles in `order` whose units are not common. They precede the handle with which they are reduced. See
            [Note: Reductions on several meshes].
    """

    def __init__(
        self,
        order: Sequence[HandleGradients],
        streams: ReductionStreams,
        *,
        inner: Collection[HandleGradients | None] = (),
    ) -> None:
        self.order = list(order)
        self._inner = inner
        self.streams = streams
        self._pools = {pool for each in self.order for pool in (each.pool, each.transport.send_scratch)}
        lasting = all(each.accumulator.storage.lasting for each in self.order)
        self._waits_after_no_sync = not (streams.host_is_ahead and lasting)
        self._prefetches = not lasting
        # Handles to whose accumulators kernels have added since reductions could be launched. See [Note: Two slabs].
        self._exposed: set[HandleGradients] = set()
        self._waiting = dict.fromkeys(self.order)  # handles that this pass has not started, in order
        self._kept: WeakSet[GradientStorage] = WeakSet()  # accumulators that the streams keep until they are done
        self._unit_calls = 0  # calls of units in forward passes since the last backward pass
        self._expected_unit_calls = 0  # the same number before the last backward pass
        self._reducing: list[HandleGradients] = []  # handles whose reductions were started in this pass
        self._events: list[deque[Waitable]] = [
            deque() for _ in IN_FLIGHT
        ]  # events of first and second collectives, oldest first

    def awaits(self, gradients: HandleGradients) -> bool:
        """Return whether the reduction of a handle has not been started in this pass."""
        return gradients in self._waiting

    def start_ready(self, *, across_replicas: bool) -> None:
        """Start the reductions of the next handles in order, up to the first handle that is not ready.

        All ranks must be at the same point of the program.
        """
        ready: list[HandleGradients] = []
        inner: list[HandleGradients] = []  # they start together with the next common handle
        for gradients in self._waiting:
            if gradients.all_arrived:
                inner.append(gradients)
            elif gradients not in self._inner or gradients.mesh_info.replicas > 1:
                break
            if gradients not in self._inner:
                ready, inner = ready + inner, []
        for gradients in ready:
            self._start(gradients, gradients.spec.stages_of_pass(across_replicas=across_replicas))
        while self._exposed:
            self._exposed.pop().incoming.close_until_write()

    def prefetch_next(self) -> None:
        """Prefetch the accumulator of the next handle if accumulators are offloaded. See [Note: Two slabs]."""
        if self._prefetches and self._waiting:
            next(iter(self._waiting)).prefetch()

    def record_exposed(self, gradients: HandleGradients) -> None:
        """Record that a kernel may add to the accumulator of a handle, which has not been launched since then."""
        if self._prefetches:
            self._exposed.add(gradients)

    def start_inner(self, ended: Iterable[HandleGradients], *, across_replicas: bool) -> None:
        """Start the reductions of those handles in `ended` that are ready, before the handles that precede them.

        Only the ranks of the handles' mesh, which has one replica, must be at the same point of the program. See
        [Note: Reductions on several meshes].
        """
        for gradients in ended:
            if gradients.all_arrived:
                self._start(gradients, gradients.spec.stages_of_pass(across_replicas=across_replicas))

    def finish(self, *, across_replicas: bool) -> None:
        """Start the reductions of the remaining handles, and end the pass.

        Wait for all reductions, unless [Note: End of a backward pass inside no_sync] applies.
        """
        for gradients in list(self._waiting):
            self._start(gradients, gradients.spec.stages_of_pass(across_replicas=across_replicas))
        if across_replicas or self._waits_after_no_sync:
            self.wait_for_in_flight()
        else:
            for gradients in self.order:
                storage = gradients.accumulator.storage
                if gradients.reduction is not None and storage not in self._kept:
                    self._kept.add(storage)  # the model may be deleted before the reduction has run
                    self.streams.keep_until_done(storage.stored_tensor())
        self._waiting = dict.fromkeys(self.order)
        if self._unit_calls:
            self._expected_unit_calls, self._unit_calls = self._unit_calls, 0
        if any(gradients.arrived for gradients in self.order):
            # A reentrant checkpoint produces the gradient of a shared parameter in several parts.
            self.finish(across_replicas=across_replicas)
        # A call that ended after the launch of its reduction has closed the next reduction.
        for gradients in self.order:
            gradients.end_pass()

    def finish_accumulated(self) -> None:
        """Reduce the gradients that backward passes inside no_sync have accumulated."""
        self._waiting.clear()  # so that no accumulator is prefetched
        try:
            for gradients in self.order:
                gradients.wait_for_reduction()
                self._start(gradients, gradients.spec.remaining_stages)
        except BaseException:
            self.drain()
            raise
        self._waiting = dict.fromkeys(self.order)
        self.wait_for_in_flight()

    def wait_for_in_flight(self) -> None:
        """Make later work wait for all in-flight reductions."""
        try:
            self.streams.synchronize(self._events)
        finally:
            if not any(self._events):  # otherwise an interrupt ended the wait, and reductions are still in flight
                while self._reducing:
                    self._reducing.pop().reduction = None
                self.trim()

    def trim(self) -> None:
        """Return the memory of released buffers to the device's allocator. On the CPU, this has no effect."""
        for pool in self._pools:
            pool.trim()

    def record_unit_call(self) -> None:
        """Record a call of a unit in a forward pass, and trim the pools in the middle of the forward pass."""
        self._unit_calls += 1
        if self._unit_calls == max(1, self._expected_unit_calls // 2):
            self.trim()

    def drain(self) -> None:
        """End a failed pass, and make later work wait for the gradients that have arrived.

        Reductions that were started are completed. Their progress differs between ranks, but all ranks must launch the
        same collectives. Further errors are suppressed, because they either follow from the first error or recur in the
        next collective.
        """
        with suppress(Exception):
            self.wait_for_in_flight()
        self.streams.record_gradients_event().wait()
        self._waiting = dict.fromkeys(self.order)

    def _start(self, gradients: HandleGradients, stages: Sequence[ReductionStage]) -> None:
        self._waiting.pop(gradients, None)
        self._exposed.discard(gradients)
        self._reducing.append(gradients)
        arrived = list(gradients.arrived.values())  # their memory may be reused only after the streams have joined
        with self.streams.joined_with_gradients():
            reduction = gradients.create_reduction(stages)
        del arrived
        if reduction is not None:
            self.streams.check()
            reduction.submit(self.streams)
            for events, event, limit in zip(self._events, reduction.finished_events, IN_FLIGHT, strict=False):
                events.append(event)
                self.streams.limit_in_flight(events, limit)
        self.prefetch_next()
