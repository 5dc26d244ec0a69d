"""Command ``verify``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.cli.common import exit_with_error, import_callable, parse_dtype
from layerzero.verification import verify


def verify_model(
    model: Annotated[str, typer.Argument(metavar="MODULE:MODEL_FN", help="Function or class that builds the model.")],
    batches: Annotated[
        str | None,
        typer.Option(help="MODULE:BATCH_FN, (index, rank) -> batch. Default: make_batch of the same module."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="MODULE:LOSS_FN, (model, batch) -> loss. Default: the output of the model.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="MODULE:OPTIMIZER_FN, (parameters) -> optimizer. Default: SGD, momentum 0.9.")
    ] = None,
    scheme: Annotated[str, typer.Option(help="layerzero, fsdp2, hsdp, ddp, or MODULE:SETUP_FN.")] = "layerzero",
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of processes to start. Default: 4; under torchrun, its number of processes."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step on each rank.")] = 2,
    zero3_size: Annotated[
        list[int] | None, typer.Option(help="zero3_size to try; may be repeated. Default: all that the scheme allows.")
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            help="Unit: the name of a submodule (such as blocks.0), or a class, as CLASS (of MODULE) or "
            "OTHER_MODULE:CLASS; may be repeated. Default: the full model is one unit."
        ),
    ] = None,
    accumulation: Annotated[str | None, typer.Option(help="sharded, full or local. Default: sharded.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative difference allowed. Default: depends on the compute dtype.")
    ] = None,
    param_dtype: Annotated[
        str | None, typer.Option(help="Compute dtype: bf16, fp16 or fp32. Default: the dtype of the model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for all random numbers.")] = 0,
) -> None:
    """Train a model for a few steps, in one process and distributed, and compare gradients and weights.

    For each parameter, the table shows the largest relative differences, the
    zero3_size (S), the steps, counted from 0, in which they occurred or first
    exceeded the tolerance, and the lowest precision of the distributed run.

    SETUP_FN, (model) -> (model, optimizer), is your own code for FSDP2, DDP or
    layerzero. --optimizer must then build the optimizer of the run in one process.

    Exit status: 0 if all distributed runs match the run in one process, 1 if one
    differs or fails (for example, for a wrong --unit name), 2 for other usage
    errors.
    """
    settings: dict[str, Any] = {} if accumulation is None else {"accumulation": accumulation}
    if param_dtype is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(parse_dtype("--param-dtype", param_dtype), torch.float32)
    model_fn = import_callable(model, "the model")
    if unit:
        settings["units"] = [_parse_unit(name, model.partition(":")[0]) for name in unit]
    batch_fn = _batch_fn(model) if batches is None else import_callable(batches, "--batches")
    _verify_and_exit(
        model_fn,
        batch_fn,
        loss_fn=None if loss is None else import_callable(loss, "--loss"),
        optimizer_fn=None if optimizer is None else import_callable(optimizer, "--optimizer"),
        scheme=import_callable(scheme, "--scheme") if ":" in scheme else scheme,
        world_size=world_size,
        zero3_sizes=zero3_size or None,
        steps=steps,
        micro_batches=micro_batches,
        tolerance=tolerance,
        seed=seed,
        **settings,
    )


def _verify_and_exit(*args: Any, **kwargs: Any) -> NoReturn:
    """Run :func:`layerzero.verify`, print its report, on the first rank only, or its error, and exit."""
    with _process_group():
        try:
            report = verify(*args, **kwargs)
        except (TypeError, ValueError) as error:
            exit_with_error(str(error))
        except (RuntimeError, ModuleNotFoundError) as error:
            exit_with_error(str(error), 1)
        if not dist.is_initialized() or dist.get_rank() == 0:
            typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


@contextmanager
def _process_group() -> Iterator[None]:
    """Context manager that initializes the default process group if torchrun has started this process."""
    if not dist.is_torchelastic_launched():
        yield
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batch_fn(model: str) -> Callable[..., Any]:
    module_name = model.partition(":")[0]
    if not hasattr(sys.modules[module_name], "make_batch"):
        exit_with_error(
            f"{module_name} has no make_batch(index, rank). Define it there, or pass a function with "
            "--batches MODULE:BATCH_FN"
        )
    return import_callable(f"{module_name}:make_batch", "--batches")


def _parse_unit(name: str, module_name: str) -> type[nn.Module] | str:
    """Return the module class that `name` refers to.

    If there is no such class and `name` has no colon, return `name` itself, which `shard_model` takes as the name of a
    submodule.
    """
    unit = import_callable(name, "--unit") if ":" in name else getattr(sys.modules[module_name], name, None)
    if isinstance(unit, type) and issubclass(unit, nn.Module):
        return unit
    if ":" in name:
        exit_with_error(f"--unit {name} is not a torch.nn.Module class")
    return name
