"""Forwards and backwards that are under way. Each is an object that lives as long as its pass.

[Note: Gathers ahead, by mesh]
Where units are on several meshes, ranks of one group may call units of another mesh that others of the group do not:
experts without tokens. A gather is launched ahead by a call of a unit on the same mesh, so that the ranks that share in
it launch it at the same place of the program. An unforeseen one waits for them; elsewhere they might wait for this rank
in an exchange of the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import islice

from layerzero.comm.trace_recorder import TraceDispatcher
from layerzero.engine.handle import Handle
from layerzero.engine.unit import Unit

__all__ = ["BackwardPass", "ForwardPass", "UnitCall", "Use"]


class UnitCall:
    """One call of a unit. It belongs to the graph of its forward, so that each graph finds its own way back."""

    __slots__ = ("__weakref__", "_position", "callers", "ends_with_input_grad", "forward", "unit")

    def __init__(self, unit: Unit, around: tuple[UnitCall, ...]) -> None:
        self.unit = unit
        self.callers = around  # the calls that make this one, outermost first
        self.ends_with_input_grad = False  # the gradients of its inputs will end its backward
        self.forward: ForwardPass | None = None  # in whose order it has a place
        self._position = 0

    def record_return(self, forward: ForwardPass) -> None:
        """Take the next place in the order of a forward."""
        self.forward, self._position = forward, len(forward.returned)
        forward.returned.append(weakref.ref(self))
        forward.first.setdefault(self.unit, self._position)

    @property
    def _order(self) -> list[weakref.ref[UnitCall]]:
        """All calls of the forward, by return; the graph keeps them."""
        return self.forward.returned if self.forward is not None else []

    @property
    def next_call(self) -> UnitCall | None:
        """The call that returned next, of those that are in a graph: its backward comes before this one's."""
        later = (self._order[place]() for place in range(self._position + 1, len(self._order)))
        return next((call for call in later if call is not None), None)

    def is_before(self, use: Use) -> bool:
        """Whether the call returned before `use` began, so that autograd runs the nodes of `use` first."""
        return self.forward is not None and self.forward is use.forward and self._position < use.place

    def ended_handles(self) -> Iterator[Handle]:
        """Yield handles of units that get no more gradients once the backward of this call begins.

        Autograd runs the nodes of the follower, of the calls around it, and of uses outside of forwards between the two
        before any of this one's. For the last call in the graph: handles of units that the forward did not call, where
        that matters.
        """
        forward, follower = self.forward, self.next_call
        for place, units in () if forward is None else forward.uses:
            if self._position < place and (follower is None or place <= follower._position):
                assert forward is not None
                for unit in units:
                    if not forward.comes_again(unit, calls=self._position + 1, uses=self._position):
                        yield from unit.handles
        if follower is not None:
            for ended in (follower, *follower.callers):
                if ended is not self and ended not in self.callers and ended.is_last_in_backward:
                    yield from ended.unit.handles
        elif forward is not None:
            for unit in forward.uncalled_units:
                yield from unit.handles

    @property
    def is_last_in_backward(self) -> bool:
        """Whether no other call or use of the unit follows in the backward."""
        assert self.forward is not None
        return not self.forward.comes_again(self.unit, calls=self._position, uses=self._position)

    def preceding(self, count: int | None) -> Sequence[UnitCall]:
        """The `count` calls, or all, of units on this one's mesh, that returned before this one, nearest first."""
        return list(islice((each for each in self._earlier() if each.unit.topology is self.unit.topology), count))

    @property
    def previous(self) -> UnitCall | None:
        """The call, of a unit on whatever mesh, that returned before this one."""
        return next(self._earlier(), None)

    def _earlier(self) -> Iterator[UnitCall]:
        earlier = (self._order[place]() for place in range(self._position - 1, -1, -1))
        return (call for call in earlier if call is not None)


