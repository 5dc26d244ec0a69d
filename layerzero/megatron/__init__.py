"""layerzero inside Megatron-like training: groups, model chunks, an optimizer with the interface of Megatron's loop.

Nothing else of layerzero imports this package, and it imports Megatron only when something is called.

>>> import layerzero.megatron
>>> chunks = layerzero.megatron.wrap(chunks, config, zero3_size=8)                          # doctest: +SKIP
>>> optimizer = layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config)       # doctest: +SKIP
"""

from layerzero.megatron.arguments import add_arguments
from layerzero.megatron.chunk import ShardedChunk
from layerzero.megatron.chunk_checkpoint import load, save
from layerzero.megatron.install import install
from layerzero.megatron.megatron_optimizer import ShardedMegatronOptimizer
from layerzero.megatron.parallel_groups import ProcessGroups, process_groups
from layerzero.megatron.wrap import wrap

__all__ = [
    "ProcessGroups",
    "ShardedChunk",
    "ShardedMegatronOptimizer",
    "add_arguments",
    "install",
    "load",
    "process_groups",
    "save",
    "wrap",
]
