"""Launch collectives between ranks.

This is the only file in the package that calls collectives of torch.distributed. Other files choose a
:class:`Collective` (gather, hop 1, hop 2, refresh, ...) and a communicator. The shared-memory transport sends no
messages; it wraps its transfers in :func:`launching`, which counts them.

[Note: Reductions in fp32]
On gloo, a reduce-scatter is an all-to-all of the pieces followed by local additions in rank order. This method sends as
many bytes as gloo's reduce-scatter and is faster. It adds in the accumulator's precision regardless of the wire dtype,
and returns bitwise identical results on every run. Other backends use their own reduce-scatter, which adds in the wire
dtype, unless `fp32_accumulation` is set. Ranks that share memory read the pieces in place and add
them in the same order, so the results are bitwise identical; see layerzero/shared_memory/transport.py.

[Note: Unequal parts]
NCCL has no all-gather or reduce-scatter for unequal parts. torch replaces them with one broadcast or one reduction per
rank, which run one after the other. Unequal parts are therefore exchanged with a single all-to-all, in which all pairs
of ranks communicate at the same time. The receiving rank adds the parts of a reduction. A rank sends itself nothing if
its shard is already in its place in the output. A copy to the same memory would overwrite what the user has written to
the shard during the collective.

[Note: Collectives on streams of the engine]
On a device, gathers, refreshes and reductions run on high-priority streams of the engine. With ``async_op=False``, NCCL
runs a collective on the current stream, without the events that lead to and from NCCL's own stream. Other backends of
devices make the current stream wait. gloo would block the host and is the exception. A reduction runs on the stream
that adds its result. An all-gather runs on the stream of its communicator. This stream also waits for a collective that
writes to the shard, such as a refresh, so the computation does not wait for it. Encoded reductions are asynchronous, so
that encoding and decoding overlap with the transfer.

Collectives of one communicator must not overlap. Therefore a collective on a stream of the engine first waits for the
last collective of its communicator, and a collective on the backend's stream waits for the last collective on a stream
of the engine. An encoded reduction does not outlive the call that enqueues its addition, so an event after the addition
represents it.

[Note: In-place gathers]
gloo's all-gather is a ring that assembles the result in an internal buffer and copies it to the output, including this
rank's piece. Between two ranks, one broadcast from each rank directly into the output sends the same number of bytes
and takes a third less work. With more ranks, the ring is used, because its messages cross node boundaries less often
than the messages of broadcast trees. A shard that is itself a master is an exception. The user may write to the master
during the collective, so the collective must only read it. In this case, broadcasts are used for any number of ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.comm.codecs import EncodedPartsSpec
from layerzero.comm.failure_report import CollectiveError, RankStatus, diagnose, transfer_error
from layerzero.comm.process_groups import HeldGroup
from layerzero.comm.traffic_counters import GATHERS, Collective, TrafficCounters, display_name
from layerzero.comm.waits import SLICE, WaitCycleError, WaitState, waiting
from layerzero.device.accelerator import compute_device, device_module
from layerzero.device.accumulate import accumulate_parts
from layerzero.device.buffer_pools import BufferPool, Size
from layerzero.device.profiling import profiler_range
from layerzero.device.streams import DeferredCollectiveError, DeviceStream
from layerzero.utils.torch_compat import backend_timeout

__all__ = [
    "Collective",
    "Communicator",
    "Message",
    "PendingCollective",
    "PendingReduction",
    "PendingSmallGather",
    "Transfer",
    "all_gather",
    "all_gather_small",
    "all_reduce",
    "all_reduce_group",
    "all_to_all",
    "broadcast",
    "broadcast_group",
    "connect",
    "encoded_buffer_sizes",
    "encoded_reduce_scatter",
    "launching",
    "receive",
    "reduce_scatter",
    "send",
    "timeout_of",
]


@dataclass(frozen=True, eq=False)
class Communicator:
    """Process group along one axis of the mesh, with the traffic counters for its collectives.

    Collectives on one communicator run in the order in which they were launched. Collectives on different communicators
    may overlap.
    """

    name: str  # for display
    axis: str  # "zero3", "replica", "control", "model_parallel" or "site"
    held_group: HeldGroup
    counters: TrafficCounters
    size: int
    rank: int
    is_gloo: bool  # see [Note: In-place gathers]
    sums_locally: bool  # True if ranks add the parts of reductions themselves; see [Note: Reductions in fp32]
    stream_device: torch.device | None = None  # see [Note: Collectives on streams of the engine]; None: no streams

    @classmethod
    def over(
        cls,
        name: str,
        axis: str,
        group: HeldGroup | dist.ProcessGroup,
        counters: TrafficCounters,
        device_type: str,
        *,
        sums_locally: bool = False,
    ) -> Communicator:
        held_group = group if isinstance(group, HeldGroup) else HeldGroup.of(group)
        is_gloo = _backend_in(held_group.backends, device_type) == "gloo"
        device = compute_device(device_type)
        return cls(
            name=name,
            axis=axis,
            held_group=held_group,
            counters=counters,
            size=len(held_group.ranks),
            rank=held_group.ranks.index(dist.get_rank()),
            is_gloo=is_gloo,
            sums_locally=sums_locally or is_gloo,
            stream_device=None if is_gloo or device_module(device) is None else device,
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError if the model was closed."""
        return self.held_group.group

    @cached_property
    def uses_streams(self) -> bool:
        """True if collectives run on streams of the engine; see [Note: Collectives on streams of the engine]."""
        return self.stream_device is not None

    @property
    def connects_on_use(self) -> bool:
        """True if the backend connects the ranks at their first collective. gloo connects them when it is created."""
        return self.size > 1 and not self.held_group.is_local

    @cached_property
    def stream(self) -> DeviceStream:
        """Stream on which all-gathers run, if `uses_streams` is True."""
        assert self.stream_device is not None
        return DeviceStream(self.stream_device)


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend that `group` uses for a device type. With "cpu:gloo,cuda:nccl", each type has its own."""
    return _backend_in(dist.get_backend_config(group), device_type)


def _backend_in(backends: str, device_type: str) -> str:
    return dict(entry.split(":") for entry in backends.split(","))[device_type]


class Transfer(Protocol):
    """Pending transfer: a :class:`torch.distributed.Work`, or a wait for ranks that share memory."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


