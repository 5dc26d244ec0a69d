"""The exchanges between ranks.

This is the only file of the package that calls a collective. Everyone else names an exchange
(gather, hop 1, hop 2, refresh, ...) and a lane to run it on.

[Note: Reductions add in fp32]
On gloo, a reduce-scatter is an all-to-all of the pieces followed by local additions in rank order. It moves the
same bytes, adds in the accumulator's precision whatever dtype travelled, gives the same bits on every run, and is
faster than gloo's own reduce-scatter. On other backends the backend's reduce-scatter is used, which adds
in the dtype that travels. Where the ranks share memory, what would be received is read where it lies, and added in the
same order: the same bits.

[Note: Gathers in place]
gloo's all-gather is a ring that builds the result in a buffer of its own and copies it out, this rank's piece included.
Between two ranks, one broadcast from each, straight into place, sends the same bytes with a third less work. Between
more, the ring crosses from node to node less often than the trees of broadcasts do, so it is taken; unless this rank's
piece is a master that the user may edit meanwhile, which must only be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from layerzero.comm.failure_report import CollectiveError, RankStatus, diagnose
from layerzero.comm.process_groups import HeldGroup, timeout_on
from layerzero.comm.trace_recorder import CollectiveTrace
from layerzero.comm.traffic_counters import GATHERS, Collective, TrafficCounters, Watched, spelled
from layerzero.comm.transport.shm_buffers import PeersReady, SharedBufferPool
from layerzero.device.accumulate import accumulate_parts
from layerzero.device.buffer_pools import BufferPool
from layerzero.device.streams import DeferredCollectiveError

__all__ = [
    "Collective",
    "Communicator",
    "PendingCollective",
    "PendingReduction",
    "PendingSmallGather",
    "all_gather",
    "all_gather_small",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collective_error",
    "connect",
    "reduce_scatter",
    "send_recv",
    "timeout_of",
]


@dataclass(frozen=True, eq=False)
class Communicator:
    """One communicator along one axis of the mesh.

    Exchanges on a lane run in the order in which they were issued; exchanges on different lanes may overlap.
    """

    name: str  # for people
    axis: str  # "zero3", "replica" or "control"
    held_group: HeldGroup
    counters: TrafficCounters
    size: int
    rank: int
    is_gloo: bool  # see [Note: Reductions add in fp32] and [Note: Gathers in place]

    @classmethod
    def over(
        cls, name: str, axis: str, group: HeldGroup | dist.ProcessGroup, ledger: TrafficCounters, device_type: str
    ) -> Communicator:
        held = group if isinstance(group, HeldGroup) else HeldGroup(group)
        return cls(
            name=name,
            axis=axis,
            held_group=held,
            counters=ledger,
            size=dist.get_world_size(held.group),
            rank=dist.get_rank(held.group),
            is_gloo=backend_of(held.group, device_type) == "gloo",
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; raises RuntimeError after the model was closed."""
        return self.held_group.group


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that carries tensors of a device: a group may have one for each, as in "cpu:gloo,cuda:nccl"."""
    config: str = dist.get_backend_config(group)
    return dict(entry.split(":") for entry in config.split(","))[device_type]


Transfer = dist.Work | PeersReady


@dataclass(frozen=True)
class LaunchedCollective:
    """An exchange that has been counted and launched."""

    communicator: Communicator
    collective: Collective
    name: str  # whose it is: a unit's, for instance
    trace: CollectiveTrace | None  # for who watches

    def carried_by(self, *each: Transfer) -> PendingCollective:
        if self.trace is not None:
            self.trace.follow(each)
        works = PendingCollective(each, self)
        if self.communicator.held_group.is_local:
            self.communicator.held_group.track(works)
        if (watching := self.communicator.counters.on_launch) is not None:  # read once: it may end meanwhile
            works.watched.append(watching.launched(works))
        return works

    @property
    def status(self) -> RankStatus:
        """What this rank leaves word of where it waits for it in vain."""
        doing = spelled(self.collective, self.name)
        if self.collective not in (*GATHERS, Collective.GATHER_ORDER):
            return RankStatus(doing)
        return RankStatus(doing, gathers=self.communicator.counters.gathers_up_to(self.collective, self.name))

    def failed(self, error: Exception) -> RuntimeError:
        """What to raise where waiting for it has raised `error`: which ranks did not come to it, as far as is known."""
        ledger, word = self.communicator.counters, self.status
        if ledger.failure:  # the others may be anywhere by now
            return RuntimeError(f"layerzero: {word.doing} failed after another exchange of the model: {ledger.failure}")
        ranks = dist.get_process_group_ranks(self.communicator.group)
        collective_error = diagnose(word, error, ranks=ranks, timeout=timeout_of(self.communicator.group))
        ledger.failure = str(collective_error)
        return collective_error


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of collectives in seconds; torch's default if the backend does not report it."""
    for entry in dist.get_backend_config(group).split(","):
        if (timeout := timeout_on(group, entry.split(":")[0])) is not None:
            return timeout.total_seconds()
    return dist.constants.default_pg_timeout.total_seconds()


