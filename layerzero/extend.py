"""Names on which add-ons are built.

An add-on imports from the core only public names of ``layerzero`` and the names of this module. They are experimental.

[Note: Ways to extend]
- An observer (:class:`StepObserver`, :func:`attach`) is told of collectives, final gradients, updates and refreshes. It
  may veto an update. ``layerzero.memory`` reports its memory, and the model closes it.
- :func:`get_state` returns the state of a sharded model: its handles, its parameters with their specs and local rows,
  its ranks and its mesh.
- A write to masters begins with ``get_state(model).refreshes.before_master_write()`` and ends with ``.launch()``, which
  sends the new values to the compute weights of all replicas.
- Codecs encode messages. Users pass them to ``shard_model(codecs=layerzero.Codecs(...))``.
- :func:`build_unit` builds one unit with its final sharded parameters, and :func:`make_root` completes a model whose
  units are built. They share :class:`SharedResources`. With ``ModelGroups(deferred=True)``, units are built without
  communication, before their model is known, and :func:`move_unit` moves them to the groups of the model.
- :func:`require_equal` compares values between ranks before an operation that depends on them. :func:`agreed` also runs
  the checks before the comparison, so that an error on one rank is an error on all ranks.

:class:`UpdateRule`, :class:`Transport`, :class:`EncodedRefresher` and :class:`GatherExtension` are interfaces of
add-ons in this package, which the core finds by name (utils/add_ons.py). Other packages cannot attach implementations.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from layerzero.comm.agreement import agreed, has_peers, require_equal
from layerzero.comm.codecs import DifferenceCodec, ParamRows
from layerzero.comm.collectives import (
    Collective,
    Communicator,
    LaunchedCollective,
    Message,
    PendingCollective,
    PendingReduction,
    PendingSmallGather,
    all_gather,
    all_gather_small,
    all_reduce,
    all_to_all,
    broadcast,
    connect,
    launching,
    receive,
    send,
    timeout_of,
)
from layerzero.comm.gather_text import all_gather_text, require_numpy
from layerzero.comm.mesh_info import MeshInfo
from layerzero.comm.model_ranks import DelayedRankMaximum, ModelRanks, all_reduce_over
from layerzero.comm.observers import StepObserver
from layerzero.comm.process_groups import HeldGroup, ModelGroups, drop_idle_groups, group_count_fields, mesh_group
from layerzero.comm.refreshers import (
    COMPARE_EVERY,
    REFRESHES_IN_FLIGHT,
    EncodedRefresher,
    PendingRefresh,
    RefreshInput,
    refresh_buffer_sizes,
)
from layerzero.comm.transport.base import (
    BufferDemand,
    FullBuffer,
    GatherOptions,
    SendBuffer,
    Transport,
    TransportTraits,
)
from layerzero.comm.waits import NonCollectiveWait, may_wait, raise_verdict, waiting
from layerzero.comm.watchdog import new_scope
from layerzero.config import (
    ACCUMULATIONS,
    Accumulation,
    Policy,
    Reshards,
    Units,
    UnitSettings,
    codec_text,
    refuse_old_names,
)
from layerzero.device.accelerator import compute_device, default_device_type, host_memory, synchronize_current_stream
from layerzero.device.buffer_pools import BufferPool, FullBufferPool, Size
from layerzero.device.profiling import profiler_range
from layerzero.device.streams import DeferredCollectiveError, PendingWait, ThreadStream
from layerzero.dtensor.full_tensor import rows_of
from layerzero.dtensor.gather_extension import ExtendedGather, GatheredBytes, GatherExtension
from layerzero.dtensor.lazy_grad import plain_access
from layerzero.dtensor.local_shard import LocalShard
from layerzero.dtensor.local_shard import plain as local_rows
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec
from layerzero.dtensor.row_shard_spec import RowShardSpec, refuse_rank_local
from layerzero.dtensor.sharded_tensor import RowShardedTensor, sharded
from layerzero.dtensor.stale_parameter import current
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import UnfinishedHook, forward_hooks, get_state, is_unit, prepare_state_dict
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.model_status import ParamView, active_view
from layerzero.engine.module_buffers import original_dtypes
from layerzero.engine.module_checks import replaced_param_error
from layerzero.engine.reduction_spec import accumulates_full_gradients
from layerzero.engine.state import LayerZeroState
from layerzero.estimates.memory_estimate import device_bytes, estimate_memory, optimizer_bytes, predicted_traffic
from layerzero.estimates.scratch_buffers import scratch_of
from layerzero.estimates.specs import HandleSpec, UnitSpec
from layerzero.layout.flat_layout import FlatLayout, Slot
from layerzero.layout.shard_grid import Extent, overlap
from layerzero.optimizers.compatibility import state_after_a_step
from layerzero.optimizers.compatibility_trial import group_kind, steps_matrices_separately
from layerzero.optimizers.optimizer_state import shorten_names
from layerzero.optimizers.torch_state_dict import strip_wrapper_names
from layerzero.optimizers.update_rule import FullParam, UpdateRule
from layerzero.optimizers.wrapped_optimizer import record_writes
from layerzero.sharding import module_methods
from layerzero.sharding.build_units import BuiltUnit, PlannedUnit, build_unit, move_unit, plan_unit
from layerzero.sharding.make_root import make_root
from layerzero.sharding.module_methods import set_gradient_divide_factor
from layerzero.sharding.optimizer_guard import guard_optimizers
from layerzero.sharding.plan_units import plan_unit_specs, plan_units
from layerzero.sharding.shared_resources import SharedResources
from layerzero.sharding.unit_meshes import find_model_parallel_meshes
from layerzero.sharding.unit_selection import (
    ParamInfo,
    UnitDefinition,
    block_classes,
    chosen_units,
    has_forward,
    qualified_name,
    ranks_in,
    refuse_shared_memory,
    refuse_unsupported,
    units_around,
)
from layerzero.sharding.unit_settings import tied_buffers
from layerzero.sharding.wrapper_checks import guard_fully_shard, guard_wrappers, refuse_wrapped_parts
from layerzero.utils import torch_compat
from layerzero.utils.add_ons import addon
from layerzero.utils.bit_sums import as_integers, digest, sum64
from layerzero.utils.import_path import load_named
from layerzero.utils.machine import available_memory, boot_id
from layerzero.utils.nonfinite import any_not_finite, format_first_names, max_magnitudes, nonfinite_names
from layerzero.utils.progress import Progress
from layerzero.utils.text_tables import size_text, table

__all__ = [
    "ACCUMULATIONS",
    "COMPARE_EVERY",
    "REFRESHES_IN_FLIGHT",
    "Accumulation",
    "BufferDemand",
    "BufferPool",
    "BuiltUnit",
    "Collective",
    "Communicator",
    "DeferredCollectiveError",
    "DelayedRankMaximum",
    "DifferenceCodec",
    "EncodedRefresher",
    "ExtendedGather",
    "Extent",
    "FlatLayout",
    "FullBuffer",
    "FullBufferPool",
    "FullParam",
    "GatherExtension",
    "GatherOptions",
    "GatheredBytes",
    "Handle",
    "HandleSpec",
    "HeldGroup",
    "LaunchedCollective",
    "LayerZeroState",
    "LocalShard",
    "ManagedParam",
    "MeshInfo",
    "Message",
    "ModelGroups",
    "ModelParallelSpec",
    "ModelRanks",
    "NonCollectiveWait",
    "ParamInfo",
    "ParamRows",
    "ParamView",
    "PendingCollective",
    "PendingReduction",
    "PendingRefresh",
    "PendingSmallGather",
    "PendingWait",
    "PlannedUnit",
    "Policy",
    "Progress",
    "RefreshInput",
    "Reshards",
    "RowShardSpec",
    "RowShardedTensor",
    "SendBuffer",
    "SharedResources",
    "Size",
    "Slot",
    "StepObserver",
    "ThreadStream",
    "Transport",
    "TransportTraits",
    "UnfinishedHook",
    "UnitDefinition",
    "UnitSettings",
    "UnitSpec",
    "Units",
    "UpdateRule",
    "accumulates_full_gradients",
    "active_view",
    "addon",
    "agreed",
    "all_gather",
    "all_gather_small",
    "all_gather_text",
    "all_reduce",
    "all_reduce_over",
    "all_to_all",
    "any_not_finite",
    "as_integers",
    "attach",
    "available_memory",
    "block_classes",
    "boot_id",
    "broadcast",
    "build_unit",
    "chosen_units",
    "codec_text",
    "compute_device",
    "connect",
    "current",
    "default_device_type",
    "device_bytes",
    "digest",
    "drop_idle_groups",
    "estimate_memory",
    "find_model_parallel_meshes",
    "format_first_names",
    "forward_hooks",
    "get_state",
    "group_count_fields",
    "group_kind",
    "guard_fully_shard",
    "guard_optimizers",
    "guard_wrappers",
    "has_forward",
    "has_peers",
    "host_memory",
    "is_unit",
    "launching",
    "load_named",
    "local_rows",
    "make_root",
    "max_magnitudes",
    "may_wait",
    "mesh_group",
    "module_methods",
    "move_unit",
    "new_scope",
    "nonfinite_names",
    "optimizer_bytes",
    "original_dtypes",
    "overlap",
    "plain_access",
    "plan_unit",
    "plan_unit_specs",
    "plan_units",
    "predicted_traffic",
    "prepare_state_dict",
    "profiler_range",
    "qualified_name",
    "raise_verdict",
    "ranks_in",
    "receive",
    "record_writes",
    "refresh_buffer_sizes",
    "refuse_old_names",
    "refuse_rank_local",
    "refuse_shared_memory",
    "refuse_unsupported",
    "refuse_wrapped_parts",
    "replaced_param_error",
    "require_equal",
    "require_numpy",
    "rows_of",
    "scratch_of",
    "send",
    "set_gradient_divide_factor",
    "sharded",
    "shorten_names",
    "size_text",
    "state_after_a_step",
    "steps_matrices_separately",
    "strip_wrapper_names",
    "sum64",
    "synchronize_current_stream",
    "table",
    "tied_buffers",
    "timeout_of",
    "torch_compat",
    "units_around",
    "waiting",
]

_T = TypeVar("_T", bound=StepObserver)


def attach(model: nn.Module, observer: _T) -> _T:
    """Attach an observer to a sharded model, and return the observer.

    The model tells the observer of the events of its training steps, reports the observer's memory in
    ``layerzero.memory``, and closes the observer when the model is closed. ``observer.detach()`` ends this.

    Example::

        class Launches(layerzero.extend.StepObserver):
            def launched(self, works):
                print(works.launched.collective.value, works.launched.name)

        layerzero.extend.attach(model, Launches())
    """
    return get_state(model).attach(observer)