def _wait_for_last(group: HeldGroup) -> None:
    """Make the current stream wait for the last collective of `group`."""
    events, launched = (group.last_on_stream, group.last_encoded_reduction), group.last_launch
    group.last_on_stream = group.last_encoded_reduction = group.last_launch = None
    for event in events:
        if event is not None:
            event.wait()
    if launched is not None and (pending := launched()) is not None:
        pending.make_stream_wait()


class _StreamGather:
    """All-gather on the stream of its communicator. See [Note: Collectives on streams of the engine].

    Args:
        functions: functions to call in order; one of them calls the collective.
        tensors: tensors that the collective uses. Their memory is not reused before the collective has completed, even
            if the gather is dropped before a wait.
        after: collective that writes to one of the tensors, if any.
    """

    def __init__(
        self,
        communicator: Communicator,
        functions: Sequence[Callable[[], object]],
        tensors: tuple[Tensor, ...],
        after: PendingCollective | None,
    ) -> None:
        group = communicator.held_group
        self._stream = communicator.stream
        self._tensors = tensors

        def launch() -> None:
            if after is not None:
                after.make_stream_wait()
            _wait_for_last(group)
            for function in functions:
                function()

        self._stream.wait_current()
        self._stream.run(launch)
        self._completed = group.last_on_stream = self._stream.record_event()

    def is_completed(self) -> bool:
        return self._completed.query()

    def wait(self) -> None:
        self._completed.wait()
        self._tensors = ()

    def __del__(self) -> None:
        with suppress(Exception):  # at the exit of the interpreter
            for tensor in self._tensors:
                self._stream.keep_until_done(tensor)


