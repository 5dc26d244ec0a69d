"""Name the private parts of torch that the package uses, with the reason for each.

No other module of the package names a private part of torch: a name of torch or of one of its modules that begins with
an underscore, or any name of a module with an underscore in its path. ``tests/project/test_torch_compat.py`` checks
this. Attributes of objects, such as ``DTensor._local_tensor``, ``Tensor._version`` and ``Module._parameters``, stay
where they are used. Add-ons use this module as ``layerzero.extend.torch_compat``.

torch 2.11 to 2.14 have all of these names, unless a comment says otherwise. ``make torch-versions`` runs tests with the
oldest and the newest version.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C._distributed_c10d import TCPStore, _unregister_process_group  # TCPStore: its wait blocks, others poll
from torch.autograd import profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.distributed._composable.contract import (
    REGISTRY_KEY,  # where fully_shard looks for an earlier one
    STATE_KEY,  # where fully_shard.state finds the state of FSDP2
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # DTensor returns it before a wait
from torch.distributed.distributed_c10d import Backend, Store, _get_default_timeout, _new_process_group_helper
from torch.distributed.distributed_c10d import _get_default_store as default_store  # agreements before collectives
from torch.distributed.fsdp.wrap import _Policy as WrapPolicy  # base class of FSDP1's policies, which select units
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # specs of DTensors made without a copy
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # parts of a model-parallel tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as fused_kernel_devices
from torch.utils._python_dispatch import TorchDispatchMode  # has no public path
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_any_only, tree_leaves, tree_map, tree_map_only, tree_structure  # no public path
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "CAN_SWAP_STORAGES",
    "PROXY_MODE",
    "REDISTRIBUTE_LOGGER",
    "REGISTRY_KEY",
    "SELECTIVE_CHECKPOINT_MODES",
    "STATE_KEY",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "DisableTorchDispatch",
    "DisableTorchFunctionSubclass",
    "TCPStore",
    "TensorMeta",
    "TorchDispatchMode",
    "WrapPolicy",
    "amp_unscale",
    "autograd_sequence_number",
    "backend_timeout",
    "can_move_data",
    "compute_local_shape_and_global_offset",
    "copy_options",
    "create_group",
    "current_graph_task",
    "current_groups",
    "default_store",
    "disable_dispatch_modes",
    "disabled_torch_function",
    "dispatch_mode",
    "dispatch_modes",
    "flatten_state_dict",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "forget_group",
    "functorch_interpreter",
    "fused_kernel_devices",
    "has_imported_dynamo",
    "has_storage",
    "hide_group",
    "is_known_group",
    "is_profiling",
    "launches_of",
    "make_subclass",
    "module_call_code",
    "num_dispatch_modes",
    "preserve_version_counter",
    "queue_callback",
    "saved_tensor_hooks",
    "tracing_state",
    "tree_any_only",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "trunc_normal_",
    "unflatten_state_dict",
    "will_execute",
]

_C: Any = torch._C
_autograd: Any = torch.autograd

# Autograd: which backward pass runs, which nodes it will run, and which nodes a forward pass has made.
current_graph_task: Callable[[], int] = _C._current_graph_task_id  # -1 outside backward passes
will_execute: Callable[[Any], bool] = _C._will_engine_execute_node
autograd_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
saved_tensor_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks

# Dispatch: subclasses of tensors, and traces and transforms, in which weights cannot be gathered.
DisableTorchDispatch: Any = _C._DisableTorchDispatch
DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
disabled_torch_function: Any = _C._disabled_torch_function_impl
make_subclass: Any = Tensor._make_subclass
functorch_interpreter: Callable[[], Any] = _C._functorch.peek_interpreter_stack
tracing_state: Callable[[], Any] = _C._get_tracing_state
dispatch_mode: Callable[[Any], Any] = _C._get_dispatch_mode
PROXY_MODE: Any = _C._TorchDispatchModeKey.PROXY
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack  # `dispatch_modes` takes longer
SELECTIVE_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
can_move_data: Any = torch._has_compatible_shallow_copy_type  # type: ignore[attr-defined]
has_storage: Callable[[Tensor], bool] = _C._has_storage
CAN_SWAP_STORAGES = hasattr(UntypedStorage, "_swap_data_ptr_")  # torch 2.12 and newer
trunc_normal_: Any = nn.init._no_grad_trunc_normal_  # what nn.init.trunc_normal_ calls on the local rows
REDISTRIBUTE_LOGGER = "torch.distributed.tensor._redistribute"  # advises to flatten the mesh of sharded parameters

# One kernel for many tensors. torch.optim uses these functions, which have no public names.
foreach_copy_, foreach_lerp_, foreach_mul_ = torch._foreach_copy_, torch._foreach_lerp_, torch._foreach_mul_
foreach_norm, foreach_zero_ = torch._foreach_norm, torch._foreach_zero_
amp_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # what GradScaler calls


def queue_callback(callback: Callable[[], object]) -> None:
    """Call a function at the end of the current backward pass."""
    _autograd.Variable._execution_engine.queue_callback(callback)


def module_call_code() -> CodeType:
    """Return the code that each call of a module runs, to find calls on the stack."""
    return nn.Module._call_impl.__code__


def is_profiling() -> bool:
    """Return whether torch's profiler is active. The public ways to ask take longer than a range without it."""
    return profiler._is_profiler_enabled


