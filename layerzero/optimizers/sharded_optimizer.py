"""Optimizer wrapper that reduces gradients, updates masters and refreshes compute weights.

[Note: Parameter groups during a step]
The wrapped optimizer and the wrapper share their group dictionaries, so a scheduler may refer to either optimizer.
Between steps, groups list sharded parameters, as schedulers, clipping functions and users expect. During a step of the
wrapped optimizer, the groups list the masters instead. Masters are plain tensors, on which fused and foreach kernels
run at full speed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_any_only, tree_map

from layerzero.device.accelerator import require_no_capture
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.row_shard_spec import RowShardSpec, refuse_rank_local
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.dtensor.stale_parameter import current
from layerzero.engine.hooks import get_state
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.param_view import ParamView
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.apex import refuse_apex_offload, require_apex_dtypes, with_preparation
from layerzero.optimizers.compatibility import (
    is_elementwise_by_name,
    kinds_that_need_full_params,
    state_after_a_step,
)
from layerzero.optimizers.optimizer_state import (
    IMPLEMENTATION_SETTINGS,
    Holder,
    as_one_row,
    is_comparable_on_host,
    load_setting,
    settings_differ,
    shard_state,
    shorten_names,
    to_device_of,
    to_float,
    to_public_value,
)
from layerzero.optimizers.pipelined_step import update_params
from layerzero.optimizers.placeholders import Placeholders, placeholder
from layerzero.optimizers.state_view import ParamKeyedState
from layerzero.optimizers.torch_state_dict import (
    NOT_STEPPED,
    STATE_IS_LOST,
    creates_state_only,
    example_shape,
    is_unwritten,
    new_state,
    to_numbered,
    to_optimizer_names,
)
from layerzero.optimizers.update_rule import FullParam, UpdateRule
from layerzero.optimizers.wrapped_optimizer import (
    MasterKeyedState,
    WriteDetector,
    record_writes,
    reduced_grad_rows,
    refuse_mixed_dtensors,
    replace_params,
    require_unedited,
    step_without_global_hooks,
)
from layerzero.utils.add_ons import addon

__all__ = ["ShardedOptimizer", "shard_optimizer"]

_OWN = ("inner", "defaults", "state", "param_groups")  # attributes that both optimizers have


def shard_optimizer(optimizer: Optimizer, model: nn.Module, *, elementwise: bool | None = None) -> ShardedOptimizer:
    """Make an optimizer update the masters of a sharded model.

    The optimizer may have been built from the model's parameters before or after :func:`shard_model`. Its groups and
    hyperparameters do not change, and existing state is sharded like the parameters. Call ``step()`` on the returned
    optimizer. Calling ``step()`` on the original optimizer raises an error. All ranks must call this function.

    Args:
        optimizer: torch optimizer that updates either each element independently (including fused and foreach variants)
            or each parameter independently, such as Muon. In the second case, each parameter has an owner rank, which
            updates the full parameter.
        model: a sharded model.
        elementwise: pass True if the optimizer updates each element independently, or False if it updates each
            parameter independently. layerzero does not verify these values. With None, layerzero decides by class name,
            or by a trial in which a copy of the optimizer steps small parameters. See ``docs/optimizers.md``.

    Raises:
        TypeError: `optimizer` is not a ``torch.optim.Optimizer``.
        ValueError: the optimizer mixes parameters or has parameters that are not in the model, or the trial failed.
        RuntimeError: the optimizer needs full parameters, but parameters already have gradients, or another optimizer
            has already stepped.

    Example::

        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True), model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"shard_optimizer expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass an optimizer of "
            "the model's parameters"
        )
    if isinstance(optimizer, ShardedOptimizer):
        raise ValueError(
            "the optimizer was already returned by shard_optimizer. Call shard_optimizer once, on the original "
            "optimizer"
        )
    lz_state = get_state(model)
    full_param_kinds = kinds_that_need_full_params(optimizer, lz_state.mesh_info.device, elementwise)
    if lz_state.config.offload.optimizer:
        refuse_apex_offload(optimizer)
    return ShardedOptimizer(optimizer, lz_state, full_param_kinds)


