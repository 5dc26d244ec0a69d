"""layerzero: ZeRO-1 optimizer states over all ranks, ZeRO-3 weights over a fast few.

>>> import layerzero
>>> model = layerzero.shard_model(model, zero3_size=8, units={Block})        # doctest: +SKIP
>>> optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)  # doctest: +SKIP
"""

import warnings

with warnings.catch_warnings():
    # torch's word on a numpy that is not there: training needs none.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch  # noqa: F401

from layerzero import checkpoint, optimizers, planning
from layerzero.comm.codecs import Float8Rows, GatherCodec
from layerzero.comm.topology import init_mesh, mesh_from_groups
from layerzero.comm.watchdog import Watchdog
from layerzero.config import LayerZeroConfig
from layerzero.optimizers.clip import clip_grad_norm_
from layerzero.optimizers.ema import EMA
from layerzero.optimizers.sharded import ShardedOptimizer, shard_optimizer
from layerzero.planning import Plan, plan
from layerzero.reliability.at_rest import BitGuard, SilentCorruption, guard_bits
from layerzero.reliability.fingerprint import Corruption, Fingerprint, fingerprint
from layerzero.reliability.guard import NonFiniteGradients, StepGuard, guard_steps
from layerzero.reliability.watchdog import watchdog
from layerzero.setup.closing import close
from layerzero.setup.shard import shard_model
from layerzero.verification import ParameterDifference, VerifyReport, verify
from layerzero.views.full import full_precision, full_state_dict, load_full_state_dict, unsharded
from layerzero.views.loop import gathered, no_sync, refresh, register_forward_method
from layerzero.views.metrics import metrics
from layerzero.views.report import MemoryReport, TrafficReport, memory, traffic
from layerzero.views.trace import Trace, TraceEvent, trace
from layerzero.views.unit_list import UnitInfo, UnitList, UnitParameter, units

__version__ = "0.1.0"  # a literal: pyproject.toml reads it from the source

__all__ = [
    "EMA",
    "BitGuard",
    "Corruption",
    "Fingerprint",
    "Float8Rows",
    "GatherCodec",
    "LayerZeroConfig",
    "MemoryReport",
    "NonFiniteGradients",
    "ParameterDifference",
    "Plan",
    "ShardedOptimizer",
    "SilentCorruption",
    "StepGuard",
    "Trace",
    "TraceEvent",
    "TrafficReport",
    "UnitInfo",
    "UnitList",
    "UnitParameter",
    "VerifyReport",
    "Watchdog",
    "checkpoint",
    "clip_grad_norm_",
    "close",
    "fingerprint",
    "full_precision",
    "full_state_dict",
    "gathered",
    "guard_bits",
    "guard_steps",
    "init_mesh",
    "load_full_state_dict",
    "memory",
    "mesh_from_groups",
    "metrics",
    "no_sync",
    "optimizers",
    "plan",
    "planning",
    "refresh",
    "register_forward_method",
    "shard_model",
    "shard_optimizer",
    "trace",
    "traffic",
    "units",
    "unsharded",
    "verify",
    "watchdog",
]
