"""layerzero: ZeRO-1 optimizer states over all ranks, ZeRO-3 weights over a fast few.

>>> import layerzero
>>> model = layerzero.shard_model(model, zero3_size=8, units={Block})        # doctest: +SKIP
>>> optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)  # doctest: +SKIP
"""

from layerzero import checkpoint, optimizers
from layerzero.api import no_sync, refresh, shard_model
from layerzero.clip import clip_grad_norm_
from layerzero.config import LayerZeroConfig
from layerzero.ema import EMA
from layerzero.full import full_state_dict, load_full_state_dict, unsharded
from layerzero.optimizer import ShardedOptimizer, shard_optimizer
from layerzero.report import MemoryReport, TrafficReport, memory, traffic
from layerzero.topology import init_mesh, mesh_from_groups
from layerzero.trace import Trace, TraceEvent, trace
from layerzero.verification import ParameterDifference, VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "LayerZeroConfig",
    "MemoryReport",
    "ParameterDifference",
    "ShardedOptimizer",
    "Trace",
    "TraceEvent",
    "TrafficReport",
    "VerifyReport",
    "checkpoint",
    "clip_grad_norm_",
    "full_state_dict",
    "init_mesh",
    "load_full_state_dict",
    "memory",
    "mesh_from_groups",
    "no_sync",
    "optimizers",
    "refresh",
    "shard_model",
    "shard_optimizer",
    "trace",
    "traffic",
    "unsharded",
    "verify",
]
