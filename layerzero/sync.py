"""The gradients of a whole model: their reduction, what the user sees of them, and what the user does to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero.agreement import agree
from layerzero.collectives import Exchange, Works, all_reduce, broadcast
from layerzero.handle import Handle
from layerzero.main_grad import take_flag
from layerzero.member import Member
from layerzero.reduction import ReductionQueue
from layerzero.shown_gradients import ShownGradients
from layerzero.topology import Topology

__all__ = ["GradientSync"]


class GradientSync:
    """Carries gradients from where they arrive to the ``.grad`` of sharded parameters, in step with all ranks.

    A backward calls :meth:`begin`, :meth:`arrive` per parameter and :meth:`finish` at its end, or :meth:`abandon` where
    it has raised.
    """

    def __init__(self, handles: Sequence[Handle], topology: Topology) -> None:
        self.failed = False  # a backward failed after it had begun to add gradients
        self._handles = tuple(handles)
        self._topology = topology
        self._owes_reduction = False  # the last backward ran inside no_sync
        self._order_agreed = False
        self._queue = ReductionQueue(self._taking_part())
        self._updated: list[Member] = []  # whose final gradient is new, and whose hooks have not run
        self._members = tuple(member for handle in handles for member in handle.members)

    def _taking_part(self) -> list[Handle]:
        """The last unit of the model first, as backwards go. The same on all ranks, which agree on what was used."""
        # Inside no_sync only this rank knows what it has used.
        left = self._owes_reduction
        return [
            handle
            for handle in reversed(self._handles)
            if handle.flow is not None and (handle.trainable or left or any(handle.flow.contributed))
        ]

    @property
    def _shown(self) -> list[ShownGradients]:
        return [handle.shown for handle in self._handles if handle.shown is not None]

    # One backward, in which autograd is off already

    def begin(self) -> None:
        """From here to the end of the backward, what it gives to ``.grad`` itself is all that is there."""
        self.heed_user()
        with _plain_access():
            for shown in self._shown:
                shown.withhold()

    def arrive(self, handle: Handle, slot: int, gradient: Tensor) -> bool:
        """Take one parameter's whole gradient; True if it completes the handle."""
        member, flow = handle.members[slot], handle.flow
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"parameter {member.name!r} got a sparse gradient; build its module with sparse=False")
        assert flow is not None
        if flow.landing_blocked:
            self._queue.make_way_for(flow)
        flow.arrive(slot, gradient)
        return flow.round.complete

    def main_grad(self, handle: Handle, slot: int, *, in_backward: bool) -> Tensor | None:
        """Where a kernel may add the gradient of one whole parameter; None if it may not."""
        flow = handle.flow
        if flow is None or not flow.offers_main_grad:
            return None
        if not in_backward:
            if not flow.keeps_main_grad:
                raise RuntimeError(
                    f"main_grad of {handle.members[slot].name!r} was asked for outside of its backward, but with "
                    "offload_grads=True it may be elsewhere by then; take it in the backward, or do not offload"
                )
            if self.failed:
                self.heed_user()
            if handle.shown is not None:
                handle.shown.heed_user()
        self._queue.make_way_for(flow)
        with torch.no_grad():
            return flow.main_grad(slot)

    def take_main_grad(self, handle: Handle, slot: int, gradient: Tensor) -> bool:
        """A kernel has added one parameter's gradient to its ``main_grad``; as :meth:`arrive`."""
        flow = handle.flow
        assert flow is not None
        flow.take_written(slot)
        if getattr(handle.members[slot].leaf, "zero_out_wgrad", False):
            flow.arrive(slot, gradient)
        return flow.round.complete

    def start_ready(self, *, across_replicas: bool) -> None:
        self._queue.start_ready(across_replicas=across_replicas)

    @torch.no_grad()
    def finish(self, arrived: Sequence[Handle], *, reduces: bool) -> None:
        """End a backward: reduce what is left of it, and show the result."""
        with _plain_access():
            for shown in self._shown:
                shown.take_rows()
        used = self._agree_on_use() if reduces else None
        self._queue.finish(across_replicas=reduces)
        with _plain_access():
            self._publish(used)
        self._owes_reduction = not reduces
        if reduces and not self._order_agreed:
            self._agree_on_order(arrived)

    def abandon(self) -> None:
        """A backward has raised. What it added cannot be told from what was there before."""
        self.failed = True
        self._queue.abandon()
        for shown in self._shown:
            shown.flow.abort()
            with _plain_access():
                shown.give_back()
            for member in shown.members:
                member.leaf.grad = None
                take_flag(member.leaf)

    # Between backwards

    def complete(self) -> bool:
        """Make every ``.grad`` final: reduce what backwards inside no_sync have left behind. True if it was needed."""
        self.heed_user()
        owed = self._owes_reduction  # even if nothing is left here: another node may hold something
        if owed:
            with torch.no_grad():
                used = self._agree_on_use()
                self._queue.finish_rest()
                self._publish(used)
        self._owes_reduction = False
        return owed

    def drop(self) -> None:
        """Forget every contribution, and a failed backward."""
        for shown in self._shown:
            shown.flow.drop(range(len(shown.members)))
            for member in shown.members:
                member.parameter.grad = None
        self.failed = False
        self._owes_reduction = False

    def heed_user(self) -> None:
        """Follow what the user has done to ``.grad``."""
        with _plain_access():
            for shown in self._shown:
                shown.heed_user()
        if self.failed:
            if left := [member.name for member in self._members if member.parameter.grad is not None]:
                raise RuntimeError(
                    "the last backward raised an exception and left incomplete gradients; call zero_grad() of all "
                    f"optimizers, or model.zero_grad() (parameters with a gradient: {', '.join(left[:3])}, ...)"
                )
            self.drop()

    def heed_requires_grad(self) -> None:
        """Follow what the user has frozen and unfrozen; an error where ranks did not do the same."""
        with _plain_access():
            changed = [m for m in self._members if m.parameter.requires_grad is not m.leaf.requires_grad]
        if not changed:
            return
        subject = "requires_grad of parameters that were frozen or unfrozen; do the same on every rank"
        agree(subject, {m.name: m.parameter.requires_grad for m in changed}, ranks=self._topology.ranks)
        for shown in self._shown:
            shown.heed_user()  # what zero_grad has dropped need not be reduced
        for handle in self._handles:
            handle.heed_requires_grad()
        self._queue = ReductionQueue(self._taking_part())
        self._order_agreed = False

    def run_hooks(self) -> None:
        """Call the user's post-accumulate-grad hooks on the parameters that have just got a final gradient."""
        updated, self._updated = self._updated, []
        for member in updated:
            hooks = getattr(member.parameter, "_post_accumulate_grad_hooks", None)
            if hooks and member.parameter.grad is not None:
                for hook in list(hooks.values()):
                    hook(member.parameter)

    # Agreement

    def _agree_on_use(self) -> tuple[Tensor, Works | None]:
        """Start finding out which parameters any rank has used, and when."""
        local = [
            contributed + (contributed and fresh)
            for handle in self._queue.order
            if handle.flow is not None
            for contributed, fresh in zip(handle.flow.contributed, handle.flow.fresh, strict=True)
        ]
        bitmap = torch.tensor(local, dtype=torch.uint8)  # 0 unused, 1 used since zero_grad, 2 since the last final one
        control = self._topology.control
        work = None
        if control.size > 1 and local:
            work = all_reduce(control, Exchange.AGREE, bitmap, dist.ReduceOp.MAX)
        return bitmap, work

    def _publish(self, used: tuple[Tensor, Works | None] | None) -> None:
        anywhere: list[int] | None = None
        if used is not None:
            bitmap, work = used
            if work is not None:
                work.wait()
            anywhere = bitmap.tolist()
        agreed = anywhere is not None or self._topology.data_parallel == 1
        position = 0
        for handle in self._queue.order:
            assert handle.flow is not None and handle.shown is not None
            stop = position + len(handle.members)
            here = handle.flow.contributed if anywhere is None else [value > 0 for value in anywhere[position:stop]]
            handle.shown.publish(here, agreed=agreed)
            if anywhere is not None:
                fresh = zip(handle.members, anywhere[position:stop], strict=True)
                self._updated += [member for member, value in fresh if value == 2]
                handle.flow.fresh = [False] * len(handle.members)
            position = stop

    def _agree_on_order(self, arrived: Sequence[Handle]) -> None:
        """From the first backward on, reduce in the order in which the first rank's gradients arrived."""
        order = self._queue.order
        seen = [*arrived, *(handle for handle in order if handle not in arrived)]
        places = torch.tensor([order.index(handle) for handle in seen], dtype=torch.int64)
        if self._topology.control.size > 1 and order:
            broadcast(self._topology.control, Exchange.AGREE, places)
        self._queue.reorder([order[place] for place in places.tolist()])
        self._order_agreed = True


def _plain_access() -> AbstractContextManager[None]:
    """Attributes of sharded parameters without the detour through Python that tensor subclasses take."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard
