"""Which parameters any rank of a model has used, one byte for each.

[Note: One order for all]
A further axis may cut a dim into parts of different sizes. Then the ranks along it lay out their parts in different
orders, and in different numbers of handles. So messages list parameters by name, in sorted order, and each rank reads
them in its own order.

[Note: Bytes along one axis after the other]
Each axis takes the maximum of what its ranks send; see [Note: Control messages] in model_ranks.py. A rank that has used
every parameter knows the result. It sends along all axes at once and waits for no rank. On another rank a thread waits
for the first axis and then sends along the second one, so that the program does not wait. Until then the lanes of the
further axes are reserved: what the program launches on them comes after. So all ranks launch the same messages on each
lane in the same order, whatever they have used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, Communicator, PendingSmallGather, all_gather_small
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.process_groups import Reservation
from layerzero.comm.waiting import record_wait
from layerzero.device.streams import DeferredCollectiveError, ThreadStream

__all__ = ["PendingUse", "UsedParamMap"]


class UsedParamMap:
    """Asks all ranks of a model about its parameters; see [Note: One order for all].

    Args:
        lanes: by name of a parameter: the lanes that reach the ranks which have the same one, or a part of it.
    """

    def __init__(self, everyone: ModelRanks, lanes: Mapping[str, tuple[Communicator, ...]]) -> None:
        self._everyone = everyone
        self._lanes = lanes
        self._own: Sequence[str] = ()
        self._names: list[str] = []  # sorted, the same on all ranks
        self._groups: list[_Group] = []
        self._thread = ThreadStream("control")
        self._thread.end_with(self)

    def close(self) -> None:
        """End the thread, after its pending work."""
        self._thread.thread.end()

    def add_names(self, names: Iterable[str]) -> None:
        """Ask about these from here on, too; the same ones on all ranks."""
        self._names = sorted({*self._names, *names})
        self.set_local_order(self._own)

    def set_local_order(self, own: Sequence[str]) -> None:
        """Take and give numbers in this order, which may be another one on another rank."""
        self._own = own
        by_lanes: dict[tuple[Communicator, ...], list[str]] = {self._everyone.control_comms: []}
        for name in self._names:
            by_lanes.setdefault(self._lanes[name], []).append(name)
        self._groups = [_Group(lanes, names, own) for lanes, names in by_lanes.items()]

    def start_exchange(self, own: bytearray, further: Sequence[Tensor], *, is_known: bool) -> PendingUse:
        """Start to send a byte for each parameter, in this rank's order.

        Args:
            further: bytes to send behind them along each of the model's control lanes, uint8 [n].
            is_known: this rank knows the maximum: `own`.
        """
        pending = PendingUse(self._groups, torch.frombuffer(own, dtype=torch.uint8), further, is_known=is_known)
        several_axes = any(len(group.lanes) > 1 for group in self._groups)
        if several_axes:
            self._thread.start()  # also where it is not needed yet, so that the number of threads stays the same
        if several_axes and not is_known:
            pending.reserve()
            self._thread.run(pending.relay_beside)
        else:
            pending.relay()
        return pending

    def from_first_rank(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Return the number that the first rank gives to each parameter; -1 where it gives none."""
        said = torch.tensor([numbers.get(name, -1) for name in self._names], dtype=torch.int64, device="cpu")
        self._everyone.broadcast_numbers(said)
        return dict(zip(self._names, said.tolist(), strict=True))


class _Group:
    """Parameters whose bytes travel along the same lanes.

    Attributes:
        own: places of these parameters in this rank's order.
        places: places of the same parameters in messages.
    """

    def __init__(self, lanes: tuple[Communicator, ...], names: Sequence[str], own: Sequence[str]) -> None:
        self.lanes = lanes
        self.numel = len(names)
        place_of = {name: place for place, name in enumerate(names)}
        here = [place for place, name in enumerate(own) if name in place_of]
        self.own = torch.tensor(here, dtype=torch.int64, device="cpu")
        self.places = torch.tensor([place_of[own[place]] for place in here], dtype=torch.int64, device="cpu")


class PendingUse:
    """Messages about used parameters in flight; see [Note: Bytes along one axis after the other]."""

    def __init__(self, groups: Sequence[_Group], own: Tensor, further: Sequence[Tensor], *, is_known: bool) -> None:
        self._groups = groups
        self._own = own
        self._further = further
        self._is_known = is_known
        self._relayed: Reservation | None = None  # of launches that a thread makes
        self._failure: Exception | None = None
        self._heard: list[list[PendingSmallGather]] = [[] for _ in groups]  # by group and axis
        self._most: list[Tensor] = []  # by group: bytes to send next, uint8 [parameters of the group]
        for group in groups:
            most = torch.zeros(group.numel, dtype=torch.uint8, device="cpu")
            most[group.places] = own[group.own]
            self._most.append(most)
        self._send_along(0)

    def reserve(self) -> None:
        """Let launches on further axes wait for :meth:`relay_beside`."""
        self._relayed = Reservation()
        for group in self._groups:
            for lane in group.lanes[1:]:
                lane.held_group.reserved = self._relayed

    def relay_beside(self) -> None:
        """Call :meth:`relay` in a thread; a failure is raised where the program waits."""
        assert self._relayed is not None
        with self._relayed.launching():
            try:
                self.relay()
            except Exception as error:
                self._failure = error

    def relay(self) -> None:
        """Send along the axes that are left, after waiting for the messages that these depend on."""
        for axis in range(1, max(len(group.lanes) for group in self._groups)):
            self._send_along(axis)

    def wait(self) -> None:
        """Wait for all messages.

        Raises:
            RuntimeError: another rank did not send its own.
        """
        if self._relayed is not None:
            with record_wait(self._groups[0].lanes[0].counters, Collective.METADATA):
                self._relayed.wait()
            if isinstance(self._failure, DeferredCollectiveError):
                raise self._failure.explain(self._failure.error) from self._failure.error
            if self._failure is not None:
                raise self._failure
        for heard in self._heard:
            for each in heard:
                each.wait()

    @property
    def further(self) -> list[Tensor]:
        """Bytes behind those of parameters that came along each control lane of the model, after :meth:`wait`."""
        return [heard.said[:, self._groups[0].numel :] for heard in self._heard[0]]

    def max_over_ranks(self) -> bytes:
        """Wait for all messages; return the largest byte of each parameter among its sharers, in this rank's order."""
        self.wait()
        most = torch.zeros_like(self._own)
        for place, group in enumerate(self._groups):
            self._take(place)
            most[group.own] = self._most[place][group.places]
        return bytes(most.tolist())

    def _send_along(self, axis: int) -> None:
        for place, (group, heard) in enumerate(zip(self._groups, self._heard, strict=True)):
            if len(heard) != axis or axis >= len(group.lanes):
                continue
            if not self._is_known and heard:
                heard[-1].work.wait(beside=True)
                self._take(place)
            behind = self._further[axis : axis + 1] if place == 0 else ()
            message = torch.cat([self._most[place], *behind])
            heard.append(all_gather_small(group.lanes[axis], Collective.METADATA, message))

    def _take(self, place: int) -> None:
        """Take the maximum of the last message of a group, which has come."""
        if heard := self._heard[place]:
            self._most[place] = heard[-1].said[:, : self._groups[place].numel].amax(dim=0)
