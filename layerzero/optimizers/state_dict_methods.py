"""State dicts of a sharded optimizer: with sharded or full tensors, and by name or in the numbered form of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from layerzero.dtensor.row_shard_spec import RowShardSpec, refuse_rank_local
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.compatibility import state_after_a_step
from layerzero.optimizers.listed_params import ListedParam, ListedParams
from layerzero.optimizers.optimizer_state import (
    IMPLEMENTATION_SETTINGS,
    Holder,
    as_one_row,
    load_setting,
    shard_state,
    shorten_names,
    to_device_of,
    to_public_value,
)
from layerzero.optimizers.state_view import ParamKeyedState
from layerzero.optimizers.torch_state_dict import (
    NOT_STEPPED,
    STATE_IS_LOST,
    example_shape,
    is_unwritten,
    new_state,
    to_numbered,
    to_optimizer_names,
)
from layerzero.optimizers.update_rule import FullParam, UpdateRule
from layerzero.utils.torch_compat import tree_any_only, tree_map


class StateDictMethods(Optimizer):
    """Part of ``ShardedOptimizer`` that saves and loads its state."""

    inner: Optimizer
    state: ParamKeyedState  # type: ignore[assignment]
    _lz_state: LayerZeroState
    _params: ListedParams
    _update_rule: UpdateRule
    _new: dict[int, dict[str, Any]]  # keyed by the id of the listed parameter; state for torch to fill
    _new_settings: list[tuple[dict[str, Any], Collection[str]]]  # groups, and settings for torch to fill
    _is_used_by_torch: bool  # True if torch's functions have created state since the last step or load

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups in the format of ``torch.optim``, with sharded tensors.

        Parameters are numbered in the order of the groups. As in torch, parameters that the optimizer has not stepped
        have no state, and state under keys that are not parameters has the same keys.

        Returns:
            ``{"state": {number: {key: value}}, "param_groups": [{"params": [number, ...], "param_names": [name, ...],
            "lr": ..., ...}]}``. State tensors with their parameter's shape are sharded tensors of the global shape.
            They share memory with the optimizer's state. ``"param_names"`` are the names in the model, or the names
            that you passed to the optimizer.

        Raises:
            NotImplementedError: parameters have owners, as with Muon. Use :meth:`state_dict_by_name` instead.

        Example::

            from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

            model_state, optimizer_state = get_state_dict(model, optimizer)  # calls this method
            state = {"model": model_state, "optim": optimizer_state}
            torch.distributed.checkpoint.load(state, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        """
        if self.has_owners:
            raise NotImplementedError(
                f"state_dict() of {type(self.inner).__name__} is not supported, and neither is "
                "torch.distributed.checkpoint.state_dict: the optimizer needs full parameters, whose state is on their "
                "owners, and torch would take this rank's part for the full state. Call "
                "optimizer.state_dict_by_name() on every rank, or use layerzero.checkpoint.save"
            )

        def make_numbered() -> dict[str, Any]:
            new = {each.name: self._new[id(each.parameter)] for each in self._params if id(each.parameter) in self._new}
            state = {**self._named_state(), **new, **self.shared_state()}
            groups = [{"param_names": names, **group, "params": names} for group, names in self._named_groups()]
            self._forget_new_state()  # only torch's functions get it; see [Note: torch's get_state_dict]
            return to_numbered({"state": state, "param_groups": groups})

        return self._run_state_dict_hooks(make_numbered)

    def state_dict_by_name(self) -> dict[str, Any]:
        """Return the state and the groups, with parameters identified by their names in the model.

        The result contains only states that the optimizer has stored. If parameters have owners, as with Muon, every
        rank must call this method, and the result contains the states of all owners.

        Returns:
            ``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}``. State
            tensors with their parameter's shape are sharded tensors of the global shape. They share memory with the
            optimizer's state. State tensors of owned parameters are sharded tensors whose rows are all on the owner.

        Raises:
            TypeError: the state of an owned parameter has a value that the owner cannot send. All ranks raise the
                error.

        Example::

            state = optimizer.state_dict_by_name()
            momentum = state["state"]["head.weight"]["exp_avg"].full_tensor()  # on every rank
            optimizer.load_state_dict(state)
        """

        def make_named() -> dict[str, Any]:
            groups = [{**group, "params": names} for group, names in self._named_groups()]
            state, shared = self._update_rule.add_remote_owner_state(self._named_state()), self.shared_state()
            if taken := shared.keys() & {name for group in groups for name in group["params"]}:
                raise ValueError(
                    f"the optimizer has state under {taken.pop()!r}, the name of a parameter. Change the key"
                )
            return {"state": {**state, **shared}, "param_groups": groups}

        return self._run_state_dict_hooks(make_named)

    def _run_state_dict_hooks(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state dict from `make`. Run the state-dict hooks before and after `make`."""
        self._params.require_unedited(self.param_groups, self.inner.param_groups)
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        result = make()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def shared_state(self) -> dict[Any, Any]:
        """Return the wrapped optimizer's state under keys that are not parameters, without a copy.

        All ranks have the same order of keys, although ranks that step owned parameters may add keys in another order.
        """
        state = self.state.stored
        return {key: state[key] for key in sorted((key for key in state if not isinstance(key, Tensor)), key=repr)}

    def _named_state(self) -> dict[str, Any]:
        """Return the state of the parameters that have state on this rank, by name and in public form."""
        return {
            each.name: {
                key: to_public_value(value, self.state.holder_of(each.parameter)) for key, value in values.items()
            }
            for each, values in self.state.stored_by_param()
        }

    def _named_groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Return each group with the names of its parameters."""
        return zip(self.param_groups, ([each.name for each in group] for group in self._params.groups), strict=True)

    def to_model_names(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with numbers or any names as one with the names in :meth:`state_dict_by_name`."""
        given: dict[str, str] = {}  # keyed by the name that the user passed
        for group, names in self._named_groups():
            given |= zip(group.get("param_names", names), names, strict=True)
        return to_optimizer_names(state_dict, [names for _, names in self._named_groups()], self._lz_state.model, given)

    @torch.no_grad()
    def full_state_dict(self, *, cpu: bool = True, rank0_only: bool = True) -> dict[str, Any]:
        """Gather the full state in the format of a plain optimizer's state dict for the unsharded model.

        A plain optimizer with the same groups can load the result. :meth:`load_state_dict` can also load it, if every
        rank passes it. Tensors are gathered one at a time. Every rank must call this method.

        Args:
            cpu: copy the tensors to host memory.
            rank0_only: return the state on the first rank only, and ``{}`` on all other ranks.

        Returns:
            ``{"state": {number: {key: value}}, "param_groups": [{"params": [number, ...], ...}]}``, the format of
            ``torch.optim``, with full plain tensors.

        Raises:
            ValueError: ranks have different parameters under the same name, such as experts that are not DTensors.

        Example::

            state = optimizer.full_state_dict()
            if torch.distributed.get_rank() == 0:
                plain_optimizer.load_state_dict(state)
        """
        model_ranks = self._lz_state.ranks
        specs = (member.spec for member in self._params.managed)
        refuse_rank_local("ShardedOptimizer.full_state_dict", specs, model_ranks.size)
        keeps = not rank0_only or model_ranks.is_first

        def gathered(value: Any) -> Any:
            if isinstance(value, DTensor):  # full_tensor is a collective: all ranks call it in the same order
                value = value.full_tensor()
            if not keeps or not isinstance(value, Tensor):
                return value if keeps else None
            copy = value.detach().clone()
            return copy.cpu() if cpu else copy

        by_name = self.to_model_names(self.state_dict_by_name())
        state = {key: tree_map(gathered, value) for key, value in by_name["state"].items()}  # same order on all ranks
        return to_numbered({**by_name, "state": state}) if keeps else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict` or :meth:`state_dict_by_name`, or the state of an unsharded optimizer.

        Each group gets the hyperparameters of the saved groups that contain its parameters. The settings `foreach`,
        `fused` and `capturable` do not affect the results and are not loaded.

        Args:
            state_dict: state with sharded tensors, or with full plain tensors of the global shape. Parameters may be
                identified by any of their tied names, or by position. If all groups have ``"param_names"``, positions
                are matched by these names, and the groups may differ from this optimizer's groups. Otherwise the groups
                must have the same order and sizes as this optimizer's groups.

        Raises:
            ValueError: names are missing or unexpected, group sizes differ, a shape is wrong, or a group's parameters
                were saved with different hyperparameters. The optimizer is not changed in these cases.

        Example::

            state = torch.load("plain.pt")  # plain_optimizer.state_dict() of one process
            optimizer.load_state_dict(state)  # on every rank
        """
        self._load(state_dict, copy=True)

    @torch.no_grad()
    def adopt_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict like :meth:`load_state_dict`, but use its tensors without copying them where possible."""
        self._load(state_dict, copy=False)

    def _load(self, state_dict: Mapping[str, Any], *, copy: bool) -> None:
        self._params.require_unedited(self.param_groups, self.inner.param_groups)
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, loaded)
            loaded = loaded if changed is None else changed
        loaded = self.to_model_names(loaded)
        groups = [self.saved_group(group, loaded["param_groups"]) for group in self.param_groups]
        saved_state, state = self._split_shared_state(loaded)
        if copy:
            self._warn_of_lost_state(saved_state)
            state = deepcopy(state)
        written = self._written_names(saved_state)
        for group, listed in zip(self.param_groups, self._params.groups, strict=True):
            for each in listed:
                if each.name in written and (
                    rows := self._rows_to_load(each, group, saved_state[each.name], copy=copy)
                ):
                    state[each.master] = rows
        self._forget_new_state()
        self._is_used_by_torch = False
        self.state.clear()
        self.state.stored.update(state)
        is_new = bool(saved_state) and not written
        for group, saved in zip(self.param_groups, groups, strict=True):
            settings = {key: value for key, value in saved.items() if key in group or not is_new}
            group.update({key: load_setting(group.get(key), value) for key, value in settings.items()})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _split_shared_state(self, loaded: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Return the state of parameters by name, and the state under keys that are not parameters."""
        # As in torch, keys that no group lists are not parameters.
        listed = {name for group in loaded["param_groups"] for name in group["params"]}
        listed |= {key for key, v in loaded["state"].items() if tree_any_only(DTensor, lambda _: True, v)}
        own = {each.name for each in self._params}
        if unexpected := sorted((listed - own) & set(loaded["state"])):
            raise ValueError(
                f"the optimizer state has parameters that the optimizer does not have: {unexpected}. Load the state of "
                "an optimizer with the same parameters"
            )
        state = loaded["state"]
        return {k: v for k, v in state.items() if k in listed}, {k: v for k, v in state.items() if k not in listed}

    def _written_names(self, saved_state: Mapping[str, Any]) -> set[str]:
        """Return the names of the parameters whose state is not that of :meth:`_create_new_state`."""
        written = {name for name, values in saved_state.items() if not is_unwritten(values)}
        is_sharded = any(member.name in written for member in self._params.managed)
        # If nothing was loaded into sharded state, the state of parameters that are not sharded is as new, too.
        return written if is_sharded or len(written) == len(saved_state) else set()

    def _rows_to_load(
        self, listed: ListedParam, group: Mapping[str, Any], values: Mapping[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        """Return this rank's part of a parameter's state, on the devices on which the optimizer needs it.

        If the state has sharded tensors, all ranks must call this method.
        """
        holder = self.state.holder_of(listed.parameter)
        rows = self._shard_state_of(values, holder, group, copy=copy)
        on_device = group.get("fused") or group.get("capturable")  # step counts must be on the parameter's device
        return {
            key: to_device_of(value, listed.master)
            if on_device or (holder is None and isinstance(value, Tensor) and value.ndim)
            else value
            for key, value in rows.items()
        }

    def _warn_of_lost_state(self, saved_state: Container[str]) -> None:
        """Warn if a load may drop the state of frozen parameters, because torch's functions have left it out."""
        frozen = [each for each in self._params if not each.parameter.requires_grad and each.name not in saved_state]
        lost = [each.name for each in frozen if self._is_used_by_torch or self.state.stored.get(each.master)]
        if lost and self._lz_state.ranks.is_first:
            warnings.warn(STATE_IS_LOST.format(names=shorten_names(lost)), stacklevel=4)

    def _shard_state_of(
        self, values: Mapping[str, Any], holder: Holder, group: Mapping[str, Any], *, copy: bool = True
    ) -> dict[str, Any]:
        if isinstance(holder, ManagedParam) and not holder.spec.shape:
            values = as_one_row(values, self._example_state(group, 1, holder.master.device)[0])
        return shard_state(values, holder, copy=copy)

    def saved_group(self, group: Mapping[str, Any], saved_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the hyperparameters of the saved groups that contain the parameters of `group`.

        A group without parameters gets those of the saved group at the same position, if this optimizer has none of
        its parameters.

        Raises:
            ValueError: a parameter is in no saved group, or the saved groups have different hyperparameters.
        """
        names = set(self.parameter_names(group))
        if names:
            matching = [saved for saved in saved_groups if names & set(saved["params"])]
        else:
            own = {each.name for each in self._params}
            at_place = zip(self.param_groups, saved_groups, strict=False)
            matching = [saved for each, saved in at_place if each is group and not own & set(saved["params"])]
        if missing := names.difference(*(saved["params"] for saved in matching)):
            raise ValueError(
                f"no saved parameter group contains {shorten_names(missing)} (load the state of an optimizer with the "
                "same parameters)"
            )
        skipped = {"params", "param_names", *IMPLEMENTATION_SETTINGS}
        settings = [{key: value for key, value in saved.items() if key not in skipped} for saved in matching]
        merged = settings[0] if settings else {}
        different = {
            key
            for each in settings
            for key in merged | each
            if (key in merged) != (key in each) or bool(merged[key] != each[key])
        }
        if different:
            raise ValueError(
                f"the parameters {shorten_names(names)} are in one group, but they were saved in groups with "
                f"different {', '.join(sorted(different))}. Use the same groups as in the saved state"
            )
        return merged

    @property
    def has_owners(self) -> bool:
        """True if the optimizer needs some full parameters. Their state is on their owner ranks."""
        return bool(self._update_rule.owned)

    def parameter_names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names that :meth:`state_dict_by_name` uses for the parameters of a group."""
        return [each.name for p in group["params"] if (each := self._params.get(p)) is not None]

    def state_by_name(self) -> dict[str, Mapping[str, Any]]:
        """Return the wrapped optimizer's state without a copy, keyed by the names in :meth:`state_dict_by_name`."""
        return {each.name: values for each, values in self.state.stored_by_param()}

    def owned(self, name: str) -> FullParam | None:
        """Return the owned parameter that :meth:`state_dict_by_name` calls `name`, or None if `name` has no owner."""
        return next((each for each in self._update_rule.owned.values() if each.member.name == name), None)

    def spec_of_state(self, name: str, shape: Sequence[int]) -> RowShardSpec | None:
        """Return the sharding of a state tensor of shape `shape` for parameter `name`, or None if it is not sharded."""
        member = self._lz_state.members.get(name)
        holder = None if member is None else self.state.holder_of(member.sharded)
        if not shape or holder is None:
            return None
        return holder.state_spec(shape) if isinstance(holder, FullParam) else holder.spec

    def _forget_new_state(self) -> None:
        self._new.clear()
        for group, names in self._new_settings:
            for name in names:
                group.pop(name, None)
        self._new_settings.clear()

    def _create_new_state(self) -> None:
        """Create tensors for torch's functions to fill. See [Note: torch's get_state_dict]."""
        self._is_used_by_torch = True
        on_read = cache(partial(warnings.warn, NOT_STEPPED) if self._lz_state.ranks.is_first else bool)
        for group, listed in zip(self.param_groups, self._params.groups, strict=True):
            example = cache(partial(self._example_state, group))
            _, settings = example(2, self._lz_state.mesh_info.device)
            self._new_settings.append((group, added := [name for name in settings if name not in group]))
            group.update({name: settings[name] for name in added})
            for each in listed:
                parameter, master = each.parameter, each.master
                if parameter.requires_grad and (values := example(master.ndim, master.device)[0]):
                    self._new[id(parameter)] = new_state(values, master, self.state.holder_of(parameter), on_read)

    def _example_state(
        self, group: Mapping[str, Any], ndim: int, device: torch.device
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return state_after_a_step(self.inner, {**group, "params": []}, device, example_shape(ndim))
