"""Represent active forward and backward passes, and the calls to units inside them.

The autograd graph of a forward pass keeps the object that represents this pass alive.

[Note: Prefetch on several meshes]
If units are on several meshes, a rank may call units of another mesh that other ranks of its group do not call, such as
experts that receive no tokens. Therefore a gather is prefetched only by the call to a unit on the same mesh, and only
the calls on this mesh determine which units are prefetched or stay gathered. All ranks that take part in the gather
then launch it at the same point in the program. This matters because an unpredicted gather waits for the other ranks.
At any other point in the program, the other ranks might be waiting for this rank in a collective launched by user code.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from layerzero.comm.mesh_info import MeshInfo
from layerzero.engine.handle import Handle
from layerzero.engine.unit import Unit


class UnitCall:
    """One call of a unit. The autograd graph refers to the calls of the forward, so the backward can find them."""

    __slots__ = ("__weakref__", "_position", "callers", "first_node", "forward_pass", "unit")

    def __init__(self, unit: Unit, around: tuple[UnitCall, ...]) -> None:
        self.unit = unit
        self.callers = around  # enclosing calls, outermost first
        self.forward_pass: ForwardPass | None = None  # forward pass that records this call in `returned`
        self.first_node = 0  # autograd's number of the first node that the forward of the unit creates
        self._position = 0

    def record_return(self, forward: ForwardPass) -> None:
        """Append this call to `forward.returned`, the list of calls in the order in which they returned."""
        self.forward_pass, self._position = forward, len(forward.returned)
        forward.returned.append(weakref.ref(self))
        forward.first.setdefault(self.unit, self._position)

    @property
    def _returned_calls(self) -> list[weakref.ref[UnitCall]]:
        """All calls in the forward pass, in the order in which they returned. The graph keeps the calls alive."""
        return self.forward_pass.returned if self.forward_pass is not None else []

    @property
    def next_call(self) -> UnitCall | None:
        """Next returned call of a common unit whose graph still exists, or None.

        Autograd runs its backward pass before that of this call.
        """
        returned = self._returned_calls
        for position in range(self._position + 1, len(returned)):
            call = returned[position]()
            if call is not None and call.unit.is_common:
                return call
        return None

    def is_before(self, use: GatheredUse) -> bool:
        """Return whether the call returned before `use` began. Autograd then runs the nodes of `use` first."""
        return self.forward_pass is not None and self.forward_pass is use.forward_pass and self._position < use.position

    def ended_handles(self) -> Iterator[Handle]:
        """Yield the handles whose units receive no more gradients once the backward pass of this call begins.

        Autograd runs three kinds of nodes before the nodes of this call: nodes of the next call, nodes of the callers
        of the next call, and nodes of uses outside of forward passes between the two calls. If units are on several
        meshes, the last call in the graph also yields the handles of units that the forward pass did not call. Only
        calls of common units count; see [Note: Reductions on several meshes] in reduction_queue.py.
        """
        forward, next_call = self.forward_pass, self.next_call
        if forward is None:
            return
        last_use = len(forward.returned) if next_call is None else next_call._position
        for position, units in forward.uses:
            if self._position < position <= last_use:
                for unit in units:
                    if not forward.is_still_needed(unit, calls=self._position + 1, uses=self._position):
                        yield from unit.handles
        if next_call is None:
            for unit in forward.uncalled_units:
                yield from unit.handles
            return
        for call in (next_call, *next_call.callers):
            if call is not self and call not in self.callers and call.is_last_in_backward:
                yield from call.unit.handles

    @property
    def is_last_in_backward(self) -> bool:
        """True if no other call or use of the unit follows in the backward pass."""
        assert self.forward_pass is not None
        return not self.forward_pass.is_still_needed(self.unit, calls=self._position, uses=self._position)

    def preceding_calls(self, count: int | None) -> Sequence[UnitCall]:
        """Return the last `count` calls on the same mesh before this call, latest first.

        If `count` is None, return all of them.
        """
        returned, position = self._returned_calls, self._position
        calls: list[UnitCall] = []
        while position and (count is None or len(calls) < count):
            position -= 1
            call = returned[position]()
            if call is not None and call.unit.mesh_info is self.unit.mesh_info:
                calls.append(call)
        return calls


class ForwardPass:
    """Forward pass of the root, or of a unit that is called directly.

    Args:
        entry: the outermost unit.
        units: if the model has several meshes, the units in the root for which :attr:`Unit.is_called_alike` is True.
            Other ranks may call units that this rank does not call. Otherwise the sequence is empty.
        expected: units that the last forward pass with the same outermost unit called, in order.

    Attributes:
        gathers: True if the pass has gathered a unit.
        called: units in the order in which they were called.
        returned: calls that are in an autograd graph, in the order in which they returned.
        prefetched: units whose gathers were launched before they were called.
        still_gathered: for each mesh, the unit of the last call if the next call is expected to be of the same unit.
    """

    def __init__(self, entry: Unit, units: Sequence[Unit], *, expected: list[Unit]) -> None:
        self.entry_unit = entry
        self.gathers = False
        self.called: list[Unit] = []
        self.returned: list[weakref.ref[UnitCall]] = []
        self.first: dict[Unit, int] = {}  # position in `returned` of each unit's first call
        self.prefetched: set[Unit] = set()
        self.still_gathered: dict[MeshInfo, Unit] = {}
        self.uses: list[
            tuple[int, Sequence[Unit]]
        ] = []  # uses of weights outside of calls: (position in `returned`, units)
        self._expected: dict[MeshInfo, deque[Unit]] = {}  # next calls on each mesh, without those that have deviated
        for unit in expected:
            self._expected.setdefault(unit.mesh_info, deque()).append(unit)
        self._units = units

    def record_call(self, unit: Unit) -> None:
        self.called.append(unit)
        expected = self._expected.get(unit.mesh_info)
        if expected and expected[0] is unit:
            expected.popleft()
        else:
            self._expected.pop(unit.mesh_info, None)

    @property
    def uncalled_units(self) -> list[Unit]:
        """Units that other ranks may have called but this forward pass did not; empty if all units are on one mesh."""
        called = set(self.called)
        return [unit for unit in self._units if unit not in called]

    def is_still_needed(self, unit: Unit, *, calls: int, uses: int) -> bool:
        """Return whether `unit` is in one of the first `calls` returned calls, or in a use up to position `uses`."""
        if self.uses and any(position <= uses and unit in units for position, units in self.uses):
            return True
        if self.first.get(unit, calls) >= calls:
            return False
        return any(call.unit is unit for ref in self.returned[:calls] if (call := ref()) is not None)

    def next_units(self, count: int, mesh: MeshInfo) -> list[Unit]:
        """Return the next `count` units on a mesh, predicted from the last forward pass.

        The list is empty once the calls on this mesh deviate from the prediction. See [Note: Prefetch on several
        meshes].
        """
        return list(islice(self._expected.get(mesh, ()), count))

    def is_expected_last(self, unit: Unit) -> bool:
        """Return whether `unit` was called last and no more calls on its mesh are expected.

        The expected calls are those of the last forward pass with the same outermost unit. If there was none, return
        False.
        """
        return bool(self.called) and self.called[-1] is unit and self._expected.get(unit.mesh_info) == deque()


class GatheredUse:
    """One use of weights in :func:`layerzero.gathered` or a weight stream, outside of the units' forward passes.

    Args:
        units: units that are gathered for the use. A weight stream reads all weights and gathers no units.
        forward: latest forward pass, which determines the position of the use in the order of calls. Its graph may be
            freed before the use. None: the use records no gradients, or no such pass exists.
    """

    __slots__ = ("_forward", "awaits_backward", "position", "units")

    def __init__(self, units: Sequence[Unit], forward: ForwardPass | None) -> None:
        self.units = units
        self.position = 0 if forward is None else len(forward.returned)  # number of calls that returned before the use
        self.awaits_backward = False  # True if a graph was recorded and its backward pass has not run
        self._forward = None if forward is None else weakref.ref(forward)
        if forward is not None:
            forward.uses.append((self.position, units))

    @property
    def forward_pass(self) -> ForwardPass | None:
        return None if self._forward is None else self._forward()

    @property
    def label(self) -> str:
        """Names of the units, for messages."""
        return ", ".join(unit.label for unit in self.units)

    @property
    def is_stream(self) -> bool:
        """True if a weight stream reads all weights. Until it ends, no pass may begin."""
        return not self.units

    @property
    def reason_not_writable(self) -> str:
        """Phrase for messages that states why weights must not change, and what to do."""
        if self.is_stream:
            return (
                "while a generator from layerzero.stream_weights or WeightSender.packets is active, because it reads "
                "the current weights. Exhaust or close the generator first"
            )
        return (
            f"inside layerzero.gathered, because the context shows the current weights of {self.label}. Leave the "
            "context first"
        )


class BackwardPass:
    """State of one backward pass.

    Attributes:
        reduces: True if the pass reduces gradients over all ranks: outside no_sync and with
            `requires_all_reduce`.
        task: id of the autograd graph task of this pass.
        callback: weak reference to the function that autograd calls at the end of the pass. Autograd drops the function
            if the pass fails.
        nested: calls whose backward passes run in a nested backward pass of a reentrant checkpoint, by graph task.
        completed_handles: handles that are ready for reduction, in the order in which their gradients arrived.
        gathered_calls: calls whose units have been gathered for this pass.
        active_calls: calls whose backward passes are active.
        ended_calls: calls whose backward passes have ended.
        uses: active uses of weights that were gathered outside of forward passes.
    """

    def __init__(self, *, reduces: bool, task: int, callback: weakref.ref[Callable[[], object]]) -> None:
        self.reduces = reduces
        self.task = task
        self.callback = callback
        self.nested: dict[int, list[UnitCall]] = {}
        self.completed_handles: dict[Handle, None] = {}
        self.gathered_calls: set[UnitCall] = set()
        self.active_calls: dict[UnitCall, None] = {}
        self.ended_calls: set[UnitCall] = set()
        self.uses: dict[GatheredUse, None] = {}

    def involves(self, unit: Unit) -> bool:
        """Return whether the backward pass of any call to the unit, or of any use of its weights, is running."""
        if unit in [call.unit for call in self.active_calls]:
            return True
        return bool(self.uses) and any(unit in use.units for use in self.uses)

    def require_unit_reached(self, handle: Handle, slot: int) -> None:
        """Raise an error if the pass has not reached the unit of a parameter that receives a gradient.

        The weights of the unit are then not gathered, and the gradient may be computed from freed memory. The check
        does not apply to units that a ``layerzero.gathered`` context has gathered: a computation in the context that
        saves no tensor needs no weights in the backward pass.

        Raises:
            RuntimeError: the pass has reached no output of the unit.
        """
        if not handle.weights.needs_gather or handle.used_in_context:
            return
        if not any(handle in call.unit.handles for call in self.gathered_calls):
            raise RuntimeError(
                f"parameter {handle.members[slot].name!r} got a gradient before the backward reached an output of its "
                f"unit, {handle.label!r}, whose weights are therefore not gathered. The loss depends on a result that "
                "the forward of the unit has stored in an attribute (self.aux_loss = ...), or returned inside an "
                "iterator or a function. Return it in a tensor, tuple, list, dict or dataclass"
            )

    def active_calls_after(self, call: UnitCall) -> list[UnitCall]:
        """Return the active calls that the forward pass began after `call` had returned.

        Autograd runs later nodes first, so all nodes of these calls have run when the backward pass reaches `call`.
        """
        if (forward := call.forward_pass) is None:
            return []
        later = [each for each in self.active_calls if each.forward_pass is forward and each._position > call._position]
        return [each for each in later if each not in call.callers]
