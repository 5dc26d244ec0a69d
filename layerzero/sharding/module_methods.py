"""Functions for training loops, also available as methods of a sharded model and its units, as in FSDP2 and DDP."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from layerzero.engine.call_context import call_with_hooks, in_backward
from layerzero.engine.hooks import forward_hooks, get_state, get_states, owning_units
from layerzero.engine.state import LayerZeroState
from layerzero.engine.unit import Unit

_LOG = logging.getLogger("layerzero")
_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager that accumulates gradients without reducing them across replicas.

    The context must be active while ``backward()`` runs. ``.grad`` is not final until the next backward outside of the
    context, or ``optimizer.step()``, has reduced the accumulated gradients. Inside the context, nothing is reduced with
    ``accumulation="full"``. With ``"sharded"``, gradients are reduced inside the ZeRO-3 group only. With ``"local"``,
    they are still reduced over all ranks.

    Example::

        for i, batch in enumerate(batches):
            with layerzero.no_sync(model) if i + 1 < len(batches) else contextlib.nullcontext():
                (model(batch) / len(batches)).backward()

    This function is also a method of a sharded model, as in DDP: ``with model.no_sync():``. For a module that contains
    sharded models, the function applies to all of these models.
    """
    before = [(lz_state, lz_state.scheduler.requires_gradient_sync) for lz_state in get_states(model).values()]
    for lz_state, _ in before:
        lz_state.scheduler.requires_gradient_sync = False
    try:
        yield
    finally:
        for lz_state, reduces in before:
            lz_state.scheduler.requires_gradient_sync = reduces


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Context manager that gathers the weights of a module, for computations outside of its unit's forward.

    Use this context for a loss that reads the head's weight after the model returns, such as a fused or chunked
    cross-entropy. On every rank, the weights are plain parameters in `mp_policy.param_dtype`. Their gradients are added
    to the gradients from the unit's forward passes and from tied weights, and are reduced together with them.

    The backward may run inside or after the context. If the backward runs inside the context, the weights are gathered
    once. If the backward runs after the context, it gathers the weights again, unless `reshard_after_forward` keeps the
    unit gathered. Under ``torch.no_grad()``, the weights are freed at the end of the context, unless they stay gathered
    until the optimizer step.

    Like a forward, the context is a collective of the ranks over which the weights are sharded. These ranks must enter
    the same contexts in the same order. Otherwise they raise an error, as for forward passes. The context gathers the
    entire unit that owns the parameters of `module`. Units inside `module` stay sharded, so ``gathered(model)`` gathers
    the parameters of the root only. Ignored parameters, and parameters inside :func:`layerzero.unsharded`, are already
    full and do not change.

    The weights are read-only. Inside the context, ``optimizer.step()``, loads, :func:`layerzero.unsharded` and
    ``EMA.swapped()`` raise an error. To edit weights, use ``layerzero.unsharded(model, writeback=True)``. Saved-tensor
    hooks are active inside the context. Therefore a kernel that adds to ``weight.main_grad`` must read this attribute
    in the forward.

    Args:
        module: a sharded model, one of its units, or a module inside one.

    Raises:
        ValueError: all parameters of `module` belong to units inside `module`.
        RuntimeError: the ranks of a ZeRO-3 group enter different contexts, or a call inside the context would change
            weights.

    Example::

        hidden = model(tokens)  # [batch, length, width]
        with layerzero.gathered(model.head):
            loss = linear_cross_entropy(hidden, model.head.weight, targets)
            loss.backward()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"layerzero.gathered expected a sharded model or a module inside one, got {type(module).__name__}. Pass "
            "the module that holds the weights, such as model.head"
        )
    with ExitStack() as contexts:
        for lz_state, units in owning_units(module).items():
            contexts.enter_context(lz_state.scheduler.gathered(units))
        yield


def refresh(model: nn.Module) -> None:
    """Refresh the compute weights of all replicas from the masters. All ranks must call this function.

    Writes through a sharded parameter are detected, and the next forward refreshes its compute weights. Call this
    function after a write that cannot be detected, such as a write through a raw pointer.
    """
    get_state(model).refreshes.launch()


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Set whether later backward passes synchronize gradients over all ranks, for training loops written for FSDP2.

    With False for any unit, backward passes accumulate the gradients of all units, as inside :func:`no_sync`: all ranks
    reduce all units of a model in one order, or none of them. The sums are the same as if the other units were reduced
    in each pass. The setting applies until the next call, and also replaces the setting of
    :func:`set_requires_all_reduce`. All ranks must make the same call. This function is also a method of a sharded
    model and its units: ``model.set_requires_gradient_sync(is_last)``.

    Args:
        module: a sharded model, or one of its units.
        recurse: if True, also set the units inside the unit.
    """
    _hold_back(module, "requires_gradient_sync", requires_gradient_sync, recurse=recurse)
    if requires_gradient_sync:
        _hold_back(module, "requires_all_reduce", True, recurse=recurse)


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Set whether later backward passes reduce gradients across replicas, for training loops written for FSDP2.

    With False for any unit, backward passes accumulate the gradients of all units, as inside :func:`no_sync`:

    - With ``accumulation="full"``, nothing is reduced.
    - With ``"sharded"``, gradients are reduced inside the ZeRO-3 group only.
    - With ``"local"``, gradients are still reduced over all ranks.

    Args:
        module: a sharded model, or one of its units.
        recurse: if True, also set the units inside the unit.
    """
    _hold_back(module, "requires_all_reduce", requires_all_reduce, recurse=recurse)


