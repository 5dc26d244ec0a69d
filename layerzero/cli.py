"""Define the command line ``python -m layerzero``. Only ``layerzero.__main__`` imports this module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.checkpoint import CheckpointError, whole_model_files
from layerzero.checkpoint.contents import num_saving_ranks
from layerzero.checkpoint.errors import escape_unprintable
from layerzero.cli_doctor import add_doctor
from layerzero.cli_planning import add_commands
from layerzero.config import ACCUMULATIONS
from layerzero.integrations.yaml_file import dtype_named
from layerzero.megatron import export_parts, is_megatron_checkpoint
from layerzero.utils.import_path import load_named
from layerzero.verification import verify

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback(epilog="layerzero --version prints the version.")
def _layerzero() -> None:
    """Hybrid of ZeRO-1 and ZeRO-3: optimizer state sharded over all ranks, weights over a few ranks with fast links."""


@app.command("verify")
def _verify(
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
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of processes to start. Default: 4; under torchrun, its number of processes."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step on each rank.")] = 2,
    zero3_size: Annotated[
        list[int] | None,
        typer.Option(help="zero3_size to try; may be repeated. Default: all divisors of the number of processes."),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            help="Unit: the name of a submodule (such as blocks.0), or a class, as CLASS (of MODULE) or "
            "OTHER_MODULE:CLASS; may be repeated. Default: the full model is one unit."
        ),
    ] = None,
    accumulation: Annotated[str, typer.Option(help="sharded, full or local.")] = "sharded",
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative difference allowed. Default: depends on the compute dtype.")
    ] = None,
    param_dtype: Annotated[
        str | None, typer.Option(help="Compute dtype: bf16, fp16 or fp32. Default: the dtype of the model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for all random numbers.")] = 0,
) -> None:
    """Train a model for a few steps, unsharded and sharded, and compare gradients and weights.

    For each parameter, the table shows the largest relative differences, the
    zero3_size (S) and the steps in which they occurred, counted from 0, and the
    lowest precision of the sharded run.

    Exit status: 0 if all sharded runs match the unsharded run, 1 if one differs
    or fails (for example, for a wrong --unit name), 2 for other usage errors.
    """
    if os.getcwd() not in sys.path:  # `python -m layerzero` adds it, but the command `layerzero` does not
        sys.path.insert(0, os.getcwd())
    if accumulation not in ACCUMULATIONS:
        _exit_with_error(f"--accumulation must be one of {', '.join(ACCUMULATIONS)}, got {accumulation!r}")
    settings: dict[str, Any] = {"accumulation": accumulation}
    if param_dtype is not None:
        dtype = _parse_dtype(param_dtype, "--param-dtype")
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model_fn = _import_callable(model, "the model")
    if unit:
        settings["units"] = [_parse_unit(name, model.partition(":")[0]) for name in unit]
    batch_fn = _batch_fn(model) if batches is None else _import_callable(batches, "--batches")
    loss_fn = None if loss is None else _import_callable(loss, "--loss")
    optimizer_fn = None if optimizer is None else _import_callable(optimizer, "--optimizer")
    with _process_group():
        try:
            report = verify(
                model_fn,
                batch_fn,
                loss_fn=loss_fn,
                optimizer_fn=optimizer_fn,
                world_size=world_size,
                zero3_sizes=zero3_size or None,
                steps=steps,
                micro_batches=micro_batches,
                tolerance=tolerance,
                seed=seed,
                **settings,
            )
        except (TypeError, ValueError) as error:
            _exit_with_error(str(error))
        except (RuntimeError, ModuleNotFoundError) as error:
            typer.echo(f"layerzero: {error}", err=True)
            raise typer.Exit(1) from None
        if not dist.is_initialized() or dist.get_rank() == 0:
            typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command("inspect")
def _inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder written by layerzero.checkpoint.save.")],
) -> None:
    """Verify the checksums of all files in a checkpoint, and list its tensors.

    Exit status: 0 if the checkpoint is intact, 1 if it is damaged or incomplete.
    """
    with _readable_failures():
        manifest, contents = whole_model_files.inspect(checkpoint)
    rows = [("name", "shape", "dtype", "bytes", "files")]
    for name, tensor in sorted(contents.tensors.items()):
        dtype, files = str(tensor.dtype).removeprefix("torch."), len({file for file, _, _ in tensor.chunks})
        rows.append((escape_unprintable(name), str(list(tensor.shape)), dtype, f"{tensor.nbytes:,}", str(files)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        typer.echo("  ".join((*cells, row[3].rjust(widths[3]), row[4].rjust(widths[4]))))
    ranks, zero3_size = num_saving_ranks(contents.topology) or 0, contents.topology["zero3_size"]
    typer.echo(
        f"saved by {ranks} rank{'s' * (ranks > 1)} with zero3_size={zero3_size}; "
        f"save number {manifest.sequence + 1} in its folder; "
        f"{sum(record.size for record in manifest.files.values()):,} bytes in total; "
        "all files are intact"
    )


@app.command("export")
def _export(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint folder written by layerzero.checkpoint.save or layerzero.megatron.save."),
    ],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    dtype: Annotated[str | None, typer.Option(help="Cast to bf16, fp16 or fp32. Default: as saved.")] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving averages of the weights (EMA) instead of the weights.")
    ] = False,
) -> None:
    """Write the full model of a checkpoint as one safetensors file, in one process.

    The parts of Megatron's tensor-parallel ranks and pipeline stages are joined into one model.
    """
    with _readable_failures():
        write = export_parts if is_megatron_checkpoint(checkpoint) else whole_model_files.export_model
        write(checkpoint, out, dtype=_parse_dtype(dtype, "--dtype"), averages=ema)


@app.command("import")
def _import(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Safetensors files, or the folder that contains them, followed by the path of the checkpoint to "
            "create."
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="Cast to bf16, fp16 or fp32. Default: as stored.")] = None,
) -> None:
    """Create a checkpoint from the safetensors files of a full model, in one process."""
    if len(files) < 2:
        _exit_with_error(
            "import requires two arguments: a safetensors file or a folder of such files, and the new checkpoint"
        )
    with _readable_failures():
        whole_model_files.import_model(files[:-1], files[-1], dtype=_parse_dtype(dtype, "--dtype"))


add_commands(app)
add_doctor(app)


@contextmanager
def _readable_failures() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError, ValueError) as error:
        typer.echo(f"layerzero: {escape_unprintable(str(error))}", err=True)
        raise typer.Exit(1) from None


def _parse_dtype(name: str | None, option: str) -> torch.dtype | None:
    if name is None:
        return None
    try:
        return dtype_named(option, name)
    except ValueError as error:
        _exit_with_error(str(error))


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
        _exit_with_error(
            f"{module_name} has no make_batch(index, rank). Define it there, or pass a function with "
            "--batches MODULE:BATCH_FN"
        )
    return _import_callable(f"{module_name}:make_batch", "--batches")


def _parse_unit(name: str, module_name: str) -> type[nn.Module] | str:
    """Return the module class that `name` refers to.

    If there is no such class and `name` has no colon, return `name` itself, which `shard_model` takes as the name of a
    submodule.
    """
    unit = _import_callable(name, "--unit") if ":" in name else getattr(sys.modules[module_name], name, None)
    if isinstance(unit, type) and issubclass(unit, nn.Module):
        return unit
    if ":" in name:
        _exit_with_error(f"--unit {name} is not a torch.nn.Module class")
    return name


def _import_callable(target: str, what: str) -> Callable[..., Any]:
    """Import the callable ``package.module:name``. If that fails, exit with status 2."""
    try:
        return load_named(target, what)
    except ValueError as error:
        _exit_with_error(str(error))


def _exit_with_error(message: str) -> NoReturn:
    typer.echo(f"layerzero: {message}", err=True)
    raise typer.Exit(2)
