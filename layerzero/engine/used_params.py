"""Determine which parameters any rank of a model has used, with one byte per parameter.

[Note: Order of names in messages]
A model-parallel axis may split a dim into parts of different sizes. The ranks along the axis then have different orders
of parameters and different numbers of handles. Therefore the bytes in messages are sorted by parameter name, and each
rank converts them to its local order.

[Note: Reduction of used parameters by axis]
The bytes are reduced to their maximum along each axis; see [Note: Control messages] in model_ranks.py. If a rank has
used every parameter, the result is known in advance. Such a rank sends its bytes along all axes immediately and does
not wait. On other ranks, a thread waits for the messages along the first axis and then sends along the second axis, so
that the main thread does not wait. Until the thread has sent its messages, the communicators of the later axes are
reserved, and the main thread launches its collectives on them only afterwards. Therefore all ranks launch the same
messages on each communicator in the same order, regardless of which parameters they have used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.comm.collectives import Collective, Communicator, PendingSmallGather, all_gather_small
from layerzero.comm.model_ranks import ModelRanks
from layerzero.comm.process_groups import Reservation
from layerzero.device.profiling import profiler_range
from layerzero.device.streams import DeferredCollectiveError, ThreadStream


class UsedParamMap:
    """Record of the parameters that at least one rank of a model has used; see [Note: Order of names in messages].

    Args:
        model_ranks: all ranks of the model.
        comms: communicators that connect the ranks that store a parameter or a part of it, by parameter name.
    """

    def __init__(self, model_ranks: ModelRanks, comms: Mapping[str, tuple[Communicator, ...]]) -> None:
        self._model_ranks = model_ranks
        self._comms = comms
        self._own: Sequence[str] = ()
        self._names: list[str] = []  # sorted, the same on all ranks
        self._groups: list[_ParamsOnComms] = []
        self._thread = ThreadStream("control")
        self._thread.end_with(self)

    def close(self) -> None:
        """Stop the control thread once it has completed its pending work."""
        self._thread.thread.end()

    def add_names(self, names: Iterable[str]) -> None:
        """Include the parameters `names` in later exchanges of usage bytes. All ranks must pass the same names."""
        self._names = sorted({*self._names, *names})
        self.set_local_order(self._own)

    def set_local_order(self, own: Sequence[str]) -> None:
        """Set the order of the parameters in this rank's usage bytes. Other ranks may use a different order."""
        self._own = own
        by_comms: dict[tuple[Communicator, ...], list[str]] = {self._model_ranks.control_comms: []}
        for name in self._names:
            by_comms.setdefault(self._comms[name], []).append(name)
        self._groups = [_ParamsOnComms(comms, names, own) for comms, names in by_comms.items()]

    def start_exchange(self, own: bytearray, extra_digests: Sequence[Tensor], *, is_known: bool) -> PendingUsage:
        """Start reducing one usage byte per parameter to its maximum over all ranks.

        Args:
            own: usage bytes of this rank, in its local order.
            extra_digests: one tensor for each control communicator of the model, uint8 [n]. It is sent only along this
                communicator.
            is_known: True if `own` is already the maximum over all ranks. Messages along one axis then do not wait for
                those along the previous axis.
        """
        pending = PendingUsage(self._groups, torch.frombuffer(own, dtype=torch.uint8), extra_digests, is_known=is_known)
        several_axes = any(len(group.comms) > 1 for group in self._groups)
        if several_axes:
            self._thread.start()  # even if it is not needed yet, to keep the number of threads constant
        if several_axes and not is_known:
            pending.reserve_communicators()
            self._thread.run(pending.relay_in_background)
        else:
            pending.relay()
        return pending

    def from_first_rank(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Return the number that the first rank has passed for each parameter, or -1 if it has passed none."""
        values = torch.tensor([numbers.get(name, -1) for name in self._names], dtype=torch.int64, device="cpu")
        self._model_ranks.broadcast_numbers(values)
        return dict(zip(self._names, values.tolist(), strict=True))


class _ParamsOnComms:
    """Parameters whose bytes are sent along the same communicators.

    Attributes:
        own: positions of these parameters in this rank's order, int64 [n].
        places: positions of the same parameters in messages, int64 [n].
    """

    def __init__(self, comms: tuple[Communicator, ...], names: Sequence[str], own: Sequence[str]) -> None:
        self.comms = comms
        self.numel = len(names)
        index_of = {name: index for index, name in enumerate(names)}
        own_positions = [index for index, name in enumerate(own) if name in index_of]
        self.own = torch.tensor(own_positions, dtype=torch.int64, device="cpu")
        self.places = torch.tensor([index_of[own[index]] for index in own_positions], dtype=torch.int64, device="cpu")


class PendingUsage:
    """In-flight reduction of usage bytes over all ranks; see [Note: Reduction of used parameters by axis]."""

    def __init__(
        self, groups: Sequence[_ParamsOnComms], own: Tensor, extra_digests: Sequence[Tensor], *, is_known: bool
    ) -> None:
        self._groups = groups
        self._own = own
        self._extra_digests = extra_digests
        self._is_known = is_known
        self._reservation: Reservation | None = None  # reservation of communicators for launches by a thread
        self._failure: Exception | None = None
        self._gathers: list[list[PendingSmallGather]] = [[] for _ in groups]  # messages, by group and axis
        self._to_send: list[Tensor] = []  # bytes to send next, by group, uint8 [number of parameters in the group]
        for group in groups:
            message_bytes = torch.zeros(group.numel, dtype=torch.uint8, device="cpu")
            message_bytes[group.places] = own[group.own]
            self._to_send.append(message_bytes)
        self._launch_gathers_along_axis(0)

    def reserve_communicators(self) -> None:
        """Reserve the communicators of all axes except the first for :meth:`relay_in_background`.

        Until that method has launched its messages, launches of other threads on these communicators wait.
        """
        self._reservation = Reservation()
        for group in self._groups:
            for comm in group.comms[1:]:
                comm.held_group.reserved = self._reservation

    def relay_in_background(self) -> None:
        """Run :meth:`relay` in a thread. If :meth:`relay` fails, :meth:`wait` raises the error."""
        assert self._reservation is not None
        with self._reservation.launching():
            try:
                self.relay()
            except Exception as error:
                self._failure = error

    def relay(self) -> None:
        """Send the message of this rank along the remaining axes, one by one. Wait for earlier axes if necessary."""
        for axis in range(1, max(len(group.comms) for group in self._groups)):
            self._launch_gathers_along_axis(axis)

    def wait(self) -> None:
        """Wait for all messages.

        Raises:
            RuntimeError: the message of another rank did not arrive.
        """
        if self._reservation is not None:
            with profiler_range("wait", Collective.METADATA.value):
                self._reservation.wait()
            if isinstance(self._failure, DeferredCollectiveError):
                raise self._failure.explain(self._failure.error) from self._failure.error
            if self._failure is not None:
                raise self._failure
        for gathers in self._gathers:
            for gather in gathers:
                gather.wait()

    @property
    def extra_digests(self) -> list[Tensor]:
        """Digests of all ranks received along each control communicator, uint8 [ranks, n]; valid after :meth:`wait`."""
        return [gather.said[:, self._groups[0].numel :] for gather in self._gathers[0]]

    def max_over_ranks(self) -> bytes:
        """Wait for all messages, and return the maximum byte of each parameter over all ranks, in this rank's order."""
        self.wait()
        maximum = torch.zeros_like(self._own)
        for index, group in enumerate(self._groups):
            self._store_maximum(index)
            maximum[group.own] = self._to_send[index][group.places]
        return bytes(maximum.tolist())

    def _launch_gathers_along_axis(self, axis: int) -> None:
        for index, (group, gathers) in enumerate(zip(self._groups, self._gathers, strict=True)):
            if len(gathers) != axis or axis >= len(group.comms):
                continue
            if not self._is_known and gathers:
                gathers[-1].work.wait(off_main_thread=True)
                self._store_maximum(index)
            extra_bytes = self._extra_digests[axis : axis + 1] if index == 0 else ()
            message = torch.cat([self._to_send[index], *extra_bytes])
            gathers.append(all_gather_small(group.comms[axis], Collective.METADATA, message))

    def _store_maximum(self, index: int) -> None:
        """Store, as the bytes to send next, the maximum over ranks of a group's last message. It must have arrived."""
        if gathers := self._gathers[index]:
            self._to_send[index] = gathers[-1].said[:, : self._groups[index].numel].amax(dim=0)
