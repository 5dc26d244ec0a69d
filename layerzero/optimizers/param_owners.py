"""Owned parameters of an optimizer, and the ZeRO-1 layouts that these parameters need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.comm.agreement import require_equal
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.process_groups import groups_so_far
from layerzero.device.buffer_pools import Size
from layerzero.engine.handle import Handle
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.state import LayerZeroState
from layerzero.estimates.scratch_buffers import ScratchBuffers, plan_scratch
from layerzero.estimates.specs import specs_of
from layerzero.layout.flat_layout import FlatLayout
from layerzero.layout.owner_layout import JoinAxis, ParamOwner, plan_owners
from layerzero.optimizers.compatibility_trial import group_kind, steps_stacks_apart
from layerzero.optimizers.owner_groups import across, owner_group_across, owner_group_of, places_across
from layerzero.optimizers.owner_state import with_what_others_own
from layerzero.optimizers.owner_step import OwnedParam, buffers_of_rounds, step_owned
from layerzero.optimizers.torch_state_dict import asked_by_torch

__all__ = ["OwnerTable"]

_Key = tuple[MeshInfo, int | None]  # of an owner group: its mesh, and the model-parallel axis that is joined


class OwnerTable:
    """Table of the parameters of one optimizer that are updated in full by an owner.

    Every rank must construct the table. The constructor assigns an owner to each parameter that needs one.

    Args:
        inner: the wrapped optimizer, with its groups.
        whole_kinds: kinds of parameter groups that need full parameters; see compatibility.py.

    Attributes:
        owned: owned parameters, by id of the sharded parameter.
    """

    def __init__(self, runtime: LayerZeroState, inner: Optimizer, whole_kinds: Collection[str] = ()) -> None:
        self.owned: dict[int, OwnedParam] = {}
        self._runtime = runtime
        self._inner = inner
        self._whole_kinds = frozenset(whole_kinds)
        self._known_kinds = {group_kind(group) for group in inner.param_groups}
        held = [p for group in inner.param_groups if group_kind(group) in self._whole_kinds for p in group["params"]]
        self._asked: set[str] = set()  # names of the parameters that have owners as this optimizer needs them
        self._ask([member for p in held if (member := runtime.parameters.managed_param(p)) is not None])

    def add_group(self, group: MutableMapping[str, Any], members: Sequence[tuple[ManagedParam, Tensor]]) -> None:
        """Add the parameters of a group, if they need owners. Every rank must call this.

        If the compatibility trial did not include the kind of the group, the group needs full parameters if any other
        kind does.

        Args:
            members: pairs of a parameter of the group and its master.
        """
        kind = group_kind(group)
        if kind not in self._whole_kinds and (not self._whole_kinds or kind in self._known_kinds):
            return
        self._ask([member for member, _ in members if member.name not in self._asked])
        for member, master in members:
            owner = self._runtime.owners[member.name]
            cell = self._runtime.cells[member.spec.mesh_info, owner.axis]
            self.owned[id(member.sharded)] = OwnedParam(member, owner, cell, group, master)
        self._foresee()

    def _ask(self, members: Sequence[ManagedParam]) -> None:
        if members:
            _own(self._runtime, members, self._inner)
        self._asked |= {member.name for member in members}

    def follow(self) -> None:
        """Update owners and owner groups after a change of layout."""
        owners, cells = self._runtime.owners, self._runtime.cells
        for key, each in self.owned.items():
            owner = owners[each.member.name]
            cell = cells[each.member.spec.mesh_info, owner.axis]
            self.owned[key] = replace(each, owner=owner, group_of_ranks=cell)
        self._foresee()

    def _foresee(self) -> None:
        """Register the buffers of the rounds with the scratch pool.

        Optimizers step one after another, and not during a reduction. So the maximum over all users suffices.
        """
        pool = self._runtime.buffers.scratch
        pool.expected = Counter(pool.expected) | buffers_of_rounds(self.owned.values())

    def step(self, take_step: Callable[[], Any]) -> None:
        """Step all parameters of the optimizer; owned parameters are stepped in full."""
        if not self.owned:
            take_step()
            return
        runtime = self._runtime
        step_owned(self._inner, list(self.owned.values()), runtime.ranks, runtime.buffers.scratch, take_step)

    def with_what_others_own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, keyed by parameter name, with entries added for parameters that other ranks own.

        If there are owned parameters, every rank must call this.
        """
        if not self.owned:
            return dict(state)
        if asked_by_torch():
            raise NotImplementedError(
                f"torch.distributed.checkpoint.state_dict cannot have the state of {type(self._inner).__name__}, which "
                "is on the owners of whole parameters: use layerzero.checkpoint.save, or optimizer.state_dict() on "
                "every rank"
            )
        return with_what_others_own(state, list(self.owned.values()), self._runtime.ranks)

    def refuse(self, method: str) -> None:
        """Raise RuntimeError if the optimizer has owned parameters, because `method` would see only their rows."""
        if self.owned:
            raise RuntimeError(
                f"{method}() of {type(self._inner).__name__} cannot be called here: it would find this rank's rows, "
                "but the optimizer works on whole parameters, which are together only while it steps"
            )


