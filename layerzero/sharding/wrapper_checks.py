"""Other wrappers that shard or average: refused around a sharded model, and inside one that is to be sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from layerzero.dtensor.sharded_tensor import RowShardedTensor

__all__ = ["guard_wrappers", "refuse_fully_shard", "refuse_wrapped_parts"]

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)


def refuse_wrapped_parts(model: nn.Module, ignored: set[int]) -> None:
    """Raise if another wrapper manages parameters that are to be sharded.

    Args:
        ignored: ids of parameters that are to be left alone.
    """
    for name, module in model.named_modules():
        if all(id(parameter) in ignored for parameter in module.parameters()):
            continue
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, FSDPModule):  # which it is beside its own class
            kind, way_out = "sharded by torch's fully_shard (FSDP2)", "leave out fully_shard"
        elif isinstance(module, _WRAPPERS):
            kind, way_out = f"wrapped in {type(module).__name__}", "shard the plain module inside it (its .module)"
        else:
            continue
        raise ValueError(
            f"{where} is {kind}, which would manage the same parameters as layerzero: {way_out}, or leave all of its "
            "parameters to it with ignored_modules"
        )


@functools.cache
def guard_wrappers() -> None:
    """Refuse DistributedDataParallel, DataParallel and FSDP1 around a sharded model, from now on in this process.

    They would send rows as if they were whole parameters, of other sizes on each rank: gloo waits for ever.
    """
    register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if isinstance(module, _WRAPPERS) and wrapped is not None:
        for parameter_name, parameter in wrapped.named_parameters():
            if isinstance(parameter, RowShardedTensor):
                raise ValueError(_twice(type(module).__name__, f"a model whose parameter {parameter_name!r}"))


def refuse_fully_shard(modules: Iterable[nn.Module]) -> None:
    """Make torch's fully_shard refuse these modules, where it asks whether it has been here before."""
    for module in modules:
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))


class _Registry(dict[str, Any]):
    """Of what torch's composable functions were applied to a module."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(_twice("fully_shard (FSDP2)", "a module that"))
        return super().__contains__(name)


def _twice(wrapper: str, subject: str) -> str:
    return (
        f"{wrapper} of {subject} layerzero has sharded: layerzero shards, gathers and averages over all ranks itself. "
        "Leave it out; layerzero.no_sync and layerzero.clip_grad_norm_ take the place of its own"
    )
