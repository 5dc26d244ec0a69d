"""Shard optimizer state over all ranks (ZeRO-1) and weights over small groups with fast links (ZeRO-3).

>>> import layerzero
>>> model = layerzero.shard_model(model, zero3_size=8, units={Block})        # doctest: +SKIP
>>> optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)  # doctest: +SKIP
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    # torch warns if numpy is not installed, but training does not need numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch  # noqa: F401

from layerzero import optimizers
from layerzero.comm.codecs import GatherCodec
from layerzero.comm.mesh_info import init_mesh, mesh_from_groups
from layerzero.comm.watchdog import Watchdog
from layerzero.config import Codecs, LayerZeroConfig, Offload, PrecisionPolicy
from layerzero.full_state import full_precision, full_state_dict, load_full_state_dict, unsharded
from layerzero.optimizers.clip import clip_grad_norm_
from layerzero.optimizers.sharded_optimizer import ShardedOptimizer, shard_optimizer
from layerzero.reports.memory_and_traffic import MemoryReport, TrafficReport, memory, traffic
from layerzero.reports.unit_list import UnitInfo, UnitList, UnitParameter, units
from layerzero.sharding.closing import close
from layerzero.sharding.module_methods import gathered, no_sync, refresh, register_forward_method
from layerzero.sharding.shard_model import shard_model

if TYPE_CHECKING:
    from layerzero import checkpoint, extend, planning
    from layerzero.ema import EMA
    from layerzero.fsdp2 import FSDPModule, fully_shard
    from layerzero.outer_steps import OuterSteps, outer
    from layerzero.planning import Plan, plan
    from layerzero.reliability.corruption_guard import CorruptionGuard, SilentDataCorruption, guard_corruption
    from layerzero.reliability.fingerprint import Corruption, Fingerprint, fingerprint
    from layerzero.reliability.nonfinite_guard import NonFiniteGradients, StepGuard, guard_steps
    from layerzero.reliability.watchdog import watchdog
    from layerzero.slow_links import (
        Float8Rows,
        Int4Blocks,
        Int4Difference,
        Int8Blocks,
        WeightPacketError,
        WeightReceiver,
    )
    from layerzero.step_trace import trace
    from layerzero.verification import ParameterDifference, VerifyReport, verify
    from layerzero.weight_stream import WeightSender, stream_weights

__version__ = "0.1.0"  # a literal: pyproject.toml reads it from the source

__all__ = [
    "EMA",
    "Codecs",
    "Corruption",
    "CorruptionGuard",
    "FSDPModule",
    "Fingerprint",
    "Float8Rows",
    "GatherCodec",
    "Int4Blocks",
    "Int4Difference",
    "Int8Blocks",
    "LayerZeroConfig",
    "MemoryReport",
    "NonFiniteGradients",
    "Offload",
    "OuterSteps",
    "ParameterDifference",
    "Plan",
    "PrecisionPolicy",
    "ShardedOptimizer",
    "SilentDataCorruption",
    "StepGuard",
    "TrafficReport",
    "UnitInfo",
    "UnitList",
    "UnitParameter",
    "VerifyReport",
    "Watchdog",
    "WeightPacketError",
    "WeightReceiver",
    "WeightSender",
    "checkpoint",
    "clip_grad_norm_",
    "close",
    "extend",
    "fingerprint",
    "full_precision",
    "full_state_dict",
    "fully_shard",
    "gathered",
    "guard_corruption",
    "guard_steps",
    "init_mesh",
    "load_full_state_dict",
    "memory",
    "mesh_from_groups",
    "no_sync",
    "optimizers",
    "outer",
    "plan",
    "planning",
    "refresh",
    "register_forward_method",
    "shard_model",
    "shard_optimizer",
    "stream_weights",
    "trace",
    "traffic",
    "units",
    "unsharded",
    "verify",
    "watchdog",
]

# Public names of add-ons, by the module that is imported at their first use. An empty tuple: the module itself.
_ADD_ONS: dict[str, tuple[str, ...]] = {
    "layerzero.checkpoint": (),
    "layerzero.ema": ("EMA",),
    "layerzero.fsdp2": ("FSDPModule", "fully_shard"),
    "layerzero.extend": (),
    "layerzero.outer_steps": ("OuterSteps", "outer"),
    "layerzero.planning": ("Plan", "plan"),
    "layerzero.reliability.corruption_guard": ("CorruptionGuard", "SilentDataCorruption", "guard_corruption"),
    "layerzero.reliability.fingerprint": ("Corruption", "Fingerprint", "fingerprint"),
    "layerzero.reliability.nonfinite_guard": ("NonFiniteGradients", "StepGuard", "guard_steps"),
    "layerzero.reliability.watchdog": ("watchdog",),
    "layerzero.step_trace": ("trace",),
    "layerzero.slow_links": (
        *("Float8Rows", "Int4Blocks", "Int4Difference", "Int8Blocks"),
        *("WeightPacketError", "WeightReceiver"),
    ),
    "layerzero.verification": ("ParameterDifference", "VerifyReport", "verify"),
    "layerzero.weight_stream": ("WeightSender", "stream_weights"),
}
_MODULE_OF = {name: module for module, names in _ADD_ONS.items() for name in names}

if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Import the public name of an add-on at its first use."""
        if f"{__name__}.{name}" in _ADD_ONS:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