@torch.no_grad()
def _own(runtime: LayerZeroState, members: Sequence[ManagedParam], optimizer: Optimizer) -> None:
    """Assign owners to `members`, and reassign the owners of owned parameters. Every rank must call this.

    A parameter may already have an owner because of another optimizer that updates the matrices of a stack separately.
    If this optimizer needs the full stack, the parts are joined for both optimizers.

    Args:
        optimizer: optimizer that needs these parameters in full.

    Raises:
        RuntimeError: rows would have to move while gradients, optimizer state or views refer to them. In this case,
            nothing is changed.
        ValueError: parameters or axes to join differ between ranks, or parts on model-parallel axes cannot be joined.
    """
    names = {*runtime.owners, *(member.name for member in members)}
    to_ask = [member for member in members if _may_be_a_part(member, runtime.owners.get(member.name))]
    if names == set(runtime.owners) and not to_ask:
        return
    plan: dict[Handle, FlatLayout] = {}
    owners: dict[str, ParamOwner] = {}
    moved: list[Handle] = []
    put_together: dict[str, JoinAxis] = {}
    new_cells: dict[_Key, dict[int, tuple[int, int]]] = {}
    failure: Exception | None = None
    try:
        before = _put_together(runtime)
        put_together = before | _to_put_together(to_ask, optimizer, runtime.mesh_info.device)
        changes = names != set(runtime.owners) or put_together != before
        if changes:
            plan, owners = _plan(runtime, names, put_together)
            moved = [handle for handle in runtime.handles if handle.layout != plan[handle]]
            runtime.scheduler.recover_interrupted_pass()
            runtime.gradients.apply_user_grads()
            _require_untouched(runtime, moved or runtime.handles, {n for n in names if n in runtime.owners})
        new_cells = _new_cells(runtime, owners)
    except (RuntimeError, ValueError) as error:
        failure = error
    told = sorted((name, along.axis, along.size) for name, along in put_together.items())
    require_equal(
        "parameters that an optimizer needs whole",
        {"names": sorted(names), "put together along further axes": told},
        ranks=runtime.ranks.ranks,
        groups=groups_so_far(*(sorted(places) for places in new_cells.values() if places)),
        failure=failure,
    )
    if not changes:
        return
    runtime.cells |= {
        (topology, axis): owner_group_of(topology) if axis is None else owner_group_across(topology, axis, places)
        for (topology, axis), places in new_cells.items()
    }
    if any(layout.bounds for layout in plan.values()):  # equal on all ranks, also on ranks whose rows stay
        runtime.refreshes.launch_deferred()
        runtime.refreshes.launch_edited()
    for handle in moved:
        handle.weights.finish_refresh()
        handle.recut(plan[handle])
    runtime.owners = owners
    runtime.buffers.scratch.expected = _scratch_again(runtime)
    for each in runtime.optimizers:
        each.on_layout_change()  # type: ignore[attr-defined]


def _plan(
    runtime: LayerZeroState, names: Collection[str], put_together: Mapping[str, JoinAxis]
) -> tuple[dict[Handle, FlatLayout], dict[str, ParamOwner]]:
    """Return the new layouts of all handles, and the owners by name."""
    plan: dict[Handle, FlatLayout] = {}
    owners: dict[str, ParamOwner] = {}
    for topology in dict.fromkeys(handle.topology for handle in runtime.handles):
        handles = [handle for handle in runtime.handles if handle.topology is topology]
        owned = [[slot.name for slot in handle.layout.slots if slot.name in names] for handle in handles]
        _require_equal_parts([handle for handle, its in zip(handles, owned, strict=True) if its], put_together)
        cuts = plan_owners(
            [handle.layout for handle in handles],
            owned,
            replicas=topology.replicas,
            zero3_size=topology.zero3_size,
            across=put_together,
        )
        plan |= zip(handles, cuts.layouts, strict=True)
        owners |= cuts.owners
    return plan, owners