@dataclass(eq=False)
class LaunchedCollective:
    """Collective that has been counted and launched. A thread that waits for it records this object."""

    communicator: Communicator
    collective: Collective
    name: str  # for example the name of the unit
    sent: int  # number of bytes that this rank sends
    on_stream: bool = False  # see [Note: Collectives on streams of the engine]
    number: int = 0  # number of launches on the group, or on the channel, up to this one
    peer: int = -1  # global rank at the other end of a transfer between two ranks
    channel: str = ""  # of such a transfer: sender, receiver and tag. The transfers of a channel have one order

    def attach_transfers(self, *each: Transfer) -> PendingCollective:
        group = self.communicator.held_group
        self.number = (group.channels[self.channel] if self.channel else group.log).append(self.collective)
        works = PendingCollective(each, self)
        if not self.on_stream and self.communicator.uses_streams:
            group.last_launch = weakref.ref(works)
        if group.is_local:
            group.log.track(works)
        for reference in self.communicator.counters.observers.of_collectives:
            if (observer := reference()) is not None:
                observer.launched(works)
        return works

    @property
    def verdict(self) -> str:
        """Message of the error to raise if the collective cannot complete, otherwise an empty string."""
        return self.communicator.held_group.failure

    def state(self, store: object = None) -> WaitState:
        """Return the state of a wait for this collective."""
        status, group = self.status, self.communicator.held_group
        ranks, name = ((self.peer,) if self.channel else group.ranks), group.name + self.channel
        return WaitState(status.doing, ranks, name, self.number, self.collective.value, status.gathers)

    @property
    def status(self) -> RankStatus:
        """Status that this rank publishes if the collective fails."""
        description = display_name(self.collective, self.name)
        if self.collective not in (*GATHERS, Collective.GATHER_ORDER):
            return RankStatus(description)
        return RankStatus(description, gathers=self.communicator.counters.gathers_up_to(self.collective, self.name))

    def failure_error(self, error: Exception) -> RuntimeError:
        """Return the error to raise for `error`, which the wait has raised.

        The new error names the ranks that did not take part or, if the model has failed before, the first failure.
        """
        if isinstance(error, WaitCycleError):
            return WaitCycleError(str(error))
        counters, status = self.communicator.counters, self.status
        if self.channel:
            if self.verdict:
                return WaitCycleError(self.verdict)
            group = self.communicator.held_group
            rank, timeout = group.ranks[self.communicator.rank], group.transfer_timeout
            seconds = timeout_of(group.group) if timeout is None else timeout.total_seconds()
            return transfer_error(status, error, rank=rank, peer=self.peer, timeout=seconds)
        if counters.failure:  # after a first failure, the statuses of other ranks do not explain this failure
            return RuntimeError(
                f"layerzero: {status.doing} failed after another collective of the model: {counters.failure}"
            )
        ranks = dist.get_process_group_ranks(self.communicator.group)
        collective_error = diagnose(status, error, ranks=ranks, timeout=timeout_of(self.communicator.group))
        counters.failure = str(collective_error)
        for observer in counters.observers:
            observer.failed(collective_error)
        return collective_error


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group's collectives, in seconds, or torch's default if no backend reports one."""
    for entry in dist.get_backend_config(group).split(","):
        if (timeout := backend_timeout(group, entry.split(":")[0])) is not None:
            return timeout.total_seconds()
    return dist.constants.default_pg_timeout.total_seconds()


@dataclass(eq=False)
class PendingCollective:
    """Collective in flight, which consists of one or more transfers and has a single wait."""

    each: tuple[Transfer, ...]
    launched: LaunchedCollective
    # By observer: what it keeps with the collective until the end of the wait.
    records: dict[Any, Any] = field(default_factory=dict, repr=False)

    def done(self) -> bool:
        return all(work.is_completed() for work in self.each)

    def wait(self, *, off_main_thread: bool = False, may_wait: Callable[[], bool] = lambda: True) -> None:
        """Wait for all transfers.

        Args:
            off_main_thread: True if a background thread of the engine calls this method. The waiting time is then not
                counted.
            may_wait: function that returns False if a background thread must leave the backend, because the process
                ends.

        Raises:
            CollectiveError: a rank did not take part, or its process exited.
            RuntimeError: a previous collective of the model has failed.
            DeferredCollectiveError: one of these errors occurred, and `off_main_thread` is True.
        """
        try:
            with profiler_range("wait", self.launched.collective, self.launched.name):
                self._wait_for_transfers(may_wait)
        except RuntimeError as error:
            self._record_wait_end()
            if off_main_thread:
                raise DeferredCollectiveError(error, self.launched.failure_error) from error
            raise self.launched.failure_error(error) from error
        self.launched.communicator.held_group.log.in_flight.pop(id(self), None)  # after an error, it may be in flight
        self._record_wait_end()

    def _wait_for_transfers(self, may_wait: Callable[[], bool]) -> None:
        launched = self.launched
        in_slices = launched.communicator.is_gloo and not launched.channel  # a timeout would end a transfer
        with nullcontext() if launched.communicator.uses_streams else waiting(launched):
            for work in self.each:
                while in_slices and isinstance(work, dist.Work) and not work.is_completed():
                    if launched.verdict:
                        raise WaitCycleError(launched.verdict)
                    if not may_wait():
                        raise RuntimeError("the process ends before the collective has completed")
                    with suppress(RuntimeError):  # the wait below raises the error of a completed transfer
                        work.wait(timedelta(seconds=SLICE))
                if launched.channel:
                    _wait_for_transfer(work, launched.communicator.held_group.transfer_timeout)
                else:
                    work.wait()

    def call(self, function: Callable[[], object]) -> None:
        """Call the function that enqueues the collective on the current stream, with the errors of :meth:`wait`."""
        try:
            function()
        except RuntimeError as error:
            self._record_wait_end()
            raise self.launched.failure_error(error) from error

    def make_stream_wait(self) -> None:
        """Make the current stream wait for the collective.

        Before the result is used, also call :meth:`wait` on the stream that uses it. Until then, the caller must keep
        references to the tensors of the collective, because this object may release its own.
        """
        for work in self.each:
            work.wait()

    def _record_wait_end(self) -> None:
        for reference in self.launched.communicator.counters.observers.of_collectives:
            if (observer := reference()) is not None:
                observer.done(self)


def _wait_for_transfer(work: Transfer, timeout: timedelta | None) -> None:
    """Wait for a transfer between two ranks. In the main thread, an exception of a signal handler ends the wait."""
    wait = partial(work.wait, *([] if timeout is None else [timeout]))
    if threading.current_thread() is not threading.main_thread():
        wait()
        return
    errors: list[BaseException] = []

    def wait_in_thread() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait_in_thread, name="layerzero transfer", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@dataclass
class PendingReduction:
    """In-flight reduce-scatter, which keeps its buffers alive until the result has been added to a target."""

    work: PendingCollective
    sent: Tensor  # 1-D [size * n]; must not be written before :meth:`add_to` returns
    # Returns the summands, each 1-D [n]; call it after `wait`. The result is the sum of the summands rounded to `wire`.
    parts: Callable[[], Sequence[Tensor]]
    wire: torch.dtype | None  # if None, the summands are not rounded
    give_back: Callable[[], None]  # releases the memory of the parts; called by :meth:`add_to`

    def wait(self, *, off_main_thread: bool = False) -> None:
        self.work.wait(off_main_thread=off_main_thread)

    def add_to(self, target: Tensor, *, overwrite: bool, scale: float, rounds_once: bool = False) -> None:
        """Add ``scale * sum(parts)`` to `target`, in the target's dtype. Call this method once, after :meth:`wait`.

        If `overwrite` is True, the result replaces the contents of `target`. If `rounds_once` is True, the sum is
        computed in fp32 and rounded once to the target's dtype.
        """
        try:
            with profiler_range("add", self.work.launched.collective, self.work.launched.name):
                accumulate_parts(
                    target, self.parts(), wire=self.wire, overwrite=overwrite, scale=scale, rounds_once=rounds_once
                )
        finally:  # other ranks may wait for the release
            self.give_back()


# torch 2.13 deprecates the `_into_tensor` and `_tensor` names; torch 2.11 has no others.
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class launching:
    """Context manager that counts the collective launched inside it. A generator would take three times as long.

    If the launch fails, the error names the collective.

    Args:
        on_stream: True if a stream of the engine runs the collective. See [Note: Collectives on streams of the engine].
    """

    __slots__ = ("_launched", "_range")

    def __init__(
        self, comm: Communicator, collective: Collective, name: str, sent: int, *, on_stream: bool = False
    ) -> None:
        self._launched = LaunchedCollective(comm, collective, name, sent, on_stream)
        self._range = profiler_range(collective, name)

    def __enter__(self) -> LaunchedCollective:
        launched, comm = self._launched, self._launched.communicator
        group = comm.held_group
        group.require_open()
        if not launched.on_stream and group.last_on_stream is not None:
            last, group.last_on_stream = group.last_on_stream, None
            last.wait()
        if group.reserved is not None:
            group.reserved.wait()
        comm.counters.record(launched.collective, comm.axis, launched.sent, launched.name)
        self._range.__enter__()
        return launched

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._range.__exit__(kind, error, trace)
        # A CollectiveError comes from a wait for a free buffer.
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            if self._launched.channel:  # the other end of a transfer may have closed the connection before the launch
                raise self._launched.failure_error(error) from error
            comm = self._launched.communicator
            raise RuntimeError(
                f"layerzero: {self._launched.collective} failed on rank {comm.rank} of {comm.size} of the {comm.axis} "
                f"axis (global rank {dist.get_rank()}): {error}"
            ) from error


def all_gather(
    comm: Communicator,
    collective: Collective,
    out: Tensor,
    shard: Tensor,
    *,
    name: str = "",
    only_reads_shard: bool = False,
    parts: Sequence[int] | None = None,
    after: PendingCollective | None = None,
    encode: Callable[[], object] | None = None,
    decode: Callable[[], object] | None = None,
) -> PendingCollective:
    """Start an all-gather of `shard` [n] into `out` [size * n]. The caller waits for the result.

    Args:
        shard: shard of this rank, which may be this rank's slice of `out`.
        name: name of the collective in messages and traces, for example the name of the unit.
        only_reads_shard: if True, do not write to `shard`, because the user may write to `shard` during the collective.
        parts: number of elements in the shard of each rank, or None if all shards have the same size.
        after: collective that writes to `shard` and for which the caller has not waited. The gather waits for it. Must
            be None unless ``comm.uses_streams`` is True.
        encode: function that writes `shard`. The stream of the communicator runs it before the all-gather. Must be None
            unless ``comm.uses_streams`` is True.
        decode: function that reads `out`, which the same stream runs after the all-gather.
    """
    assert comm.uses_streams or (after, encode, decode) == (None, None, None)
    sent = (comm.size - 1) * shard.numel() * shard.element_size()
    with launching(comm, collective, name, sent, on_stream=comm.uses_streams) as launched:
        if not comm.is_gloo or (parts is None and comm.size > 2 and not only_reads_shard):
            function = (
                partial(_all_gather_flat, out, shard, group=comm.group)
                if parts is None
                else _gather_unequal(comm, torch.split(out, list(parts)), shard)
            )  # see [Note: In-place gathers] and [Note: Unequal parts]
            functions = (encode, partial(function, async_op=False), decode)
            work: Transfer = (
                _StreamGather(comm, [each for each in functions if each is not None], (out, shard), after)
                if comm.uses_streams
                else function(async_op=True)
            )
            return launched.attach_transfers(work)
        pieces = out.chunk(comm.size) if parts is None else torch.split(out, list(parts))
        if pieces[comm.rank].data_ptr() != shard.data_ptr():
            pieces[comm.rank].copy_(shard)
        works = [
            dist.broadcast(piece, group_src=rank, group=comm.group, async_op=True)
            for rank, piece in enumerate(pieces)
            if piece.numel()
        ]
        return launched.attach_transfers(*works)


def _gather_unequal(comm: Communicator, pieces: Sequence[Tensor], shard: Tensor) -> Callable[..., Any]:
    """Return a function that gathers `shard` into `pieces`. See [Note: Unequal parts]."""
    outputs, inputs = list(pieces), [shard] * comm.size
    if pieces[comm.rank].data_ptr() == shard.data_ptr():
        outputs[comm.rank] = inputs[comm.rank] = shard[:0]
    return partial(dist.all_to_all, outputs, inputs, group=comm.group)


def reduce_scatter(
    comm: Communicator,
    collective: Collective,
    flat: Tensor,
    pool: BufferPool,
    *,
    wire: torch.dtype,
    name: str = "",
    parts: Sequence[int] | None = None,
) -> PendingReduction:
    """Start a reduce-scatter of `flat` [size * n] in the dtype `wire`. Rank i receives the sum of piece i of all ranks.

    If `comm.uses_streams` is True, the current stream runs it. See [Note: Collectives on streams of the engine].

    Args:
        pool: pool that provides the receive buffer.
        parts: number of elements that each rank receives, or None if all ranks receive equally many.
    """
    assert flat.dtype == wire
    numel = flat.numel() // comm.size if parts is None else parts[comm.rank]
    sent = (flat.numel() - numel) * flat.element_size()
    sums_locally = comm.sums_locally or parts is not None  # see [Note: Unequal parts]
    with launching(comm, collective, name, sent, on_stream=comm.uses_streams) as launched:
        received = pool.acquire(numel * comm.size if sums_locally else numel, flat.dtype)
        summands: Sequence[Tensor] = (received,)
        if sums_locally:
            function = partial(
                dist.all_to_all_single,
                received,
                flat,
                output_split_sizes=None if parts is None else [numel] * comm.size,
                input_split_sizes=None if parts is None else list(parts),
                group=comm.group,
            )
            summands = received.view(comm.size, numel).unbind()
        else:
            function = partial(_reduce_scatter_flat, received, flat, group=comm.group)
        if comm.uses_streams:
            work = launched.attach_transfers()
            _wait_for_last(comm.held_group)
            work.call(partial(function, async_op=False))
        else:
            work = launched.attach_transfers(function(async_op=True))
        return PendingReduction(work, flat, lambda: summands, wire, partial(pool.release, received))


def encoded_reduce_scatter(
    comm: Communicator,
    collective: Collective,
    flat: Tensor,
    pool: BufferPool,
    encoded: EncodedPartsSpec,
    *,
    residual: Tensor | None = None,
    name: str = "",
) -> PendingReduction:
    """Start a reduce-scatter of `flat` [size * n] with encoded messages.

    The encoded pieces are exchanged with an all-to-all. Each rank decodes the pieces that it receives, and adds them
    to its own exact piece. The other arguments are the same as for :func:`reduce_scatter`.

    Args:
        encoded: codec, and the elements of each rank's piece that it encodes. The other elements are padding.
        residual: encoding errors of the previous messages, 1-D bf16, in the order of the pieces that this rank sends.
            They are added to the new messages and then overwritten with the errors of the new messages. None if error
            feedback is off.
    """
    rank, codec, to_each = comm.rank, encoded.parts_codec, encoded.to_each
    width, blocks = encoded.widths[rank], encoded.blocks[rank]
    from_each = [0 if index == rank else width for index in range(comm.size)]
    with launching(comm, collective, name, sum(to_each)) as launched:
        sent, received, total = (pool.acquire(*size) for size in encoded_buffer_sizes(encoded))

        def release_buffers() -> None:
            for buffer in (sent, received, total):
                pool.release(buffer)

        try:
            total.copy_(torch.split(flat, encoded.numels)[rank])  # a final gradient may be restored to this memory
            for run in encoded.runs:
                parts, messages = flat[run.elements].view(run.parts), sent[run.nbytes].view(run.messages)
                messages = messages[:, : encoded.sizes[run.replica]]
                errors = None if residual is None else residual[run.residual].view(run.parts)
                codec.encode_parts(parts, encoded.blocks[run.replica], messages, errors)
            work = dist.all_to_all_single(received, sent, from_each, to_each, group=comm.group, async_op=True)
        except BaseException:
            release_buffers()
            raise

    def add_parts() -> Sequence[Tensor]:
        if blocks:
            messages = received.view(comm.size - 1, width)[:, : encoded.sizes[rank]]
            codec.add_decoded(messages, blocks, total)
        return (total,)

    return PendingReduction(launched.attach_transfers(work), flat, add_parts, None, release_buffers)


def encoded_buffer_sizes(encoded: EncodedPartsSpec) -> list[Size]:
    """Return the sizes of the send, receive and sum buffers that :func:`encoded_reduce_scatter` acquires."""
    rank, widths = encoded.replica, encoded.widths
    return [
        (sum(encoded.to_each), torch.uint8),
        ((len(widths) - 1) * widths[rank], torch.uint8),
        (encoded.numels[rank], encoded.dtype),
    ]


def all_to_all(
    comm: Communicator,
    collective: Collective,
    received: Tensor,
    sent: Tensor,
    *,
    from_each: Sequence[int],
    to_each: Sequence[int],
    name: str = "",
) -> PendingCollective:
    """Start an all-to-all, which sends one piece of `sent` to each rank and receives one piece from each rank.

    The received pieces are written to `received`. In both tensors, the pieces are in rank order.

    Args:
        from_each: number of elements received from each rank.
        to_each: number of elements sent to each rank.
    """
    sent_numel = sum(to_each) - to_each[comm.rank]
    with launching(comm, collective, name, sent_numel * sent.element_size()) as launched:
        splits = {"output_split_sizes": list(from_each), "input_split_sizes": list(to_each)}
        work = dist.all_to_all_single(received, sent, **splits, group=comm.group, async_op=True)
        return launched.attach_transfers(work)


def send(comm: Communicator, tensor: Tensor, to: int, *, name: str, tag: int = 0) -> PendingCollective:
    """Start sending a tensor in host memory to rank `to` of the communicator.

    Args:
        tag: number by which gloo tells the messages of threads apart that use the communicator at the same time.
    """
    with launching(comm, Collective.TRANSFER, name, tensor.nbytes) as launched:
        launched.peer, launched.channel = comm.held_group.ranks[to], f"/{comm.rank}-{to}/{tag}"
        work = dist.isend(tensor, group=comm.group, group_dst=to, tag=tag)
        assert work is not None
        return launched.attach_transfers(work)


def receive(comm: Communicator, tensor: Tensor, source: int, *, name: str, tag: int = 0) -> PendingCollective:
    """Start receiving into a tensor in host memory what rank `source` of the communicator sends; see :func:`send`."""
    with launching(comm, Collective.TRANSFER, name, 0) as launched:
        launched.peer, launched.channel = comm.held_group.ranks[source], f"/{source}-{comm.rank}/{tag}"
        work = dist.irecv(tensor, group=comm.group, group_src=source, tag=tag)
        assert work is not None
        return launched.attach_transfers(work)


def all_reduce(
    comm: Communicator, collective: Collective, tensor: Tensor, op: dist.ReduceOp.RedOpType
) -> PendingCollective:
    """Start an in-place all-reduce of a small tensor, and count the bytes that a ring algorithm would send."""
    sent = 2 * (comm.size - 1) * tensor.numel() * tensor.element_size() // comm.size
    with launching(comm, collective, "", sent) as launched:
        return launched.attach_transfers(dist.all_reduce(tensor, op=op, group=comm.group, async_op=True))


@dataclass(frozen=True)
class PendingSmallGather:
    """In-flight all-gather of a few numbers per rank."""

    work: PendingCollective
    said: Tensor  # [size, n], indexed by rank; valid after the wait
    sent: Tensor  # 1-D [size * n]; must not be written before the wait returns

    def wait(self) -> Tensor:
        self.work.wait()
        return self.said


def all_gather_small(
    comm: Communicator, collective: Collective, tensor: Tensor, *, name: str = ""
) -> PendingSmallGather:
    """Start an all-gather of `tensor`, a 1-D tensor [n] of a few numbers.

    Each rank sends to all other ranks concurrently. A reduction, for which gloo uses a ring, would send fewer bytes but
    would take 2 (size - 1) times as long as a single message.
    """
    with launching(comm, collective, name, (comm.size - 1) * tensor.numel() * tensor.element_size()) as launched:
        sent = tensor.repeat(comm.size)
        received = sent.new_empty(sent.shape)
        work = dist.all_to_all_single(received, sent, group=comm.group, async_op=True)
        return PendingSmallGather(launched.attach_transfers(work), received.view(comm.size, -1), sent)


class Message(NamedTuple):
    """Largest message of an operation, for :func:`connect`."""

    operation: str  # "all_gather", "reduce_scatter", "all_to_all" or "all_reduce"
    numel: int = 1  # number of elements of the input or the output, whichever is longer
    dtype: torch.dtype = torch.float32


def connect(
    comm: Communicator,
    device: torch.device,
    messages: Iterable[Message] = (Message("all_gather"), Message("reduce_scatter")),
) -> None:
    """Run operations with one element per rank and with their largest message, if the backend connects on first use.

    ``ncclCommInit`` allocates memory and blocks the host until all ranks have called it. NCCL also connects ranks and
    allocates memory when an operation first uses an algorithm, which depends on the size of the message. This must not
    happen in the first step, near the peak of memory usage. All ranks of the communicator must call this function.
    """
    if not comm.connects_on_use:
        return
    _wait_for_last(comm.held_group)
    for operation, numel, dtype in messages:
        for length in dict.fromkeys((1, -(-numel // comm.size))):
            full = torch.zeros(length * comm.size, dtype=dtype, device=device)
            _OPERATIONS[operation](full, full[:length].clone(), comm.group)


_OPERATIONS: dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], object]] = {
    "all_gather": lambda full, part, group: _all_gather_flat(full, part, group=group),
    "reduce_scatter": lambda full, part, group: _reduce_scatter_flat(part, full, group=group),
    "all_to_all": lambda full, part, group: dist.all_to_all_single(torch.empty_like(full), full, group=group),
    "all_reduce": lambda full, part, group: dist.all_reduce(full, group=group),
}


def all_reduce_group(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """All-reduce `tensor` in place over a user-provided process group, synchronously. Traffic is not counted."""
    dist.all_reduce(tensor, op=op, group=group)


def broadcast_group(tensor: Tensor, group: dist.ProcessGroup, *, from_rank: int) -> None:
    """Broadcast `tensor` from rank `from_rank` of a user-provided process group. Traffic is not counted."""
    dist.broadcast(tensor, group=group, group_src=from_rank)


def broadcast(comm: Communicator, collective: Collective, tensor: Tensor, *, from_rank: int = 0) -> None:
    """Broadcast `tensor` from rank `from_rank` of the communicator and wait."""
    sent = tensor.numel() * tensor.element_size() if comm.rank == from_rank else 0
    with launching(comm, collective, "", sent) as launched:
        work = dist.broadcast(tensor, group_src=from_rank, group=comm.group, async_op=True)
        works = launched.attach_transfers(work)
    works.wait()
