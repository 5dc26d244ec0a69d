"""The schedule: when units are gathered, freed and reduced. Driven by module, tensor and parameter hooks.

[Note: Who frees the full buffer]
A forward frees it when it returns, unless it runs inside a backward (a checkpoint recomputes it) or
`reshard_after_forward` is off and the graph will come back. A backward frees it when the gradients of a use's inputs
are known: autograd runs later nodes first, so all of the use's nodes have run by then. A use whose inputs need no
gradient ends when the unit's last parameter gradient arrives. The end of the backward frees what is left, such as a
unit whose inputs are leaves.

[Note: Forward order]
A forward's calls are recorded. The next forward prefetches along that record as long as it follows it; a backward
prefetches along the record of its own forward, which its hooks hold.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.agreement import agree
from layerzero.buffers import BufferPool
from layerzero.config import LayerZeroConfig
from layerzero.handle import Handle, Member
from layerzero.order import GatherOrder
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
        pool: BufferPool,
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.handles = tuple(handle for unit in units for handle in unit.handles)
        self.config = config
        self.topology = topology
        self.pool = pool
        self.reduces = True  # False inside no_sync
        self.shows_full = False  # inside layerzero.unsharded
        self.shows_averages = False  # inside EMA.swapped
        self.members = {member.name: member for handle in self.handles for member in handle.members}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # from shard_optimizer
        self._member_of = WeakIdKeyDictionary({member.parameter: member for member in self.members.values()})
        self._origins = WeakIdKeyDictionary()  # parameter before sharding -> member
        self._running: list[Use] = []  # calls of units under way, outermost first
        self._forward: _Forward | None = None
        self._backward: _Backward | None = None
        self._last_calls: dict[Unit, list[Unit]] = {}  # by entry
        self.gradients = GradientSync(self.handles, topology)
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._order = GatherOrder([unit.name or "the root" for unit in self.units], topology.node_control)

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

    def is_sharded(self, parameter: Tensor) -> bool:
        return parameter in self._member_of

    # Forward

    def before_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        use = Use(unit, around=tuple(self._running))
        unit.running.append(use)  # first: after_forward runs even where this raises
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
        return args, kwargs

    def after_forward(self, unit: Unit, output: Any) -> Any:
        """`output` is None where the forward raised."""
        use = unit.running.pop()
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
        self.notice_failure()
        self.gradients.heed_requires_grad()
        self.refresh_edited()
        self._forward = _Forward(entry, expected=self._last_calls.get(entry, []))

    def _end_forward(self, forward: _Forward, *, comes_back: bool) -> None:
        self._forward = None
        self._last_calls[forward.entry] = forward.called
        # Where no gradient comes back (or the forward raised), no backward will free what was kept for it.
        for unit in forward.prefetched.difference(forward.called) if comes_back else self.units:
            if unit.idle:
                unit.reshard()

    def _watch_inputs(self, use: Use, args: Any, kwargs: Any) -> None:
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        use.leads_to_inputs = bool(inputs)
        # A leaf's hook may run before later nodes of the use; see [Note: Who frees the full buffer].
        inputs = [tensor for tensor in inputs if tensor.grad_fn is not None]
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
        unit.in_backward.add(use)
        # Outermost first, whichever output the backward reaches first: that may differ between ranks.
        for around in use.around:
            if around not in backward.begun:
                backward.begun.add(around)
                self._gather(around.unit)
        backward.begun.add(use)
        self._gather(unit)
        for earlier in use.before(self.config.prefetch):
            self._gather(earlier.unit)
        self._wait(unit)
        unit.show_leaves()
        self.gradients.advance()

    def _after_backward(self, use: Use, gradients: object) -> None:
        use.unit.in_backward.discard(use)
        if use.unit.idle:
            use.unit.release()

    def on_gradient(self, unit: Unit, handle: Handle, slot: int, leaf: Tensor) -> None:
        """The gradient of one whole parameter has arrived in ``leaf.grad``."""
        backward = self._enter_backward(handle.members[slot].name)
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:  # frozen since its forward: torch drops the gradient, too
            return
        if not self.gradients.arrive(handle, slot, gradient):
            return
        backward.arrived[handle] = None
        if all(other in backward.arrived for other in unit.trainable):
            unit.in_backward = {use for use in unit.in_backward if use.leads_to_inputs}
            if unit.idle:
                unit.release()
        self.gradients.start_ready(across_replicas=backward.reduces)

    def _enter_backward(self, name: str) -> _Backward:
        if torch.is_grad_enabled():  # the engine's own mode inside a backward
            raise RuntimeError(
                f"backward or autograd.grad with create_graph=True through {name!r} is not supported: gradients of "
                "gradients would need weights that are freed by then. Compute such a penalty on an unsharded model, or "
                "by finite differences"
            )
        if self._backward is None:
            self.gradients.heed_user()
            self._backward = _Backward(reduces=self.reduces)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        backward = self._backward
        assert backward is not None
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
        for unit in self.units:
            unit.running.clear()
            unit.in_backward.clear()
            unit.release()
        self._running.clear()

    def complete_gradients(self) -> None:
        """Make every ``.grad`` final: reduce what backwards inside no_sync have left behind."""
        self.notice_failure()
        if self.gradients.complete():
            self.gradients.run_hooks()

    # Refresh

    def refresh(self, handles: Sequence[Handle]) -> None:
        """Launch the refresh of `handles`; it is awaited where each is next gathered."""
        for handle in handles:
            handle.reshard()
            handle.launch_refresh()

    def refresh_after_step(self) -> None:
        self.refresh([handle for handle in self.handles if handle.trainable or handle.watch.edited])

    def refresh_edited(self) -> None:
        """Carry edits of masters to all replicas; an error where ranks edited different ones."""
        edited = [handle for handle in self.handles if handle.watch.edited]
        if edited:
            names = [handle.name for handle in edited]
            subject = (
                "refresh of parameters that were changed outside optimizer.step(); change them on every rank, or call "
                "layerzero.refresh(model) on every rank afterwards"
            )
            agree(subject, {"changed": names}, ranks=self.topology.ranks)
            self.refresh(edited)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
