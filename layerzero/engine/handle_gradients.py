"""The gradients of one handle: its sums on the ladder, and the way from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, LaunchedCollective, PendingReduction, reduce_scatter
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.waiting import record_wait
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.gradient_storage import AliasedStorage, GradientStorage, Lease, PersistentStorage, PooledStorage
from layerzero.device.host_storage import HostStorage
from layerzero.device.streams import ReductionStreams, Waitable
from layerzero.engine.gradient_buffer import GradientBuffer
from layerzero.engine.reduction_spec import ReductionSpec, ReductionStage
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.shard_grid import Extent
from layerzero.layout.usage import GradUsage

__all__ = ["HandleGradients", "HandleReduction", "Inspect", "PendingSlots"]

Inspect = Callable[[Sequence[tuple[int, Tensor]]], None]


class MakeStorage(Protocol):
    def __call__(self, numel: int, dtype: torch.dtype, *, sent_in_node: bool) -> GradientStorage:
        """`sent_in_node`: hop 1 sends it, if there is one."""


class HandleGradients:
    """Sums and usage of one trainable handle.

    A backward calls :meth:`arrive` per parameter. When all have arrived, or the pass ends, :meth:`carry` takes the
    result down the ladder, as far as the pass requires.

    Args:
        label: for traces: the unit's name.
        make_place: gives the memory for what waits between backwards.
        pool: lends scratch.
        outgoing: lends scratch for what hop 1 sends.
        to_host: carries the final gradient to the host, where it is used; None: it is used on the device.
    """

    def __init__(
        self,
        layout: FlatLayout,
        route: ReductionSpec,
        *,
        label: str,
        master: torch.dtype,
        topology: MeshInfo,
        pool: BufferPool,
        outgoing: BufferPool,
        make_place: MakeStorage,
        to_host: HostDeviceCopies | None = None,
    ) -> None:
        self.spec = route
        self._accumulating = route.between(route.incoming_extent, route.accumulator_extent)
        self._rest = route.between(route.accumulator_extent, Extent.ZERO1)
        self.label = label
        self.topology = topology
        self.pool = pool
        self.outgoing = outgoing
        self._to_host = to_host
        self._layout = layout
        self.buffers: dict[Extent, GradientBuffer] = {}
        for extent in sorted(
            {route.incoming_extent, route.accumulator_extent, Extent.ZERO1, *(leg.target for leg in route.stages)},
            reverse=True,
        ):
            dtype = route.incoming_dtype if extent is route.incoming_extent else master
            place = self._place(extent, dtype, make_place)
            self.buffers[extent] = GradientBuffer(layout, topology.grid, extent, place)
        self.incoming = self.buffers[route.incoming_extent]
        self.accumulator = self.buffers[route.accumulator_extent]
        self.final = self.buffers[Extent.ZERO1]
        self.pending_slots = PendingSlots(len(layout.slots))
        self.usage = bytearray(len(layout.slots))  # a Usage for each slot
        self.reduction: Waitable | None = None  # ends when what is on its way down the ladder has come
        self.inspect: Inspect | None = None  # sees what has landed, by slot, before it is sent

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Of hop 2: elements that each replica gets, where they differ."""
        return self.topology.grid.replica_part_sizes(self._layout)

    def recut(self, layout: FlatLayout) -> None:
        """Sum up for other ZeRO-1 shards from here on. Nothing is held, and there are several replicas."""
        assert layout.slots == self._layout.slots and self.accumulator is not self.final
        self._layout = layout
        place = self._final_place(self.final.storage.dtype)
        self.final = self.buffers[Extent.ZERO1] = GradientBuffer(layout, self.topology.grid, Extent.ZERO1, place)

    def _place(self, extent: Extent, dtype: torch.dtype, make_place: MakeStorage) -> GradientStorage:
        """Where the sum of an extent has its memory: decided here alone."""
        if extent is Extent.ZERO1:
            return self._final_place(dtype)
        numel = self.topology.grid.numel(self._layout, extent)
        if extent is self.spec.accumulator_extent:
            return make_place(numel, dtype, sent_in_node=extent is Extent.FULL)
        return PooledStorage(numel, dtype, self.outgoing if extent is Extent.FULL else self.pool)

    def _final_place(self, dtype: torch.dtype) -> GradientStorage:
        grid, node = self.topology.grid, self.buffers.get(Extent.ZERO3)
        if self._to_host is not None:
            return HostStorage(grid.numel(self._layout, Extent.ZERO1), dtype, self._to_host, self.pool)
        if node is not None and self.spec.accumulator_extent is Extent.ZERO3 and node.storage.lasting:
            return AliasedStorage(node.storage, grid.slice_within(self._layout, Extent.ZERO1, Extent.ZERO3))
        return PersistentStorage(grid.numel(self._layout, Extent.ZERO1), dtype, self.pool.device)

    # What it holds

    @property
    def unreduced(self) -> bool:
        """Contributions wait for an exchange before the final gradient is complete."""
        return self.accumulator is not self.final and not self.accumulator.empty

    @property
    def slots_of_peers(self) -> bool:
        """What other ranks of the node have contributed, of which they have not told yet."""
        return self.spec.accumulator_is_reduced and not (self.accumulator.empty and self.final.empty)

    @property
    def used(self) -> bool:
        """Some parameter has been contributed to on this rank, or is known to have been on another."""
        return bool(self.usage) and max(self.usage) >= GradUsage.SEEN

    def is_used(self, slot: int) -> bool:
        return self.usage[slot] >= GradUsage.SEEN

    def record_usage(self, anywhere: bytes) -> None:
        """Take the Usage of each slot that the ranks have agreed on; a final gradient is going to be shown."""
        for slot, use in enumerate(anywhere):
            if use >= GradUsage.SEEN:
                self.usage[slot] = GradUsage.SEEN

    @property
    def is_blocked(self) -> bool:
        """What waits cannot be used before an exchange in flight has ended."""
        return self.reduction is not None or (not self.accumulator.storage.lasting and self.accumulator.storage.blocked)

    @property
    def landing_blocked(self) -> bool:
        """No gradient can be taken before an exchange in flight has ended."""
        return self.incoming is self.accumulator and self.is_blocked

    @property
    def no_sync_saves(self) -> bool:
        """A backward that reduces sends more than one that only accumulates."""
        return len(self.spec.stages) > len(self._accumulating)

    # One backward pass

    def receive(self, slot: int, gradient: Tensor) -> None:
        """Accept the full gradient of one parameter, in any floating dtype and the parameter's shape."""
        self.pending_slots.mark_arrived(slot)
        self.usage[slot] = GradUsage.NEW
        self.incoming.add(slot, gradient, self.spec.incoming_scale)

    def take(self, slot: int) -> None:
        """A kernel has added one parameter's gradient to what it was offered; as :meth:`arrive`."""
        self.incoming.mark_written(slot)
        self.pending_slots.mark_arrived(slot)
        self.usage[slot] = GradUsage.NEW

    @property
    def offers_main_grad(self) -> bool:
        return self.incoming is self.accumulator and self.spec.incoming_scale == 1.0

    def prefetch(self) -> None:
        """Gradients will arrive soon."""
        if self.incoming is self.accumulator:
            self.incoming.storage.prefetch(keep=not self.incoming.untouched)

    def start_reduction(self, *, across_replicas: bool) -> HandleReduction | None:
        """Take what has landed to where it waits, or (`across_replicas`) to the final gradient; ends the round.

        The result is to be handed to streams; None where nothing is to be exchanged.
        """
        self.pending_slots.end()
        return self._carry(self.spec.stages if across_replicas else self._accumulating)

    def start_rest(self) -> HandleReduction | None:
        """Take to the final gradient what backwards inside no_sync have left behind."""
        return self._carry(self._rest)

    def _carry(self, legs: Sequence[ReductionStage]) -> HandleReduction | None:
        if not legs:
            self.incoming.rest()
            return None
        if self.inspect is not None and legs[0].source is self.spec.incoming_extent:
            self.inspect(self.incoming.filled_parts())
        return HandleReduction(self, legs)

    def abort(self) -> None:
        """Forget the round under way, after a backward that failed."""
        self.pending_slots.end()
        self.incoming.withdraw(range(len(self.usage)))  # a kernel may have written there
        if self.incoming is not self.accumulator:
            self.incoming.discard()

    # What the user contributes and takes back

    def add_rows(self, slot: int, rows: Tensor) -> None:
        """Add this rank's rows of a gradient that no exchange need carry, of the master's shape."""
        if self.reduction is not None:
            self.reduction.wait()
        self.final.add(slot, rows)
        self.final.rest()
        self.usage[slot] = GradUsage.NEW

    def drop(self, slots: Sequence[int]) -> None:
        """Forget every contribution to some parameters: they have no gradient."""
        for slot in slots:
            self.usage[slot] = GradUsage.NONE
        slots = slots if any(self.usage) else range(len(self.usage))
        for each in self.buffers.values():
            each.clear(slots)
        if not any(self.usage):
            self.final.settle()

    def zero(self, slot: int) -> None:
        """Forget every contribution to one parameter, but let it have a gradient of zero."""
        self.drop([slot])
        self.final.zero(slot)
        self._come_home()
        self.usage[slot] = GradUsage.SEEN

    def replace(self, slot: int, rows: Tensor) -> None:
        """Let a final gradient be another one: this rank's rows of it."""
        self.final.overwrite(slot, rows)
        self._come_home()

    def _come_home(self) -> None:
        """The user reads the final gradient next."""
        self.final.rest()
        self.final.storage.wait_for_host()