def has_imported_dynamo() -> bool:
    """Return whether ``torch.compile`` may have been used."""
    return "torch._dynamo" in sys.modules


def flatten_state_dict(state_dict: Any) -> tuple[dict[str, Any], Mapping[str, tuple[Any, ...]]]:
    """Return the leaves of a nested state dict by name, as torch.distributed.checkpoint names them, and their paths."""
    flattened: tuple[dict[str, Any], Mapping[str, tuple[Any, ...]]] = _nested_dict().flatten_state_dict(state_dict)
    return flattened


def unflatten_state_dict(leaves: Any, paths: Any) -> dict[str, Any]:
    """Invert :func:`flatten_state_dict`."""
    state_dict: dict[str, Any] = _nested_dict().unflatten_state_dict(leaves, paths)
    return state_dict


def _nested_dict() -> Any:
    """Import the module at its first use, because it takes a third of the import time of the package."""
    return importlib.import_module("torch.distributed.checkpoint._nested_dict")


# Process groups. See the notes in comm/process_groups.py.


def _world() -> Any:
    return dist.distributed_c10d._world


def current_groups() -> list[dist.ProcessGroup]:
    """Return the groups that ``destroy_process_group()`` would destroy."""
    return list(_world().pg_map)


def is_known_group(group: dist.ProcessGroup | None) -> bool:
    """Return whether ``destroy_process_group()`` would destroy a group."""
    return group in _world().pg_map


def create_group(
    members: Sequence[int], name: str, *, store: Store, backend: str, timeout: timedelta | None, options: Any = None
) -> dist.ProcessGroup:
    """Create a group with a chosen name, by its members only. Its keys in `store` begin with its name.

    ``new_group(use_local_synchronization=True)`` derives the name from the number of groups that a rank has, on which
    the members may disagree.

    Args:
        members: ranks in ascending order.
        backend: backend, or configuration of backends.
        timeout: timeout of the collectives. None: the default of the backend.
        options: ``pg_options`` of torch, which only this group uses. None: the default of the backend.
    """
    chosen = Backend(backend)
    timeout = timeout or _get_default_timeout(chosen)
    if options is not None:
        options._timeout = timeout  # torch warns if it differs
    with _without_group_split():
        group, _ = _new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            chosen,
            store,
            name,  # type: ignore[arg-type]
            backend_options=options,
            timeout=timeout,
        )
    assert isinstance(group, dist.ProcessGroup)
    backends = set(dist.BackendConfig(chosen).device_backend_map.values())
    if len(backends) == 1:
        # torch sets none, or gloo, if a backend plugin is registered (importing FSDP registers one), and warns later.
        group._set_default_backend(Backend.backend_type_map[backends.pop()])
    _world().pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


@contextmanager
def _without_group_split() -> Iterator[None]:
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def hide_group(group: dist.ProcessGroup) -> None:
    """Remove a group from the tables that ``destroy_process_group()`` and compiled collectives use."""
    world = _world()
    world.pg_map.pop(group, None)
    world.pg_names.pop(group, None)
    tag = world.pg_to_tag.pop(group, "")
    for group_tag in {tag, ""}:
        if group in (groups := world.tags_to_pg.get(group_tag, [])):
            groups.remove(group)
    if tag:
        world.tags_to_pg.pop(tag, None)
    _unregister_process_group(group.group_name)


def forget_group(group: dist.ProcessGroup) -> None:
    """Remove a hidden group from the other tables, so that torch holds no reference to it."""
    for table in (_world().pg_group_ranks, _world().pg_backend_config):
        table.pop(group, None)


def backend_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Return the timeout of the group's collectives on a device type, or None if the backend does not report one."""
    try:
        timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # the base class of backends raises if there are no options
        return None
    return timeout


def copy_options(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return a copy of the options of the group's backend, for another group, or None if they cannot be copied.

    NCCL's options can be copied, as ``split_group`` does. A group writes its name and ranks to its options, and a copy
    that kept `split_from` would split the parent of `group`, which needs all of the parent's ranks.
    """
    try:
        options: Any = copy.deepcopy(group._get_backend(torch.device(device_type)).options)
    except (AttributeError, RuntimeError, TypeError):  # no options, as above, or options that cannot be copied (gloo)
        return None
    if getattr(options, "split_from", None) is not None:
        options.split_from = None
    return options


def launches_of(group: Any) -> int:
    """Return the number of collectives that this rank has launched on a group, or 0 if the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0