def _hold_back(module: nn.Module, setting: str, value: bool, *, recurse: bool) -> None:
    lz_state, units = _units_of(module, recurse=recurse)
    held_back = lz_state.scheduler.held_back[setting]
    if value:
        held_back.difference_update(units)
    else:
        held_back.update(units)


def set_gradient_divide_factor(module: nn.Module, factor: float, *, recurse: bool = True) -> None:
    """Set the divisor of the sum of all ranks' gradients of a unit.

    The default is the number of data-parallel ranks D, so that gradients are averaged. Use 1.0 to sum the gradients if
    the loss is already divided by the total number of tokens on all ranks. The divisor applies to later backward
    passes. Gradients that ``.grad`` already has are not divided again.

    All ranks must make the same call between two steps. Divisors are compared together with the optimizers' settings
    when gradients are reduced. If they differ, ``optimizer.step()`` raises an error on all ranks, two or three steps
    later. For training loops written for FSDP2, this function is also a method of a sharded model and its units.

    Args:
        module: a sharded model, or one of its units.
        factor: positive divisor.
        recurse: if True, also set the divisor of the units inside the unit.

    Raises:
        TypeError, ValueError: `factor` is not a positive and finite number, or `module` is not a unit.
        RuntimeError: a backward pass is running, or gradients that :func:`no_sync` has accumulated are not reduced yet.

    Example::

        model = layerzero.shard_model(model, zero3_size=8, units={Block})
        model.set_gradient_divide_factor(1.0)
    """
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        raise TypeError(f"set_gradient_divide_factor expects a number, got {factor!r}. Pass a positive number")
    if not 0 < factor < float("inf"):
        raise ValueError(
            f"set_gradient_divide_factor expects a positive and finite number, got {factor}. Pass 1.0 to sum gradients"
        )
    lz_state, units = _units_of(module, recurse=recurse)
    handles = [handle for unit in units for handle in unit.handles]
    if in_backward() or any(handle.gradients is not None and handle.gradients.has_unreduced for handle in handles):
        raise RuntimeError(
            "set_gradient_divide_factor was called while gradients are accumulated, which have already been scaled for "
            "the previous divisor. Call it before the first backward of a step"
        )
    for handle in handles:
        handle.set_divide_factor(float(factor))
    lz_state.gradients.settings.note_divisors({unit.name: float(factor) for unit in units})


class UnshardHandle:
    """Handle to the in-flight gather that :func:`unshard` has launched."""

    def __init__(self, lz_state: LayerZeroState, unit: Unit) -> None:
        self._weak_state, self._unit = weakref.ref(lz_state), weakref.ref(unit)

    def wait(self) -> None:
        """Wait until the weights are gathered. The unit's forward also waits for the gather."""
        if (lz_state := self._weak_state()) is not None and (unit := self._unit()) is not None:
            lz_state.scheduler.wait(unit)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Gather the weights of a unit ahead of its next forward pass, but not the weights of the units inside it.

    The weights stay gathered until the next forward frees them (see `reshard_after_forward`), until a backward pass
    ends, or until :func:`reshard` or ``optimizer.step()`` is called. ``module.weight`` is the gathered weight only
    inside forward passes and inside :func:`gathered`. Like a forward pass, this function is a collective of the ranks
    over which the weights are sharded.

    Args:
        module: a sharded model, or one of its units. Both have this function as a method: ``unit.unshard()``.
        async_op: if True, return before the weights are gathered.

    Returns:
        If `async_op` is True, a handle whose ``wait()`` returns when the weights are gathered. Otherwise None.
    """
    lz_state, unit = _state_and_unit_of(module)
    lz_state.scheduler.unshard(unit)
    handle = UnshardHandle(lz_state, unit)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of a unit, but not the weights of the units inside it.

    A backward pass that needs the weights gathers them again.

    Raises:
        RuntimeError: the unit is in its forward, in its backward or inside :func:`gathered`.
    """
    lz_state, unit = _state_and_unit_of(module)
    lz_state.scheduler.reshard(unit)


