"""Set up the model and the optimizer of a distributed run: with layerzero, FSDP2, HSDP, DDP, or a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from layerzero import init_mesh, shard_model, shard_optimizer
from layerzero.extend import Units, chosen_units, compute_device

OptimizerFn = Callable[[Iterable[nn.Parameter]], Optimizer]
Scheme = str | Callable[[nn.Module], tuple[nn.Module, Optimizer]]

SCHEMES = ("layerzero", "fsdp2", "hsdp", "ddp")
PER_MODEL = ("ignored_params", "ignored_modules")  # settings of shard_model that refer to parts of one model


def scheme_name(scheme: object) -> str:
    return scheme if isinstance(scheme, str) else getattr(scheme, "__qualname__", type(scheme).__name__)


def set_up(
    scheme: Scheme,
    model: nn.Module,
    optimizer_fn: OptimizerFn,
    *,
    zero3_size: int | None,
    device_type: str,
    settings: Mapping[str, Any],
) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer of a distributed run. The model is `model` or a wrapper around it.

    Args:
        scheme: one of `SCHEMES`, or the user's function, which uses none of the other arguments but `model`.
        model: new model, which is changed.
        optimizer_fn: function that builds the optimizer from the parameters.
        zero3_size: number of ranks over which weights are sharded.
        device_type: type of the device on which the model is trained.
        settings: settings of :func:`layerzero.shard_model`. FSDP2 and HSDP support `units` and `mp_policy`.
    """
    if not isinstance(scheme, str):
        return _call_user(scheme, model)
    if scheme == "layerzero":
        return _shard_with_layerzero(model, optimizer_fn, init_mesh(zero3_size, device_type), settings)
    if scheme == "ddp":
        model = DistributedDataParallel(model.to(compute_device(device_type)))
    else:
        mesh = init_mesh(zero3_size, device_type)  # its axes are those of HSDP
        _fully_shard(model, mesh if scheme == "hsdp" else mesh["zero3"], **settings)
    return model, optimizer_fn(model.parameters())


def _call_user(scheme: Callable[[nn.Module], object], model: nn.Module) -> tuple[nn.Module, Optimizer]:
    result = scheme(model)
    match result:
        case (nn.Module() as trained, Optimizer() as optimizer) if model in set(trained.modules()):
            return trained, optimizer
    raise TypeError(
        f"{scheme_name(scheme)}(model) returned {result!r:.200}. Return a tuple: the model that it was called with, or "
        "a wrapper around it, and its torch.optim.Optimizer"
    )


def _shard_with_layerzero(
    model: nn.Module, optimizer_fn: OptimizerFn, mesh: DeviceMesh, settings: Mapping[str, Any]
) -> tuple[nn.Module, Optimizer]:
    per_model = {name: settings[name] for name in PER_MODEL if settings.get(name) is not None}
    model_settings = {name: value(model) if callable(value) else value for name, value in per_model.items()}
    # Use collectives, which detect a wrong order, unless the user sets shared memory. Real runs may use devices.
    model = shard_model(model, mesh=mesh, **{"shared_memory": "off", **settings, **model_settings})
    return model, shard_optimizer(optimizer_fn(model.parameters()), model)


def _fully_shard(model: nn.Module, mesh: DeviceMesh, *, units: Units = None, **settings: Any) -> None:
    modules: dict[str, list[nn.Module]] = {}  # by unit
    for unit, module in chosen_units(model, units, ()):
        modules.setdefault(unit, []).append(module)
    for group in (*reversed(modules.values()), [model]):  # inner units first
        fully_shard(group, mesh=mesh, **settings)


@contextmanager
def accumulating(model: Any) -> Iterator[None]:
    """Context manager in which backward passes accumulate gradients without reducing them, if `model` can do this."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
