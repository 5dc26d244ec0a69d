"""Names on which add-ons are built.

An add-on imports from the core only public names of ``layerzero`` and the names of this module.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from layerzero.comm.agreement import require_equal
from layerzero.comm.collectives import PendingCollective
from layerzero.comm.observers import StepObserver
from layerzero.comm.process_groups import group_count_fields, mesh_group
from layerzero.config import ACCUMULATIONS, AUTO, Accumulation, Policy, Units, refuse_old_names
from layerzero.device.accelerator import default_device_type
from layerzero.dtensor.local_shard import plain
from layerzero.dtensor.mutation_tracker import MutationTracker
from layerzero.dtensor.row_shard_spec import RowShardSpec
from layerzero.dtensor.sharded_tensor import RowShardedTensor, sharded
from layerzero.dtensor.stale_parameter import current
from layerzero.engine.hooks import get_state
from layerzero.engine.managed_param import ManagedParam
from layerzero.engine.reduction_spec import accumulates_full_gradients
from layerzero.estimates.memory_estimate import device_bytes, estimate_memory, optimizer_bytes, predicted_traffic
from layerzero.estimates.specs import HandleSpec, UnitSpec
from layerzero.layout.shard_grid import Extent
from layerzero.optimizers.compatibility import kinds_that_need_full_params, state_after_a_step
from layerzero.optimizers.torch_state_dict import strip_wrapper_names
from layerzero.sharding.module_methods import set_gradient_divide_factor
from layerzero.sharding.plan_units import plan_unit_specs, plan_units
from layerzero.sharding.unit_selection import UnitDefinition, block_classes
from layerzero.utils.add_ons import ADD_ONS, addon
from layerzero.utils.import_path import load_named
from layerzero.utils.text_tables import parameters_text, seconds_text, size_text, table

__all__ = [
    "ACCUMULATIONS",
    "ADD_ONS",
    "AUTO",
    "Accumulation",
    "Extent",
    "HandleSpec",
    "ManagedParam",
    "MutationTracker",
    "PendingCollective",
    "Policy",
    "RowShardSpec",
    "RowShardedTensor",
    "StepObserver",
    "UnitDefinition",
    "UnitSpec",
    "Units",
    "accumulates_full_gradients",
    "addon",
    "attach",
    "block_classes",
    "current",
    "default_device_type",
    "device_bytes",
    "estimate_memory",
    "get_state",
    "group_count_fields",
    "kinds_that_need_full_params",
    "load_named",
    "mesh_group",
    "optimizer_bytes",
    "parameters_text",
    "plain",
    "plan_unit_specs",
    "plan_units",
    "predicted_traffic",
    "refuse_old_names",
    "require_equal",
    "seconds_text",
    "set_gradient_divide_factor",
    "sharded",
    "size_text",
    "state_after_a_step",
    "strip_wrapper_names",
    "table",
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
