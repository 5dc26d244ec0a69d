"""Manage the gradient buffers of one handle, and the reductions between these buffers.

[Note: Error feedback]
A codec with error feedback rounds each message of hop 2, and adds the rounding errors to the next message of the same
handle. The errors of a message belong to the gradient in which the message was used. If this gradient is dropped
without a step (a skipped step, or an exception), the errors are dropped, too. The errors of a handle are kept or
dropped together. They are kept if a step has used the gradient of at least one of its parameters. If the gradient is
clipped before a step, the errors are multiplied by the same coefficient, or set to zero if it is not finite. Otherwise
the error of one very large gradient would enter the next steps unclipped. If masters change outside of a step, the
errors are dropped as well. They are not stored in checkpoints. A handle that no rank has used in a backward pass is
reduced like all others. Its message then contains the stored errors, which are lost, because the parameters get no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from layerzero.comm.codecs import EncodedPartsSpec, has_feedback, residual_numel
from layerzero.comm.collectives import (
    Collective,
    Communicator,
    PendingReduction,
    encoded_reduce_scatter,
    reduce_scatter,
)
from layerzero.comm.transport.base import SendBuffer
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.streams import ReductionStreams, Stream, Waitable
from layerzero.engine.gradient_buffer import GradientBuffer
from layerzero.engine.gradient_storage import (
    AliasedStorage,
    GradientStorage,
    HostStorage,
    PersistentStorage,
    PooledStorage,
)
from layerzero.engine.reduction_spec import ReductionSpec, ReductionStage
from layerzero.engine.resources import MeshResources
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.grad_usage import GradUsage
from layerzero.layout.shard_grid import Extent

Inspect = Callable[[Sequence[tuple[int, Tensor]]], None]

# Maximum number of bytes of a handle's gradients that wait to be added to memory that exists between passes.
_MOST_WAITING = 1 << 25


class HandleGradients:
    """Gradient buffers of one trainable handle, and a record of which parameters have contributions.

    A backward pass calls :meth:`receive` for each parameter. When all gradients have arrived, or the pass ends,
    :meth:`create_reduction` adds them to the incoming buffer and returns the reduction that the pass requires. If the
    incoming buffer needs no scratch memory, gradients are added before they use much memory of their own.

    Args:
        spec: stages of the reduction.
        label: name of the unit, for traces.
        master: dtype of the masters.
        mesh: transport and pools.
        to_host: object that copies the final gradient to the host, or None if the optimizer runs on the device.

    Attributes:
        accumulator: buffer that stores gradients between backward passes; see [Note: Separate accumulators] in
            reduction_spec.py.
        final: buffer of the final gradient.
        reduction: event that completes with the in-flight reduction, or None if no reduction is in flight.
        arrived: gradients that have arrived in the current backward pass, by slot. None: the gradient is already in the
            incoming buffer.
        spec: stages of the reduction. A new spec may differ from it only in its scales, and needs no accumulated
            gradients.
        awaited: slots whose gradients are expected after the last call of the unit, or None before its end.
        incoming: buffer to which the current backward pass adds the gradients from autograd.
    """

    def __init__(
        self,
        layout: FlatLayout,
        spec: ReductionSpec,
        *,
        label: str,
        master: torch.dtype,
        mesh: MeshResources,
        to_host: HostDeviceCopies | None = None,
    ) -> None:
        self.spec = spec
        self.label = label
        self.mesh_info = mesh.mesh_info
        self.transport = mesh.transport
        self.pool = mesh.pools.scratch
        self._accumulators = mesh.pools.accumulators
        self._to_host = to_host
        self._layout = layout
        self.buffers: dict[Extent, GradientBuffer] = {}  # excludes a separate accumulator
        self._separate = None if spec.separate_dtype is None else self._separate_accumulator(spec.separate_dtype)
        targets = (stage.target for stage in spec.stages)
        for extent in sorted({spec.incoming_extent, spec.accumulator_extent, Extent.ZERO1, *targets}, reverse=True):
            dtype = spec.incoming_dtype if extent is spec.incoming_extent else master
            self.buffers[extent] = GradientBuffer(layout, mesh.mesh_info.grid, extent, self._storage(extent, dtype))
        self.accumulator = self._separate or self.buffers[spec.accumulator_extent]
        self.final = self.buffers[Extent.ZERO1]
        self.begin_pass(reduces=True)
        self.arrived: dict[int, Tensor | None] = {}
        self._arrived_bytes = 0  # bytes in `arrived` for which the accumulator has memory
        self.awaited: set[int] | None = None
        self.usage = bytearray(len(layout.slots))  # a GradUsage for each slot
        self.reduction: Waitable | None = None
        self.residual: Tensor | None = None  # 1-D, bf16; see [Note: Error feedback]
        self._residual_is_applied = False  # True if a step has used the gradient of at least one parameter
        self._live_slots: set[int] = set()  # slots whose gradients were not dropped since the errors were stored
        self.inspector: Inspect | None = None  # called with incoming gradients by slot, before they are sent

    @property
    def replica_part_sizes(self) -> tuple[int, ...] | None:
        """Numbers of elements that the replicas receive in hop 2, by replica, or None if they are equal."""
        return self.mesh_info.grid.replica_part_sizes(self._layout)

    @cached_property
    def encoded_parts_spec(self) -> EncodedPartsSpec | None:
        """Codec and sizes of the encoded messages of hop 2, or None if hop 2 does not encode its messages."""
        for stage in self.spec.stages:
            if stage.codec is not None:
                return EncodedPartsSpec.of(stage.codec, self._layout, self.mesh_info.grid, stage.wire_dtype)
        return None

    def change_layout(self, layout: FlatLayout) -> None:
        """Change to the ZeRO-1 shards of `layout`. The model must have several replicas, and no gradients."""
        assert layout.slots == self._layout.slots and self.mesh_info.grid.replicas > 1
        self._layout = layout
        self.residual = None
        self.__dict__.pop("encoded_parts_spec", None)
        storage = self._final_storage(self.final.storage.dtype)
        self.final = self.buffers[Extent.ZERO1] = GradientBuffer(layout, self.mesh_info.grid, Extent.ZERO1, storage)
        self.accumulator = self._separate or self.buffers[self.spec.accumulator_extent]
        self.begin_pass(reduces=True)

    def _separate_accumulator(self, dtype: torch.dtype) -> GradientBuffer:
        extent, grid = self.spec.accumulator_extent, self.mesh_info.grid
        storage = self._accumulators.make(grid.numel(self._layout, extent), dtype)
        return GradientBuffer(self._layout, grid, extent, storage, rounds_once=True)

    def _storage(self, extent: Extent, dtype: torch.dtype) -> GradientStorage:
        """Return the memory for the buffer of one extent."""
        if extent is Extent.ZERO1:
            return self._final_storage(dtype)
        numel, is_sent = self.mesh_info.grid.numel(self._layout, extent), extent is Extent.FULL
        if extent is self.spec.accumulator_extent and self._separate is None:
            send_buffer = self.transport.send_buffer if is_sent else None
            return self._accumulators.make(numel, dtype, send_buffer)
        is_sent = is_sent and dtype is self.spec.stages[0].wire_dtype  # otherwise, a rounded copy is sent
        return PooledStorage(numel, dtype, self.transport.send_scratch if is_sent else self.pool)

    def _final_storage(self, dtype: torch.dtype) -> GradientStorage:
        grid, accumulator = self.mesh_info.grid, self._separate or self.buffers.get(self.spec.accumulator_extent)
        numel = grid.numel(self._layout, Extent.ZERO1)
        if self._to_host is not None:
            return HostStorage(numel, dtype, self._to_host, self.pool)
        if (
            accumulator is None
            or not accumulator.storage.lasting
            or not self.spec.fits_final(self._layout, grid, dtype)
        ):
            return PersistentStorage(SendBuffer(numel, dtype, self.pool.device))
        part = grid.slice_within(self._layout, Extent.ZERO1, Extent.ZERO3)
        if self._separate is not None:
            part = slice(0, numel * dtype.itemsize // accumulator.storage.dtype.itemsize)
        return AliasedStorage(accumulator.storage, part, dtype)

    # Error feedback

    def take_residual(self) -> Tensor | None:
        """Return the errors to add to the gradients before they are encoded again, or None without error feedback.

        The tensor is 1-D, bf16. Encoding overwrites it with the new errors. Call this method only when the next message
        is created, because it changes the state of the errors.
        """
        encoded = self.encoded_parts_spec
        if encoded is None or not has_feedback(encoded.codec):
            return None
        if self.residual is None:
            numel = residual_numel(self._layout, self.mesh_info.grid)
            self.residual = torch.zeros(numel, dtype=torch.bfloat16, device=self.pool.device)
        self._residual_is_applied, self._live_slots = False, set(range(len(self.usage)))
        return self.residual

    @property
    def residual_to_scale(self) -> Tensor | None:
        """Residuals of messages whose gradients no optimizer step has used yet. None if there are none."""
        return None if self._residual_is_applied else self.residual

    def record_step(self, slots: Iterable[int]) -> None:
        """Record that an optimizer has updated the parameters at `slots`."""
        self._residual_is_applied |= any(self.usage[slot] for slot in self._live_slots.intersection(slots))

    def record_drop(self, slots: Iterable[int]) -> None:
        """Record that the final gradients at `slots` have been dropped or set to zero."""
        self._live_slots.difference_update(slots)
        if not self._residual_is_applied and not any(self.usage[slot] for slot in self._live_slots):
            self.clear_residual()

    def clear_residual(self) -> None:
        """Discard the errors of the previous encoded messages."""
        if self.residual is not None:
            self.residual.zero_()

    # State

    @property
    def has_unreduced(self) -> bool:
        """True if the accumulator has contributions that have not been reduced into the final gradient."""
        return self.accumulator is not self.final and not self.accumulator.empty

    @property
    def may_have_peer_contributions(self) -> bool:
        """True if a buffer may include contributions from ZeRO-3 group peers whose usage is not known yet."""
        return self.spec.accumulator_is_reduced and not (self.accumulator.empty and self.final.empty)

    @property
    def used(self) -> bool:
        """True if a parameter has a contribution from this rank, or a known contribution from another rank."""
        return bool(self.usage) and max(self.usage) >= GradUsage.PUBLISHED

    def is_used(self, slot: int) -> bool:
        return self.usage[slot] >= GradUsage.PUBLISHED

    def record_unused(self, unknown: Collection[int]) -> None:
        """Record that no rank has contributed to the slots without a known contribution.

        Args:
            unknown: slots to which another rank may have contributed.
        """
        for slot, use in enumerate(self.usage):
            if use < GradUsage.PUBLISHED:
                self.usage[slot] = GradUsage.UNKNOWN if slot in unknown else GradUsage.UNUSED

    def record_usage(self, anywhere: bytes) -> None:
        """Record the usage on which the ranks have agreed.

        Call this method before the final gradient is published.

        Args:
            anywhere: one GradUsage per slot, the maximum over all ranks.
        """
        for slot, use in enumerate(anywhere):
            if use >= GradUsage.PUBLISHED:
                self.usage[slot] = GradUsage.PUBLISHED

    @property
    def benefits_from_no_sync(self) -> bool:
        """True if a backward pass inside no_sync runs fewer collectives than one outside no_sync."""
        return len(self.spec.stages) > len(self.spec.accumulating_stages)

    # One backward pass

    def begin_pass(self, *, reduces: bool) -> None:
        """Select the buffer of the gradients that arrive from now on.

        Args:
            reduces: True if the backward pass reduces gradients over all ranks.
        """
        self.incoming = self.buffers[self.spec.incoming_extent]
        if self._separate is not None and not reduces and not self.spec.accumulator_is_reduced:
            self.incoming = self._separate
        # Otherwise gradients need memory of the buffer only when their reduction is launched.
        self._has_memory = self.incoming is self.accumulator and self.accumulator.storage.lasting

    def wait_until_writable(self) -> None:
        """Wait until gradients can be added to the incoming buffer, which an in-flight reduction may use."""
        if self.incoming is self.accumulator:
            self.wait_for_reduction()

    def receive(self, slot: int, gradient: Tensor) -> None:
        """Add the full gradient of one parameter. It has the parameter's shape and any floating-point dtype."""
        if self.arrived.get(slot) is not None:  # a reentrant checkpoint produces several parts
            self._add_arrived()
        self.arrived[slot] = gradient
        self.usage[slot] = GradUsage.CONTRIBUTED
        if self._has_memory:
            self._arrived_bytes += gradient.nbytes
            if self._arrived_bytes > _MOST_WAITING:
                self._add_arrived()

    def record_main_grad(self, slot: int) -> None:
        """Record that a kernel has added a parameter's gradient to the memory that was exposed for this parameter."""
        self.incoming.mark_written(slot)
        self.arrived.setdefault(slot)
        self.usage[slot] = GradUsage.CONTRIBUTED

    def await_only(self, slots: Iterable[int]) -> None:
        """Record that the backward pass is past all calls of the unit, and expects only the gradients at `slots`."""
        self.awaited = set(slots) if self.awaited is None else self.awaited.intersection(slots)

    @property
    def all_arrived(self) -> bool:
        """True if the backward pass is past all calls of the unit, and all expected gradients have arrived.

        The reduction may then be launched; see [Note: Launch order of reductions] in reduction_queue.py.
        """
        return self.awaited is not None and self.awaited <= self.arrived.keys()

    def end_pass(self) -> None:
        """Forget what has arrived. The next gradient that arrives belongs to a new backward pass."""
        self.arrived.clear()
        self._arrived_bytes = 0
        self.awaited = None

    def _add_arrived(self) -> None:
        """Add the gradients that have arrived to the incoming buffer."""
        gradients = {slot: gradient for slot, gradient in self.arrived.items() if gradient is not None}
        if gradients:
            self.wait_until_writable()
            self.incoming.add_all(gradients, self.spec.incoming_scale)
            self.arrived.update(dict.fromkeys(gradients))
            self._arrived_bytes = 0

    @property
    def offers_main_grad(self) -> bool:
        return self.spec.sends_accumulator and self.incoming is self.accumulator and self.spec.incoming_scale == 1.0

    def prefetch(self) -> None:
        """Prefetch the memory of the accumulator if it receives the next gradients or is reduced together with them."""
        if not self.spec.accumulator_is_reduced and (self.incoming is self.accumulator or not self.accumulator.empty):
            self.accumulator.storage.prefetch(keep=not self.accumulator.untouched)

    def create_reduction(self, stages: Sequence[ReductionStage]) -> HandleReduction | None:
        """Create the reduction that runs `stages`, or return None if there are none.

        The current backward pass must not add gradients after this call. The caller submits the reduction to streams.
        """
        self._add_arrived()
        self.end_pass()
        if not stages:
            self.incoming.close_until_write()
            return None
        if self.inspector is not None and stages[0].source is self.spec.incoming_extent:
            self.inspector(self.buffers[self.spec.incoming_extent].filled_parts())
            if self._separate is not None and not self.spec.accumulator_is_reduced:
                self.inspector(self._separate.filled_parts())
        return HandleReduction(self, stages)

    def abort(self) -> None:
        """Discard the state of the current pass after a failed backward pass."""
        self.end_pass()
        self.incoming.withdraw(range(len(self.usage)))  # a kernel may have written to exposed slots
        if self.incoming is not self.accumulator:
            self.incoming.discard()
        self.accumulator.close_until_write()  # it may be in one of the two slabs

    def target_buffer(self, stage: ReductionStage, *, is_last: bool) -> GradientBuffer:
        """Return the buffer to which the result of a stage is added.

        Args:
            is_last: True if the stage is the last one of the reduction.
        """
        is_accumulated = is_last and stage.target is self.spec.accumulator_extent
        return self.accumulator if is_accumulated else self.buffers[stage.target]

    def accumulator_to_add(self, stage: ReductionStage) -> GradientBuffer | None:
        """Return the accumulator that must be added to the source of a stage before the source is sent, or None."""
        return self._separate if stage.source is self.spec.accumulator_extent else None

    # Gradients that are set or dropped by the user

    def add_rows(self, slot: int, rows: Tensor) -> None:
        """Add this rank's rows of a gradient without reducing them. `rows` has the shape of the master."""
        self.wait_for_reduction()
        self.final.add(slot, rows)
        self.final.close_until_write()
        self.usage[slot] = GradUsage.CONTRIBUTED

    def wait_for_reduction(self) -> None:
        """Wait for the in-flight reduction of this handle, if any, because it uses the buffers."""
        if self.reduction is not None:
            self.reduction.wait()

    def drop(self, slots: Sequence[int]) -> None:
        """Drop all contributions to the parameters at `slots`. The gradients of these parameters become None."""
        self.wait_for_reduction()
        for slot in slots:
            self.usage[slot] = GradUsage.UNUSED
        self.record_drop(slots)
        slots = slots if any(self.usage) else range(len(self.usage))
        for buffer in {self.accumulator, *self.buffers.values()}:
            buffer.clear(slots)
        if not any(self.usage):
            self.final.restore()

    def zero(self, slot: int) -> None:
        """Drop all contributions to one parameter and set its gradient to zero."""
        self.drop([slot])
        self.final.zero(slot)
        self._make_final_readable()
        self.usage[slot] = GradUsage.PUBLISHED

    def replace_rows(self, slot: int, rows: Tensor) -> None:
        """Replace this rank's rows of a final gradient. `rows` has the shape of the master."""
        self.wait_for_reduction()
        self.final.overwrite(slot, rows)
        self._make_final_readable()

    def _make_final_readable(self) -> None:
        """Make the final gradient readable by the user."""
        self.final.close_until_write()
        self.final.storage.wait_for_host()


