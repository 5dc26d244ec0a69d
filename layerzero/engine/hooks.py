"""Register the hooks through which a model calls its `LayerZeroState`.

The hooks are the only objects that layerzero attaches to the user's modules. :func:`get_state` reads the state from
them.

[Note: Closed models]
``layerzero.close`` clears the attributes of the state, because a sharded optimizer, an EMA or the graph of a loss may
still refer to the state. The module hooks then raise an error saying that the model was closed.
Every other use of the state raises the same error. The parameters keep this rank's rows. The rows of other ranks can no
longer be gathered.
"""

# [Note: References between model and state]
# The hooks of the root module own the state, and the state owns the units, the handles and their memory. Only the user
# owns the root module. The state and its objects refer to modules through weak references, or through the modules'
# dicts of parameters. The hooks of other units refer to the state weakly. Therefore the model's memory is freed when
# the last reference to the model is dropped, without Python's garbage collector.

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from layerzero.comm.process_groups import CLOSED
from layerzero.dtensor.lazy_grad import post_accumulate_grad_hooks
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.call_context import explain_dtype_error
from layerzero.engine.gathered_params import MainGradParameter
from layerzero.engine.handle import Handle
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.model_status import ParamView, require_no_grad, require_unsharded
from layerzero.engine.state import LayerZeroState
from layerzero.engine.unit import Unit, split_at_units
from layerzero.utils.torch_compat import (
    SELECTIVE_CHECKPOINT_MODES,
    disable_dispatch_modes,
    dispatch_modes,
    num_dispatch_modes,
)

_ALL_STATES: weakref.WeakSet[LayerZeroState] = weakref.WeakSet()  # states of all sharded models in this process


def register_hooks(lz_state: LayerZeroState) -> None:
    """Register the hooks through which the modules and parameters of a model call its state."""
    _ALL_STATES.add(lz_state)
    lz_state.model.register_load_state_dict_pre_hook(prepare_state_dict)
    for unit in lz_state.units:
        # Our pre-hook runs first. Our hook runs after the hooks that the user registered before shard_model. All of
        # these hooks see gathered parameters.
        for module in unit.modules:
            before = _PreForwardHook(lz_state, unit, _pre_forward)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            after = _PostForwardHook(lz_state, unit, _post_forward)
            module.register_forward_hook(after, always_call=True)
        for handle in unit.handles:
            for slot, member in enumerate(handle.members):
                hook = _GradientHook(lz_state, unit, handle, slot)
                requires_grad = member.gathered.requires_grad
                # Otherwise torch rejects the hook. A frozen parameter may be unfrozen later.
                member.gathered.requires_grad_(True)
                member.gathered.register_post_accumulate_grad_hook(hook)
                member.gathered.requires_grad_(requires_grad)
                if isinstance(member.gathered, MainGradParameter):
                    member.gathered.offer_main_grad(hook.main_grad)