def _may_be_a_part(member: ManagedParam, owner: ParamOwner | None) -> bool:
    """Return whether a model-parallel axis that is not joined cuts the parameter."""
    face, axis = member.spec.model_parallel, None if owner is None else owner.axis
    return face is not None and any(face.sharded_dim(at) is not None for at in range(face.mesh.ndim) if at != axis)


def _put_together(runtime: LayerZeroState) -> dict[str, JoinAxis]:
    """Return, by name, the model-parallel axis along which each owned parameter is joined, if any."""
    found: dict[str, JoinAxis] = {}
    for name, owner in runtime.owners.items():
        face = runtime.members[name].spec.model_parallel
        if face is not None and owner.axis is not None:
            found[name] = JoinAxis(owner.axis, face.mesh.size(owner.axis), face.joined_shape(owner.axis))
    return found


def _to_put_together(
    members: Iterable[ManagedParam], optimizer: Optimizer, device: torch.device
) -> dict[str, JoinAxis]:
    """Return, by name, the model-parallel axis along which `optimizer` needs each parameter joined, if any."""
    found: dict[str, JoinAxis] = {}
    apart: dict[int, bool] = {}  # by number of dims: whether the optimizer updates each matrix of a stack separately
    for member in members:
        face = member.spec.model_parallel
        assert face is not None
        dims = len(face.shape)
        if dims > 2 and dims not in apart:
            apart[dims] = steps_stacks_apart(optimizer, device, dims)
        along = across(member.name, face, stacks_apart=apart.get(dims, False))
        if along is not None:
            found[member.name] = along
    return found


def _new_cells(runtime: LayerZeroState, owners: Mapping[str, ParamOwner]) -> dict[_Key, dict[int, tuple[int, int]]]:
    """Return the owner groups to create for these owners, in the same order on all ranks.

    Returns:
        By owner group, the positions of its ranks. For an owner group that is a ZeRO-3 group, this inner dict is empty.
    """
    found: dict[_Key, dict[int, tuple[int, int]]] = {}
    for name, owner in sorted(owners.items()):
        topology, face, axis = (
            runtime.members[name].spec.mesh_info,
            runtime.members[name].spec.model_parallel,
            owner.axis,
        )
        if (topology, axis) not in {*runtime.cells, *found}:
            found[topology, axis] = {} if face is None or axis is None else places_across(topology, face, axis)
    return found


def _require_equal_parts(handles: Iterable[Handle], put_together: Mapping[str, JoinAxis]) -> None:
    """Raise ValueError if parameters are cut unevenly along an axis whose parts are joined.

    Ranks along such an axis must have equal layouts.
    """
    members = [member for handle in handles for member in handle.members]
    axes = {along.axis: member.name for member in members if (along := put_together.get(member.name)) is not None}
    for member in members:
        face = member.spec.model_parallel
        for axis, name in axes.items() if face is not None else ():
            assert face is not None
            dim, size = face.sharded_dim(axis), face.mesh.size(axis)
            if dim is not None and face.joined_shape(axis)[dim] % size:
                raise ValueError(
                    f"the optimizer needs {name!r} whole, and {member.name!r}, a parameter of shape {list(face.shape)} "
                    f"in a unit with such ones, is cut unevenly along dim {dim} over {size} ranks, which is not "
                    "supported: use a size that they divide, or an element-wise optimizer for all of its unit"
                )


def _scratch_again(runtime: LayerZeroState) -> Counter[Size]:
    total = ScratchBuffers(Counter(), Counter())
    planned = specs_of(runtime.units)
    for over in dict.fromkeys(unit.over for unit in planned):
        units = [unit for unit in planned if unit.over is over]
        handles = [handle for unit in units for handle in unit.handles]
        total = total.plus(plan_scratch(handles, runtime.config, units[0].traits))
    return total.scratch


def _require_untouched(runtime: LayerZeroState, moved: Iterable[Handle], owned: set[str]) -> None:
    """Raise if something refers to the rows that are about to move.

    Raises:
        NotImplementedError: `offload_optimizer` is set.
        RuntimeError: a view is active, a parameter has a gradient, or an optimizer has state for a parameter.
    """
    if runtime.config.offload_optimizer:
        raise NotImplementedError(
            "offload_optimizer=True is for optimizers that update rows, and this one needs whole parameters: use "
            "offload_optimizer=False, or an element-wise optimizer"
        )
    names = {member.name for handle in moved for member in handle.members} | owned
    if runtime.status.active_views:
        raise RuntimeError("shard_optimizer inside layerzero.unsharded or EMA.swapped(); leave the context first")
    if any(runtime.members[name].sharded.grad is not None for name in names):
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
