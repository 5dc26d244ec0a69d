"""Shard a model with the calls of torch's FSDP2: :func:`fully_shard` for each unit, innermost first.

- `call`: `fully_shard`: shards the parameters of one unit at the call
- `unfinished`: units whose model is not complete, and the step that makes the root of the model
- `fsdp_module`: `FSDPModule`: class of the sharded modules, with FSDP2's methods
"""

from layerzero.fsdp2.call import fully_shard
from layerzero.fsdp2.fsdp_module import FSDPModule

__all__ = ["FSDPModule", "fully_shard"]
