"""Schedule one sharded model: decide when units are gathered, prefetched and freed, and when gradients are reduced.

Hooks of modules, tensors and parameters call the methods of :class:`Scheduler`. A unit is gathered before its forward
pass, and in a backward pass when the gradient of one of its outputs arrives, after the units that called it. The next
units are gathered ahead.

[Note: Release of full buffers]
A forward pass frees the full buffer when it returns, with three exceptions: the forward pass runs inside a backward
pass (as in the recomputation of a checkpoint), the unit stays gathered for the backward pass or until the optimizer
step, or the next call is expected to be a call to the same unit. On a device, the root and the unit that is expected to
be called last stay gathered, because the backward pass begins with them. On several meshes, ranks that call different
experts expect different last calls, so only the root stays gathered.

A unit that stays gathered until the step is freed early only if its gather has failed, or if its weights were edited.
A pass that calls only gathered units may therefore run on one rank only, and a rank may repeat a pass that has failed.

A backward pass frees the full buffer when all nodes of a call have run. Autograd runs later nodes first. Therefore a
call has ended when the backward pass reaches an output of a call that returned before it began, or when the gradients
of its inputs are known. The latter alone is not enough: an input may be a leaf, have no gradient, or be an input of
earlier calls, too, such as the output of an encoder to which all layers of a decoder attend. The first call may end
with the enclosing backward pass. In a reentrant checkpoint, this is a nested backward pass.
Gradients of the unit's own parameters are not a criterion, because autograd may still have to run nodes of nested units
and of tied weights that use the unit's weights.

[Note: Forward order]
Each forward pass records its calls. The next forward pass prefetches in the recorded order as long as it makes the same
calls. Only a pass that gathers replaces this record, because other passes may run on one rank only. A backward pass
prefetches in the reverse order of its forward pass. The hooks of the backward pass refer to the record of this order.

[Note: Weights outside of forwards]
The inputs and outputs of a computation inside `gathered` are unknown. Therefore `gathered` installs autograd's
saved-tensor hooks. When a backward pass unpacks the first tensor that was saved inside the context, the units are
gathered again. Their modules then have the gathered parameters, including in recomputed activation checkpoints. These
hooks replace the outer saved-tensor hooks, and therefore call the outer hooks themselves. They also disable autograd's
version check, which `unpack` therefore repeats. Gradients arrive at the gathered parameters as in any other backward
pass. The units are freed when the backward pass reaches a call that returned before the use began.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from layerzero.comm.failure_report import CollectiveError
from layerzero.comm.mesh_info import MeshInfo
from layerzero.config import LayerZeroConfig
from layerzero.device.accelerator import device_module, require_no_capture
from layerzero.device.buffer_pools import max_gathered_bytes
from layerzero.engine.call_context import in_backward, is_called, is_recursive_call, require_no_transform
from layerzero.engine.gathered_params import FLAG, consume_main_grad_flag
from layerzero.engine.gradient_reducer import GradientReducer
from layerzero.engine.handle import GatherState, Handle
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.model_status import Closable, ModelStatus, ParamView, require_no_grad
from layerzero.engine.no_sync import NoSyncHint
from layerzero.engine.passes import BackwardPass, ForwardPass, GatheredUse, UnitCall
from layerzero.engine.resources import ModelPools
from layerzero.engine.side_results import SideResults, is_computed_in, with_latest_nodes
from layerzero.engine.unit import Unit, make_gather_order_checks
from layerzero.engine.weight_refresh import WeightRefresher
from layerzero.utils.pytree import iter_tensors
from layerzero.utils.torch_compat import (
    autograd_sequence_number,
    current_graph_task,
    queue_callback,
    saved_tensor_hooks,
)


class Scheduler(Closable):
    """Scheduler that gathers and frees the units of one sharded model and launches the reductions of their gradients.

    Args:
        units: units of the model. The root must be first.
        config: settings of the model.
        mesh_info: mesh of the root.
        pools: memory pools of the model.
        gradients: object that reduces the gradients of the handles.
        refresher: object that copies masters to compute weights.
        uses: active uses of weights outside of forward passes, outermost first. The refresher shares this list.
        status: status that determines whether passes may run.

    Attributes:
        prefetched_forward: for some units, the units that the forward pass of the unit prefetches. They replace the
            units that the `prefetch` setting selects.
        prefetched_backward: the same for the backward pass of the unit.
        requires_gradient_sync: False inside ``no_sync``.
        held_back: units for which `requires_gradient_sync` or `requires_all_reduce` was set to False, by setting. A
            backward pass reduces the gradients of all units, or accumulates all of them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        config: LayerZeroConfig,
        mesh_info: MeshInfo,
        pools: ModelPools,
        gradients: GradientReducer,
        refresher: WeightRefresher,
        uses: list[GatheredUse],
        status: ModelStatus,
    ) -> None:
        self._units = tuple(units)
        self._handles = tuple(handle for unit in units for handle in unit.handles)
        self._config = config
        self._mesh_info = mesh_info
        self._pools = pools
        self._gradients = gradients
        self._refresher = refresher
        self._uses = uses
        self.status = status
        self._parts = mesh_info.counters.parts
        self.staying: set[Unit] = set()  # units that stay gathered between a forward pass and its backward pass
        self._last_unit_stays = False
        self.prefetched_forward: dict[Unit, Sequence[Unit]] = {}
        self.prefetched_backward: dict[Unit, Sequence[Unit]] = {}
        self.requires_gradient_sync = True
        self.held_back: dict[str, set[Unit]] = {"requires_gradient_sync": set(), "requires_all_reduce": set()}
        self._side_results = SideResults(self._units)
        self._running: list[UnitCall] = []  # calls to units in progress, outermost first
        self._ahead: set[Unit] = set()  # units that unshard() has gathered for a later forward pass
        self._forward: ForwardPass | None = None
        self._last_forward: Callable[[], ForwardPass | None] = lambda: None  # weak; the graph keeps the pass alive
        self._backward: BackwardPass | None = None
        gradients.lazy_grad.show = weakref.WeakMethod(self._show_grads)
        self._begin_lock = threading.RLock()  # autograd runs hooks in one thread for each device
        self._last_calls: dict[Unit, list[Unit]] = {}  # units that the last forward pass called, by outermost unit
        saving = (handle.gradients for handle in self._handles if handle.gradients is not None)
        saves = any(each.benefits_from_no_sync for each in saving)
        self.no_sync_hint = NoSyncHint(listens=saves and gradients.model_ranks.is_first)
        self._index = {unit: index for index, unit in enumerate(self._units)}
        self._orders = make_gather_order_checks(self._units)
        self._full_precision_orders = make_gather_order_checks(self._units, full_precision=True)
        self.apply_unit_settings()

    # Explicit control of gathers

    def apply_unit_settings(self) -> None:
        """Apply the units' settings for resharding and explicit prefetching."""
        self.staying = {unit for unit in self._units if not unit.reshard_after_forward}
        root, on_device = self._units[0], device_module(self._mesh_info.device) is not None
        if on_device and not root.reshard_is_explicit:
            self.staying.add(root)
        self._last_unit_stays = on_device and len(self._orders) == 1
        lists = (*self.prefetched_forward.values(), *self.prefetched_backward.values())
        prefetch_depth = max([self._config.prefetch, *map(len, lists)])
        self._pools.full.limit = max_gathered_bytes([unit.gathered_footprint for unit in self._units], prefetch_depth)

    def unshard(self, unit: Unit) -> None:
        """Launch the gather of a unit for a later forward pass."""
        if ParamView.UNSHARDED in self.status.active_views:
            return
        self.prepare_gathers()
        self._gather(unit)
        self._ahead.add(unit)

    def reshard(self, unit: Unit) -> None:
        """Free the gathered weights of a unit.

        Raises:
            RuntimeError: the unit is in use.
        """
        if ParamView.UNSHARDED in self.status.active_views:
            return
        if not self._is_idle(unit):
            raise RuntimeError(
                f"reshard() of {unit.label} was called during the forward or backward of the unit, or inside "
                "layerzero.gathered, which need its weights. Call reshard() afterwards"
            )
        self._ahead.discard(unit)
        unit.show_sharded()
        unit.reshard()

    # Forward

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self._begin_call(unit)
        self._gather(unit)
        for next_unit in () if self._forward is None else self._record_call(self._forward, unit):
            self._gather(next_unit)
        self.wait(unit)
        unit.show_gathered()
        args, kwargs = unit.cast_inputs(args, kwargs)
        if torch.is_grad_enabled():
            self._hook_inputs(call, args, kwargs)
        self._parts.begin("forward", unit.label, call)
        call.first_node = autograd_sequence_number()
        return args, kwargs

    def post_forward(self, unit: Unit, output: Any) -> Any:
        """Finish the forward pass of a unit. `output` is None if the forward pass raised."""
        call = next((each for each in reversed(self._running) if each.unit is unit), None)
        if call is None:  # pre_forward raised before it appended the call
            return output
        self._parts.end(call)
        self._running.remove(call)
        self._ahead.discard(unit)
        is_idle, stays = self._is_idle(unit), torch.is_grad_enabled() and self._stays_gathered(unit)
        if is_idle:
            unit.show_sharded()
        try:
            output, awaits_backward = self._prepare_output(call, output, stays=stays)
        except BaseException:  # torch does not call a hook again that has raised
            self._end_forward(unit, awaits_backward=False)
            raise
        if awaits_backward and self._forward is not None:
            call.record_return(self._forward)
            unit.keep_post_forward(self._forward)
        if is_idle and not in_backward() and not (awaits_backward and stays):
            self._free_after_forward(unit)
        self._end_forward(unit, awaits_backward=awaits_backward)
        return output

    def _begin_call(self, unit: Unit) -> UnitCall:
        """Begin a call of a unit, and a forward pass if the call is the outermost one outside of backward passes."""
        if self._forward is None or (self._is_running(unit) and not is_recursive_call(unit.modules)):
            self.recover_interrupted_pass()
        call = UnitCall(unit, around=tuple(self._running))
        self._running.append(call)  # append first: post_forward runs even if the rest of this method raises
        require_no_transform(unit.label)
        if self._forward is None and not in_backward():
            self._begin_forward(unit)
        return call

    def _record_call(self, forward: ForwardPass, unit: Unit) -> Sequence[Unit]:
        """Record the call of a unit whose gather was launched, and return the units to prefetch."""
        forward.record_call(unit)
        self._gradients.queue.record_unit_call()
        self._free_still_gathered(forward, unit.mesh_info, unless=unit)
        recorded = forward.next_units(self._config.prefetch, unit.mesh_info)
        next_units = self.prefetched_forward.get(unit, recorded)
        forward.prefetched.update(next_units)
        return next_units

    def _free_after_forward(self, unit: Unit) -> None:
        """Free a unit whose forward pass has returned, unless the next call is expected to be of the same unit."""
        forward = self._forward
        if forward is not None and forward.next_units(1, unit.mesh_info) == [unit]:
            forward.still_gathered[unit.mesh_info] = unit
        else:
            unit.end_use()

    def _prepare_output(self, call: UnitCall, output: Any, *, stays: bool) -> tuple[Any, bool]:
        """Return the output as the caller receives it, and whether it requires a gradient.

        Args:
            stays: True if the unit stays gathered for the backward pass.
        """
        output = call.unit.cast_output(output)
        if not stays:
            output = call.unit.copy_aliases(output)
        return self._hook_outputs(call, output) if torch.is_grad_enabled() else (output, False)

    def _stays_gathered(self, unit: Unit) -> bool:
        """Return whether a unit whose forward pass has returned stays gathered until its backward pass."""
        if unit in self.staying:
            return True
        # A unit that is called directly is the last one of its own forward pass.
        may_stay = self._last_unit_stays and unit.reshard_after_forward is True and not unit.reshard_is_explicit
        forward = self._forward if may_stay else None
        return forward is not None and forward.entry_unit is self._units[0] and forward.is_expected_last(unit)

    def _is_running(self, unit: Unit) -> bool:
        """Return whether a forward pass of the unit is in progress."""
        return unit in [call.unit for call in self._running]

    def is_held(self, unit: Unit) -> bool:
        """Return whether a :func:`layerzero.gathered` context for the unit is active."""
        return any(unit in use.units for use in self._uses)

    def _is_idle(self, unit: Unit) -> bool:
        """Return whether no forward pass, backward pass or other use of the unit is active."""
        busy = (self._running and self._is_running(unit)) or (self._uses and self.is_held(unit))
        return not busy and not (self._backward is not None and self._backward.involves(unit))

    def _begin_forward(self, entry: Unit) -> None:
        require_no_capture(self._mesh_info.device, f"the forward of {entry.label}")
        self._apply_user_changes("a forward")
        self._refresher.record_pass()
        units = [unit for unit in self._units[1:] if unit.is_called_alike] if len(self._orders) > 1 else ()
        self._forward = ForwardPass(entry, units, expected=self._last_calls.get(entry, []))
        self._last_forward = weakref.ref(self._forward)

    def prepare_gathers(self) -> None:
        """Prepare for gathers outside of a forward pass, which then use the same weights as the next forward pass."""
        if self._forward is None and not in_backward():
            require_no_capture(self._mesh_info.device, "a gather outside of forwards")
            self.recover_interrupted_pass()
            self._apply_user_changes("a gather outside of forwards")

    def _apply_user_changes(self, what: str) -> None:
        """Check that the model may compute, and apply changes that the user has made since the last pass.

        Args:
            what: name of the user's call, for messages.
        """
        self._require_no_stream(what)
        self.status.require_usable()
        if torch.is_grad_enabled():  # reference forward passes without gradients may temporarily freeze adapters
            self._gradients.apply_requires_grad()
        self._refresher.pre_forward()

    def _free_still_gathered(self, forward: ForwardPass, mesh: MeshInfo, *, unless: Unit | None = None) -> None:
        unit = forward.still_gathered.pop(mesh, None)
        if unit is not None and unit is not unless and self._is_idle(unit):
            unit.end_use()

    def _end_forward(self, unit: Unit, *, awaits_backward: bool) -> None:
        """End the forward pass if `unit`, whose call has returned, is its outermost unit."""
        forward = self._forward
        if forward is None or forward.entry_unit is not unit or self._is_running(unit):
            return
        self._forward = None
        if forward.gathers:
            self._last_calls[unit] = forward.called
        for mesh in self._orders:
            self._free_still_gathered(forward, mesh)
        # Without a graph (or if the forward pass raised), no backward pass will free the units that stayed gathered.
        for each in forward.prefetched.difference(forward.called) if awaits_backward else self._units:
            if self._is_idle(each) and each not in self._ahead:
                each.end_backward(None) if torch.is_grad_enabled() and not awaits_backward else each.end_use()

    def _hook_inputs(self, call: UnitCall, args: Any, kwargs: Any) -> None:
        # A leaf's hook may run before later nodes of the call; see [Note: Release of full buffers].
        inputs = [t for t in iter_tensors((*args, *kwargs.values())) if t.requires_grad and t.grad_fn is not None]
        if len(inputs) == 1:
            inputs[0].register_hook(functools.partial(self.post_backward, call))
        elif inputs:
            register_multi_grad_hook(inputs, functools.partial(self.post_backward, call))

    def _hook_outputs(self, call: UnitCall, output: Any) -> tuple[Any, bool]:
        """Register hooks that gather the unit when the backward pass reaches this call.

        Return the output, and whether an output requires a gradient. See [Note: Side results] in side_results.py.
        """
        outputs = [tensor for tensor in iter_tensors(output) if tensor.requires_grad]
        results = self._side_results.find(call, in_objects=not outputs)
        if call.unit.needs_gather and not (outputs or results) and (isroutine(output) or isinstance(output, Iterator)):
            raise RuntimeError(
                f"the forward of unit {call.unit.label!r} returned only a {type(output).__name__}, inside which "
                "layerzero finds no tensors, so that a backward would read freed weights. Return the result in a "
                "tensor, tuple, list, dict or dataclass, or call the unit in torch.no_grad()"
            )
        output, latest = with_latest_nodes(call, output, outputs)
        for tensor in (*outputs, *latest, *results):
            tensor.register_hook(functools.partial(self.pre_backward, call))
            # If the caller changes a view in place, autograd gives the view another node, without the hook above. The
            # backward pass then reaches the node of the base.
            if tensor._base is not None and is_computed_in(tensor._base, call):
                tensor._base.register_hook(functools.partial(self._pre_backward_of_base, call))
        return output, bool(outputs or results)

    # Weights outside of forwards

    @contextmanager
    def gathered(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context manager in which the modules of `units` hold their gathered parameters.

        See [Note: Weights outside of forwards].
        """
        label = f"layerzero.gathered of {', '.join(unit.label for unit in units)}"
        require_no_transform(label)
        if ParamView.FULL_PRECISION in self.status.active_views:
            require_no_grad(label, ParamView.FULL_PRECISION)
        self.prepare_gathers()
        forward = self._forward or self._last_forward()
        use = GatheredUse(units, forward if torch.is_grad_enabled() else None)
        self._uses.append(use)
        try:
            self._gather_and_show(units)
            for handle in (each for unit in units for each in unit.handles) if torch.is_grad_enabled() else ():
                handle.used_in_context = True
            with self._saved_tensors_hooks(use):
                yield
        except BaseException:
            use.awaits_backward = False
            raise
        finally:
            self._uses.remove(use)
            for unit in units:
                if self._is_idle(unit):
                    unit.show_sharded()
                    if not in_backward() and not (use.awaits_backward and unit in self.staying):
                        unit.end_use()

    def require_no_active_pass(self, what: str) -> None:
        """Raise RuntimeError if a pass is in progress. `what` names the refused call."""
        if in_backward() or any(is_called(call.unit.modules) for call in self._running):
            raise RuntimeError(
                f"{what} was called during a forward or backward, whose gathers it would interrupt. Call it between "
                "passes"
            )

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Context manager for a weight stream. Inside it, changes of weights and new passes raise an error."""
        use = GatheredUse((), None)
        self._uses.append(use)
        try:
            yield
        finally:
            self._uses.remove(use)

    def _require_no_stream(self, operation: str) -> None:
        if stream := next((use for use in self._uses if use.is_stream), None):
            raise RuntimeError(f"{operation} is not possible {stream.reason_not_writable}")

    def _saved_tensors_hooks(self, use: GatheredUse) -> saved_tensors_hooks:
        outer_hooks = saved_tensor_hooks(True)

        def pack(tensor: Tensor) -> Any:
            use.awaits_backward = True
            if outer_hooks is not None:
                return outer_hooks[0](tensor)
            saved = tensor.detach()  # saving an output with its graph would create a reference cycle
            return saved, saved._version

        def unpack(packed: Any) -> Tensor:
            if outer_hooks is None and packed[0]._version != packed[1]:
                raise RuntimeError(
                    f"a tensor saved for the backward inside layerzero.gathered of {use.label} has been modified by an "
                    f"inplace operation: the tensor is at version {packed[0]._version}, expected version {packed[1]}. "
                    "If the tensor is a weight, optimizer.step() or a load has changed it. Run the forward again"
                )
            self._before_backward_of(use)
            unpacked: Tensor = packed[0] if outer_hooks is None else outer_hooks[1](packed)
            return unpacked

        return saved_tensors_hooks(pack, unpack)

    def _before_backward_of(self, use: GatheredUse) -> None:
        if not in_backward():
            raise RuntimeError(
                f"a tensor saved for the backward inside layerzero.gathered of {use.label} was read outside of a "
                "backward, when weights may have been freed. Read the tensor inside the context"
            )
        backward = self._enter_backward(use.label)
        if use in backward.uses:
            return
        backward.uses[use] = None
        use.awaits_backward = False
        self._gather_and_show(use.units)

    def _gather_and_show(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._gather(unit)
        for unit in units:
            self.wait(unit)
            unit.show_gathered()

    def _end_uses_after(self, backward: BackwardPass, call: UnitCall) -> None:
        """End the uses of gathered weights that began after `call` had returned, and free their units."""
        for use in [use for use in backward.uses if call.is_before(use)]:
            del backward.uses[use]
            for unit in use.units:
                if self._is_idle(unit) and all(caller.unit is not unit for caller in call.callers):
                    unit.end_backward(())

    # Gather

    def _gather(self, unit: Unit) -> None:
        sharded_handles = [handle for handle in unit.handles if handle.state is GatherState.SHARDED]
        if not sharded_handles:
            return
        if self._forward is not None:
            self._forward.gathers = True
        # For each handle that needs a gather: True if the masters are gathered.
        gathers = [each.in_full_precision for each in sharded_handles if each.source.needs_gather]
        if True in gathers:
            self._full_precision_orders[unit.mesh_info].check(self._index[unit])
        if False in gathers:
            self._orders[unit.mesh_info].check(self._index[unit] + unit.has_post_forward_shard * len(self._units))
        for handle in sharded_handles:
            handle.gather()

    def wait(self, unit: Unit) -> None:
        """Wait for the gather of a unit, if one is in flight."""
        try:
            for handle in unit.handles:
                handle.wait()
        except CollectiveError as error:
            raise self._orders[unit.mesh_info].explain_failure(error) from error.__cause__

    # Backward

    def pre_backward(self, call: UnitCall, gradient: Tensor) -> None:
        unit, queue = call.unit, self._gradients.queue
        backward = self._enter_backward(f"unit {unit.name!r}")
        if call in backward.ended_calls:  # an output of the call is one of its inputs, which earlier calls use, too
            return
        self._parts.reach(call, call.callers)
        prefetches = call not in backward.active_calls  # the first of its outputs that the backward pass reaches
        backward.active_calls[call] = None
        if backward.uses:
            self._end_uses_after(backward, call)
        self._defer_end_to_nested_backward(backward, call)
        if unit.is_common:
            self._end_handles(backward, call.ended_handles(), called=call.next_call is not None)
            queue.start_ready(across_replicas=backward.reduces)
        # Gather the outermost call first, because ranks may differ in which output the backward pass reaches first.
        for caller in call.callers:
            if caller not in backward.gathered_calls:
                # Only with several meshes may ranks differ in the first call that the pass reaches.
                if len(self._orders) > 1 and caller.unit.is_common:
                    self._end_handles(backward, caller.ended_handles(), called=caller.next_call is not None)
                    queue.start_ready(across_replicas=backward.reduces)
                backward.gathered_calls.add(caller)
                self._gather(caller.unit)
        backward.gathered_calls.add(call)
        self._gather(unit)
        later_calls = backward.active_calls_after(call)
        if prefetches and not later_calls:  # otherwise prefetch when they have freed their buffers
            self._prefetch_before(call)
        self.wait(unit)
        unit.show_gathered()
        self._parts.begin("backward", unit.label, call)
        for later_call in later_calls:  # all of their nodes have run
            same_mesh = later_call.unit.mesh_info is call.unit.mesh_info and not later_call.unit.is_common
            self.post_backward(later_call, None, reduces=call.unit.is_common or same_mesh)
        if prefetches and later_calls:
            self._prefetch_before(call)

    def _pre_backward_of_base(self, call: UnitCall, gradient: Tensor) -> None:
        """Gather the unit when the backward pass reaches the base of an output, unless an output was reached before."""
        if call not in self._enter_backward(f"unit {call.unit.name!r}").active_calls:
            self.pre_backward(call, gradient)

    def _end_handles(self, backward: BackwardPass, handles: Iterable[Handle], *, called: bool) -> list[HandleGradients]:
        """Record that handles receive no more gradients, except those that autograd still computes.

        Their reductions may then be launched; see [Note: Launch order of reductions]. Return the gradients of the
        handles, and of the handles that precede them in the queue and start with them.

        Args:
            called: True if the forward pass has called the units of `handles`. Only such handles are added to the order
                of arrival.
        """
        inner, queue = self._gradients.inner_handles, self._gradients.queue
        ended: list[HandleGradients] = []
        for outer in handles:
            for handle in (*inner.get(outer, ()), outer):
                gradients = handle.gradients
                if gradients is not None and queue.awaits(gradients) and handle.trainable:
                    ended.append(gradients)
                    handle.await_remaining_gradients()
                    if gradients.all_arrived and called:
                        backward.completed_handles[handle] = None
        return ended

    def _end_remaining_handles(self, backward: BackwardPass) -> None:
        """Record at the end of a backward pass that no more gradients will arrive."""
        queue = self._gradients.queue
        for handle in reversed(self._handles):  # the root's last
            gradients = handle.gradients
            if gradients is not None and queue.awaits(gradients) and handle.trainable:
                if gradients.arrived:
                    backward.completed_handles[handle] = None
                gradients.await_only(())

    def _prefetch_before(self, call: UnitCall) -> None:
        recorded = call.preceding_calls(self._config.prefetch)
        for unit in self.prefetched_backward.get(call.unit, [preceding_call.unit for preceding_call in recorded]):
            self._gather(unit)

    def post_backward(self, call: UnitCall, gradients: object, *, reduces: bool = True) -> None:
        """End the backward pass of a call.

        Args:
            gradients: gradients of the inputs of the call, which are not used.
            reduces: False if the ranks that reduce the unit's gradients may be at other points of the program.
        """
        backward = self._backward
        if backward is not None and backward.callback() is None:
            backward = None  # no hook has begun the current backward pass yet
        if backward is not None:
            if call in backward.ended_calls:
                return
            backward.ended_calls.add(call)
            backward.active_calls.pop(call, None)
            self._parts.end(call)
            if reduces and call.forward_pass and call.unit.is_called_alike and call.is_last_in_backward:
                ended = self._end_handles(backward, call.unit.handles, called=True)
                if call.unit.is_common:
                    self._gradients.queue.start_ready(across_replicas=backward.reduces)
                else:  # see [Note: Reductions on several meshes]
                    self._gradients.queue.start_inner(ended, across_replicas=backward.reduces)
        self._end_use_in_backward(backward, call)

    def _end_use_in_backward(self, backward: BackwardPass | None, call: UnitCall) -> None:
        """Release the unit of a call whose backward pass has ended, unless the pass still needs the unit."""
        earlier_calls = call.preceding_calls(
            None if call.unit.has_post_forward_shard else 1
        )  # any of the forward passes may use the post-forward shard
        gathered_calls = earlier_calls if backward is None else backward.gathered_calls
        pending_calls = [each for each in earlier_calls if each.unit is call.unit and each not in gathered_calls]
        if self._is_idle(call.unit) and not set(pending_calls).intersection(earlier_calls[:1]):
            call.unit.end_backward(() if pending_calls else {call.forward_pass} - {None})

    def _defer_end_to_nested_backward(self, backward: BackwardPass, call: UnitCall) -> None:
        """If a reentrant checkpoint runs a nested backward pass, schedule the call to end when that pass ends.

        The nested backward pass contains all nodes of the recomputed call.
        """
        task = current_graph_task()
        if task == backward.task:
            return
        if task not in backward.nested:
            backward.nested[task] = []
            queue_callback(functools.partial(self._end_nested, task))
        backward.nested[task].append(call)

    def _end_nested(self, task: int) -> None:
        assert self._backward is not None
        for call in self._backward.nested.pop(task):
            self.post_backward(call, None)
            if call.unit.is_common:
                self._end_handles(self._backward, call.unit.handles, called=True)
                self._gradients.queue.start_ready(across_replicas=self._backward.reduces)

    def post_accumulate_grad(self, handle: Handle, slot: int, leaf: Tensor) -> None:
        """Move the gradient of one gathered parameter from ``leaf.grad`` to the gradient buffer."""
        gradient, leaf.grad = leaf.grad, None  # taken first, because the recovery from a failed backward pass drops it
        backward, member = self._backward, handle.members[slot]
        if backward is None or backward.callback() is None or torch.is_grad_enabled():
            backward = self._enter_backward(member.name)
        if handle.state is not GatherState.GATHERED:
            backward.require_unit_reached(handle, slot)
        gradients = handle.gradients
        wrote_main_grad = getattr(leaf, FLAG, False) and consume_main_grad_flag(leaf)
        if gradient is None:  # torch drops the gradient of a parameter that was frozen after its forward pass
            _drop_frozen(gradients, slot, wrote_main_grad=wrote_main_grad)
            return
        assert gradients is not None
        if member.spec.model_parallel is not None:
            gradient = member.spec.model_parallel.local_grad(gradient)
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"parameter {member.name!r} has a sparse gradient. Build its module with sparse=False")
        if wrote_main_grad:
            gradients.record_main_grad(slot)
        if not wrote_main_grad or getattr(leaf, "zero_out_wgrad", False):
            gradients.receive(slot, gradient)
        if gradients.awaited is not None and gradients.all_arrived:
            backward.completed_handles[handle] = None

    def main_grad(self, handle: Handle, slot: int) -> Tensor | None:
        """Return the ``main_grad`` of a gathered parameter, or None if kernels may not add to it."""
        # A recomputed forward pass does not count as a backward pass.
        return self._gradients.main_grad(handle, slot, in_backward=in_backward() and not self._running)

    def _enter_backward(self, name: str) -> BackwardPass:
        if torch.is_grad_enabled():  # inside a backward pass, the autograd engine sets this mode
            raise RuntimeError(
                f"backward or autograd.grad with create_graph=True through {name!r} is not supported: gradients "
                "of gradients need weights that have been freed. Compute the penalty on an unsharded model, or by "
                "finite differences"
            )
        if self._backward is None or self._backward.callback() is None:
            with self._begin_lock:
                self.recover_failed_backward()
                if self._backward is None:
                    self._begin_backward(name)
        assert self._backward is not None
        return self._backward

    def _begin_backward(self, name: str) -> None:
        require_no_capture(self._mesh_info.device, f"the backward of {name}")
        self._require_no_stream("a backward")
        if ParamView.FULL_PRECISION in self.status.active_views:
            raise RuntimeError(
                f"backward through {name!r} was called inside layerzero.full_precision, where the compute weights "
                "of its forward are not gathered. Run the backward before or after the context"
            )
        if edited := [handle.name for handle in self._handles if handle.edited]:
            raise RuntimeError(
                f"parameters of {', '.join(edited)} were changed between a forward and its backward, which needs "
                "the old values. Change parameters after the backward"
            )
        self._gradients.apply_requires_grad()
        reduces = self.requires_gradient_sync and not any(self.held_back.values())
        self._gradients.begin(reduces=reduces)
        if self.no_sync_hint.listens:
            self.no_sync_hint.note_backward(reduces=reduces, is_first=self._gradients.empty)
        callback: Callable[[], object] = self.finalize_backward
        weak_callback = weakref.ref(callback, self._show_sharded_after_failure)
        self._backward = BackwardPass(reduces=reduces, task=current_graph_task(), callback=weak_callback)
        queue_callback(callback)

    def _show_sharded_after_failure(self, _: object) -> None:
        """Let the modules have their sharded parameters when a backward pass has failed.

        The first access to ``.grad`` of one of them, as in ``model.zero_grad()``, recovers from the failed pass. The
        parameters are left as they are inside ``layerzero.unsharded``, and in a forward pass that runs a backward pass.
        """
        if self._running or ParamView.UNSHARDED in self.status.active_views:
            return
        self._gradients.lazy_grad.pending = True
        for unit in self._units:
            if not self.is_held(unit):
                unit.show_sharded()

    def _show_grads(self) -> None:
        """Make each ``.grad`` current before the user reads or sets one; see [Note: Lazy .grad]."""
        if self._backward is not None and self._backward.callback() is None:
            self.recover_failed_backward()
        else:
            self._gradients.publish_when_agreed()

    def finalize_backward(self) -> None:
        backward = self._backward
        assert backward is not None
        self._end_remaining_handles(backward)
        self._gradients.queue.start_ready(across_replicas=backward.reduces)
        self._parts.end_backward()
        backward.active_calls.clear()
        backward.uses.clear()
        self._ahead.clear()
        finished = {call.forward_pass for call in backward.gathered_calls} - {None}
        for unit in self._units:
            if (unit.gathered or unit.has_post_forward_shard) and not self._is_running(unit):
                unit.drop_post_forward(finished) if self.is_held(unit) else unit.end_backward(finished)
        self._gradients.finish(list(backward.completed_handles), reduces=backward.reduces)
        self._backward = None
        if backward.reduces:
            self._gradients.run_hooks()

    def recover_failed_backward(self) -> None:
        """Recover from a backward pass that began and failed. Do nothing if no pass has failed or one is running."""
        if self._backward is None or (in_backward() and self._backward.callback() is not None):
            return
        self._gradients.abandon()  # if it is interrupted, the next recovery calls it again
        self._backward = None
        if self._forward is None or not in_backward():  # otherwise a running forward pass may use the full buffers
            self._release_all()

    def recover_interrupted_pass(self) -> None:
        """Recover from a failed backward or interrupted forward pass. torch runs no hooks after an interrupt."""
        self.recover_failed_backward()
        if self._running and not in_backward():
            self._forward = None
            self._release_all()

    def set_full_precision(self, enabled: bool) -> None:
        """Set whether later forward passes compute with gathered masters (`enabled` is True) or with compute weights.

        Call this method between passes.
        """
        self.recover_interrupted_pass()
        for unit in self._units:
            unit.show_sharded()
            unit.reshard()
        with torch.inference_mode(False), torch.no_grad():  # so that the new tensors have version counters
            for unit in self._units:
                unit.set_full_precision(enabled)

    def _release_all(self) -> None:
        self._parts.end_all()
        self._running.clear()
        self._ahead.clear()
        for unit in self._units:
            if not self.is_held(unit):
                unit.end_backward(None)

    def complete_gradients(self, *, without_backward: bool = False) -> None:
        """Make every ``.grad`` final by reducing the gradients that backward passes inside no_sync have accumulated.

        Args:
            without_backward: True if this rank has run no backward pass since the last step. If it has only zero
                gradients, it takes part in the backward pass of other ranks. All ranks must call this method.
        """
        self.recover_interrupted_pass()
        if without_backward and self._gradients.lacks_gradients():
            self.prepare_gathers()  # as the forward pass of the other ranks does
            self._gradients.join_backward()
        elif self._gradients.complete():
            self._gradients.run_hooks()


def _drop_frozen(gradients: HandleGradients | None, slot: int, *, wrote_main_grad: bool) -> None:
    """Withdraw what a kernel has added for a parameter that was frozen after its forward pass."""
    if wrote_main_grad and gradients is not None:
        gradients.incoming.withdraw([slot])
