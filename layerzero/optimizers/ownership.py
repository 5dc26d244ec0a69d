"""Which parameters of an optimizer have owners, and the other cuts of the ZeRO-1 shards that this takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.comm.agreement import agree
from layerzero.engine.handle import Handle
from layerzero.engine.member import Member
from layerzero.engine.runtime import Runtime
from layerzero.layout.owners import plan_owners
from layerzero.optimizers.interchange import asked_by_torch
from layerzero.optimizers.owned import Owned, buffers_of_rounds, step_owned
from layerzero.optimizers.owned_state import with_what_others_own
from layerzero.optimizers.trial import kind_of
from layerzero.setup.planned import planned_again
from layerzero.setup.scratch import plan_scratch

__all__ = ["Ownership", "own"]


class Ownership:
    """The parameters of one optimizer that are updated whole.

    Args:
        inner: the wrapped optimizer.
        whole_kinds: the kinds of its groups that need whole parameters; see elementwise.py.

    Attributes:
        owned: by id of the sharded parameter.
    """

    def __init__(self, runtime: Runtime, inner: Optimizer, whole_kinds: Collection[str]) -> None:
        self.owned: dict[int, Owned] = {}
        self._runtime = runtime
        self._inner = inner
        self._whole_kinds = frozenset(whole_kinds)
        self._known_kinds = {kind_of(group) for group in inner.param_groups}

    def add_group(self, group: MutableMapping[str, Any], members: Sequence[tuple[Member, Tensor]]) -> None:
        """A group has come, with these parameters and their masters. Every rank must call this.

        Groups of a kind that has not been tried out are taken to need whole parameters if any do.
        """
        kind = kind_of(group)
        if kind not in self._whole_kinds and (not self._whole_kinds or kind in self._known_kinds):
            return
        own(self._runtime, [member for member, _ in members])
        for member, master in members:
            self.owned[id(member.parameter)] = Owned(member, self._runtime.owners[member.name], group, master)
        self._foresee()

    def follow(self) -> None:
        """Owners may have changed."""
        owners = self._runtime.owners
        self.owned = {key: replace(each, owner=owners[each.member.name]) for key, each in self.owned.items()}
        self._foresee()

    def _foresee(self) -> None:
        """Optimizers step one after the other, and when nothing is being reduced: the most of each will do."""
        pool = self._runtime.buffers.scratch
        pool.foreseen = Counter(pool.foreseen) | buffers_of_rounds(self.owned.values(), self._runtime.topology)

    def step(self, take_step: Callable[[], Any]) -> None:
        """Step the whole optimizer."""
        runtime = self._runtime
        if not self.owned:
            take_step()
            return
        step_owned(self._inner, list(self.owned.values()), runtime.topology, runtime.buffers.scratch, take_step)

    def with_what_others_own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state by name, with the entries that only owners know. Every rank must call this if there are owners."""
        if not self.owned:
            return dict(state)
        if asked_by_torch():
            raise NotImplementedError(
                f"torch.distributed.checkpoint.state_dict cannot have the state of {type(self._inner).__name__}, which "
                "is on the owners of whole parameters: use layerzero.checkpoint.save, or optimizer.state_dict() on "
                "every rank"
            )
        return with_what_others_own(state, list(self.owned.values()), self._runtime.topology)

    def refuse(self, method: str) -> None:
        """Raise RuntimeError if a method of the optimizer would find rows for whole parameters."""
        if self.owned:
            raise RuntimeError(
                f"{method}() of {type(self._inner).__name__} cannot be called here: it would find this rank's rows, "
                "but the optimizer works on whole parameters, which are together only while it steps"
            )


@torch.no_grad()
def own(runtime: Runtime, members: Iterable[Member]) -> None:
    """Let each of these parameters, and of those that have one already, have an owner. Every rank must call this.

    Raises:
        RuntimeError: rows would have to move that something refers to already; nothing is changed then.
        ValueError: ranks ask for different parameters.
    """
    names = {*runtime.owners, *(member.name for member in members)}
    if names == set(runtime.owners):
        return
    topology, handles = runtime.topology, runtime.handles
    beside = [m.name for m in runtime.members.values() if m.span.face is not None or m.span.topology is not topology]
    if beside:
        raise ValueError(
            f"the optimizer needs whole parameters, in a model of which {beside[0]!r} and others are on axes beside "
            "the data-parallel ones (tensor or expert parallel), which is not supported: use an element-wise optimizer"
        )
    layouts = [handle.layout for handle in handles]
    owned = [[slot.name for slot in layout.slots if slot.name in names] for layout in layouts]
    plan = plan_owners(layouts, owned, replicas=topology.replicas, zero3_size=topology.zero3_size)
    moved = [handle for handle, layout in zip(handles, plan.layouts, strict=True) if handle.layout != layout]
    failure: Exception | None = None
    try:
        runtime.notice_interrupt()
        runtime.gradients.heed_user()
        _require_untouched(runtime, moved if moved else handles, {n for n in names if n in runtime.owners})
    except RuntimeError as error:
        failure = error
    agree("parameters that an optimizer needs whole", {"names": sorted(names)}, ranks=topology.ranks, failure=failure)
    if moved:
        runtime.refreshes.launch_due()
        runtime.refreshes.launch_edited()
    for handle, layout in zip(handles, plan.layouts, strict=True):
        if handle in moved:
            handle.finish_refresh()
            handle.recut(layout)
    runtime.owners = plan.owners
    planned = planned_again(runtime.units)
    again = [handle for unit in planned for handle in unit.handles]
    runtime.buffers.scratch.foreseen = plan_scratch(again, runtime.config, planned[0].where).scratch
    for optimizer in runtime.optimizers:
        optimizer.rows_have_moved()  # type: ignore[attr-defined]


def _require_untouched(runtime: Runtime, moved: Iterable[Handle], owned: set[str]) -> None:
    """Nothing refers to rows that are going to move."""
    if runtime.config.offload_optimizer:
        raise NotImplementedError(
            "offload_optimizer=True is for optimizers that update rows, and this one needs whole parameters: use "
            "offload_optimizer=False, or an element-wise optimizer"
        )
    names = {member.name for handle in moved for member in handle.members} | owned
    if runtime.views:
        raise RuntimeError("shard_optimizer inside layerzero.unsharded or EMA.swapped(); leave the context first")
    if any(runtime.members[name].parameter.grad is not None for name in names):
        raise RuntimeError(
            "this optimizer needs whole parameters, whose rows have to move to their owners, but there are gradients "
            "already: call shard_optimizer before the first backward, or model.zero_grad() before it"
        )
    for optimizer in runtime.optimizers:
        held = optimizer.state_by_name()  # type: ignore[attr-defined]
        if stepped := sorted(name for name in names if name in held):
            raise RuntimeError(
                "this optimizer needs whole parameters, whose rows have to move to their owners, but another one has "
                f"state for {stepped[0]!r}: call shard_optimizer (and add_param_group) for all before the first step, "
                "and load their states afterwards"
            )
