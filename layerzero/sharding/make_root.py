"""Complete a model whose units are built: create the state of its root, and attach the state to its modules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import nn

from layerzero.comm.agreement import has_peers
from layerzero.comm.collectives import timeout_of
from layerzero.comm.waits import monitor_waits
from layerzero.comm.watchdog import Watchdog, default_limit, new_scope
from layerzero.device.accelerator import device_module
from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.dtensor.warning_filter import filter_mesh_warnings
from layerzero.engine.hooks import register_hooks
from layerzero.engine.state import LayerZeroState
from layerzero.engine.unit import Unit
from layerzero.estimates.memory_estimate import held_bytes
from layerzero.estimates.scratch_buffers import scratch_of
from layerzero.estimates.specs import specs_of
from layerzero.sharding.build_units import BuiltUnit
from layerzero.sharding.connections import connect_for_steps
from layerzero.sharding.launchers import connections_warning, restart_warning
from layerzero.sharding.meta_init import initialization_check
from layerzero.sharding.module_methods import bind_methods, show_units_in_repr
from layerzero.sharding.optimizer_guard import guard_optimizers
from layerzero.sharding.shared_resources import SharedResources
from layerzero.sharding.wrapper_checks import guard_fully_shard, guard_wrappers

_log = logging.getLogger("layerzero")


def make_root(model: nn.Module, built: Iterable[BuiltUnit], shared: SharedResources) -> LayerZeroState:
    """Create the state of a model from its units, register the hooks, and start the watchdog. Return the state.

    All ranks of the model must call this function, with the same units and settings.

    Args:
        built: all units of the model, in any order. One of them is the root, whose module is `model`.
        shared: resources with which the units were built.

    Raises:
        ValueError: a unit is not in the model, or the model is not one of the units.
    """
    built, config, ranks = list(built), shared.config, shared.ranks
    units = _in_order(model, [each.unit for each in built])
    scratch = scratch_of(units, config)
    shared.pools.scratch.set_predicted(scratch.scratch, scratch.nbytes)
    connect_for_steps(units, ranks, shared.connection_cost)
    ignored = [parameter for parameter in model.parameters() if not isinstance(parameter, RowShardedTensor)]
    resources = [site.resources for site in shared.sites.values()]
    transports = dict.fromkeys(each.transport for each in resources)
    lz_state = LayerZeroState(model, units, config, ranks, shared.pools, transports, ignored)
    lz_state.on_close += [each.refresher.close for each in resources if each.refresher is not None]
    uninitialized = [tensor for each in built for tensor in each.uninitialized]
    # Without sync_module_states, each rank may have different uninitialized tensors. Therefore all ranks must check.
    if uninitialized or (not config.sync_module_states and any(each.was_on_meta for each in built)):
        lz_state.status.first_forward_checks.append(initialization_check(uninitialized, lz_state.members, ranks.ranks))
    _attach_to_model(lz_state)
    return lz_state


def _in_order(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units in the order of the model, the root first."""
    position = {module: index for index, module in enumerate(model.modules())}  # the model itself is first
    outside = [unit.name for unit in units if not position.keys() >= {*unit.modules}]
    if outside or not any(unit.modules == [model] for unit in units):
        problem = f"unit {outside[0]!r} is outside of the model" if outside else "the model is not one of the units"
        raise ValueError(f"make_root: {problem}. Build units of modules of the model, and one of the model itself")
    return sorted(units, key=lambda unit: position[unit.modules[0]])


def _attach_to_model(lz_state: LayerZeroState) -> None:
    """Register the hooks, checks and methods of a sharded model, log its size, and start its watchdog."""
    register_hooks(lz_state)
    guard_optimizers(lz_state)
    guard_wrappers()
    guard_fully_shard(lz_state.model.modules())
    bind_methods(lz_state)
    show_units_in_repr(lz_state.units)
    filter_mesh_warnings()
    mesh_info = lz_state.mesh_info
    if lz_state.ranks.is_first:
        size = held_bytes(specs_of(lz_state.units), lz_state.config) / 2**20
        _log.info(
            "%s: %d units (including the root), D=%d, S=%d, %.1f MiB per rank without the optimizer state",
            type(lz_state.model).__name__,
            len(lz_state.units),
            mesh_info.data_parallel,
            mesh_info.zero3_size,
            size,
        )
        for message in (restart_warning(), connections_warning(mesh_info.device.type)):
            if message:
                _log.warning("%s", message)
    _start_watchdog(lz_state)


def _start_watchdog(lz_state: LayerZeroState) -> None:
    """Monitor waits and, on a device, start the default watchdog; see [Note: Completion on a device]."""
    mesh_info, ranks = lz_state.mesh_info, lz_state.ranks.ranks
    if not has_peers(ranks):
        return
    lz_state.on_close.append(monitor_waits(lz_state, mesh_info.counters))
    if device_module(mesh_info.device) is None:
        return
    groups = {each.zero3_gather_comm.group for each in (mesh_info, *(handle.mesh_info for handle in lz_state.handles))}
    limit = default_limit(min(map(timeout_of, groups)))
    watchdog = Watchdog(mesh_info, new_scope(ranks), limit, is_default=True)
    lz_state.attach(watchdog)