def set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool, recurse: bool = True) -> None:
    """Change the setting `reshard_after_forward` of a unit.

    If `recurse` is True, also change the setting of the units inside the unit.

    :func:`layerzero.shard_model` describes the setting. On a device, True also frees the root and the unit that is
    called last, which otherwise stay gathered. A forward without gradients frees its weights, unless
    :func:`set_reshard_after_backward` keeps them. All ranks must make the same call.

    Raises:
        ValueError: `reshard_after_forward` is not a bool.
    """
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"set_reshard_after_forward expects a bool, got {reshard_after_forward!r}. Only shard_model creates the "
            "process groups for a number of ranks. Pass a number, or 'step', to shard_model(reshard_after_forward=...)"
        )
    lz_state, units = _units_of(module, recurse=recurse)
    for unit in units:
        unit.reshard_after_forward, unit.reshard_is_explicit = reshard_after_forward, True
    lz_state.scheduler.apply_unit_settings()


def set_reshard_after_backward(module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True) -> None:
    """Set whether a unit's gathered weights are freed after a backward pass.

    If `recurse` is True, the setting also applies to the units inside the unit.

    Passing False needs more memory but avoids the gathers of the next micro-batch. If the unit's forward does not free
    the weights either, they stay gathered until ``optimizer.step()``, as with ``reshard_after_forward="step"``, whose
    value for the unit the call replaces. All ranks must make the same call.
    """
    lz_state, units = _units_of(module, recurse=recurse)
    for unit in units:
        unit.reshard_after_backward = bool(reshard_after_backward)
    lz_state.scheduler.apply_unit_settings()


def set_modules_to_forward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Set the units that a unit's forward prefetches, in the given order.

    These units replace the units that the setting `prefetch` selects. All ranks must make the same call. Prefetched
    units that are not called are freed when the forward of the model ends.

    Raises:
        TypeError, ValueError: one of `modules` is not a unit of this model, or is on another mesh.
    """
    lz_state, unit = _state_and_unit_of(module)
    lz_state.scheduler.prefetched_forward[unit] = _units_to_prefetch(lz_state, unit, modules, "forward")
    lz_state.scheduler.apply_unit_settings()


def set_modules_to_backward_prefetch(module: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Set the units that a unit's backward prefetches.

    See :func:`set_modules_to_forward_prefetch`. Prefetched units that the backward does not reach are freed when the
    backward ends.
    """
    lz_state, unit = _state_and_unit_of(module)
    lz_state.scheduler.prefetched_backward[unit] = _units_to_prefetch(lz_state, unit, modules, "backward")
    lz_state.scheduler.apply_unit_settings()


def _units_to_prefetch(
    lz_state: LayerZeroState, unit: Unit, modules: Sequence[nn.Module], direction: str
) -> list[Unit]:
    method = f"set_modules_to_{direction}_prefetch"
    if isinstance(modules, nn.Module):
        raise TypeError(f"{method} expects a list of units, got one {type(modules).__name__}. Pass [unit]")
    units = []
    for module in modules:
        other_state, other_unit = _state_and_unit_of(module)
        if other_state is not lz_state or other_unit.mesh_info is not unit.mesh_info:
            raise ValueError(
                f"{method}: {other_unit.label} belongs to a different "
                f"{'model' if other_state is not lz_state else 'mesh'} from {unit.label}. A rank that calls one of "
                "them does not necessarily call the other. Pass units of the same model and mesh"
            )
        units.append(other_unit)
    return units


def _state_and_unit_of(module: nn.Module) -> tuple[LayerZeroState, Unit]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a sharded model or a unit of one, got {type(module).__name__}")
    before, _ = forward_hooks(module)
    return before.lz_state, before.unit


