"""Command ``plan``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from torch import nn

from layerzero import LayerZeroConfig
from layerzero.cli.common import exit_with_error, import_callable, readable_failures
from layerzero.planning import Cluster, TransformerShape, plan

T = TypeVar("T", Cluster, TransformerShape)


def plan_model(
    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face config.json or its folder, sizes of a transformer such as "
            "layers=32,hidden=4096,vocab=32000,heads=32, or module:function that builds the model.",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Argument(
            help="Fields of layerzero.planning.Cluster, such as nodes=16,accelerators=8,memory=80,between=400 (GB, "
            "and Gbit/s per node over all of its ports)."
        ),
    ],
    settings: Annotated[
        Path | None,
        typer.Option(help="YAML file of LayerZeroConfig with the settings that all rows have in common."),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(help="Name or class of a unit, if MODEL is module:function; may be repeated."),
    ] = None,
    zero3_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Value of S to try, the number of ranks over which weights are sharded; may be repeated. Default: "
            "divisors of the number of ranks per node, and the total number of ranks."
        ),
    ] = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens in a rank's micro-batch.")] = 4096,
    activations: Annotated[
        float, typer.Option(help="Activations of a micro-batch, in GB. Default: estimated unless MODEL is a function.")
    ] = 0.0,
    recompute: Annotated[
        bool, typer.Option(help="Blocks repeat their forward pass in the backward pass (activation checkpointing).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory and step times into this PNG, PDF or SVG file.")
    ] = None,
) -> None:
    """Tell whether a model fits on a cluster, what crosses nodes, and at which link layerzero pays.

    The command needs neither the cluster nor memory for the model.

    Exit status: 0 if any settings fit, 1 if none fit, 2 for usage errors.
    """
    with readable_failures(TypeError, ModuleNotFoundError, status=2):
        found = plan(
            _read_model(model),
            _read_fields(Cluster, cluster, "the cluster"),
            *([] if settings is None else [LayerZeroConfig.from_yaml(settings)]),
            units=unit or None,
            zero3_sizes=zero3_size or None,
            tokens=tokens,
            micro_batches=micro_batches,
            recompute=recompute,
            activation_bytes=activations * 1e9,
        )
        if plot is not None:
            found.draw(plot)
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else str(found))
    raise typer.Exit(0 if found.best is not None else 1)


def _read_model(text: str) -> Callable[[], nn.Module] | TransformerShape | str:
    if Path(text).exists():
        return text
    if "=" in text:
        return _read_fields(TransformerShape, text, "the model")
    if ":" in text:
        return import_callable(text, "the model")
    exit_with_error(
        f"there is no file or folder {text!r}. As the model, pass a config.json, its folder, sizes or a module:function"
    )


def _read_fields(kind: type[T], text: str, what: str) -> T:
    """Return the dataclass with the fields in `text`, such as ``nodes=16,between=200``."""
    known = [field.name for field in fields(kind)]
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{what} has {part!r}, but must be a list such as name=1,name=2 of {', '.join(known)}")
        is_json = re.fullmatch(r"-?[\d.]+|true|false", value)
        values[name] = json.loads(value) if is_json else value
    if missing := [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]:
        raise ValueError(f"{what} has no {', '.join(missing)}. Add {'=NUMBER,'.join(missing)}=NUMBER")
    return kind(**values)