def close_hooks(model: nn.Module) -> None:
    """Make the module hooks of a closed model raise an error; see [Note: Closed models]."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, _Hook):
                hook.close()


def is_closed(model: nn.Module) -> bool:
    """Return whether `layerzero.close` has closed `model`, or the model that contains `model` as a unit."""
    return any(isinstance(hook, _Hook) and hook.closed for hook in model._forward_pre_hooks.values())


def require_not_closed(module: nn.Module) -> None:
    """Raise RuntimeError if `module`, or a module inside it, is a closed model or a unit of one."""
    if any(is_closed(each) for each in module.modules()):
        raise RuntimeError(CLOSED)


def prepare_state_dict(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Add missing names of tied parameters to a state dict, before torch copies the tensors into the parameters.

    Each sharded parameter then copies this rank's rows from the full tensor. With ``assign=True``, it is copied here:
    torch would replace the parameter. A tensor on meta has no values, so the parameter keeps its own.
    """
    names: dict[int, tuple[RowShardedTensor, list[str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, RowShardedTensor):
            names.setdefault(id(parameter), (parameter, []))[1].append(prefix + name)
    for sharded_param, tied in names.values():
        present = [name for name in tied if name in state_dict]
        if present and local_metadata.get("assign_to_params_buffers"):
            value = state_dict[present[-1]]
            if not isinstance(value, Tensor) or value.shape != sharded_param.shape:
                continue  # torch raises an error
            if value is not sharded_param and not value.is_meta:
                with torch.no_grad():
                    sharded_param.copy_(value)
            state_dict.update(dict.fromkeys(tied, sharded_param))
        for name in tied if present else ():  # a state dict needs only one of the names of a tied parameter
            state_dict.setdefault(name, state_dict[present[-1]])


class UnfinishedHook:
    """Forward pre-hook of a unit that was built before the root of its model; see ``layerzero.fully_shard``."""

    def __init__(self) -> None:
        _UNFINISHED.add(self)

    def finish(self, module: nn.Module) -> None:
        """Make the root of the model to which `module`, or the unit inside it, belongs. All ranks must call this."""
        raise NotImplementedError


_UNFINISHED: weakref.WeakSet[UnfinishedHook] = weakref.WeakSet()


def has_unfinished_units() -> bool:
    """Return whether the model of any unit in this process is not complete."""
    return bool(_UNFINISHED)


def _finish_units(module: nn.Module) -> bool:
    """Complete the model of the first unfinished unit inside `module`. Return False if there is none."""
    for each in module.modules() if _UNFINISHED else ():  # training loops call this function in every micro-batch
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, UnfinishedHook):
                hook.finish(module)
                return True
    return False


def get_state(model: nn.Module) -> LayerZeroState:
    """Return the state of a sharded model.

    Raises:
        TypeError, ValueError: `model` is not a module, is not sharded, or is a part of a sharded model.
        RuntimeError: the model was closed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model sharded by layerzero.shard_model, got {type(model).__name__}. "
            "Pass the model itself, as shard_model returned it"
        )
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _PreForwardHook) and not hook.closed:
            if not hook.is_on_root:
                raise ValueError(f"this is unit {hook.unit.name!r} of a sharded model. Pass the root model")
            return hook.lz_state
    require_not_closed(model)
    if _finish_units(model):
        return get_state(model)
    if inside := ", ".join(repr(path) for path in _states_in(model)):
        raise ValueError(
            f"this {type(model).__name__} is not sharded, but contains sharded models: {inside}. Call this function "
            "for each of these models"
        )
    raise ValueError("the model is not sharded. Call layerzero.shard_model first")


def get_states(model: nn.Module) -> dict[str, LayerZeroState]:
    """Return the states of all sharded models inside `model`, by path. The path of `model` itself is ``""``.

    Raises:
        TypeError, ValueError: `model` is not a module, contains no sharded model, or is a part of a sharded model.
    """
    inside = {}
    if isinstance(model, nn.Module):
        while _finish_units(model):
            pass
        inside = _states_in(model)
    return inside or {"": get_state(model)}


def _states_in(module: nn.Module) -> dict[str, LayerZeroState]:
    """Return the state of each sharded model in `module`, including `module` itself, keyed by attribute path."""
    return {
        path: hook.lz_state
        for path, each in module.named_modules()
        for hook in each._forward_pre_hooks.values()
        if isinstance(hook, _PreForwardHook) and hook.is_on_root
    }


def managed_params_in(module: nn.Module) -> dict[LayerZeroState, list[ManagedParam]]:
    """Return the sharded parameters inside `module`, keyed by state.

    `module` is a sharded model, a part of a sharded model, or a module that contains sharded models. States and
    parameters are in the order of the modules, which is the same on all ranks. A tied parameter is included if any of
    its modules is inside `module`.

    Raises:
        TypeError, ValueError: `module` is not a module, or it contains no sharded parameter.
        RuntimeError: `module` was a part of a sharded model that was garbage collected.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a sharded model or a part of one, got {type(module).__name__}")
    while _finish_units(module):
        pass
    holders = {
        id(held): lz_state
        for lz_state in _ALL_STATES
        if not lz_state.closed
        for member in lz_state.members.values()
        for held, _ in member.module_refs
    }
    inside = [id(each._parameters) for each in module.modules()]
    members_by_state: dict[LayerZeroState, list[ManagedParam]] = {
        holders[held]: [] for held in inside if held in holders
    }
    for lz_state, members in members_by_state.items():
        ids = set(inside)
        members += [m for m in lz_state.members.values() if any(id(held) in ids for held, _ in m.module_refs)]
    if not members_by_state:
        require_not_closed(module)
        for hook in module._forward_pre_hooks.values():
            assert (
                not isinstance(hook, _PreForwardHook) or hook.lz_state
            )  # `hook.lz_state` raises if the model was collected
        raise ValueError(
            f"this {type(module).__name__} has no parameter that layerzero.shard_model has sharded. Call shard_model "
            "on the full model first"
        )
    return members_by_state


def forward_hooks(module: nn.Module) -> tuple[_PreForwardHook, _PostForwardHook]:
    """Return the forward pre-hook and the forward hook of `module`, a sharded model or one of its units.

    Raises:
        ValueError: `module` is neither a sharded model nor one of its units.
    """
    before = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _PreForwardHook)), None)
    after = next((hook for hook in module._forward_hooks.values() if isinstance(hook, _PostForwardHook)), None)
    if before is None or after is None or before.closed:
        require_not_closed(module)
        if _finish_units(module):
            return forward_hooks(module)
        raise ValueError(
            f"this {type(module).__name__} is neither a model that layerzero.shard_model has sharded nor a unit of a "
            "sharded model"
        )
    return before, after


