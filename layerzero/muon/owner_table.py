"""Assign owners to the parameters that an optimizer needs in full, and change their ZeRO-1 layouts accordingly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from layerzero.extend import (
    FlatLayout,
    Handle,
    LayerZeroState,
    ManagedParam,
    Message,
    UpdateRule,
    agreed,
    connect,
    group_count_fields,
    group_kind,
    scratch_of,
    steps_matrices_separately,
)
from layerzero.muon.owner_groups import (
    axis_to_join,
    owner_group_across,
    owner_group_of,
    positions_across,
    sharded_axes,
)
from layerzero.muon.owner_layout import JoinAxis, ParamOwner, plan_owners
from layerzero.muon.owner_state import add_remote_owner_state
from layerzero.muon.owner_step import GroupKey, ModelOwners, OwnedParam, OwnerSteps, peak_buffer_counts
from layerzero.muon.split_step import step_param_by_param

__all__ = ["OwnerTable", "owners_of", "step_param_by_param"]


def owners_of(lz_state: LayerZeroState) -> ModelOwners:
    """Return the owners of a model's parameters."""
    return lz_state.attached_of(ModelOwners) or lz_state.attach(ModelOwners())


class OwnerTable(UpdateRule):
    """Table of one optimizer's owned parameters. The owner of a parameter updates it in full.

    Every rank must construct the table. The constructor assigns an owner to each parameter that needs an owner.

    Args:
        inner: the wrapped optimizer, with its groups.
        full_param_kinds: kinds of parameter groups that need full parameters; see compatibility.py.

    Attributes:
        owned: owned parameters, keyed by the id of the sharded parameter.
    """

    def __init__(self, lz_state: LayerZeroState, inner: Optimizer, full_param_kinds: Collection[str] = ()) -> None:
        self.owned: dict[int, OwnedParam] = {}
        self._lz_state = lz_state
        self._model_owners = owners_of(lz_state)
        self._inner = inner
        self._steps = OwnerSteps(inner, lz_state.ranks, lz_state.pools.scratch)
        self._full_param_kinds = frozenset(full_param_kinds)
        self._known_kinds = {group_kind(group) for group in inner.param_groups}
        candidates = [
            p for group in inner.param_groups if group_kind(group) in self._full_param_kinds for p in group["params"]
        ]
        self._examined: set[str] = set()  # names of the parameters for which this optimizer has requested owners
        self._assign_owners(
            [member for p in candidates if (member := lz_state.parameters.managed_param(p)) is not None]
        )
        lz_state.observers.add(self)

    def add_group(self, group: MutableMapping[str, Any], members: Sequence[ManagedParam]) -> None:
        """Add a group's parameters to the table if they need owners. Every rank must call this method.

        If any kind of group needs full parameters, so does a group whose kind the compatibility trial did not cover.

        Args:
            members: sharded parameters of the group.
        """
        kind = group_kind(group)
        if kind not in self._full_param_kinds and (not self._full_param_kinds or kind in self._known_kinds):
            return
        self._assign_owners([member for member in members if member.name not in self._examined])
        for member in members:
            self.owned[id(member.sharded)] = OwnedParam(member, group, self._model_owners)
        self._reserve_buffers()

    def _assign_owners(self, members: Sequence[ManagedParam]) -> None:
        if members:
            _reassign_owners(self._lz_state, members, self._inner)
        self._examined |= {member.name for member in members}

    def layout_changed(self) -> None:
        self._reserve_buffers()

    def _reserve_buffers(self) -> None:
        """Register the buffers that rounds use with the scratch pool, after parameters or owners have changed.

        Optimizers step one after another, and never during a reduction. Therefore it is sufficient to register the
        maximum over all users.
        """
        self._steps.forget()
        self._lz_state.pools.scratch.add_predicted(peak_buffer_counts(self.owned.values()))

    def step(self, take_step: Callable[[], Any]) -> None:
        """Update all parameters of the optimizer. Owned parameters are updated as full tensors by their owners."""
        if not self.owned:
            super().step(take_step)
            return
        self._steps.step(list(self.owned.values()), take_step)

    def add_remote_owner_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, which is keyed by parameter name, with entries added for parameters that other ranks own.

        If there are owned parameters, every rank must call this method.
        """
        if not self.owned:
            return dict(state)
        return add_remote_owner_state(state, list(self.owned.values()), self._lz_state.ranks)


@torch.no_grad()
def _reassign_owners(lz_state: LayerZeroState, members: Sequence[ManagedParam], optimizer: Optimizer) -> None:
    """Assign owners to `members` and reassign the owners of owned parameters. Every rank must call this function.

    A parameter may already have an owner because another optimizer, which updates the matrices of a stack separately,
    needs one. If `optimizer` needs the full stack, the parts are joined for both optimizers.

    Args:
        optimizer: optimizer that needs these parameters in full.

    Raises:
        RuntimeError: gradients, optimizer state or views refer to rows that must move. Owners and rows are not changed.
        ValueError: ranks have different parameters or different axes to join, or model-parallel parts cannot be joined.
    """
    table = owners_of(lz_state)
    names = {*table.owners, *(member.name for member in members)}
    # Model-parallel axis along which a parameter's parts are joined, by name, for parameters with such an axis.
    before = {name: owner.axis for name, owner in table.owners.items() if owner.axis is not None}
    # Parameters that are sharded along a model-parallel axis along which their parts are not joined.
    to_ask = [each for each in members if sharded_axes(each.spec.model_parallel, joined=before.get(each.name))]
    if names == set(table.owners) and not to_ask:
        return
    change: _OwnerChange | None = None
    fields: dict[str, object] = {"names": sorted(names)}
    groups: dict[str, dict[str, object]] = {}
    subject = "parameters that an optimizer needs in full"
    with agreed(subject, fields, ranks=lz_state.ranks.ranks, groups=groups):
        axes = before | _requested_axes(to_ask, optimizer, lz_state.mesh_info.device)
        if names != set(table.owners) or axes != before:
            change = _plan_change(lz_state, names, axes)
            groups |= group_count_fields(*(sorted(positions) for positions in change.groups.values() if positions))
        fields["joined along model-parallel axes"] = sorted(axes.items())
    if change is not None:
        _apply_change(lz_state, change)


class _OwnerChange(NamedTuple):
    """New owners, and the changes of layouts and groups that they need.

    Attributes:
        layouts: new layouts of all handles.
        moved: handles whose layout differs from the new one, in the order of the model.
        owners: owners of all owned parameters, by parameter name.
        groups: new owner groups; see :func:`_new_owner_groups`.
    """

    layouts: dict[Handle, FlatLayout]
    moved: list[Handle]
    owners: dict[str, ParamOwner]
    groups: dict[GroupKey, dict[int, tuple[int, int]]]


def _plan_change(lz_state: LayerZeroState, names: Collection[str], axes: Mapping[str, int]) -> _OwnerChange:
    """Plan owners for the parameters `names`. Raise an error if their rows cannot be moved now."""
    layouts, owners = _plan_layouts(lz_state, names, axes)
    moved = [handle for handle in lz_state.handles if handle.layout != layouts[handle]]
    lz_state.scheduler.recover_interrupted_pass()
    lz_state.gradients.apply_user_grads()
    _require_movable(lz_state, moved or lz_state.handles, set(owners_of(lz_state).owners))
    return _OwnerChange(layouts, moved, owners, _new_owner_groups(lz_state, owners))


def _apply_change(lz_state: LayerZeroState, change: _OwnerChange) -> None:
    """Create the new owner groups, move rows to the new layouts, and record the owners."""
    table = owners_of(lz_state)
    table.groups |= {
        (mesh_info, axis): owner_group_of(mesh_info) if axis is None else owner_group_across(mesh_info, axis, positions)
        for (mesh_info, axis), positions in change.groups.items()
    }
    # The result is the same on all ranks, even on those whose rows do not move.
    if any(layout.bounds for layout in change.layouts.values()):
        lz_state.refreshes.launch_due()
    for handle in change.moved:
        handle.change_layout(change.layouts[handle])
    for mesh_info in dict.fromkeys(handle.mesh_info for handle in change.moved):
        # Unequal parts are exchanged by an all-to-all.
        connect(mesh_info.replica_comm, mesh_info.device, [Message("all_to_all")])
    for key in change.groups:
        connect(table.groups[key].communicator, key[0].device, [Message("all_to_all")])
    table.owners = change.owners
    scratch = scratch_of(lz_state.units, lz_state.config)
    lz_state.pools.scratch.set_predicted(scratch.scratch, scratch.nbytes)
    for observer in lz_state.observers:
        observer.layout_changed()


def _plan_layouts(
    lz_state: LayerZeroState, names: Collection[str], axes: Mapping[str, int]
) -> tuple[dict[Handle, FlatLayout], dict[str, ParamOwner]]:
    """Return the new layouts of all handles, and the owners by parameter name."""
    plan: dict[Handle, FlatLayout] = {}
    owners: dict[str, ParamOwner] = {}
    join_axes: dict[str, JoinAxis] = {}
    for name, axis in axes.items():
        model_parallel = lz_state.members[name].spec.model_parallel
        assert model_parallel is not None
        join_axes[name] = JoinAxis(axis, model_parallel.mesh.size(axis), model_parallel.joined_shape(axis))
    for mesh_info in dict.fromkeys(handle.mesh_info for handle in lz_state.handles):
        handles = [handle for handle in lz_state.handles if handle.mesh_info is mesh_info]
        owned = [[slot.name for slot in handle.layout.slots if slot.name in names] for handle in handles]
        _require_equal_parts([handle for handle, owned_names in zip(handles, owned, strict=True) if owned_names], axes)
        cuts = plan_owners(
            [handle.layout for handle in handles],
            owned,
            replicas=mesh_info.replicas,
            zero3_size=mesh_info.zero3_size,
            join_axes_of=join_axes,
        )
        plan |= zip(handles, cuts.layouts, strict=True)
        owners |= cuts.owners
    return plan, owners


def _requested_axes(members: Iterable[ManagedParam], optimizer: Optimizer, device: torch.device) -> dict[str, int]:
    """Return the model-parallel axis along which `optimizer` needs each parameter's parts joined, by parameter name.

    Parameters whose parts need not be joined are omitted.
    """
    axes: dict[str, int] = {}
    separate_by_dims: dict[int, bool] = {}  # whether the optimizer updates each matrix in a stack separately
    for member in members:
        model_parallel = member.spec.model_parallel
        assert model_parallel is not None
        dims = len(model_parallel.shape)
        if dims > 2 and dims not in separate_by_dims:
            separate_by_dims[dims] = steps_matrices_separately(optimizer, device, dims)
        requested = axis_to_join(member.name, model_parallel, matrices_separately=separate_by_dims.get(dims, False))
        if requested is not None:
            axes[member.name] = requested
    return axes


def _new_owner_groups(
    lz_state: LayerZeroState, owners: Mapping[str, ParamOwner]
) -> dict[GroupKey, dict[int, tuple[int, int]]]:
    """Return the owner groups that `owners` need and that do not exist yet. The order is the same on all ranks.

    Returns:
        For each new owner group, a dict from global rank to position, as in :func:`positions_across`. The dict is empty
        if the group is a ZeRO-3 group.
    """
    new_groups: dict[GroupKey, dict[int, tuple[int, int]]] = {}
    for name, owner in sorted(owners.items()):
        spec, axis = lz_state.members[name].spec, owner.axis
        mesh_info, model_parallel = spec.mesh_info, spec.model_parallel
        if (mesh_info, axis) not in {*owners_of(lz_state).groups, *new_groups}:
            new_groups[mesh_info, axis] = (
                {} if model_parallel is None or axis is None else positions_across(mesh_info, model_parallel, axis)
            )
    return new_groups


def _require_equal_parts(handles: Iterable[Handle], axes_of: Mapping[str, int]) -> None:
    """Raise ValueError if parameters are sharded unevenly along an axis along which parts are joined.

    Ranks along such an axis must have equal layouts.
    """
    members = [member for handle in handles for member in handle.members]
    axes = {axes_of[member.name]: member.name for member in members if member.name in axes_of}
    for member in members:
        model_parallel = member.spec.model_parallel
        for axis, name in axes.items() if model_parallel is not None else ():
            assert model_parallel is not None
            dim, size = model_parallel.sharded_dim(axis), model_parallel.mesh.size(axis)
            if dim is not None and model_parallel.joined_shape(axis)[dim] % size:
                raise ValueError(
                    f"the optimizer needs the full parameter {name!r}, but {member.name!r} of shape "
                    f"{list(model_parallel.shape)} in a unit with such parameters is sharded unevenly along dim {dim} "
                    f"over {size} ranks, which is not supported. Use a size that this number divides, or an "
                    "element-wise optimizer for the full unit"
                )


def _require_movable(lz_state: LayerZeroState, moved: Iterable[Handle], owned: set[str]) -> None:
    """Raise an error if a view, a gradient or optimizer state refers to rows that will move.

    Raises:
        NotImplementedError: `Offload.optimizer` is set.
        RuntimeError: a view is active, a parameter has a gradient, or an optimizer has state for a parameter.
    """
    if lz_state.config.offload.optimizer:
        raise NotImplementedError(
            "Offload(optimizer=True) supports only optimizers that update rows, but this optimizer needs full "
            "parameters. Use Offload(optimizer=False), or an element-wise optimizer"
        )
    names = {member.name for handle in moved for member in handle.members} | owned
    lz_state.status.refuse_inside(what="shard_optimizer", why="but it must move rows of the masters")
    if any(lz_state.members[name].sharded.grad is not None for name in names):
        raise RuntimeError(
            "this optimizer needs full parameters, so layerzero must move their rows to owners, but some parameters "
            "already have gradients. Call shard_optimizer before the first backward, or call model.zero_grad() first"
        )
    for optimizer in lz_state.optimizers:
        state = optimizer.state_by_name()  # type: ignore[attr-defined]
        if with_state := sorted(name for name in names if name in state):
            raise RuntimeError(
                "this optimizer needs full parameters, so layerzero must move their rows to owners, but another "
                f"optimizer already has state for {with_state[0]!r}. Call shard_optimizer and add_param_group for all "
                "optimizers before the first step, and load their states afterwards"
            )
