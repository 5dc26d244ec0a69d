"""Integrate with Megatron-Core: process groups, sharded model chunks, and an optimizer for Megatron's training loop.

No other package of layerzero imports this package. Megatron is imported only when a function of this package is called.

>>> import layerzero.megatron
>>> chunks = layerzero.megatron.wrap(chunks, config, zero3_size=8)                          # doctest: +SKIP
>>> optimizer = layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config)       # doctest: +SKIP
"""

from layerzero.megatron.arguments import add_arguments
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.chunk_checkpoint import load, save
from layerzero.megatron.export import export_parts, is_megatron_checkpoint
from layerzero.megatron.install import install
from layerzero.megatron.megatron_optimizer import ShardedMegatronOptimizer
from layerzero.megatron.parallel_groups import ProcessGroups, process_groups
from layerzero.megatron.wrap import wrap

__all__ = [
    "ProcessGroups",
    "ShardedChunk",
    "ShardedMegatronOptimizer",
    "add_arguments",
    "export_parts",
    "install",
    "is_megatron_checkpoint",
    "load",
    "process_groups",
    "save",
    "wrap",
]