def owning_units(module: nn.Module) -> dict[LayerZeroState, list[Unit]]:
    """Return the units that own the parameters of `module`, keyed by state, in the order of the model.

    Units nested in `module` are not included. Ignored parameters belong to no unit. Inside ``layerzero.unsharded``, no
    parameter belongs to a unit.

    Raises:
        ValueError: all parameters of `module` are in units nested in it.
    """
    require_not_closed(module)
    own_modules, inner_units = split_at_units([module], is_unit)
    parameters = [each for own in own_modules for each in own._parameters.values() if each is not None]
    if inner_units and not parameters:
        raise ValueError(
            f"all parameters of this {type(module).__name__} are in units inside it, which are gathered one by one. "
            "Pass a unit, or a module inside a unit"
        )
    units_by_state: dict[LayerZeroState, set[Unit]] = {}
    for parameter in parameters:
        leaf = getattr(parameter, "gathered", parameter)  # in a forward pass, `parameter` is already gathered
        for hook in post_accumulate_grad_hooks(leaf):
            if isinstance(hook, _GradientHook) and (lz_state := hook.weak_state()) is not None:
                units_by_state.setdefault(lz_state, set()).add(hook.unit)
    return {lz_state: [unit for unit in lz_state.units if unit in units] for lz_state, units in units_by_state.items()}


def is_unit(module: nn.Module) -> bool:
    """Return whether `module` is a sharded model or a unit of one."""
    return any(isinstance(hook, _Hook) for hook in module._forward_pre_hooks.values())


class _GradientHook:
    """Post-accumulate-grad hook of a gathered parameter, which passes the gradient to the state.

    References are weak, because Python's garbage collector does not visit the hooks of a tensor and therefore cannot
    free a reference cycle that contains a hook.
    """

    def __init__(self, lz_state: LayerZeroState, unit: Unit, handle: Handle, slot: int) -> None:
        self.weak_state, self._unit, self._handle = weakref.ref(lz_state), weakref.ref(unit), weakref.ref(handle)
        self._slot = slot

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None
        return unit

    def __call__(self, leaf: Tensor) -> None:
        lz_state, handle = self.weak_state(), self._handle()
        if lz_state is not None and handle is not None:
            lz_state.scheduler.post_accumulate_grad(handle, self._slot, leaf)  # raises if the model was closed

    def main_grad(self) -> Tensor | None:
        """Return the ``main_grad`` of the parameter, or None if it currently has none."""
        lz_state, handle = self.weak_state(), self._handle()
        return None if lz_state is None or handle is None else lz_state.scheduler.main_grad(handle, self._slot)


