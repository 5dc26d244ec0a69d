"""Commands ``inspect``, ``export`` and ``import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.extend import escape_unprintable, export_model, import_model, inspect, num_saving_ranks
from layerzero.cli.common import exit_with_error, parse_dtype, readable_failures
from layerzero.extend import table
from layerzero.megatron import export_parts, is_megatron_checkpoint


def inspect_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder written by layerzero.checkpoint.save.")],
) -> None:
    """Verify the checksums of all files in a checkpoint, and list its tensors.

    Exit status: 0 if the checkpoint is intact, 1 if it is damaged or incomplete.
    """
    with readable_failures(CheckpointError, status=1):
        manifest, contents = inspect(checkpoint)
    rows = []
    for name, tensor in sorted(contents.tensors.items()):
        dtype, files = str(tensor.dtype).removeprefix("torch."), len({file for file, _, _ in tensor.chunks})
        rows.append((escape_unprintable(name), str(list(tensor.shape)), dtype, f"{tensor.nbytes:,}", str(files)))
    typer.echo(table(("name", "shape", "dtype", "bytes", "files"), rows, left=3))
    ranks, zero3_size = num_saving_ranks(contents.topology) or 0, contents.topology["zero3_size"]
    typer.echo(
        f"saved by {ranks} rank{'s' * (ranks > 1)} with zero3_size={zero3_size}; "
        f"save number {manifest.sequence + 1} in its folder; "
        f"{sum(record.size for record in manifest.files.values()):,} bytes in total; "
        "all files are intact"
    )


def export_checkpoint(
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
    with readable_failures(CheckpointError, status=1):
        write = export_parts if is_megatron_checkpoint(checkpoint) else export_model
        write(checkpoint, out, dtype=parse_dtype("--dtype", dtype), averages=ema)


def import_checkpoint(
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
        exit_with_error(
            "import requires two arguments: a safetensors file or a folder of such files, and the new checkpoint"
        )
    with readable_failures(CheckpointError, status=1):
        import_model(files[:-1], files[-1], dtype=parse_dtype("--dtype", dtype))