class ShardedOptimizer(Optimizer):
    """Torch ``Optimizer`` over sharded parameters. Created by :func:`shard_optimizer`.

    Other public attributes are those of the wrapped optimizer. Methods of the wrapped optimizer,
    such as ``train`` and ``eval`` of schedule-free optimizers, operate on the masters. All ranks must call these
    methods, because the changed weights are refreshed before the next forward.

    Attributes:
        inner: the wrapped optimizer. Its state is keyed by master. Masters are plain tensors with this rank's rows.
        state: the same state, keyed by sharded parameter, with sharded tensors that share memory with it.
    """

    load_error: str | None = None  # error that the next step raises; set while a load is incomplete

    def __init__(self, inner: Optimizer, lz_state: LayerZeroState, full_param_kinds: Collection[str] = ()) -> None:
        self.inner = inner
        self._lz_state = lz_state
        self._completed_backwards = 0  # number of backward passes up to the last step
        self._model = lz_state.model  # a strong reference, as torch optimizers hold to their parameters
        self._listed: list[list[Tensor]] = []  # by group: parameters that the group lists between steps
        self._members: dict[int, ManagedParam | None] = {}  # by id of the listed parameter; None: it is not sharded
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (rows that replace a sharded tensor, that tensor)
        self._new: dict[int, dict[str, Any]] = {}  # keyed by the id of the listed parameter; state for torch to fill
        self._new_settings: list[tuple[dict[str, Any], Collection[str]]] = []  # groups, and settings for torch to fill
        self._is_used_by_torch = False  # True if torch's functions have created state since the last step or load
        self._placeholders = Placeholders()
        self._update_rule = UpdateRule()  # who updates which rows
        if full_param_kinds:
            self._update_rule = addon("muon").OwnerTable(lz_state, inner, full_param_kinds)
        old_groups, old_state = list(inner.param_groups), inner.state
        old_parameters = [group["params"] for group in old_groups]
        inner.param_groups.clear()
        inner.state = MasterKeyedState(old_state, type(inner).__name__)
        try:
            super().__init__(old_groups, inner.defaults)
        except Exception:
            inner.param_groups[:], inner.state = old_groups, old_state
            for group, group_parameters in zip(old_groups, old_parameters, strict=True):
                group["params"] = group_parameters
            raise
        self.param_groups = inner.param_groups
        self.state: ParamKeyedState = ParamKeyedState(  # type: ignore[assignment]
            inner, self._members, lz_state.parameters, self._update_rule, self._new
        )
        for group, former, listed in zip(self.param_groups, old_parameters, self._listed, strict=True):
            for old, parameter in zip(former, listed, strict=True):
                holder = self.state.holder_of(parameter)
                if old in old_state and (values := self._shard_state_of(old_state[old], holder, group)):
                    inner.state[self._master_of(parameter)] = values
        for find in (self._find_master, self._find_sharded):  # tables may refer to parameters from before shard_model
            self._replace_references(find)
        lz_state.optimizers.add(self)

    def __getattr__(self, name: str) -> Any:
        # Private attributes are not forwarded. GradScaler reads one of them from fused optimizers.
        if name.startswith("_") or "inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.inner, name)
        if inspect.ismethod(value) and value.__self__ is self.inner:
            return wraps(value)(partial(self._call_inner, value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        view = vars(self).get(name)
        if isinstance(view, ParamKeyedState):  # optimizer.state = defaultdict(dict)
            view.replace(value)
        elif name in _OWN or name.startswith("_") or hasattr(type(self), name) or "inner" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "deepcopy of a sharded optimizer is not supported, because it refers to the model. To keep its state, use "
            "copy.deepcopy(optimizer.state_dict_by_name()) or layerzero.checkpoint.save"
        )

    # One step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce unreduced gradients, update the masters, and launch the refresh.

        Args:
            closure: function that computes the loss and its gradients. It is called once, before the update.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: the method is called inside :meth:`layerzero.EMA.swapped`, which would undo the update; or
                learning rates or other settings differed between ranks in one of the last two steps.
        """
        require_no_capture(self._lz_state.mesh_info.device, "optimizer.step()")
        if ParamView.EMA in self._lz_state.status.active_views:
            raise RuntimeError(
                "optimizer.step() was called inside EMA.swapped(), which would undo the update. Leave the context first"
            )
        if load_error := self._lz_state.status.load_error or self.load_error:
            raise RuntimeError(load_error)
        require_unedited(self.param_groups, self.inner.param_groups, self._listed)
        loss = None if closure is None else torch.enable_grad()(closure)()
        if creates_state_only(self, self._lz_state.gradients, self._lz_state.ranks):
            self._create_new_state()
            return loss
        self._forget_new_state()
        self._is_used_by_torch = False
        without_backward = self._lz_state.gradients.backwards == self._completed_backwards
        self._lz_state.refreshes.require_no_active_use("optimizer.step()")
        self._lz_state.scheduler.complete_gradients(without_backward=without_backward)
        self._completed_backwards = self._lz_state.gradients.backwards
        observers = list(self._lz_state.observers)
        for observer in observers:
            observer.gradients_final(self)
        self._lz_state.scheduler.no_sync_hint.note_step()
        if not all(observer.before_update(self) for observer in observers):
            return loss
        self.state.forget_owners()
        with self._lz_state.refreshes.step() as refresh, self._use_masters_in_groups():

            def update_all(take_step: Callable[[], Any]) -> None:
                prepared = with_preparation(self.inner, take_step)
                update_params(self.inner, self._update_rule, self._lz_state, refresh, prepared)

            step_without_global_hooks(self.inner, update_all)
        self._lz_state.gradients.record_step(self._managed)
        self._lz_state.gradients.record_use()
        for observer in observers:
            observer.after_update(self)
        return loss

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
        for group in self.param_groups:
            example = cache(partial(self._example_state, group))
            _, settings = state_after_a_step(self.inner, {**group, "params": []}, self._lz_state.mesh_info.device)
            self._new_settings.append((group, added := [name for name in settings if name not in group]))
            group.update({name: settings[name] for name in added})
            for parameter in group["params"]:
                master = self._master_of(parameter)
                if parameter.requires_grad and (values := example(master.ndim, master.device)):
                    self._new[id(parameter)] = new_state(values, master, self.state.holder_of(parameter), on_read)

    def _example_state(self, group: Mapping[str, Any], ndim: int, device: torch.device) -> dict[str, Any]:
        return state_after_a_step(self.inner, {**group, "params": []}, device, example_shape(ndim))[0]

    def comparable_settings(self) -> list[list[tuple[str, Any]]]:
        """Return the optimizer's class, and the hyperparameters of each group that must be the same on all ranks."""
        names = sorted(set(self.defaults) - set(IMPLEMENTATION_SETTINGS))
        return [
            [("class", type(self.inner).__name__)]
            + [(name, to_float(group[name])) for name in names if name in group and is_comparable_on_host(group[name])]
            for group in self.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters, including gradients accumulated inside ``no_sync``."""
        self._lz_state.scheduler.recover_interrupted_pass()
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if set_to_none or self._lz_state.gradients.failed:
            for parameter in parameters:
                parameter.grad = None
        if set_to_none:
            self._lz_state.gradients.record_use()
            return
        self._lz_state.scheduler.complete_gradients()
        for parameter in parameters:
            if parameter.grad is not None:
                (parameter.grad if self._members[id(parameter)] is None else plain(parameter.grad)).zero_()
        self._lz_state.gradients.record_drop(self._managed)
        self._lz_state.gradients.record_use(are_zero=True)

    @property
    def _managed(self) -> list[ManagedParam]:
        """Sharded parameters in the groups."""
        return [member for member in self._members.values() if member is not None]

    def _master_of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the inner optimizer updates for a listed parameter."""
        member = self._members[id(parameter)]
        return parameter if member is None else member.master_param

    @contextmanager
    def _use_masters_in_groups(self, rows_of: Callable[[Tensor], Tensor | None] = plain) -> Iterator[None]:
        # See [Note: Parameter groups during a step].
        params_by_group = [group["params"] for group in self.param_groups]
        pairs = [(member.sharded, member.master_param) for member in self._managed]
        try:
            self._replace_references(self._find_master)
            for parameter, master in pairs:
                master.grad = None if parameter.grad is None else rows_of(parameter.grad)
            for group, parameters in zip(self.param_groups, params_by_group, strict=True):
                group["params"] = list(map(self._master_of, parameters))
            with self._placeholders.replacing(self._masters_without_rows(), lambda: self.state.stored):
                yield
        finally:
            self._replace_references(self._find_sharded)
            for group, parameters in zip(self.param_groups, params_by_group, strict=True):
                group["params"] = parameters
            for _, master in pairs:
                master.grad = None

    def _replace_references(self, find: Callable[[Tensor | int], Tensor | None]) -> None:
        if is_elementwise_by_name(self.inner):
            return
        replace_params(vars(self.inner), find)
        replace_params({key: value for key, value in self.state.stored.items() if not isinstance(key, Tensor)}, find)
        for group in self.param_groups:
            replace_params(group, find)

    def _find_master(self, reference: Tensor | int) -> Tensor | None:
        if (member := self._lz_state.parameters.managed_param(reference)) is not None:
            return member.master_param
        if not isinstance(reference, RowShardedTensor):
            return None
        rows = plain(reference) if plain(reference).numel() else placeholder(plain(reference))
        self._lent[id(rows)] = rows, reference
        return rows

    def _find_sharded(self, reference: Tensor | int) -> Tensor | None:
        if (member := self._lz_state.parameters.managed_param(reference)) is not None:
            return member.sharded
        return self._lent.pop(id(reference), (None, None))[1]

    def _masters_without_rows(self) -> list[Tensor]:
        """Return the empty masters that need placeholders during a step; see placeholders.py."""
        if is_elementwise_by_name(self.inner):
            return []
        masters = (m.master_param for m in self._managed if id(m.sharded) not in self._update_rule.owned)
        return [master for master in masters if not master.numel()]

    def _call_inner(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the inner optimizer that may write to masters, such as ``train`` or ``eval``."""
        require_unedited(self.param_groups, self.inner.param_groups, self._listed)
        if self.has_owners:
            raise RuntimeError(
                f"{method.__name__}() of {type(self.inner).__name__} is not supported: it would read this rank's rows, "
                "but the optimizer needs full parameters, which exist only inside step(). Use an element-wise optimizer"
            )
        refusal = (
            f"{method.__name__}() was called inside EMA.swapped(), which would undo its writes. Leave the context first"
        )
        writes = WriteDetector(
            map(self._master_of, chain.from_iterable(self._listed)),
            partial(record_writes, [member.sharded for member in self._managed]),
            refusal if ParamView.EMA in self._lz_state.status.active_views else None,
        )
        with self._use_masters_in_groups(reduced_grad_rows), writes:
            return method(*args, **kwargs)

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its parameters may have been read from the model before or after sharding.

        As in torch, `param_group` itself becomes the group, so that changes of the dictionary take effect.
        """
        require_unedited(self.inner.param_groups, self.inner.param_groups, self._listed)
        params = [param_group["params"]] if isinstance(param_group["params"], Tensor) else list(param_group["params"])
        names = [each[0] for each in params if isinstance(each, tuple)]  # of pairs of a name and a parameter
        parameters = [current(each[1] if isinstance(each, tuple) else each) for each in params]
        refuse_mixed_dtensors(
            self.inner, param_group, [p for p in parameters if self._lz_state.parameters.is_ignored(p)], parameters
        )
        given, count, known = dict(param_group), len(self.inner.param_groups), dict(self._members)
        try:
            for parameter in parameters:
                self._add_member(parameter)
            masters = list(map(self._master_of, parameters))
            require_apex_dtypes(self.inner, [master for master in masters if master.requires_grad])
            param_group["params"] = list(zip(names, masters, strict=True)) if names else masters
            self.inner.add_param_group(param_group)
            param_group.update(self.inner.param_groups[-1])  # an overridden method may have added a copy
            self.inner.param_groups[-1] = param_group
            param_group["params"] = parameters
            members = [member for parameter in parameters if (member := self._members[id(parameter)]) is not None]
            self._update_rule.add_group(param_group, members)
        except Exception:
            del self.inner.param_groups[count:]
            param_group.clear()
            param_group.update(given)
            self._members.clear()  # in place, because the state refers to it
            self._members.update(known)
            raise
        self._listed.append(list(parameters))

    def _add_member(self, parameter: Tensor) -> None:
        member = self._lz_state.parameters.managed_param(parameter)
        if member is None and not self._lz_state.parameters.is_ignored(parameter):
            raise ValueError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that was not in the model when it "
                "was sharded. Build the optimizer from model.parameters() of the sharded model, and add modules "
                "before shard_model"
            )
        if member is not None:
            if id(parameter) in self._members:
                raise ValueError(f"parameter {member.name!r} appears twice in the optimizer. Remove one of the entries")
            member.master_param.requires_grad_(member.sharded.requires_grad)
        self._members[id(parameter)] = member

    # State dicts

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
            state = {self._name_of(p): self._public_state(p, values) for p, values in self.state.stored_by_param()}
            state |= {self._name_of(p): self._new[id(p)] for p in chain(*self._listed) if id(p) in self._new}
            groups = [{"param_names": names, **group, "params": names} for group, names in self._named_groups()]
            self._forget_new_state()  # only torch's functions get it; see [Note: torch's get_state_dict]
            return to_numbered({"state": {**state, **self.shared_state()}, "param_groups": groups})

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
            state = {self._name_of(p): self._public_state(p, values) for p, values in self.state.stored_by_param()}
            groups = [{**group, "params": names} for group, names in self._named_groups()]
            state, shared = self._update_rule.add_remote_owner_state(state), self.shared_state()
            if taken := shared.keys() & {name for group in groups for name in group["params"]}:
                raise ValueError(
                    f"the optimizer has state under {taken.pop()!r}, the name of a parameter. Change the key"
                )
            return {"state": {**state, **shared}, "param_groups": groups}

        return self._run_state_dict_hooks(make_named)

    def _run_state_dict_hooks(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state dict from `make`. Run the state-dict hooks before and after `make`."""
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

    def _public_state(self, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        holder = self.state.holder_of(parameter)
        return {key: to_public_value(value, holder) for key, value in values.items()}

    def _named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return each group with the names of its parameters."""
        return [(group, self.parameter_names(group)) for group in self.param_groups]

    def to_model_names(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with numbers or any names as one with the names in :meth:`state_dict_by_name`."""
        user_names: dict[str, str] = {}  # keyed by the name that the user passed
        for group, names in self._named_groups():
            user_names |= zip(group.get("param_names", names), names, strict=True)
        return to_optimizer_names(state_dict, [names for _, names in self._named_groups()], self._model, user_names)

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
        specs = (member.spec for member in self._managed)
        refuse_rank_local("ShardedOptimizer.full_state_dict", specs, model_ranks.size)
        keeps = not rank0_only or model_ranks.is_first

        def gathered(value: Any) -> Any:
            if isinstance(value, DTensor):  # full_tensor is a collective: all ranks call it in the same order
                value = value.full_tensor()  # type: ignore[no-untyped-call]
            if not keeps or not isinstance(value, Tensor):
                return value if keeps else None
            copy = value.detach().clone()
            return copy.cpu() if cpu else copy

        by_name = self.to_model_names(self.state_dict_by_name())
        state = {key: tree_map(gathered, value) for key, value in by_name["state"].items()}  # same order on all ranks
        return to_numbered({**by_name, "state": state}) if keeps else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
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
        for group in self.param_groups:
            for parameter, name in zip(group["params"], self.parameter_names(group), strict=True):
                if name in written:
                    rows = self._rows_to_load(parameter, group, saved_state[name], copy=copy)  # may communicate
                    holder = self.state.holder_of(parameter)
                    if not isinstance(holder, FullParam) or holder.is_owned_by_this_rank:
                        state[self._master_of(parameter)] = rows
        self._forget_new_state()
        self._is_used_by_torch = False
        self.state.clear()
        self.state.stored.update(state)
        self._load_settings(groups, is_new=bool(saved_state) and not written)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_settings(self, groups: Sequence[Mapping[str, Any]], *, is_new: bool) -> None:
        """Load the hyperparameters of the groups. If `is_new` is True, only those that the groups already have."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            settings = {key: value for key, value in saved.items() if key in group or not is_new}
            group.update({key: load_setting(group.get(key), value) for key, value in settings.items()})

    def _split_shared_state(self, loaded: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Return the state of parameters by name, and the state under keys that are not parameters."""
        # As in torch, keys that no group lists are not parameters.
        listed = {name for group in loaded["param_groups"] for name in group["params"]}
        listed |= {key for key, v in loaded["state"].items() if tree_any_only(DTensor, lambda _: True, v)}
        own = {name for _, names in self._named_groups() for name in names}
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
        is_sharded = any(member.name in written for member in self._managed)
        # If nothing was loaded into sharded state, the state of parameters that are not sharded is as new, too.
        return written if is_sharded or len(written) == len(saved_state) else set()

    def _rows_to_load(
        self, parameter: Tensor, group: Mapping[str, Any], values: Mapping[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        """Return this rank's part of a parameter's state, on the devices on which the optimizer needs it."""
        holder = self.state.holder_of(parameter)
        rows = self._shard_state_of(values, holder, group, copy=copy)
        on_device = group.get("fused") or group.get("capturable")  # step counts must be on the parameter's device
        return {
            key: to_device_of(value, self._master_of(parameter))
            if on_device or (holder is None and isinstance(value, Tensor) and value.ndim)
            else value
            for key, value in rows.items()
        }

    def _warn_of_lost_state(self, saved_state: Container[str]) -> None:
        """Warn if a load may drop the state of frozen parameters, because torch's functions have left it out."""
        frozen = [p for p in chain(*self._listed) if not p.requires_grad and self._name_of(p) not in saved_state]
        lost = [p for p in frozen if self._is_used_by_torch or self.state.stored.get(self._master_of(p))]
        if lost and self._lz_state.ranks.is_first:
            warnings.warn(STATE_IS_LOST.format(names=shorten_names(map(self._name_of, lost))), stacklevel=4)

    def _shard_state_of(
        self, values: Mapping[str, Any], holder: Holder, group: Mapping[str, Any], *, copy: bool = True
    ) -> dict[str, Any]:
        if isinstance(holder, ManagedParam) and not holder.spec.shape:
            values = as_one_row(values, self._example_state(group, 1, holder.master.device))
        return shard_state(values, holder, copy=copy)

    def saved_group(self, group: Mapping[str, Any], saved_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the hyperparameters of the saved groups that contain the parameters of `group`.

        A group without parameters gets those of the saved group at the same position, if this optimizer has none of
        its parameters.

        Raises:
            ValueError: a parameter is in no saved group, or the saved groups have different hyperparameters.
        """
        missing = {self._name_of(parameter) for parameter in group["params"]}
        names, merged = set(missing), None
        if names:
            matching = [saved for saved in saved_groups if names & set(saved["params"])]
        else:
            own = {name for each in self.param_groups for name in self.parameter_names(each)}
            at_place = zip(self.param_groups, saved_groups, strict=False)
            matching = [saved for each, saved in at_place if each is group and not own & set(saved["params"])]
        for saved in matching:
            missing -= set(saved["params"])
            settings = {
                key: value
                for key, value in saved.items()
                if key not in ("params", "param_names", *IMPLEMENTATION_SETTINGS)
            }
            if merged is not None and (
                different := sorted(key for key in merged | settings if settings_differ(merged, settings, key))
            ):
                raise ValueError(
                    f"the parameters {shorten_names(names)} are in one group, but they were saved in groups with "
                    f"different {', '.join(different)}. Use the same groups as in the saved state"
                )
            merged = settings
        if missing:
            raise ValueError(
                f"no saved parameter group contains {shorten_names(missing)} (load the state of an optimizer with the "
                "same parameters)"
            )
        return merged or {}

    @property
    def has_owners(self) -> bool:
        """True if the optimizer needs some full parameters. Their state is on their owner ranks."""
        return bool(self._update_rule.owned)

    def parameter_names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names that :meth:`state_dict_by_name` uses for the parameters of a group."""
        return [self._name_of(parameter) for parameter in group["params"]]

    def state_by_name(self) -> dict[str, Mapping[str, Any]]:
        """Return the wrapped optimizer's state without a copy, keyed by the names in :meth:`state_dict_by_name`."""
        return {self._name_of(p): values for p, values in self.state.stored_by_param()}

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

    def _name_of(self, parameter: Tensor) -> str:
        member = self._members.get(id(parameter))
        if member is not None:
            return member.name
        return next(name for name, candidate in self._model.named_parameters() if candidate is parameter)