class PendingSlots:
    """Slots of one handle whose gradients are expected or have arrived in one backward.

    The reduction of the handle may be launched when the round is `ready`; see [Note: One order on all ranks] in
    reduction_queue.py.
    """

    def __init__(self, slots: int) -> None:
        self._trained = (1 << slots) - 1
        self._missing = self._trained  # expected in this round, and not arrived
        self._arrived = 0
        self._closed = False  # the backward has passed all calls of the unit

    @property
    def ready(self) -> bool:
        return self._closed and not self._missing

    @property
    def has_begun(self) -> bool:
        return self._arrived != 0

    def mark_arrived(self, slot: int) -> None:
        self._arrived |= 1 << slot
        self._missing &= ~self._arrived

    def close(self, is_coming: Callable[[int], bool]) -> None:
        """Stop expecting gradients that cannot come any more: the backward has passed all calls of the unit."""
        self._closed = True
        if self._missing:
            coming = _set(map(is_coming, range(self._trained.bit_length())))
            self._missing &= coming

    def end(self) -> None:
        """The pass needs no more of this handle: the next arrival starts a new round."""
        self._arrived = 0
        self._missing = self._trained
        self._closed = False

    def set_trainable(self, trained: Sequence[bool]) -> None:
        """From the next round on, expect gradients of these slots."""
        self._trained = _set(trained)
        self.end()