@dataclass(frozen=True)
class PendingCollective:
    """Several transfers in flight that are waited for together, as one exchange."""

    each: tuple[Transfer, ...]
    issued: LaunchedCollective
    watched: list[Watched] = field(default_factory=list, compare=False, repr=False)  # by a watchdog, if there is one

    @property
    def flight(self) -> CollectiveTrace | None:
        return self.issued.trace

    def done(self) -> bool:
        return all(work.is_completed() for work in self.each)

    def wait(self, *, beside: bool = False) -> None:
        """Raises CollectiveError where a rank did not come to it, or is gone.

        `beside`: the program does not wait, a thread does.
        """
        began = time.perf_counter()
        try:
            with nullcontext() if self.flight is None or beside else self.flight.waiting():
                for work in self.each:
                    work.wait()
        except RuntimeError as error:
            self._waited()
            if beside:
                raise DeferredCollectiveError(error, self.issued.failed) from error
            raise self.issued.failed(error) from error
        self._waited()
        if self.flight is not None:
            self.flight.arrived()
        if not beside:
            self.issued.communicator.counters.waited[self.issued.collective.value] += time.perf_counter() - began

    def _waited(self) -> None:
        self.issued.communicator.held_group.in_flight.pop(id(self), None)
        for watched in self.watched:
            watched.waited()


@dataclass
class PendingReduction:
    """A reduce-scatter in flight; holds its buffers alive until it is added somewhere."""

    work: PendingCollective
    sent: Tensor  # 1-D [size * n]; must not be written before :meth:`add_to` returns
    parts: Callable[[], Sequence[Tensor]]  # after `wait`: each 1-D [n]; rounded to `wire`, their sum is the result
    wire: torch.dtype
    give_back: Callable[[], None]  # the memory of the parts, which :meth:`add_to` calls

    def wait(self, *, beside: bool = False) -> None:
        self.work.wait(beside=beside)

    def add_to(self, target: Tensor, *, overwrite: bool, scale: float) -> None:
        """target (+)= scale * sum of the parts, in the target's dtype; once, after :meth:`wait`."""
        try:
            with nullcontext() if self.work.flight is None else self.work.flight.adding():
                accumulate_parts(target, self.parts(), wire=self.wire, overwrite=overwrite, scale=scale)
        finally:  # other ranks may wait for it
            self.give_back()


# torch 2.13 deprecates the `_into_tensor` and `_tensor` names; torch 2.11 has no others.
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _issued(lane: Communicator, exchange: Collective, name: str, sent: int) -> Iterator[LaunchedCollective]:
    """Count an exchange that is launched, show it to who watches, and name it where it fails."""
    lane.held_group.require_open()
    if lane.held_group.reserved is not None:
        lane.held_group.reserved.wait()
    lane.counters.record(exchange, lane.axis, sent, name)
    observer, flight = lane.counters.observer, None
    if observer.recorder is not None or profiler._is_profiler_enabled:
        flight = observer.flight(
            exchange=exchange.value, lane=lane.name, axis=lane.axis, ranks=lane.size, name=name, sent=sent
        )
    try:
        with nullcontext() if flight is None else flight.launching():
            yield LaunchedCollective(lane, exchange, name, flight)
    except CollectiveError:  # while it waited for room
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"layerzero: {exchange.value} failed on rank {lane.rank} of {lane.size} of the {lane.axis} axis "
            f"(global rank {dist.get_rank()}): {error}"
        ) from error


