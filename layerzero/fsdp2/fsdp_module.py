"""Define the class of modules that :func:`fully_shard` has sharded, with the methods of torch's ``FSDPModule``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import nn
from torch.distributed import fsdp

from layerzero.extend import MeshInfo, forward_hooks, get_state, module_methods, torch_compat
from layerzero.fsdp2.unfinished import unfinished_unit_of

_ON_OTHER_MESHES = "_layerzero_on_other_meshes"  # attribute of a module; see `mix_in`


class FSDPModule(fsdp.FSDPModule, nn.Module):
    """Base class of modules that :func:`layerzero.fully_shard` has sharded, derived from torch's ``FSDPModule``.

    docs/fsdp2.md lists what each method does. A setting that is changed before the model is complete applies from the
    first forward.
    """

    is_layerzeros = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an unsharded module of the original class, for example for a slice of a ``Sequential``."""
        return cls.__mro__[3](*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super(fsdp.FSDPModule, self)  # torch's would reset FSDP2's parameters
        return plain._apply(*args, **kwargs)

    def _get_fsdp_state(self) -> Any:
        return _State(self)

    def unshard(self, async_op: bool = False) -> Any:
        """Gather the weights of the unit ahead of its next forward. With `async_op`, return a handle to wait for."""
        return module_methods.unshard(self, async_op)

    def reshard(self) -> None:
        """Free the gathered weights of the unit."""
        if unfinished_unit_of(self) is None:
            module_methods.reshard(self)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether later backward passes synchronize gradients over all ranks."""
        _set(self, module_methods.set_requires_gradient_sync, requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether later backward passes reduce gradients across replicas."""
        _set(self, module_methods.set_requires_all_reduce, requires_all_reduce, recurse=recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether weights are freed after a forward."""
        _set(self, module_methods.set_reshard_after_forward, reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether weights are freed after a backward."""
        _set(self, module_methods.set_reshard_after_backward, reshard_after_backward, recurse=recurse)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Set the units that the unit's forward prefetches, without those on other meshes."""
        _set(self, _set_prefetched, module_methods.set_modules_to_forward_prefetch, modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Set the units that the unit's backward prefetches, without those on other meshes."""
        _set(self, _set_prefetched, module_methods.set_modules_to_backward_prefetch, modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of all ranks' gradients of the call, but not of the calls inside it."""
        for each in (self, *vars(self).get(_ON_OTHER_MESHES, ())):
            _set(each, module_methods.set_gradient_divide_factor, factor, recurse=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Same as :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: each backward pass ends by itself."""

    def reset_iter_state(self) -> None:
        """Do nothing: ``zero_grad()`` recovers after an exception."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: messages always contain sums."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: the number of reductions in flight is fixed."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: gathers and reductions always have separate groups."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: reductions always include unused parameters."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: messages are in memory of torch's allocator."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing: messages are in memory of torch's allocator."""

    def set_post_optim_event(self, event: Any) -> None:
        """Do nothing: a forward waits only for the refresh of its unit."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing: a backward gathers every unit that it reaches."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are always asynchronous."""

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Raise NotImplementedError; see docs/fsdp2.md for alternatives."""
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Raise NotImplementedError; see docs/fsdp2.md for alternatives."""
        _refuse("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Callable[..., None], *, stream: Any = None) -> NoReturn:
        """Raise NotImplementedError; see docs/fsdp2.md for alternatives."""
        _refuse("set_all_reduce_hook")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "deepcopy of a model sharded by layerzero is not supported. Copy the model before fully_shard, or load "
            "layerzero.full_state_dict(model) into a new model. layerzero.EMA(model) averages its weights"
        )


for _method in vars(FSDPModule).values():
    if callable(_method):
        _method.is_layerzeros = True


def _set(module: nn.Module, setter: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Change a setting now, or when the model is complete."""
    unit = unfinished_unit_of(module)
    if unit is None:
        setter(module, *args, **kwargs)
    else:
        unit.defer(functools.partial(setter, module, *args, **kwargs))


def _set_prefetched(module: nn.Module, setter: Callable[..., None], modules: Sequence[nn.Module]) -> None:
    """Set the prefetched units. Units on another mesh than `module` are gathered by the calls around them."""
    if not isinstance(modules, nn.Module):
        own = _mesh_of(module)
        modules = [each for each in modules if _mesh_of(each) is own]
    setter(module, modules)


def _mesh_of(module: nn.Module) -> MeshInfo:
    return forward_hooks(module)[0].unit.mesh_info


def _refuse(method: str) -> NoReturn:
    raise NotImplementedError(
        f"{method} is not supported: all ranks must launch reductions in the same order, which user code between them "
        "could change. Read or change .grad between backward() and step() instead, and see docs/fsdp2.md"
    )


class _State:
    """State of FSDP2 that torch finds for a module, with the parts that torch's pipeline schedules use.

    The schedules synchronize no gradients in the backward passes of micro-batches, and reduce them at the end.
    """

    _state_ctx = SimpleNamespace(all_states=())  # whose gradients the schedule would reduce one by one

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def _root_post_backward_final_callback(self) -> None:
        if (module := self._module()) is not None:
            get_state(module).scheduler.complete_gradients()

    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"a method of torch's FSDPModule needs the state of FSDP2 ({name}) for a module that layerzero.fully_shard "
            "has sharded. Leave the method out (docs/fsdp2.md)"
        )


@functools.cache
def _mixed_class(kind: Any) -> Any:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def mix_in(module: nn.Module, on_other_meshes: Sequence[nn.Module]) -> None:
    """Make the class of a module derive from :class:`FSDPModule`, as torch's ``fully_shard`` does.

    Args:
        on_other_meshes: modules of the call whose parameters are on another mesh.
    """
    kind: Any = type(module)
    function: Any = fsdp.fully_shard
    vars(module).setdefault(torch_compat.STATE_KEY, {})[function.__wrapped__] = _State(module)
    if on_other_meshes:
        vars(module)[_ON_OTHER_MESHES] = on_other_meshes
    module.__class__ = _mixed_class(kind)