def _set(members: Iterable[bool]) -> int:
    return sum(1 << index for index, member in enumerate(members) if member)


class HandleReduction:
    """One handle's gradients on their way along some legs of their route. One exchange is in flight at a time.

    Attributes:
        buffers_written: of each exchange: a mark that it has been added up; from :meth:`hand_to` on.
    """

    def __init__(self, gradients: HandleGradients, legs: Sequence[ReductionStage]) -> None:
        self.gradients = gradients
        self.buffers_written: list[Waitable] = []
        self._legs = legs
        self._pending: PendingReduction | None = None  # the exchange in flight
        self._leases: tuple[Lease, ...] = ()  # of it
        self._issued: list[LaunchedCollective] = []  # the exchanges so far
        self._streams: ReductionStreams  # that it was handed to

    def add_on(self, streams: ReductionStreams) -> None:
        """Give all that is to be done to the streams, once. See [Note: Streams] in device/streams.py.

        Where only some handles have a hop 1 to go ("full" ones, after no_sync), a hop 2 that comes first waits for
        those that follow one: else timing would decide their order on the replica axis.
        """
        self._streams = streams
        ledger, label = self.gradients.topology.counters, self.gradients.label
        stream = streams.launches
        stream.wait_event(streams.gradients_ready())
        if self._legs[0].collective is Collective.HOP2 and self.gradients.topology.zero3_size > 1:
            stream.wait_event(streams.node.record_event(partial(record_wait, ledger, Collective.HOP1)))
        stream.run(partial(self._launch, self._legs[0], is_first=True))
        for number, (leg, following) in enumerate(zip(self._legs, (*self._legs[1:], None), strict=True)):
            launched = stream.record_event()
            stream = streams.node if leg.collective is Collective.HOP1 else streams.replica
            stream.wait_event(launched)
            stream.wait_event(self)
            stream.run(partial(self._go_on, leg, following))
            waiting = partial(record_wait, ledger, leg.collective, label, self._issued, number)
            self.buffers_written.append(stream.record_event(waiting))
        self.gradients.reduction = self.buffers_written[-1]

    # For the streams: the exchange in flight

    def wait(self) -> None:
        """A failure ends the carry: what is left of it does nothing."""
        if self._pending is not None:
            try:
                self._pending.wait(beside=self._streams.off_main_thread)
            except BaseException:
                self._pending = None
                self._end_leases()
                raise

    def _go_on(self, leg: ReductionStage, following: ReductionStage | None) -> None:
        """Add up what an exchange has brought, and launch the next one: nobody takes its slab in between."""
        if self._pending is not None:  # else it has failed
            pending, self._pending = self._pending, None
            with self.gradients.accumulator.storage.guard:
                self._land(leg, pending, is_last=following is None)
                if following is not None:
                    self._launch(following, is_first=False)

    def _launch(self, leg: ReductionStage, *, is_first: bool) -> None:
        gradients = self.gradients
        if leg.collective is Collective.HOP2 and self._streams.failed:
            return  # a hop 2 was left out: the next one would meet it on other ranks, which wait, and are told
        source, target = gradients.buffers[leg.source], gradients.buffers[leg.target]
        if leg.source is Extent.ZERO3:
            gradients.final.vacate()
        source.seal()
        lane, pool = gradients.topology.replica_comm, gradients.pool
        if leg.collective is Collective.HOP1:
            lane, pool = gradients.topology.zero3_reduce_comm, gradients.outgoing
        # A second exchange is waited for later: others may need the slab until then.
        sent = source.storage.lend_send_buffer(leg.wire_dtype, pool, copies=not is_first and not source.storage.lasting)
        if target.storage.lasting:
            self._leases = (sent,)
        else:
            target.storage.prefetch(keep=not target.untouched)
            self._leases = (sent, target.storage.lease())
        parts = gradients.parts if leg.collective is Collective.HOP2 else None
        self._pending = reduce_scatter(
            lane, leg.collective, sent.tensor, pool, wire=leg.wire_dtype, name=gradients.label, parts=parts
        )
        self._issued.append(self._pending.work.issued)

    def _land(self, leg: ReductionStage, pending: PendingReduction, *, is_last: bool) -> None:
        target, final = self.gradients.buffers[leg.target], self.gradients.final
        try:
            if target is final:
                final.settle()
            elif leg.target is Extent.ZERO3:
                final.vacate()
            target.add_exchange(pending, scale=leg.scale)
            if is_last:
                target.rest()
        finally:
            self._end_leases()

    def _end_leases(self) -> None:
        leases, self._leases = self._leases, ()
        for lease in leases:
            lease.end()