def all_gather(
    lane: Communicator,
    exchange: Collective,
    out: Tensor,
    shard: Tensor,
    *,
    name: str = "",
    only_reads_shard: bool = False,
    parts: Sequence[int] | None = None,
) -> PendingCollective:
    """Start gathering `shard` [n] of every rank into `out` [size * n]; the caller waits.

    `shard` may be this rank's own place inside `out`; `only_reads_shard` if others may write there meanwhile. `name`
    says, here and below, whose exchange it is, and `parts` how many elements each rank has, where they differ.
    """
    sent = (lane.size - 1) * shard.numel() * shard.element_size()
    with _issued(lane, exchange, name, sent) as issued:
        pieces = out.chunk(lane.size) if parts is None else torch.split(out, list(parts))
        if parts is None and (not lane.is_gloo or (lane.size > 2 and not only_reads_shard)):
            # see [Note: Gathers in place]
            return issued.carried_by(_all_gather_flat(out, shard, group=lane.group, async_op=True))
        if not lane.is_gloo:
            return issued.carried_by(dist.all_gather(list(pieces), shard, group=lane.group, async_op=True))
        if pieces[lane.rank].data_ptr() != shard.data_ptr():
            pieces[lane.rank].copy_(shard)
        each = [
            dist.broadcast(piece, group_src=rank, group=lane.group, async_op=True)
            for rank, piece in enumerate(pieces)
            if piece.numel()
        ]
        return issued.carried_by(*each)


def reduce_scatter(
    lane: Communicator,
    exchange: Collective,
    flat: Tensor,
    pool: BufferPool,
    *,
    wire: torch.dtype,
    name: str = "",
    parts: Sequence[int] | None = None,
) -> PendingReduction:
    """Start summing `flat` [size * n], as `wire`, over the lane, piece i to rank i.

    `pool` lends what is received into; if it is the node's, nothing is received, and the others read `flat`, which may
    then be finer than `wire`.
    """
    if isinstance(pool, SharedBufferPool):
        assert parts is None
        return _sum_in_node(lane, flat, pool, wire, name)
    assert flat.dtype == wire
    numel = flat.numel() // lane.size if parts is None else parts[lane.rank]
    sent = (flat.numel() - numel) * flat.element_size()
    with _issued(lane, exchange, name, sent) as issued:
        received = pool.acquire(numel * lane.size if lane.is_gloo else numel, flat.dtype)
        summands: Sequence[Tensor] = (received,)
        if lane.is_gloo:
            work = dist.all_to_all_single(
                received,
                flat,
                output_split_sizes=None if parts is None else [numel] * lane.size,
                input_split_sizes=None if parts is None else list(parts),
                group=lane.group,
                async_op=True,
            )
            summands = received.view(lane.size, numel).unbind()
        elif parts is None:
            work = _reduce_scatter_flat(received, flat, group=lane.group, async_op=True)
        else:
            work = dist.reduce_scatter(received, list(torch.split(flat, list(parts))), group=lane.group, async_op=True)
        return PendingReduction(issued.carried_by(work), flat, lambda: summands, wire, partial(pool.release, received))


def _sum_in_node(
    lane: Communicator, flat: Tensor, pool: SharedBufferPool, wire: torch.dtype, name: str
) -> PendingReduction:
    """See [Note: When a buffer is written again] in shm_buffers.py."""
    numel = flat.numel() // lane.size
    with _issued(lane, Collective.NODE_SUM, name, (lane.size - 1) * numel * flat.element_size()) as issued:
        shown = flat if pool.holds(flat) else pool.acquire(flat.numel(), flat.dtype).copy_(flat)
        number = pool.publish(shown)

        def give_back() -> None:
            pool.mark_consumed(number)
            if shown is not flat:
                pool.release(shown)

        # Rounded by who reads: the bits of what would have travelled, without memory for all of it.
        parts = partial(pool.parts, number, numel, flat.dtype)
        return PendingReduction(issued.carried_by(pool.peers_ready(number)), flat, parts, wire, give_back)


