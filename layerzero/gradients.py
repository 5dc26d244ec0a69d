"""The gradients of one handle on their way to its ZeRO-1 gradient shard.

[Note: Where a gradient lands]
With G = D * L elements in the handle (padding included), a parameter's gradient is first written to one place:

    D = 1                      the gradient shard itself
    "full", or S = 1           the accumulator  [G], master dtype, kept between micro-batches
    "sharded", S > 1           a reduce buffer  [G], reduce dtype, sent by hop 1 after each backward

Hop 1 leads to the accumulator [G / S] (sharded, R > 1) or straight to the gradient shard (R = 1).
Hop 2 leads to the gradient shard, in a backward that reduces. The gradient shard may lie in the accumulator that hop 2
has sent; see [Note: The gradient shard rests in the accumulator].

[Note: Where the mean is taken]
Contributions are summed and divided once, by D or by the user's factor, when they enter the gradient shard. Only where
fp16 travels, which would overflow, and where nothing travels, they are divided when they land.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from layerzero.accumulator import Accumulator
from layerzero.buffers import BufferPool
from layerzero.collectives import Exchange, Lane, PendingSum, reduce_scatter, scratch_numel
from layerzero.config import Precision
from layerzero.gradient_shard import GradientShard
from layerzero.layout import FlatLayout
from layerzero.rounds import Round
from layerzero.topology import Topology

__all__ = ["GradientFlow", "Phases"]

_MOST_PLACES = 8  # flat tensors whose views a flow keeps: more than there are buffers of one size in use

Phases = Generator[PendingSum, None, None]  # the exchanges of one reduction, as they are launched


class Landing(enum.Enum):
    """Where a parameter's gradient is first written; see [Note: Where a gradient lands]."""

    SHARD = "gradient shard"
    ACCUMULATOR = "accumulator"
    BUFFER = "reduce buffer"


