"""Raise errors for other data-parallel wrappers around a sharded model or inside a model that is being sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.utils.torch_compat import REGISTRY_KEY

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)


def refuse_wrapped_parts(model: nn.Module, ignored: set[int]) -> None:
    """Raise ValueError if another data-parallel wrapper manages parameters that would be sharded.

    Args:
        ignored: ids of parameters that are not sharded.
    """
    for name, module in model.named_modules():
        if all(id(parameter) in ignored for parameter in module.parameters()):
            continue
        subject = f"module {name!r}" if name else "the model"
        if isinstance(module, FSDPModule) and not getattr(module, "is_layerzeros", False):  # a class that it adds
            kind = "sharded by torch's fully_shard (FSDP2)"
            way_out = "leave out torch's fully_shard, import it from layerzero"
        elif isinstance(module, _WRAPPERS):
            kind, way_out = f"wrapped in {type(module).__name__}", "shard the plain module inside it (its .module)"
        else:
            continue
        raise ValueError(
            f"{subject} is {kind}, which would manage the same parameters as layerzero. Either {way_out}, or pass the "
            "module in ignored_modules"
        )


@functools.cache
def guard_wrappers() -> None:
    """Make DistributedDataParallel, DataParallel and FSDP1 raise ValueError if they wrap a sharded model.

    These wrappers would send row shards as if they were full parameters. Shard sizes differ between ranks, so gloo
    collectives would hang. The hook that raises the error stays registered until the process ends.
    """
    register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if isinstance(module, _WRAPPERS) and wrapped is not None:
        ignored = getattr(wrapped, "_ddp_params_and_buffers_to_ignore", ())
        for parameter_name, parameter in wrapped.named_parameters():
            if isinstance(parameter, RowShardedTensor) and parameter_name not in ignored:
                raise ValueError(
                    _sharded_twice_message(type(module).__name__, f"a model whose parameter {parameter_name!r}")
                )


def guard_fully_shard(modules: Iterable[nn.Module]) -> None:
    """Make torch's fully_shard raise ValueError if it is applied to any of `modules`."""
    for module in modules:
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))


class _Registry(dict[str, Any]):
    """Registry of composable torch functions for one module. A lookup of ``fully_shard`` raises ValueError.

    Both ``fully_shard`` and ``replicate`` look it up.
    """

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(_sharded_twice_message("fully_shard (FSDP2) or replicate", "a module that"))
        return super().__contains__(name)


def _sharded_twice_message(wrapper: str, subject: str) -> str:
    return (
        f"applying {wrapper} to {subject} layerzero has sharded is not supported: layerzero already shards and gathers "
        "weights, and averages gradients over all ranks. Leave the wrapper out, and use layerzero.no_sync and "
        "layerzero.clip_grad_norm_"
    )
