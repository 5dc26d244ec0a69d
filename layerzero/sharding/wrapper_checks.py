"""Checks that refuse other data-parallel wrappers, both around a sharded model and inside a model to be sharded."""

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
        ignored: ids of parameters that are not sharded.
    """
    for name, module in model.named_modules():
        if all(id(parameter) in ignored for parameter in module.parameters()):
            continue
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, FSDPModule):  # fully_shard adds it to the module's own class
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
    """Make DistributedDataParallel, DataParallel and FSDP1 raise around a sharded model, from now on in this process.

    These wrappers would send row shards as if they were full parameters. Sizes of shards differ between ranks, so gloo
    would hang.
    """
    register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if isinstance(module, _WRAPPERS) and wrapped is not None:
        for parameter_name, parameter in wrapped.named_parameters():
            if isinstance(parameter, RowShardedTensor):
                raise ValueError(_twice(type(module).__name__, f"a model whose parameter {parameter_name!r}"))


def refuse_fully_shard(modules: Iterable[nn.Module]) -> None:
    """Make torch's fully_shard raise for these modules, as soon as it looks for an earlier application of itself."""
    for module in modules:
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))


class _Registry(dict[str, Any]):
    """Registry of torch's composable functions on one module, which raises for ``fully_shard``."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(_twice("fully_shard (FSDP2)", "a module that"))
        return super().__contains__(name)


def _twice(wrapper: str, subject: str) -> str:
    return (
        f"{wrapper} of {subject} layerzero has sharded: layerzero shards, gathers and averages over all ranks itself. "
        "Leave it out; layerzero.no_sync and layerzero.clip_grad_norm_ take the place of its own"
    )