class GradientFlow:
    """Gradient storage and reduction of one trainable handle.

    A backward pass calls :meth:`arrive` per parameter. When all have arrived, or the pass ends, :meth:`reduce`
    carries the result on, as far as the pass requires.
    """

    def __init__(
        self,
        layout: FlatLayout,
        local_views: Sequence[slice],
        *,
        label: str,
        precision: Precision,
        accumulation: str,
        divide_factor: float,
        topology: Topology,
        pool: BufferPool,
        make_accumulator: Callable[[int, torch.dtype], Accumulator],
    ) -> None:
        self.layout = layout
        self.label = label  # for traces: the unit's name
        self.precision = precision
        self.topology = topology
        self._pool = pool
        if topology.data_parallel == 1:
            self.landing = Landing.SHARD
        elif accumulation == "full" or topology.zero3_size == 1:
            self.landing = Landing.ACCUMULATOR
        else:
            self.landing = Landing.BUFFER
        early = self.landing is Landing.SHARD or torch.float16 in (precision.reduce, precision.replica_reduce)
        self._scale_on_landing = 1.0 / divide_factor if early else 1.0
        self._scale_at_end = 1.0 if early else 1.0 / divide_factor

        self.accumulator_numel = self._accumulator_numel()  # 0 where the gradient shard does its work
        self._accumulator = make_accumulator(self.accumulator_numel, precision.master)  # G or G / S elements
        rests = self.landing is Landing.BUFFER and topology.replicas > 1 and self._accumulator.lasting
        self.shard = GradientShard(
            layout.shard_numel,
            precision.master,
            local_views,
            pool=pool,
            resting_place=self._own_part if rests else None,
        )
        self._buffer: Tensor | None = None  # 1-D [G], reduce dtype, between a first arrival and hop 1
        self._places: dict[int, list[Tensor]] = {}  # by address of a flat tensor: its parts by slot
        slots = len(layout.slots)
        self.round = Round(slots)  # under way
        self._opened = [False] * slots  # its landing place has been shown to a kernel, and held zeros then
        self._landed = [False] * slots  # has a value in the landing place
        self.contributed = [False] * slots  # has a value anywhere since the user last zeroed it
        self.fresh = [False] * slots  # the same, since a final gradient was last shown
        self.maybe_from_peers = [False] * slots  # no value from here, but perhaps one from another rank of the node
        self._accumulated = False  # the sharded accumulator holds something

    # What a flow holds

    @property
    def unreduced(self) -> bool:
        """Contributions wait for an exchange before the gradient shard is complete."""
        return self._accumulated or (self.landing is Landing.ACCUMULATOR and any(self._landed))

    @property
    def holds_of_peers(self) -> bool:
        """What other ranks of the node have contributed, of which they have not told yet."""
        return self.landing is Landing.BUFFER and (self._accumulated or self.shard.valid)

    @property
    def blocked(self) -> bool:
        """The accumulator cannot be used before an exchange in flight has ended."""
        return self._accumulator.busy or self._accumulator.blocked

    @property
    def landing_blocked(self) -> bool:
        """No gradient can be taken before an exchange in flight has ended."""
        return self.landing is Landing.ACCUMULATOR and self.blocked

    @property
    def _holds_whole(self) -> bool:
        """The whole accumulator has contents that matter."""
        return any(self._landed) or any(self._opened)

    def _accumulator_numel(self) -> int:
        if self.landing is Landing.SHARD:
            return 0
        if self.landing is Landing.ACCUMULATOR:
            return self.layout.numel
        return self.layout.numel // self.topology.zero3_size if self.topology.replicas > 1 else 0

    # One backward pass

    def arrive(self, slot: int, gradient: Tensor) -> None:
        """Take one parameter's whole gradient, any floating dtype, of the parameter's shape."""
        place = self._landing_place(slot)
        if not self._landed[slot]:
            place.copy_(gradient)
            if self._scale_on_landing != 1.0:
                place.mul_(self._scale_on_landing)
        else:
            place.add_(gradient, alpha=self._scale_on_landing)
        self.note_written(slot)

    def note_written(self, slot: int) -> None:
        """One parameter's gradient is in its landing place."""
        self._landed[slot] = True
        self._opened[slot] = False
        self.fresh[slot] = True
        self.round.arrive(slot)
        self.contributed[slot] = True

    def take_written(self, slot: int) -> None:
        """A kernel has added one parameter's gradient to its :meth:`main_grad`."""
        if not self._landed[slot] and not self._opened[slot]:
            raise RuntimeError(
                f"main_grad of {self.layout.slots[slot].name!r} was kept from a forward, and its contents were "
                "reduced or zeroed since; take it in the backward"
            )
        self.note_written(slot)

    def forget_written(self, slot: int) -> None:
        """What a kernel may have added does not count: the parameter has been frozen."""
        self._opened[slot] = False

    @property
    def offers_main_grad(self) -> bool:
        return self.landing is not Landing.BUFFER and self._scale_on_landing == 1.0

    @property
    def keeps_main_grad(self) -> bool:
        """A view of it may be kept from a forward to its backward."""
        return self.landing is Landing.SHARD or self._accumulator.lasting

    def main_grad(self, slot: int) -> Tensor:
        """The landing place of one parameter, to be added to; :meth:`note_written` makes it count."""
        place = self._landing_place(slot)
        if not self._landed[slot] and not self._opened[slot]:
            place.zero_()
            self._opened[slot] = True
        return place

    def reduce(self, *, across_replicas: bool) -> Phases:
        """Carry what has landed to the accumulator, or (`across_replicas`) to the gradient shard.

        Yields each exchange that it launches; the caller resumes it when the exchange is done, and drains it in the
        order in which flows were started.
        """
        self.round.end()
        if self.landing is Landing.SHARD:
            return
        if self.landing is Landing.BUFFER:
            yield from self._hop1(self._take_buffer(), across_replicas=across_replicas)
        elif across_replicas:
            yield from self._reduce_accumulator()
        else:
            self._accumulator.close(keep=self._holds_whole)

    def reduce_rest(self) -> Phases:
        """Carry to the gradient shard what backwards inside no_sync have left behind; as :meth:`reduce`."""
        if self.landing is Landing.ACCUMULATOR:
            yield from self._reduce_accumulator()
        elif self.landing is Landing.BUFFER and self.topology.replicas > 1:
            if not self._accumulated:
                self.shard.leave_home()
                self._sharded_accumulator().zero_()  # what was there has been dropped, or sent
            yield from self._hop2_of_accumulator()

    def abort(self) -> None:
        """Forget the round under way, after a backward that failed."""
        self.round.end()
        self._accumulator.busy = False
        self._opened = [False] * len(self._opened)  # a kernel may have written there
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = None
            self._landed = [False] * len(self._landed)

    def prefetch(self) -> None:
        """Gradients will arrive soon."""
        if self.landing is Landing.ACCUMULATOR:
            self._accumulator.prefetch(keep=self._holds_whole)

    def _hop1(self, send: Tensor, *, across_replicas: bool) -> Phases:
        has_accumulator = self.topology.replicas > 1
        if has_accumulator:
            self._accumulator.prefetch(keep=self._accumulated)
            self._accumulator.busy = True
        pending, scratch = self._launch(self.topology.reduce, Exchange.HOP1, send)
        yield pending
        if has_accumulator:
            self.shard.leave_home()
            pending.add_to(self._sharded_accumulator(), overwrite=not self._accumulated, scale=1.0)
            self._accumulated = True
            self._accumulator.busy = False
        else:
            self.shard.add_sum(pending, scale=self._scale_at_end)
        self._pool.give(send)
        self._pool.give(scratch)
        if has_accumulator and across_replicas:
            yield from self._hop2_of_accumulator()
        elif has_accumulator:
            self._accumulator.close(keep=True)

    def _hop2_of_accumulator(self) -> Phases:
        node = self._sharded_accumulator()
        if self._accumulator.lasting:
            yield from self._hop2(node)
            self._accumulated = False
            return
        copy = self._pool.take(node.numel(), self.precision.replica_reduce).copy_(node)
        self._accumulated = False
        self._accumulator.close(keep=False)
        yield from self._hop2(copy, gives_back=True)

    def _reduce_accumulator(self) -> Phases:
        full = self._accumulator.open(keep=self._holds_whole)
        for index, slot in enumerate(self.layout.slots):
            if not self._landed[index]:
                place = full[slot.offset : slot.end]
                if self._opened[index] and place.any():
                    raise RuntimeError(
                        f"main_grad of {slot.name!r} was written to, but its gradient never came: the kernel must set "
                        "grad_added_to_main_grad and return a gradient, of any contents"
                    )
                place.zero_()
        self._landed = [False] * len(self._landed)
        self._opened = [False] * len(self._opened)
        first = self.precision.reduce if self.topology.zero3_size > 1 else self.precision.replica_reduce
        self._accumulator.busy = first == full.dtype
        if not self._accumulator.busy:
            full = self._pool.take(full.numel(), first).copy_(full)
            self._accumulator.close(keep=False)
        if self.topology.zero3_size == 1:
            yield from self._hop2(full)
            self._end_reading(full)
            return
        pending, scratch = self._launch(self.topology.reduce, Exchange.HOP1, full)
        yield pending
        if self.topology.replicas == 1:
            self.shard.add_sum(pending, scale=self._scale_at_end)
            self._end_reading(full)
            self._pool.give(scratch)
            return
        node = self._pool.take(self.layout.numel // self.topology.zero3_size, self.precision.master)
        pending.add_to(node, overwrite=True, scale=1.0)
        self._end_reading(full)
        self._pool.give(scratch)
        yield from self._hop2(node, gives_back=True)

    def _end_reading(self, sent: Tensor) -> None:
        """The exchange of the accumulator, or of a copy of it, is done."""
        if self._accumulator.busy:
            self._accumulator.busy = False
            self._accumulator.close(keep=False)
        else:
            self._pool.give(sent)

    def _hop2(self, node: Tensor, *, gives_back: bool = False) -> Phases:
        """Sum over the replicas; `gives_back` if `node` is scratch."""
        copies = node.dtype != self.precision.replica_reduce
        send = self._pool.take(node.numel(), self.precision.replica_reduce).copy_(node) if copies else node
        if copies and gives_back:
            self._pool.give(node)
        pending, scratch = self._launch(self.topology.replica, Exchange.HOP2, send)
        yield pending
        self.shard.add_sum(pending, scale=self._scale_at_end)
        if copies or gives_back:
            self._pool.give(send)
        self._pool.give(scratch)

    def _launch(self, lane: Lane, exchange: Exchange, send: Tensor) -> tuple[PendingSum, Tensor]:
        scratch = self._pool.take(scratch_numel(lane, send.numel()), send.dtype)
        return reduce_scatter(lane, exchange, send, scratch, name=self.label), scratch

    # Storage

    def _landing_place(self, slot: int) -> Tensor:
        """Where one parameter's gradient is first written, of the parameter's shape."""
        if self.landing is Landing.SHARD:
            flat = self.shard.home()
        elif self.landing is Landing.ACCUMULATOR:
            flat = self._accumulator.open(keep=self._holds_whole)
        else:
            if self._buffer is None:
                self._buffer = self._pool.take(self.layout.numel, self.precision.reduce)
            flat = self._buffer
        key = flat.data_ptr()  # the views keep the memory, so that no other tensor comes to lie there
        if key not in self._places:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            self._places[key] = [flat[each.offset : each.end].view(each.shape) for each in self.layout.slots]
        return self._places[key][slot]

    def _take_buffer(self) -> Tensor:
        """The reduce buffer with zeros where nothing arrived; the flow no longer holds it."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._pool.take(self.layout.numel, self.precision.reduce)
        for slot, landed in zip(self.layout.slots, self._landed, strict=True):
            if not landed:
                buffer[slot.offset : slot.end].zero_()
        self._buffer = None
        self._landed = [False] * len(self._landed)
        return buffer

    def _sharded_accumulator(self) -> Tensor:
        return self._accumulator.open(keep=self._accumulated)

    def _own_part(self) -> Tensor:
        """What hop 2 reduces to this rank, of the sharded accumulator."""
        length = self.layout.shard_numel
        return self._sharded_accumulator().narrow(0, self.topology.replica.rank * length, length)

    # What the user contributes and takes back

    def add_rows(self, slot: int, rows: Tensor) -> None:
        """Add this rank's rows of a gradient that no exchange need carry, of the master's shape."""
        lands = self.landing is Landing.SHARD
        if not lands:
            self.shard.make_valid()
        self.shard.add_rows(slot, rows, overwrite=lands and not self._landed[slot])
        self._landed[slot] |= lands
        self.contributed[slot] = True
        self.fresh[slot] = True

    def drop(self, slots: Sequence[int]) -> None:
        """Forget every contribution to some parameters: they have no gradient."""
        for slot in slots:
            self.contributed[slot] = self.maybe_from_peers[slot] = self.fresh[slot] = False
            self._landed[slot] = self._opened[slot] = False
        if not any(self.contributed) and not any(self.maybe_from_peers):
            self._accumulated = False
            self.shard.forget()
            return
        for slot in slots:
            if self.shard.valid:
                self.shard.zero(slot)
            if self._accumulated:
                self._zero_accumulated(slot)

    def _zero_accumulated(self, slot: int) -> None:
        place = self.layout.slots[slot]
        node = self.layout.zero3_range(self.topology.gather.rank, self.topology.zero3_size)
        start, stop = max(place.offset, node.start), min(place.end, node.stop)
        if start < stop:
            self._sharded_accumulator()[start - node.start : stop - node.start].zero_()
            self._accumulator.close(keep=True)

    def zero(self, slot: int) -> None:
        """Forget every contribution to one parameter, but let it have a gradient of zero."""
        self.drop([slot])
        if self.landing is Landing.SHARD:
            self.shard.zero(slot)
            self._landed[slot] = True
        else:
            self.shard.make_valid()
        self.contributed[slot] = True
