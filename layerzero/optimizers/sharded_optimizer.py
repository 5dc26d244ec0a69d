"""Optimizer wrapper that reduces gradients, updates masters and refreshes compute weights.

[Note: Parameter groups during a step]
The wrapped optimizer and the wrapper share their group dictionaries, so a scheduler may refer to either optimizer.
Between steps, groups list sharded parameters, as schedulers, clipping functions and users expect. During a step of the
wrapped optimizer, the groups list the masters instead. Masters are plain tensors, on which fused and foreach kernels
run at full speed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.device.accelerator import require_no_capture
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.hooks import get_state
from layerzero.engine.model_status import ParamView
from layerzero.engine.state import LayerZeroState
from layerzero.optimizers.apex import refuse_apex_offload, require_apex_dtypes, with_preparation
from layerzero.optimizers.compatibility import is_elementwise_by_name, kinds_that_need_full_params
from layerzero.optimizers.listed_params import ListedParams
from layerzero.optimizers.optimizer_state import IMPLEMENTATION_SETTINGS, to_comparable
from layerzero.optimizers.pipelined_step import update_params
from layerzero.optimizers.placeholders import Placeholders, placeholder
from layerzero.optimizers.state_dict_methods import StateDictMethods
from layerzero.optimizers.state_view import MasterKeyedState, ParamKeyedState
from layerzero.optimizers.torch_state_dict import creates_state_only
from layerzero.optimizers.update_rule import UpdateRule
from layerzero.optimizers.wrapped_optimizer import (
    WriteDetector,
    record_writes,
    reduced_grad_rows,
    refuse_mixed_dtensors,
    replace_params,
    step_without_global_hooks,
)
from layerzero.utils.add_ons import addon

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


class ShardedOptimizer(StateDictMethods):
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
        self._params = ListedParams(lz_state)
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (rows that replace a sharded tensor, that tensor)
        self._new, self._new_settings, self._is_used_by_torch = {}, [], False
        self._placeholders = Placeholders()
        self._update_rule = UpdateRule()  # who updates which rows
        if full_param_kinds:
            self._update_rule = addon("muon").OwnerTable(lz_state, inner, full_param_kinds)
        old_groups, old_state = list(inner.param_groups), inner.state
        old_parameters = [group["params"] for group in old_groups]
        inner.param_groups.clear()
        shared = {key: value for key, value in old_state.items() if not isinstance(key, Tensor)}
        inner.state = MasterKeyedState(dict, shared)
        try:
            super().__init__(old_groups, inner.defaults)
        except Exception:
            inner.param_groups[:], inner.state = old_groups, old_state
            for group, group_parameters in zip(old_groups, old_parameters, strict=True):
                group["params"] = group_parameters
            raise
        self.param_groups = inner.param_groups
        self.state = ParamKeyedState(inner, self._params, self._update_rule, self._new)
        for group, former, listed in zip(self.param_groups, old_parameters, self._params.groups, strict=True):
            for old, each in zip(former, listed, strict=True):
                holder = self.state.holder_of(each.parameter)
                if old in old_state and (values := self._shard_state_of(old_state[old], holder, group)):
                    inner.state[each.master] = values
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        self._lz_state.status.refuse_inside(ParamView.EMA, what="optimizer.step()", why="which would undo the update")
        if load_error := self._lz_state.status.load_error or self.load_error:
            raise RuntimeError(load_error)
        self._params.require_unedited(self.param_groups, self.inner.param_groups)
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
        self._lz_state.gradients.record_step(self._params.managed)
        self._lz_state.gradients.record_use()
        for observer in observers:
            observer.after_update(self)
        return loss

    def comparable_settings(self) -> list[list[tuple[str, Any]]]:
        """Return the optimizer's class, and the hyperparameters of each group that must be the same on all ranks."""
        names = sorted(set(self.defaults) - set(IMPLEMENTATION_SETTINGS))
        return [
            [("class", type(self.inner).__name__)]
            + [(name, to_comparable(group[name])) for name in names if name in group]
            for group in self.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters, including gradients accumulated inside ``no_sync``."""
        self._lz_state.scheduler.recover_interrupted_pass()
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if set_to_none or self._lz_state.gradients.failed:
            for parameter in parameters:
                parameter.grad = None
            self._lz_state.gradients.record_use()
        if set_to_none:
            return
        self._lz_state.scheduler.complete_gradients()
        for parameter in parameters:
            if parameter.grad is not None:
                plain(parameter.grad).zero_()
        self._lz_state.gradients.record_drop(self._params.managed)
        self._lz_state.gradients.record_use(zeroed=self._params.managed)

    @contextmanager
    def _use_masters_in_groups(self, rows_of: Callable[[Tensor], Tensor | None] = plain) -> Iterator[None]:
        # See [Note: Parameter groups during a step].
        params_by_group = [group["params"] for group in self.param_groups]
        members = self._params.managed
        try:
            self._replace_references(self._find_master)
            for member in members:
                gradient = member.sharded.grad
                member.master_param.grad = None if gradient is None else rows_of(gradient)
            for group, listed in zip(self.param_groups, self._params.groups, strict=True):
                group["params"] = [each.master for each in listed]
            with self._placeholders.replacing(self._masters_without_rows(), lambda: self.state.stored):
                yield
        finally:
            self._replace_references(self._find_sharded)
            self._lent.clear()  # rows that the optimizer has replaced by other tensors
            for group, parameters in zip(self.param_groups, params_by_group, strict=True):
                group["params"] = parameters
            for member in members:
                member.master_param.grad = None

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
        masters = (m.master_param for m in self._params.managed if id(m.sharded) not in self._update_rule.owned)
        return [master for master in masters if not master.numel()]

    def _call_inner(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the inner optimizer that may write to masters, such as ``train`` or ``eval``."""
        self._params.require_unedited(self.param_groups, self.inner.param_groups)
        if self.has_owners:
            raise RuntimeError(
                f"{method.__name__}() of {type(self.inner).__name__} is not supported: it would read this rank's rows, "
                "but the optimizer needs full parameters, which exist only inside step(). Use an element-wise optimizer"
            )

        def before_write() -> None:
            what = f"{method.__name__}()"
            self._lz_state.status.refuse_inside(ParamView.EMA, what=what, why="which would undo its writes")
            record_writes(member.sharded for member in self._params.managed)

        writes = WriteDetector([each.master for each in self._params], before_write)
        with self._use_masters_in_groups(reduced_grad_rows), writes:
            return method(*args, **kwargs)

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its parameters may have been read from the model before or after sharding.

        As in torch, `param_group` itself becomes the group, so that changes of the dictionary take effect.
        """
        self._params.require_unedited(self.inner.param_groups, self.inner.param_groups)
        params = [param_group["params"]] if isinstance(param_group["params"], Tensor) else list(param_group["params"])
        names = [each[0] for each in params if isinstance(each, tuple)]  # of pairs of a name and a parameter
        listed = self._params.create(each[1] if isinstance(each, tuple) else each for each in params)
        refuse_mixed_dtensors(self.inner, param_group, listed)
        given, count = dict(param_group), len(self.inner.param_groups)
        masters = [each.master for each in listed]
        try:
            require_apex_dtypes(self.inner, [master for master in masters if master.requires_grad])
            param_group["params"] = list(zip(names, masters, strict=True)) if names else masters
            self.inner.add_param_group(param_group)
            param_group.update(self.inner.param_groups[-1])  # an overridden method may have added a copy
            self.inner.param_groups[-1] = param_group
            param_group["params"] = [each.parameter for each in listed]
            self._update_rule.add_group(param_group, [each.member for each in listed if each.member is not None])
        except Exception:
            del self.inner.param_groups[count:]
            param_group.clear()
            param_group.update(given)
            raise
        self._params.add_group(listed)