class ForwardPass:
    """A forward of the root, or of a unit called by itself.

    Args:
        units: of the model, where others may call some that this rank does not: where units are on several meshes.
        expected: the calls of the last forward through the same entry.
    """

    def __init__(self, entry: Unit, units: Sequence[Unit], *, expected: list[Unit]) -> None:
        self.entry_unit = entry
        self.called: list[Unit] = []
        self.returned: list[weakref.ref[UnitCall]] = []
        self.first: dict[Unit, int] = {}  # position in `returned` of each unit's first call
        self.prefetched: set[Unit] = set()
        self.still_gathered: Unit | None = (
            None  # by a call that has returned, for the next one, if that is of the same unit
        )
        self.uses: list[tuple[int, Sequence[Unit]]] = []  # of weights outside of calls: place in `returned`, units
        self._expected = expected
        self._units = units

    @property
    def uncalled_units(self) -> list[Unit]:
        """Of the units that others may call, those that it did not call."""
        called = set(self.called)
        return [unit for unit in self._units if unit not in called]

    def comes_again(self, unit: Unit, *, calls: int, uses: int) -> bool:
        """Whether the graph has a call of `unit` among the first `calls`, or a use of it up to the place `uses`."""
        if any(place <= uses and unit in units for place, units in self.uses):
            return True
        if self.first.get(unit, calls) >= calls:
            return False
        return any(call.unit is unit for weak in self.returned[:calls] if (call := weak()) is not None)

    def next_units(self, count: int) -> list[Unit]:
        """The units that follow if this forward goes on like the last one; none once it has left that path.

        Those on the mesh of the unit that was called last. See [Note: Gathers ahead, by mesh].
        """
        here = len(self.called)
        # There is no call where the first one has raised before it began.
        if not 0 < here <= len(self._expected) or self._expected[here - 1] is not self.called[-1]:
            self._expected = []
        following = (unit for unit in self._expected[here:] if unit.topology is self.called[-1].topology)
        return list(islice(following, count))


class Use:
    """One use of weights outside of their units' forwards, :func:`layerzero.gathered`, and the graph made there.

    Args:
        units: units that are gathered.
        forward: the last forward that has begun, whose calls order the use. Its graph may end before the use.
    """

    __slots__ = ("_forward", "comes_back", "place", "units")

    def __init__(self, units: Sequence[Unit], forward: ForwardPass | None) -> None:
        self.units = units
        self.place = 0 if forward is None else len(forward.returned)  # after the calls that have returned
        self.comes_back = False  # a graph was recorded, and its backward has not run
        self._forward = None if forward is None else weakref.ref(forward)
        if forward is not None:
            forward.uses.append((self.place, units))

    @property
    def forward(self) -> ForwardPass | None:
        return None if self._forward is None else self._forward()

    @property
    def label(self) -> str:
        """Names of the units, for messages."""
        return ", ".join(unit.label for unit in self.units)


class BackwardPass:
    """A backward.

    Attributes:
        reduces: it runs outside no_sync.
        task: autograd's number for it.
        observer: whom it is told to; None: nobody listens.
        nested: by task: calls whose backward runs in a backward inside this one, of a reentrant checkpoint.
        arrived: handles that are ready to be reduced, in order of arrival.
        begun: calls that have been gathered for.
        open: calls whose backward has begun and not ended.
        uses: uses of weights outside of forwards whose backward is running.
    """

    def __init__(self, *, reduces: bool, task: int, observer: TraceDispatcher | None) -> None:
        self.requires_gradient_sync = reduces
        self.task = task
        self.observer = observer
        self.nested: dict[int, list[UnitCall]] = {}
        self.completed_handles: dict[Handle, None] = {}
        self.gathered_calls: set[UnitCall] = set()
        self.active_calls: dict[UnitCall, None] = {}
        self.uses: dict[Use, None] = {}

    def involves(self, unit: Unit) -> bool:
        """Whether a call or use of the unit is in its backward."""
        return any(call.unit is unit for call in self.active_calls) or any(unit in use.units for use in self.uses)

    def next_call_holds_buffer(self, call: UnitCall) -> bool:
        """The follower's backward ends where the one of `call` begins, but the hook that ends it comes second.

        Until then it holds its full buffer.
        """
        follower = call.next_call
        return (
            follower is not None
            and follower.ends_with_input_grad
            and follower not in call.callers
            and follower in self.active_calls
        )