class _Hook:
    """Module hook with a reference to the state.

    Copying the hook raises an error, because a copied model would use the storage of the original.

    Args:
        run: function that the hook calls. torch.compile may compile a unit's forward method, but must not trace this
            function, which runs collectives and has state.
    """

    def __init__(self, lz_state: LayerZeroState, unit: Unit, run: Callable[..., Any]) -> None:
        self.unit = unit
        self._run = torch.compiler.disable(run)
        self._weak = weakref.ref(lz_state)
        self._kept = lz_state if unit is lz_state.units[0] else None  # see [Note: References between model and state]
        self.closed = False

    def close(self) -> None:
        """Drop the references to the model's state. Every later call of the module raises an error."""
        self.closed, self._kept = True, None
        del self.unit

    @property
    def is_on_root(self) -> bool:
        """True if this is a hook of the root module."""
        return self._kept is not None

    @property
    def lz_state(self) -> LayerZeroState:
        lz_state = self._weak()
        if self.closed:
            raise RuntimeError(CLOSED)
        if lz_state is None:
            raise RuntimeError(
                f"unit {self.unit.name!r} is a part of a sharded model that was garbage collected. Keep a reference to "
                "the sharded model while its parts are in use"
            )
        return lz_state

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "deepcopy of a model sharded by layerzero is not supported. Copy the model before shard_model, or load "
            "layerzero.full_state_dict(model) into a new model. layerzero.EMA(model) averages its weights"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("pickling a model sharded by layerzero is not supported. Save layerzero.full_state_dict(model)")

    @property
    def __name__(self) -> str:
        raise AttributeError(  # torch.jit.script reads the name to compile the hook
            "hooks of layerzero have no name. torch.jit.script reads it, but cannot compile a sharded model. Load "
            "layerzero.full_state_dict(model) into an unsharded model, and script that model"
        )


def _in_selective_checkpoint() -> bool:
    """Return whether a selective activation checkpoint stores or replaces the results of operators.

    The checkpoint would skip gathers and other operators of the engine when it recomputes a forward pass. Hooks
    therefore run without dispatch modes.
    """
    return num_dispatch_modes() > 0 and any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) for mode in dispatch_modes())


def _pre_forward(lz_state: LayerZeroState, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if _in_selective_checkpoint():
        with disable_dispatch_modes():
            return _pre_forward(lz_state, unit, args, kwargs)
    views = lz_state.status.active_views
    if ParamView.UNSHARDED in views:
        require_no_grad(unit.label)
        require_unsharded(unit.label, unit.members(), lz_state.status.unsharded)
        return unit.cast_inputs(args, kwargs, unsharded=True)
    if ParamView.FULL_PRECISION in views:
        require_no_grad(unit.label, ParamView.FULL_PRECISION)
    return lz_state.scheduler.pre_forward(unit, args, kwargs)


def _post_forward(lz_state: LayerZeroState, unit: Unit, output: Any) -> Any:
    if _in_selective_checkpoint():
        with disable_dispatch_modes():
            return _post_forward(lz_state, unit, output)
    if ParamView.UNSHARDED in lz_state.status.active_views:
        return unit.cast_output(output, unsharded=True)
    return lz_state.scheduler.post_forward(unit, output)


class _PreForwardHook(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        changed: tuple[Any, Any] = self._run(self.lz_state, self.unit, args, kwargs)
        return changed


class _PostForwardHook(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        lz_state = self._weak()
        if self.closed or lz_state is None or lz_state.closed:  # the pre-hook has raised
            return output
        if output is None:
            explain_dtype_error(sys.exc_info()[1], self.unit.label, module, self.unit.param_dtype)
        return self._run(lz_state, self.unit, output)