def _units_of(module: nn.Module, *, recurse: bool) -> tuple[LayerZeroState, list[Unit]]:
    """Return the unit that `module` belongs to and, if `recurse` is True, the units inside that unit."""
    lz_state, unit = _state_and_unit_of(module)
    if recurse and unit is lz_state.units[0]:
        return lz_state, list(lz_state.units)
    inside = set(module.modules()) if recurse else set()
    return lz_state, [each for each in lz_state.units if each is unit or not inside.isdisjoint(each.modules)]


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Register a method of a sharded model or unit that computes with gathered parameters, as ``forward`` does.

    While the method runs, the parameters of that unit are gathered. Parameters of other units are gathered during the
    forward passes of those units. Inputs and outputs are cast according to `mp_policy`, gradients flow through the
    return value, and forward hooks do not run. Like a forward, the method is a collective. The ranks of a ZeRO-3 group
    must call the same units in the same order. Unless these ranks share memory, all of them must therefore generate
    sequences of the same length (``synced_gpus=True`` in transformers).

    Args:
        module: a sharded model, or one of its units.
        method_name: name of the method, such as ``"generate"`` or ``"encode"``. Registering the same method again has
            no effect.

    Raises:
        AttributeError, TypeError: the method does not exist, or the method returns before it computes, such as a
            generator or coroutine.
        ValueError: `module` is not a sharded model or a unit of one.

    Example::

        layerzero.register_forward_method(model, "generate")
        tokens = model.generate(prompt)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a sharded model or a unit of one, got {type(module).__name__}")
    method = getattr(module, method_name)
    if getattr(method, "is_layerzeros", False):
        return
    if not callable(method):
        raise TypeError(
            f"{type(module).__name__}.{method_name} is a {type(method).__name__}, not a method. Pass the name of a "
            "method"
        )
    if any(kind(method) for kind in _LATER):
        raise TypeError(
            f"{type(module).__name__}.{method_name} is a generator or a coroutine: it computes after it returns, when "
            "its parameters are sharded again. Register a method that computes before it returns"
        )
    forward_hooks(module)
    function = method.__func__ if getattr(method, "__self__", None) is module else None
    setattr(module, method_name, _as_forward(method if function is None else function, module, function is not None))


def _as_forward(method: Callable[..., Any], module: nn.Module, takes_module: bool) -> Callable[..., Any]:
    module_ref = weakref.ref(module)  # see `_bind_weakly`

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        live_module = module_ref()
        assert live_module is not None
        call = functools.partial(method, live_module) if takes_module else method
        return call_with_hooks(live_module, call, args, kwargs, *forward_hooks(live_module))

    as_forward.is_layerzeros = True  # type: ignore[attr-defined]
    return as_forward


def bind_methods(lz_state: LayerZeroState) -> None:
    """Add methods with FSDP2's names to the model and its units, for training loops written for FSDP2.

    If a module already has an attribute with the name of a method, the attribute is kept and a warning is logged.
    """
    skipped: dict[str, str] = {}
    for unit in lz_state.units:
        is_root = unit is lz_state.units[0]
        for module in unit.modules:
            for function in (*_OF_MODELS, *_OF_UNITS) if is_root else _OF_UNITS:
                name = function.__name__
                if not hasattr(module, name):
                    setattr(module, name, _bind_weakly(function, module))
                elif not getattr(getattr(module, name), "is_layerzeros", False):
                    skipped.setdefault(name, "model" if is_root else type(module).__name__)
    for name, owner in skipped.items():
        _LOG.warning(
            "layerzero: the %s defines its own %s, which layerzero does not replace. A training loop that calls it "
            "does not call layerzero. %s",
            *(owner, name, "Call layerzero.no_sync(model)" if "sync" in name else "See docs/fsdp2.md"),
        )


_OF_MODELS = (no_sync,)
_OF_UNITS = (
    set_requires_gradient_sync,
    set_requires_all_reduce,
    unshard,
    reshard,
    set_gradient_divide_factor,
    set_reshard_after_forward,
    set_reshard_after_backward,
    set_modules_to_forward_prefetch,
    set_modules_to_backward_prefetch,
)


def _bind_weakly(function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Bind a function to a model through a weak reference, because a bound method would create a reference cycle."""
    model_ref = weakref.ref(model)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(model_ref(), *args, **kwargs)

    return method


def show_units_in_repr(units: Iterable[Unit]) -> None:
    """Mark the units in the output of ``print(model)``, through their ``extra_repr``."""
    for unit in units:
        sizes = f"zero3_size={unit.mesh_info.zero3_size} of {unit.mesh_info.data_parallel} ranks"
        mark = f"layerzero unit {unit.name!r}" if unit.name else f"layerzero root, {sizes}"
        for module in unit.modules:
            module.extra_repr = _extra_repr_with_mark(module, mark)  # type: ignore[method-assign]


def _extra_repr_with_mark(module: nn.Module, mark: str) -> Callable[[], str]:
    """Return an ``extra_repr`` that appends `mark` and holds no strong reference to the module; see `_bind_weakly`."""
    module_ref, own_extra_repr = weakref.ref(module), vars(module).get("extra_repr")

    def extra_repr() -> str:
        live_module = module_ref()
        assert live_module is not None
        text = type(live_module).extra_repr(live_module) if own_extra_repr is None else own_extra_repr()
        return f"{text}{chr(10) if chr(10) in text else ', '}{mark}" if text else mark

    return extra_repr