def all_to_all(
    lane: Communicator,
    exchange: Collective,
    received: Tensor,
    sent: Tensor,
    *,
    from_each: Sequence[int],
    to_each: Sequence[int],
    name: str = "",
) -> PendingCollective:
    """Start sending each rank its own piece of `sent`; `received` is put together from what came, in rank order.

    Args:
        from_each: elements that come from each rank.
        to_each: elements for each rank.
    """
    elsewhere = sum(to_each) - to_each[lane.rank]
    with _issued(lane, exchange, name, elsewhere * sent.element_size()) as issued:
        splits = {"output_split_sizes": list(from_each), "input_split_sizes": list(to_each)}
        work = dist.all_to_all_single(received, sent, **splits, group=lane.group, async_op=True)
        return issued.carried_by(work)


def send_recv(
    lane: Communicator, *, sent: Tensor, to: int | None, received: Tensor, source: int | None, name: str
) -> PendingCollective:
    """Start sending host memory to one rank of the lane, and receiving from another; None: nothing goes that way."""
    with _issued(lane, Collective.SNAPSHOT, name, 0 if to is None else sent.nbytes) as issued:
        works = []
        if source is not None and received.numel():
            works.append(dist.irecv(received, group=lane.group, group_src=source))
        if to is not None and sent.numel():
            works.append(dist.isend(sent, group=lane.group, group_dst=to))
        return issued.carried_by(*(work for work in works if work is not None))


def collective_error(lane: Communicator, exchange: Collective, name: str, error: Exception) -> RuntimeError:
    """What to raise where waiting for others, in an exchange that is not carried by a backend, has raised `error`."""
    return LaunchedCollective(lane, exchange, name, None).failed(error)


def all_reduce(
    lane: Communicator, exchange: Collective, tensor: Tensor, op: dist.ReduceOp.RedOpType
) -> PendingCollective:
    """Start reducing a small tensor in place over the lane (counted as a ring would send it)."""
    sent = 2 * (lane.size - 1) * tensor.numel() * tensor.element_size() // lane.size
    with _issued(lane, exchange, "", sent) as issued:
        return issued.carried_by(dist.all_reduce(tensor, op=op, group=lane.group, async_op=True))


@dataclass(frozen=True)
class PendingSmallGather:
    """What all ranks of a lane are telling each other."""

    work: PendingCollective
    said: Tensor  # [size, n]: by rank, after the wait
    sent: Tensor  # 1-D [size * n]; must not be written before the wait

    def wait(self) -> Tensor:
        self.work.wait()
        return self.said


def all_gather_small(lane: Communicator, exchange: Collective, tensor: Tensor) -> PendingSmallGather:
    """Start telling all ranks of the lane a few numbers, 1-D [n].

    Each sends to each at once. A ring, which gloo makes of a reduction, would send less, and take 2 (size - 1) times as
    long as one message.
    """
    with _issued(lane, exchange, "", (lane.size - 1) * tensor.numel() * tensor.element_size()) as issued:
        sent = tensor.repeat(lane.size)
        said = sent.new_empty(sent.shape)
        work = dist.all_to_all_single(said, sent, group=lane.group, async_op=True)
        return PendingSmallGather(issued.carried_by(work), said.view(lane.size, -1), sent)


def connect(lane: Communicator, device: torch.device) -> None:
    """Connect the lane's communicator with a tiny gather and a tiny reduction, if its backend connects at first use.

    ``ncclCommInit`` blocks the host until all ranks have called it, and allocates memory. So it must not run in the
    first backward, near the peak of memory. All ranks of the lane must call this.
    """
    if lane.size == 1 or lane.held_group.is_local:  # gloo connects when the group is made
        return
    each = torch.zeros(1, device=device)
    all_of_them = torch.zeros(lane.size, device=device)
    _all_gather_flat(all_of_them, each, group=lane.group)
    _reduce_scatter_flat(each, all_of_them, group=lane.group)


def broadcast(lane: Communicator, exchange: Collective, tensor: Tensor, *, from_rank: int = 0) -> None:
    """Copy `tensor` from the lane's rank `from_rank` to all of the lane."""
    sent = tensor.numel() * tensor.element_size() if lane.rank == from_rank else 0
    with _issued(lane, exchange, "", sent) as issued:
        work = dist.broadcast(tensor, group_src=from_rank, group=lane.group, async_op=True)
        works = issued.carried_by(work)
    works.wait()