class HandleReduction:
    """Reduction of one handle's gradients in one or more stages. One collective is in flight at a time.

    Attributes:
        finished_events: one event per collective. The event completes when the result has been added to the target
            buffer. :meth:`submit` appends these events.
    """

    def __init__(self, gradients: HandleGradients, stages: Sequence[ReductionStage]) -> None:
        self.gradients = gradients
        self.finished_events: list[Waitable] = []
        self._stages = stages
        self._pending: PendingReduction | None = None  # the in-flight collective
        self._give_back: Callable[[], object] | None = None  # releases the memory that the collective sends
        self._streams: ReductionStreams  # set by submit()

    def submit(self, streams: ReductionStreams) -> None:
        """Submit the complete reduction to the streams.

        Call this method once. See [Note: Streams] in device/streams.py.

        After no_sync, only handles with "full" accumulation still need hop 1. If threads act as streams, a reduction
        that begins with hop 2 then waits for hop 1 of earlier reductions. Otherwise the order of hop 2 collectives on
        the replica axis would depend on timing.
        """
        self._streams = streams
        ready = streams.record_gradients_event()
        if streams.off_main_thread:
            self._submit_to_threads(streams)
        else:
            for number, stage in enumerate(self._stages):  # a stream runs the collective and then adds the result
                stream, is_encoded = self._stream_of(stage), stage.codec is not None
                launches = streams.zero3 if is_encoded else stream  # encodes while `stream` decodes an earlier message
                launches.wait_event(ready)
                launches.run(partial(self._launch, stage, is_first=number == 0))
                stream.wait_event(self)  # an encoded reduction, and its launch, are on other streams
                stream.run(partial(self._add_received, stage))
                ready = stream.record_event(stage.collective, self.gradients.label)
                self.finished_events.append(ready)
                if (comm := self._comm_of(stage)).uses_streams and is_encoded:
                    comm.held_group.last_encoded_reduction = ready
                elif comm.uses_streams:
                    comm.held_group.last_on_stream = ready
        self.gradients.reduction = self.finished_events[-1]

    def _submit_to_threads(self, streams: ReductionStreams) -> None:
        """Launch the first collective, and let the threads add its result and process the remaining stages."""
        if self._stages[0].collective is Collective.HOP2 and self.gradients.mesh_info.zero3_size > 1:
            streams.zero3.record_event(Collective.HOP1).wait()
        self._launch(self._stages[0], is_first=True)
        for number, (stage, next_stage) in enumerate(zip(self._stages, (*self._stages[1:], None), strict=True)):
            stream = self._stream_of(stage)
            if number:
                stream.wait_event(self.finished_events[-1])  # the previous stage has then launched this one
            stream.wait_event(self)
            stream.run(partial(self._add_received, stage, next_stage))
            self.finished_events.append(stream.record_event(stage.collective, self.gradients.label))

    def _stream_of(self, stage: ReductionStage) -> Stream:
        return self._streams.zero3 if stage.collective is Collective.HOP1 else self._streams.replica

    def _comm_of(self, stage: ReductionStage) -> Communicator:
        mesh_info = self.gradients.mesh_info
        return mesh_info.zero3_reduce_comm if stage.collective is Collective.HOP1 else mesh_info.replica_comm

    # Operations that run on the streams

    def wait(self) -> None:
        """Wait for the in-flight collective. If it fails, the remaining stages do nothing."""
        if self._pending is not None:
            try:
                self._pending.wait(off_main_thread=self._streams.off_main_thread)
            except BaseException:
                self._pending = None
                self._release_sent()
                raise

    def _add_received(self, stage: ReductionStage, next_stage: ReductionStage | None = None) -> None:
        """Add a collective's result, and launch `next_stage`."""
        if self._pending is not None:  # None after a failure
            pending, self._pending = self._pending, None
            self._add_result(stage, pending)
            if next_stage is not None:
                self._launch(next_stage, is_first=False)

    def _launch(self, stage: ReductionStage, *, is_first: bool) -> None:
        gradients, is_hop1 = self.gradients, stage.collective is Collective.HOP1
        if not is_hop1 and self._streams.failed:
            return  # this rank has skipped an earlier hop 2, with which other ranks would match this one
        pool = gradients.transport.send_scratch if is_hop1 else gradients.pool
        sent = self._lend_source(stage, pool, is_first=is_first)
        try:
            if is_hop1:
                self._pending = gradients.transport.reduce_scatter(sent, stage.wire_dtype, name=gradients.label)
            elif stage.codec is not None:
                self._pending = self._start_encoded(stage, sent, pool)
            else:
                self._pending = reduce_scatter(
                    self._comm_of(stage),
                    stage.collective,
                    sent,
                    pool,
                    wire=stage.wire_dtype,
                    name=gradients.label,
                    parts=gradients.replica_part_sizes,
                )
        except BaseException:
            self._release_sent()
            raise

    def _release_sent(self) -> None:
        """Release the memory that the last collective has sent, unless it was released before."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def _lend_source(self, stage: ReductionStage, pool: BufferPool, *, is_first: bool) -> Tensor:
        """Return the source of a stage in the dtype of its messages, and prepare the buffers that its result needs."""
        gradients = self.gradients
        source, separate = gradients.buffers[stage.source], gradients.accumulator_to_add(stage)
        if separate is not None:
            source.add_buffer(separate)
        elif stage.source is Extent.ZERO3:
            gradients.final.set_aside()
        source.seal()
        # For a second collective, send a copy. Its wait comes later, and other handles may need the slab before then.
        copies = not is_first and not source.storage.lasting
        sent, self._give_back = source.storage.lend_send_buffer(stage.wire_dtype, pool, copies=copies)
        for buffer in self._buffers_used_with_result(stage):
            if not buffer.storage.lasting:
                buffer.storage.prefetch(keep=not buffer.untouched)
        return sent

    def _buffers_used_with_result(self, stage: ReductionStage) -> list[GradientBuffer]:
        """Return the buffers that are used when the collective of a stage has completed."""
        is_last = stage is self._stages[-1]
        used = [self.gradients.target_buffer(stage, is_last=is_last)]
        if not is_last:
            separate = self.gradients.accumulator_to_add(self._stages[self._stages.index(stage) + 1])
            if separate is not None and not separate.empty:
                used.append(separate)
        return used

    def _start_encoded(self, stage: ReductionStage, sent: Tensor, pool: BufferPool) -> PendingReduction:
        gradients, comm = self.gradients, self._comm_of(stage)
        encoded, residual = gradients.encoded_parts_spec, gradients.take_residual()
        assert encoded is not None
        return encoded_reduce_scatter(
            comm, stage.collective, sent, pool, encoded, residual=residual, name=gradients.label
        )

    def _add_result(self, stage: ReductionStage, pending: PendingReduction) -> None:
        gradients, final, is_last = self.gradients, self.gradients.final, stage is self._stages[-1]
        target = gradients.target_buffer(stage, is_last=is_last)
        try:
            if target is final:
                final.restore()
            elif target is gradients.accumulator:
                final.set_aside()
            target.add_reduction(pending, scale=stage.scale)
            if is_last:
                target.close_until_write()
        finally:
            self._release_sent()
