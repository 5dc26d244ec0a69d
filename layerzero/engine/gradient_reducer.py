"""Reduce the gradients of a full model, publish them as ``.grad``, and apply changes that the user has made.

Hop 1 reduces full gradients inside a ZeRO-3 group. Hop 2 reduces the sums of the groups (ZeRO-3 gradient shards) and
usually crosses nodes. It sends `replica_reduce_dtype`, which is `reduce_dtype` by default, or messages of a codec.
The mean is taken once, when the result of the last hop is added to the final gradient. ReductionSpec in
reduction_spec.py decides this and the exceptions ([Note: Dtype of full gradients], [Note: Division of gradients]).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.comm.agreement import require_equal
from layerzero.comm.model_ranks import ModelRanks
from layerzero.device.streams import make_reduction_streams
from layerzero.dtensor.lazy_grad import LazyGrad, plain_access, post_accumulate_grad_hooks
from layerzero.engine.gathered_params import consume_main_grad_flag
from layerzero.engine.grad_attribute import INCOMPLETE, GradAttribute
from layerzero.engine.handle import Handle
from layerzero.engine.handle_gradients import HandleGradients
from layerzero.engine.hyperparameter_check import HyperparameterCheck
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.reduction_queue import ReductionQueue
from layerzero.engine.used_params import PendingUsage, UsedParamMap
from layerzero.layout.grad_usage import GradUsage
from layerzero.utils.torch_compat import foreach_mul_


class GradientStatus(enum.Enum):
    """State of the gradients after all passes so far. INVALID takes precedence over UNREDUCED."""

    FINAL = "final"
    UNREDUCED = "unreduced"  # the last backward pass ran inside no_sync
    INVALID = "invalid"  # a backward pass failed after it had started to add gradients


class GradientReducer:
    """Object that reduces the gradients of all handles in the same order on all ranks and publishes them as ``.grad``.

    A backward pass calls :meth:`begin`, starts the reductions of `queue` as handles complete, and calls :meth:`finish`
    at its end. If the backward pass raises an error, :meth:`abandon` is called instead.

    Args:
        enclosing: for each handle, the handles of the units in :attr:`Unit.enclosing` of its unit.

    Attributes:
        backwards: number of backward passes begun so far.
        inner_handles: for each handle of a common unit, the handles that precede it in the queue and start with it. See
            [Note: Reductions on several meshes] in reduction_queue.py.
        queue: queue that starts the reductions of the handles, in the same order on all ranks.
        settings: object that compares optimizer settings between ranks.
        lazy_grad: object that makes reads of ``.grad`` wait until the ranks have agreed on which parameters were used.
    """

    def __init__(
        self, handles: Sequence[Handle], model_ranks: ModelRanks, enclosing: Mapping[Handle, Sequence[Handle]]
    ) -> None:
        self.backwards = 0
        self._backwards_at_use = 0  # number of backward passes when a step last used the gradients, or they were zeroed
        self._zeroed: set[ManagedParam] = set()  # parameters whose gradients were zeroed since the last backward pass
        self._enclosing = enclosing
        self.inner_handles: dict[Handle | None, list[Handle]] = {}
        self._status = GradientStatus.FINAL
        self._handles = tuple(handles)
        self.model_ranks = model_ranks
        self._used_params = UsedParamMap(
            model_ranks, {m.name: h.holders(model_ranks).control_comms for h in handles for m in h.members}
        )
        self._used_params.add_names(m.name for h in handles for m in h.members if m.gathered.requires_grad)
        self._order_agreed = False
        self._streams = make_reduction_streams(model_ranks.mesh_info.device, on_gloo=model_ranks.mesh_info.on_gloo)
        self.queue = ReductionQueue([], self._streams)
        self._order: list[Handle] = []  # handles in the order of the queue
        self._rebuild_queue()
        self.settings = HyperparameterCheck(model_ranks)
        model_ranks.mesh_info.counters.observers.add(self.settings)
        self._last_usage: PendingUsage | None = None  # the latest exchange of usage bytes
        self._pending_usage: PendingUsage | None = None  # the same exchange, until it has been waited for
        self._updated: list[ManagedParam] = []  # parameters with a new final gradient whose hooks have not run yet
        self._members = tuple(member for handle in handles for member in handle.members)
        self._new_in_failed: set[ManagedParam] = set()  # parameters that had no gradient before a failed backward pass
        self.lazy_grad = LazyGrad()
        for handle in handles:
            handle.tracker.lazy_grad = self.lazy_grad

    def _rebuild_queue(self) -> None:
        """Rebuild the queue in backward order, which begins with the last unit. The order is the same on all ranks."""
        # After no_sync, this rank does not know which parameters other ranks have used, so all handles must take part.
        has_unreduced = self._status is not GradientStatus.FINAL
        self._set_order(
            [
                handle
                for handle in reversed(self._handles)
                if handle.gradients is not None and (handle.trainable or has_unreduced or handle.gradients.used)
            ]
        )

    def _set_order(self, order: Sequence[Handle]) -> None:
        common = dict.fromkeys(handle for handle in order if not self._enclosing[handle])
        self.inner_handles = {}
        for handle in order:
            if handle not in common:
                outer = next((each for each in self._enclosing[handle] if each in common), None)
                self.inner_handles.setdefault(outer, []).append(handle)
        order = [each for handle in common for each in (*self.inner_handles.get(handle, ()), handle)]
        self._order = order = order + self.inner_handles.get(None, [])
        self._used_params.set_local_order([member.name for handle in order for member in handle.members])
        self.queue = ReductionQueue(
            [gradients for handle in order if (gradients := handle.gradients) is not None],
            self._streams,
            inner={handle.gradients for handle in order if self._enclosing[handle]},
        )

    @property
    def failed(self) -> bool:
        """True if a backward pass has failed and its incomplete gradients have not been dropped."""
        return self._status is GradientStatus.INVALID

    @property
    def empty(self) -> bool:
        """True if no parameter has a gradient or an unreduced contribution."""
        return not any(grad_attribute.gradients.used for grad_attribute in self._grad_attributes)

    def is_published(self, gradient: Tensor) -> bool:
        """Return whether `gradient` shows a final gradient. False for a tensor that the user has assigned."""
        return any(grad_attribute.is_published(gradient) for grad_attribute in self._grad_attributes)

    @property
    def _grad_attributes(self) -> list[GradAttribute]:
        return [handle.grads for handle in self._handles if handle.grads is not None]

    # One backward pass, in which gradient recording is disabled

    def begin(self, *, reduces: bool) -> None:
        """Begin a backward pass: apply the user's changes to ``.grad``, and hide ``.grad`` until the pass ends.

        Args:
            reduces: True if the pass reduces gradients over all ranks; see :meth:`finish`.
        """
        self.backwards += 1
        self._zeroed.clear()
        self.apply_user_grads()
        with plain_access():
            for grad_attribute in self._grad_attributes:
                grad_attribute.hide()
                grad_attribute.gradients.begin_pass(reduces=reduces)
        self.queue.prefetch_next()

    def main_grad(self, handle: Handle, slot: int, *, in_backward: bool) -> Tensor | None:
        """Return the memory to which a kernel may add a parameter's full gradient.

        Return None if the parameter has no ``main_grad``.

        Raises:
            RuntimeError: the method was called outside of a backward pass, and the memory may be offloaded.
        """
        gradients = handle.gradients
        if gradients is None or not gradients.offers_main_grad:
            return None
        if not in_backward:
            if not gradients.incoming.storage.lasting:
                raise RuntimeError(
                    f"main_grad of {handle.members[slot].name!r} was read outside of the backward. With "
                    "Offload(grads=True) or Offload(optimizer=True) its memory may move before the backward. Read "
                    "main_grad in the backward"
                )
            if self._status is GradientStatus.INVALID:
                self.apply_user_grads()
            self.lazy_grad.resolve()
            if handle.grads is not None:
                handle.grads.apply_user_grads()
        gradients.wait_until_writable()
        self.queue.record_exposed(gradients)
        with torch.no_grad():
            return gradients.incoming.expose(slot)

    @torch.no_grad()
    def finish(self, arrived: Sequence[Handle], *, reduces: bool) -> None:
        """End a backward pass: start the remaining reductions, wait for all reductions, and publish the gradients.

        Args:
            arrived: handles in the order in which their gradients became complete.
            reduces: True if the pass reduces gradients over all ranks: outside no_sync and with `requires_all_reduce`.
        """
        with plain_access():
            for grad_attribute in self._grad_attributes:
                grad_attribute.collect_local_grads()
        used = self._agree_on_use() if reduces else None
        self.queue.finish(across_replicas=reduces)
        self._status = GradientStatus.FINAL if reduces else GradientStatus.UNREDUCED
        with plain_access():
            is_lazy = isinstance(used, PendingUsage) and self._order_agreed
            if is_lazy and not any(post_accumulate_grad_hooks(member.sharded) for member in self._members):
                for grad_attribute in self._grad_attributes:
                    grad_attribute.unlock()
                self.lazy_grad.pending = True
            else:
                self._publish_grads(used)
        if reduces and not self._order_agreed:
            self._agree_on_order(arrived)

    def record_use(self, zeroed: Iterable[ManagedParam] = ()) -> None:
        """Record that a step has used the gradients, or that they were dropped, or set to zero for `zeroed`."""
        self._backwards_at_use = self.backwards
        self._zeroed.update(zeroed)

    @property
    def has_run_no_backward(self) -> bool:
        """True if this rank has run no backward pass since gradients were last used or dropped."""
        return self.backwards == self._backwards_at_use

    def lacks_gradients(self) -> bool:
        """Return whether this rank has only zero gradients and no unreduced contribution, and there are other ranks."""
        self.apply_user_grads()
        is_final = self.model_ranks.size > 1 and self._status is GradientStatus.FINAL
        with plain_access():
            return is_final and all(m.sharded.grad is None or m in self._zeroed for m in self._members)

    def join_backward(self) -> None:
        """Take part in a backward pass of other ranks, without gradients.

        If no other rank runs a backward pass, all ranks must call this method. If other ranks wait for this rank in
        another operation, such as a gather, all ranks raise an error.
        """
        self.begin(reduces=True)
        self.finish([], reduces=True)
        self.lazy_grad.resolve()
        self.run_hooks()

    def publish_when_agreed(self) -> None:
        """Wait until the ranks have agreed on the used parameters, and then publish each ``.grad``.

        This method may be called again after an interrupt.
        """
        if self._pending_usage is not None:
            for grad_attribute in self._grad_attributes:
                grad_attribute.collect_local_grads()  # gradients from a backward pass that ran through no unit
            self._publish_grads(self._pending_usage)
        self._updated.clear()  # no parameter has hooks; see finish()

    def abandon(self) -> None:
        """Mark gradients as invalid after a failed backward pass.

        The contributions of the failed pass cannot be separated from earlier contributions.
        """
        self._status = GradientStatus.INVALID
        self.lazy_grad.pending = False
        self.queue.drain()
        for grad_attribute in self._grad_attributes:
            grad_attribute.gradients.abort()
            with plain_access():
                self._new_in_failed |= grad_attribute.mark_incomplete()
            for member in grad_attribute.members:
                member.gathered.grad = None
                consume_main_grad_flag(member.gathered)
        self.queue.trim()  # abort() has released buffers

    def close(self) -> None:
        """Stop the reduction threads and drop all references.

        Other objects, such as a step guard, may keep the reducer alive.
        """
        self._streams.close()
        self._used_params.close()
        self.__dict__.clear()

    # Between backward passes

    def complete(self) -> bool:
        """Make every ``.grad`` final by reducing the gradients that backward passes inside no_sync have accumulated.

        Returns:
            True if a reduction was necessary.

        Raises:
            RuntimeError: the last backward pass has failed, and its incomplete gradients have not been zeroed.
        """
        self.apply_user_grads(for_step=not self.has_run_no_backward)
        has_unreduced = (
            self._status is GradientStatus.UNREDUCED
        )  # even if this rank has no accumulated gradients, because another replica may have some
        if has_unreduced:
            with torch.no_grad():
                used = self._agree_on_use()
                self.queue.finish_accumulated()
                self._publish_grads(used)
        self._status = GradientStatus.FINAL
        return has_unreduced

    # [Note: Error feedback] in handle_gradients.py explains the next three methods.

    def scale_residuals(self, factor: Tensor) -> None:
        """Multiply the stored errors of encoded gradients by `factor`, the coefficient that clipped the gradients.

        Args:
            factor: scalar tensor. If it is not finite, the errors are set to zero.
        """
        candidates = (handle.gradients.residual_to_scale for handle in self._handles if handle.gradients is not None)
        if residuals := [each for each in candidates if each is not None]:
            factor = factor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            foreach_mul_(residuals, factor.to(residuals[0].device))

    def record_step(self, params: Sequence[ManagedParam]) -> None:
        """Record that an optimizer has updated `params`."""
        for gradients, slots in self._slots_of(params):
            gradients.record_step(slots)

    def record_drop(self, params: Sequence[ManagedParam]) -> None:
        """Record that the final gradients of `params` have been dropped or set to zero, not used by a step."""
        for gradients, slots in self._slots_of(params):
            gradients.record_drop(slots)

    def _slots_of(self, params: Sequence[ManagedParam]) -> Iterator[tuple[HandleGradients, list[int]]]:
        """Yield the gradients of each handle that stores codec errors, and the slots of `params` in that handle."""
        ids = {id(param) for param in params}
        for handle in self._handles:
            if handle.gradients is not None and handle.gradients.residual is not None:
                yield handle.gradients, [slot for slot, member in enumerate(handle.members) if id(member) in ids]

    def drop(self) -> None:
        """Drop all gradients and contributions, and clear the state of a failed backward pass."""
        for grad_attribute in self._grad_attributes:
            grad_attribute.gradients.drop(range(len(grad_attribute.members)))
            grad_attribute.forbid_access(None)
            for member in grad_attribute.members:
                member.sharded.grad = None
        self._status = GradientStatus.FINAL
        self._new_in_failed.clear()

    def apply_user_grads(self, *, for_step: bool = False) -> None:
        """Apply changes that the user has made to ``.grad``.

        Args:
            for_step: True if a step is about to use the gradients. Other passes may follow a failed backward pass if
                there was no gradient before it.

        Raises:
            RuntimeError: a backward pass has failed, and its incomplete gradients have not been zeroed.
        """
        self.lazy_grad.resolve()
        with plain_access():
            for grad_attribute in self._grad_attributes:
                grad_attribute.apply_user_grads(failed=self.failed)
        if self.failed:
            accepted = () if for_step else self._new_in_failed
            shown = [member for member in self._members if member.sharded.grad is not None]
            if names := [member.name for member in shown if member not in accepted]:
                raise RuntimeError(f"{INCOMPLETE}. Parameters with a gradient: {', '.join(names[:3])}, ...")
            self.drop()

    def apply_requires_grad(self) -> None:
        """Apply the user's changes to ``requires_grad``. Raise on all ranks if the changes differ between ranks."""
        with plain_access():
            changed = [m for m in self._members if m.sharded.requires_grad is not m.gathered.requires_grad]
        if not changed:
            return
        subject, advice = "requires_grad of parameters that were frozen or unfrozen", "Set equal values on every rank"
        detail = ", ".join(m.name for m in changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        failure = next((error for handle in self._handles if (error := handle.requires_grad_error)), None)
        values = {m.name: m.sharded.requires_grad for m in changed}
        require_equal(subject, values, ranks=self.model_ranks.ranks, failure=failure, advice=advice, detail=detail)
        self.lazy_grad.resolve()
        self.queue.wait_for_in_flight()  # reductions of a backward pass inside no_sync may still use the buffers
        for grad_attribute in self._grad_attributes:
            grad_attribute.apply_user_grads()  # so that gradients dropped by zero_grad() are not reduced
        for handle in self._handles:
            handle.apply_requires_grad()
        self._used_params.add_names(m.name for m in changed)
        self._rebuild_queue()
        self._order_agreed = False

    def run_hooks(self) -> None:
        """Call the user's post-accumulate-grad hooks on parameters that have a new final gradient."""
        updated, self._updated = self._updated, []
        with plain_access():
            hooked = [(m.sharded, hooks) for m in updated if (hooks := post_accumulate_grad_hooks(m.sharded))]
            hooked = [(parameter, hooks) for parameter, hooks in hooked if parameter.grad is not None]
        for parameter, hooks in hooked:
            for hook in hooks:
                hook(parameter)

    # Agreement

    def _agree_on_use(self) -> bytes | PendingUsage:
        """Start the exchange that determines which parameters any rank has used.

        If this rank has used every parameter, the result is known in advance. In this case, the rank still sends its
        usage bytes, but does not wait for the bytes of other ranks.

        Returns:
            One :class:`GradUsage` byte per parameter if the result is already known, otherwise the pending exchange.
        """
        local = bytearray().join(gradients.usage for gradients in self.queue.order)
        if self.model_ranks.size == 1 or not local:
            return bytes(local)
        if self._pending_usage is not None:
            self._pending_usage.wait()
        if self._last_usage is not None:
            self.settings.receive(self._last_usage.extra_digests)
        is_known = min(local) == GradUsage.CONTRIBUTED
        self._pending_usage = self._last_usage = self._used_params.start_exchange(
            local, self.settings.digests(), is_known=is_known
        )
        return bytes(local) if is_known else self._pending_usage

    def _publish_grads(self, agreement: bytes | PendingUsage | None) -> None:
        if agreement is not None:
            self._take_agreed(agreement)
        agreed = agreement is not None or self.model_ranks.size == 1
        for handle in self._order:
            assert handle.grads is not None
            handle.grads.publish(agreed=agreed)
        if agreement is self._pending_usage:
            self._pending_usage = None

    def _take_agreed(self, agreement: bytes | PendingUsage) -> None:
        usage = agreement if isinstance(agreement, bytes) else agreement.max_over_ranks()
        start = 0
        for handle, gradients in zip(self._order, self.queue.order, strict=True):
            stop = start + len(handle.members)
            handle_usage = usage[start:stop]
            if GradUsage.CONTRIBUTED in handle_usage:
                self._updated += [
                    member
                    for member, use in zip(handle.members, handle_usage, strict=True)
                    if use == GradUsage.CONTRIBUTED
                ]
            gradients.record_usage(handle_usage)
            start = stop

    def _agree_on_order(self, arrived: Sequence[Handle]) -> None:
        """Set the order of later reductions to the order in which gradients arrived on the first rank."""
        arrival_order = [*arrived, *(handle for handle in self._order if handle not in arrived)]
        positions = self._used_params.from_first_rank(
            {m.name: position for position, each in enumerate(arrival_order) for m in each.members}
        )
        self._set_order(sorted(self._order, key=lambda each: max(positions.get(m.name, -1) for m in each.members)))
        self._order_agreed = True
