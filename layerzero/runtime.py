"""The schedule: when units are gathered, freed and reduced. Driven by module, tensor and parameter hooks.

[Note: Who frees the full buffer]
A forward frees it when it returns, unless it runs inside a backward (a checkpoint recomputes it) or
`reshard_after_forward` is off and the graph will come back. A backward frees it when the gradients of a
use's inputs are known: autograd runs later nodes first, so all of the use's nodes have run by then. Leaves come before
later nodes, though, and of inputs without gradients nothing is heard: such a use ends with the backward that holds it,
which in a reentrant checkpoint is one inside another. The gradients of the unit's parameters tell nothing: others, of
nested units or tied weights, may still be reached through its weights.

[Note: Forward order]
A forward's calls are recorded. The next forward prefetches along that record as long as it follows it; a backward
prefetches along the record of its own forward, which its hooks hold.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.buffers import Buffers
from layerzero.config import LayerZeroConfig
from layerzero.handle import Handle
from layerzero.main_grad import take_flag
from layerzero.member import Member
from layerzero.order import GatherOrder
from layerzero.refreshing import Refreshes
from layerzero.structures import cast_floating, tensors_in
from layerzero.sync import GradientSync
from layerzero.topology import Topology
from layerzero.unit import Unit, Use

__all__ = ["Runtime"]


@dataclass
class _Forward:
    """A forward of the root, or of a unit called by itself, that is under way."""

    entry: Unit
    expected: list[Unit]  # the calls of the last forward through the same entry
    called: list[Unit] = field(default_factory=list)
    returned: list[Use] = field(default_factory=list)
    prefetched: set[Unit] = field(default_factory=set)

    def upcoming(self, count: int) -> list[Unit]:
        """The units that follow if this forward goes on like the last one; none once it has left that path."""
        here = len(self.called)
        if here > len(self.expected) or self.expected[here - 1] is not self.called[-1]:
            self.expected = []
        return self.expected[here : here + count]


@dataclass
class _Backward:
    """A backward that is under way."""

    reduces: bool  # outside no_sync
    task: int  # autograd's number for it
    nested: dict[int, list[Use]] = field(default_factory=dict)  # by task: uses whose backward runs in a nested one
    arrived: dict[Handle, None] = field(default_factory=dict)  # complete handles, in order
    begun: set[Use] = field(default_factory=set)  # uses that have been gathered for


class Runtime:
    """Runs one sharded model. The hooks on its modules keep it; see :mod:`layerzero.hooks`."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        config: LayerZeroConfig,
        topology: Topology,
        buffers: Buffers,
        ignored: Sequence[nn.Parameter],
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.handles = tuple(handle for unit in units for handle in unit.handles)
        self.config = config
        self.topology = topology
        self.buffers = buffers
        buffers.full.limit = self._most_gathered()
        self.observer = topology.ledger.observer
        self.reduces = True  # False inside no_sync
        self.shows_full = False  # inside layerzero.unsharded
        self.shows_averages = False  # inside EMA.swapped
        self.staging: object | None = None  # of saves in the background: layerzero.checkpoint's
        self.members = {member.name: member for handle in self.handles for member in handle.members}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # from shard_optimizer
        self._member_of = WeakIdKeyDictionary({member.parameter: member for member in self.members.values()})
        self._origins = WeakIdKeyDictionary()  # parameter before sharding -> member
        self._ignored = WeakIdKeyDictionary(dict.fromkeys(ignored))
        self._running: list[Use] = []  # calls of units under way, outermost first
        self._forward: _Forward | None = None
        self._backward: _Backward | None = None
        self._last_calls: dict[Unit, list[Unit]] = {}  # by entry
        self.gradients = GradientSync(self.handles, topology)
        self.refreshes = Refreshes(self.handles, topology)
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._order = GatherOrder([unit.label for unit in self.units], topology.node_control)

    def _most_gathered(self) -> int:
        """Bytes of the full buffers that are filled at once: the root's, a unit's and those of the ones ahead of it."""
        root = sum(handle.gathered_bytes for unit in self.units if unit.module is self.model for handle in unit.handles)
        others = [unit for unit in self.units if unit.module is not self.model]
        sizes = sorted(sum(handle.gathered_bytes for handle in unit.handles) for unit in others)
        return root + sum(sizes[-1 - self.config.prefetch :] if self.config.reshard_after_forward else sizes)

    # Parameters

    def remember_origins(self, origins: Sequence[tuple[nn.Parameter, str]]) -> None:
        """Know the parameters that the model had before sharding: an optimizer may hold them."""
        for parameter, name in origins:
            self._origins[parameter] = self.members[name]

    def member_of(self, parameter: Tensor) -> Member | None:
        """Of a sharded parameter, or of one that the model had before sharding; None if it has neither."""
        member: Member | None = self._member_of.get(parameter)  # type: ignore[no-untyped-call]
        if member is None:
            member = self._origins.get(parameter)  # type: ignore[no-untyped-call]
        return member

    def is_ignored(self, parameter: Tensor) -> bool:
        """The model had it when it was sharded, and shard_model was told to leave it alone."""
        return parameter in self._ignored

    # Forward

    def before_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        interrupted = unit.running and self._forward is not None and not _being_called(unit.module)
        if self._forward is None or interrupted:
            self.notice_interrupt()
        use = Use(unit, around=tuple(self._running))
        unit.running.append(use)  # now: after_forward runs even where this raises
        self._running.append(use)
        if self.shows_full:
            raise RuntimeError("forward inside layerzero.unsharded; leave the context first")
        if self._forward is None and not _inside_backward():
            self._begin_forward(unit)
        self._gather(unit)
        if self._forward is not None:
            self._forward.called.append(unit)
            for upcoming in self._forward.upcoming(self.config.prefetch):
                self._forward.prefetched.add(upcoming)
                self._gather(upcoming)
        self._wait(unit)
        unit.show_leaves()
        policy = self.config.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        if torch.is_grad_enabled():
            self._watch_inputs(use, args, kwargs)
        self.observer.begin("forward", unit.label, use)
        return args, kwargs

    def after_forward(self, unit: Unit, output: Any) -> Any:
        """`output` is None where the forward raised."""
        if not unit.running:  # before_forward has raised at once
            return output
        use = unit.running.pop()
        self.observer.end(use)
        self._running.remove(use)
        if self.shows_full:  # before_forward has refused
            return output
        if unit.idle:
            unit.show_sharded()
        if self.config.mp_policy.output_dtype is not None:
            output = cast_floating(output, self.config.mp_policy.output_dtype)
        comes_back = torch.is_grad_enabled() and self._watch_outputs(use, output)
        if self._forward is not None and comes_back:
            use.join(self._forward.returned)
        if not _inside_backward() and unit.idle and not (comes_back and not self.config.reshard_after_forward):
            unit.reshard()
        if self._forward is not None and self._forward.entry is unit and not unit.running:
            self._end_forward(self._forward, comes_back=comes_back)
        return output

    def _begin_forward(self, entry: Unit) -> None:
        self.gradients.heed_requires_grad()
        self.refreshes.before_forward()
        self._forward = _Forward(entry, expected=self._last_calls.get(entry, []))

    def _end_forward(self, forward: _Forward, *, comes_back: bool) -> None:
        self._forward = None
        self._last_calls[forward.entry] = forward.called
        # Where no gradient comes back (or the forward raised), no backward will free what was kept for it.
        for unit in forward.prefetched.difference(forward.called) if comes_back else self.units:
            if unit.idle:
                unit.reshard()

    def _watch_inputs(self, use: Use, args: Any, kwargs: Any) -> None:
        # A leaf's hook may run before later nodes of the use; see [Note: Who frees the full buffer].
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.grad_fn is not None]
        use.is_watched = len(inputs) == 1  # with several, it is not known where the backward ends
        if len(inputs) == 1:
            inputs[0].register_hook(functools.partial(self._after_backward, use))  # type: ignore[no-untyped-call]
        elif inputs:
            register_multi_grad_hook(inputs, functools.partial(self._after_backward, use))

    def _watch_outputs(self, use: Use, output: Any) -> bool:
        """Gather again when the backward reaches this use; False where it never will."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(functools.partial(self._before_backward, use))  # type: ignore[no-untyped-call]
        return bool(outputs)

    # Gather

    def _gather(self, unit: Unit) -> None:
        if unit.must_gather:
            self._order.check(self._index[unit])
        unit.gather()

    def _wait(self, unit: Unit) -> None:
        try:
            unit.wait()
        except RuntimeError as error:
            raise self._order.explain(error) from error

    # Backward

    def _before_backward(self, use: Use, gradient: Tensor) -> None:
        unit = use.unit
        backward = self._enter_backward(f"unit {unit.name!r}")
        self.observer.reach(use, use.around)
        unit.in_backward.add(use)
        self._end_with_nested_backward(backward, use)
        # Outermost first, whichever output the backward reaches first: that may differ between ranks.
        for around in use.around:
            if around not in backward.begun:
                backward.begun.add(around)
                self._gather(around.unit)
        backward.begun.add(use)
        self._gather(unit)
        unit.prefetch_accumulators()
        self._expect_no_more(backward, use)
        if not use.follower_ends_next:
            self._prefetch_before(use)
        self._wait(unit)
        unit.show_leaves()
        self.gradients.start_ready(across_replicas=backward.reduces)
        self.observer.begin("backward", unit.label, use)

    def _expect_no_more(self, backward: _Backward, use: Use) -> None:
        """What the uses before this one in the backward have not delivered by now will not come.

        Another rank may have used other parameters, complete a handle and wait for its reduction. So this rank starts
        it in the same place of the program, before it waits itself for a gather that the other has not come to.
        """
        for handle in use.ended_handles():
            if handle.trainable and handle.flow is not None and not handle.flow.round.complete:
                handle.flow.round.expect([member.is_coming() for member in handle.members])
                if handle.flow.round.complete:
                    backward.arrived[handle] = None

    def _prefetch_before(self, use: Use) -> None:
        for distance, earlier in enumerate(use.before(self.config.prefetch)):
            self._gather(earlier.unit)
            if distance == 0:  # there are two slabs
                earlier.unit.prefetch_accumulators()

    def _after_backward(self, use: Use, gradients: object) -> None:
        self.observer.end(use)
        use.unit.in_backward.discard(use)
        if use.unit.idle:
            use.unit.release()
        for previous in use.before(1):
            if previous in previous.unit.in_backward:
                self._prefetch_before(previous)

    def _end_with_nested_backward(self, backward: _Backward, use: Use) -> None:
        """The backward of a reentrant checkpoint runs inside another one. It holds all of a recomputed use's nodes."""
        task = torch._C._current_graph_task_id()
        if task == backward.task:
            return
        if task not in backward.nested:
            backward.nested[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_nested, task))
        backward.nested[task].append(use)

    def _end_nested(self, task: int) -> None:
        assert self._backward is not None
        for use in self._backward.nested.pop(task):
            self._after_backward(use, None)

    def on_gradient(self, handle: Handle, slot: int, leaf: Tensor) -> None:
        """The gradient of one whole parameter has arrived in ``leaf.grad``."""
        backward = self._enter_backward(handle.members[slot].name)
        gradient, leaf.grad = leaf.grad, None
        written = take_flag(leaf)
        if gradient is None:  # frozen since its forward: torch drops the gradient, too
            if written and handle.flow is not None:
                handle.flow.forget_written(slot)
            return
        take = self.gradients.take_main_grad if written else self.gradients.arrive
        if not take(handle, slot, gradient):
            return
        backward.arrived[handle] = None
        self.gradients.start_ready(across_replicas=backward.reduces)

    def main_grad(self, handle: Handle, slot: int) -> Tensor | None:
        """What a gathered parameter offers as ``main_grad``."""
        in_backward = _inside_backward() and not self._running  # a forward that is computed again is no backward
        return self.gradients.main_grad(handle, slot, in_backward=in_backward)

    def _enter_backward(self, name: str) -> _Backward:
        if torch.is_grad_enabled():  # the engine's own mode inside a backward
            raise RuntimeError(
                f"backward or autograd.grad with create_graph=True through {name!r} is not supported: gradients of "
                "gradients would need weights that are freed by then. Compute such a penalty on an unsharded model, or "
                "by finite differences"
            )
        if self._backward is None:
            if edited := [handle.name for handle in self.handles if handle.watch.edited]:
                raise RuntimeError(
                    f"parameters of {', '.join(edited)} were changed between a forward and its backward, which needs "
                    "them as they were; change them after the backward"
                )
            self.gradients.begin()
            self._backward = _Backward(reduces=self.reduces, task=torch._C._current_graph_task_id())
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        backward = self._backward
        assert backward is not None
        self.observer.end_backward()
        for unit in self.units:
            unit.in_backward.clear()
            if unit.idle:
                unit.release()
        self.gradients.finish(list(backward.arrived), reduces=backward.reduces)
        self._backward = None
        if backward.reduces:
            self.gradients.run_hooks()

    def notice_failure(self) -> None:
        """Outside a backward, one that has begun and not ended has raised."""
        if self._backward is None or _inside_backward():
            return
        self._backward = None
        self.gradients.abandon()
        self._release_all()

    def notice_interrupt(self) -> None:
        """Between passes, a forward that has begun and not ended was interrupted: torch runs no hook then."""
        self.notice_failure()
        if self._running and not _inside_backward():
            self._forward = None
            self._release_all()

    def _release_all(self) -> None:
        self.observer.end_all()
        for unit in self.units:
            unit.running.clear()
            unit.in_backward.clear()
            unit.release()
        self._running.clear()

    def complete_gradients(self) -> None:
        """Make every ``.grad`` final: reduce what backwards inside no_sync have left behind."""
        self.notice_interrupt()
        if self.gradients.complete():
            self.gradients.run_hooks()


def _being_called(module: nn.Module) -> bool:
    """An outer call of the module, beside the one that asks, is on the stack: it calls itself."""
    frame, calls = inspect.currentframe(), 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
