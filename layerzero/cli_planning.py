"""Commands ``plan``, ``trace`` and ``simulate``. Only ``layerzero.cli`` imports this module, which requires typer."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import torch.distributed as dist
import typer
from torch import nn

from layerzero.device.accelerator import default_device_type
from layerzero.planning.cluster import Cluster
from layerzero.planning.planner import plan
from layerzero.planning.probe import probe as probe_cluster
from layerzero.planning.sim_program import read_recording
from layerzero.planning.simulator import simulate
from layerzero.planning.site_estimate import SiteSettings, sites_text
from layerzero.planning.transformer_shapes import TransformerShape
from layerzero.utils.import_path import load_named
from layerzero.utils.text_tables import seconds_text, size_text, table

__all__ = ["add_commands"]

_CLUSTER = "Cluster"
_SIZES = "Sizes of the model"
_SITES = "Training at several sites"
_DEFAULTS = {field.name: field.default for field in fields(Cluster)} | {
    "between": "400 per accelerator (an assumption)"
}
_PATIENCE = 2.0  # seconds before progress is shown
_INTERVAL = 0.2  # seconds between two updates


def _cluster_option(name: str, text: str) -> Any:
    return typer.Option(
        f"--{name.replace('_', '-')}", help=f"{text} Default: {_DEFAULTS[name]}.", rich_help_panel=_CLUSTER
    )


_BETWEEN = _cluster_option("between", "Gbit/s that a node sends to other nodes, over all of its ports.")
_INSIDE = _cluster_option("inside", "GB/s that an accelerator sends inside its node.")
_JSON = typer.Option("--json", help="Print the result as one JSON object.")


def _plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="module:function that builds the model, or a Hugging Face config.json or its folder. Omit it if you "
            "pass the sizes of the model.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", rich_help_panel=_SIZES)] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.", rich_help_panel=_SIZES)] = None,
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.", rich_help_panel=_SIZES)] = None,
    heads: Annotated[int | None, typer.Option(help="Number of attention heads.", rich_help_panel=_SIZES)] = None,
    ffn: Annotated[
        int,
        typer.Option(
            help="Width of the (gated) feed-forward layers. Default: 4 x --hidden.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = 0,
    kv_heads: Annotated[
        int,
        typer.Option(
            help="Number of key-value heads. Default: the value of --heads.", show_default=False, rich_help_panel=_SIZES
        ),
    ] = 0,
    experts: Annotated[int, typer.Option(help="Experts per layer.", rich_help_panel=_SIZES)] = 0,
    tied: Annotated[
        bool, typer.Option("--tied", help="The head shares the weight of the embedding.", rich_help_panel=_SIZES)
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(help="YAML file with the fields of layerzero.planning.Cluster.", rich_help_panel=_CLUSTER),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Measure the cluster on which torchrun runs this command.", rich_help_panel=_CLUSTER
        ),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes. Required unless --cluster or --probe is passed.", rich_help_panel=_CLUSTER),
    ] = None,
    accelerators: Annotated[int | None, _cluster_option("accelerators", "Accelerators per node.")] = None,
    memory: Annotated[float | None, _cluster_option("memory", "GB per accelerator.")] = None,
    reserve: Annotated[
        float | None, _cluster_option("reserve", "GB per accelerator that the model cannot use.")
    ] = None,
    between: Annotated[float | None, _BETWEEN] = None,
    inside: Annotated[float | None, _INSIDE] = None,
    tflops: Annotated[
        float | None, _cluster_option("tflops", "Achieved TFLOP/s per accelerator, not the peak.")
    ] = None,
    host_memory: Annotated[float | None, _cluster_option("host_memory", "GB of host memory per node.")] = None,
    price: Annotated[float | None, _cluster_option("price", "Price of an accelerator per hour.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in a rank's micro-batch.")] = 4096,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens in one sequence. Default: the value of --tokens.")
    ] = None,
    micro_batches: Annotated[
        list[int] | None,
        typer.Option(metavar="<int>", help="Micro-batches per step; may be repeated. Default: 1, 4, 16."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per step across all ranks; replaces --micro-batches.")
    ] = None,
    zero3_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="<int>",
            help="Value of S to try, the number of ranks over which weights are sharded; may be repeated. Default: "
            "every divisor of the number of ranks per node, and the total number of ranks.",
        ),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Name or class of a unit, if MODEL is module:function; may be repeated."),
    ] = None,
    param_dtype: Annotated[str, typer.Option(help="Compute dtype: bf16, fp16 or fp32.")] = "bf16",
    hop2_codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Codec to try for gradients between ZeRO-3 groups: int8_blocks, int4_blocks or none; may be repeated. "
            "Default: none.",
        ),
    ] = None,
    refresh_codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Codec to try for the refresh (only with device: cpu): lossless, int4_difference or none; may be "
            "repeated. Default: none.",
        ),
    ] = None,
    replica_reduce_dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Dtype to try for gradients in hop 2 (between ZeRO-3 groups): bf16, fp16, fp32 or none (as in hop 1); "
            "may be repeated. Default: none.",
        ),
    ] = None,
    accumulation_dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>",
            help="Dtype to try for accumulated gradients: bf16 or none (fp32); may be repeated. Default: none.",
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Assume that each block's forward pass is recomputed in its backward pass (activation checkpointing)."
        ),
    ] = True,
    activations: Annotated[
        float,
        typer.Option(
            help="Size of the activations of one micro-batch, in GB. Default: estimated, or not counted if MODEL is "
            "a function.",
            show_default=False,
        ),
    ] = 0.0,
    sites: Annotated[
        int | None,
        typer.Option(
            help="Number of sites with --nodes nodes each. layerzero.outer trains across them.", rich_help_panel=_SITES
        ),
    ] = None,
    between_sites: Annotated[
        float | None,
        typer.Option(help="Gbit/s from a site to the others. Required with --sites.", rich_help_panel=_SITES),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Steps between two exchanges of a fragment. Default: 16.", rich_help_panel=_SITES)
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option(
            help="Number of fragments of the model, which are exchanged in turn. Default: 4, or fewer if "
            "--every or the number of units is smaller.",
            rich_help_panel=_SITES,
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="Try offloading for every combination, not only for those that do not fit otherwise."
        ),
    ] = False,
    every_row: Annotated[bool, typer.Option("--all", help="Show all rows, even those that do not fit.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts to this HTML file.")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Recommend settings for a model on a cluster, and estimate memory and speed.

    The command needs neither the cluster nor memory for the model.

    Exit status: 0 if any settings fit, 1 if none fit, 2 for usage errors.
    """
    cluster_fields = {
        "nodes": nodes,
        "accelerators": accelerators,
        "memory": memory,
        "between": between,
        "inside": inside,
    }
    cluster_fields |= {"tflops": tflops, "host_memory": host_memory, "price": price, "reserve": reserve}
    named = {"layers": layers, "hidden": hidden, "vocab": vocab, "heads": heads}
    optional = {"ffn": ffn, "kv_heads": kv_heads, "experts": experts, "tied": tied}
    with _readable_failures(_plan):
        if micro_batches and batch_tokens is not None:
            raise ValueError("--batch-tokens and --micro-batches exclude each other. Pass one of them")
        if probe and cluster is not None:
            raise ValueError("--probe and --cluster exclude each other. Pass one of them")
        site_settings = _site_settings(sites, between_sites, every, fragments)
        described = None if probe else _read_cluster(cluster, cluster_fields)
        source = _read_model(model, named, optional)  # before the probe, to report a wrong argument immediately
        target = _probe_cluster(cluster_fields, quiet=as_json) if described is None else described
        if html is not None:  # before the plan, to report a missing package immediately
            from layerzero.planning.plan_html import write_report  # noqa: PLC0415 - needs the optional matplotlib
        counts = micro_batches or [1, 4, 16]
        if batch_tokens is not None:
            counts = [max(1, round(batch_tokens / (tokens * target.ranks)))]
        with _Progress() as progress:
            result_plan = plan(
                source,
                target,
                units=unit or None,
                tokens=tokens,
                sequence=sequence,
                micro_batches=counts,
                zero3_sizes=zero3_size or None,
                offload=True if offload else None,
                param_dtype=param_dtype,
                replica_reduce_dtypes=_parse_none(replica_reduce_dtype),
                accumulation_dtypes=_parse_none(accumulation_dtype),
                hop2_codecs=_parse_none(hop2_codec),
                refresh_codecs=_parse_none(refresh_codec),
                recompute=recompute,
                activation_bytes=activations * 1e9,
                on_estimate=progress.count_estimate,
            )
            at_sites = [] if site_settings is None else result_plan.at_sites(site_settings)
            if as_json:
                data = result_plan.as_dict(every_row=every_row) | {"sites": [each.as_dict() for each in at_sites]}
                result = json.dumps(data, indent=1)
            else:
                result = result_plan.as_text(every_row=every_row)
                result += f"\n\n{sites_text(at_sites)}" if at_sites else ""
                result += "\n\nSites are not estimated, because no settings fit." * (
                    bool(site_settings) and not at_sites
                )
            progress.clear()
            typer.echo(result)
            if html is not None:
                write_report(result_plan, html, sites=at_sites)  # estimates more rows
                progress.clear()
                typer.echo(f"\nwritten: {html}", err=as_json)
    raise typer.Exit(0 if result_plan.best is not None else 1)


def _trace(file: Annotated[Path, typer.Argument(help="A trace file written by layerzero.trace.")]) -> None:
    """Print the contents of a trace: collectives with their bytes and wait times, and the compute times of units."""
    with _readable_failures(_trace):
        events = read_recording(file).events
    calls: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    launched = {event.number for event in events if event.kind == "launch"}
    for event in events:
        row = calls[event.collective, event.axis] if event.number in launched else [0, 0, 0.0, 0.0]
        if event.kind == "launch":
            row[0], row[1] = row[0] + 1, row[1] + event.bytes
            row[2] += max(0.0, (event.completed or event.end) - event.start) / 1e6
        elif event.kind == "wait":
            row[3] += (event.end - event.start) / 1e6
    collectives = [
        (kind, axis, f"{n:.0f}", size_text(b), seconds_text(f), seconds_text(w))
        for (kind, axis), (n, b, f, w) in calls.items()
    ]
    typer.echo(table(("collective", "axis", "calls", "sent", "in flight", "waited"), collectives, left=2))
    spans: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    open_spans: list[tuple[str, str, float]] = []
    for event in events:
        if event.kind == "begin":
            open_spans.append((event.phase, event.name, event.start))
        elif event.kind == "end":
            phase, name, start = open_spans.pop()
            total = spans[phase, name]
            total[0], total[1] = total[0] + 1, total[1] + (event.end - start) / 1e6
    computed = [
        (phase, name, f"{n:.0f}", seconds_text(t), seconds_text(t / n)) for (phase, name), (n, t) in spans.items()
    ]
    typer.echo("\n" + table(("phase", "unit", "times", "in all", "each"), computed, left=2))
    typer.echo("times of a unit include the units inside it")


def _simulate(
    file: Annotated[Path, typer.Argument(help="A trace file written by layerzero.trace.")],
    cluster: Annotated[
        Path | None, typer.Option(help="YAML file that describes the cluster, as for plan.", rich_help_panel=_CLUSTER)
    ] = None,
    accelerators: Annotated[
        int | None,
        typer.Option(help="Ranks per node. Default: zero3_size of the trace.", rich_help_panel=_CLUSTER),
    ] = None,
    between: Annotated[float | None, _BETWEEN] = None,
    inside: Annotated[float | None, _INSIDE] = None,
    between_latency: Annotated[
        float | None,
        _cluster_option("between_latency", "Latency of each step of a collective between nodes, in microseconds."),
    ] = None,
    inside_latency: Annotated[
        float | None,
        _cluster_option("inside_latency", "Latency of each step of a collective inside a node, in microseconds."),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Simulate the schedule of a trace on a cluster with other link speeds.

    Computations keep their recorded durations.
    """
    cluster_fields = {"between": between, "inside": inside, "accelerators": accelerators}
    cluster_fields |= {"between_latency": between_latency, "inside_latency": inside_latency}
    with _readable_failures(_simulate):
        recording = read_recording(file)
        if cluster is None:
            per_node = recording.zero3_size if accelerators is None else accelerators
            ranks = recording.zero3_size * recording.replicas
            cluster_fields |= {"accelerators": per_node, "nodes": max(1, ranks // max(1, per_node))}
        target = _read_cluster(cluster, cluster_fields)
    outcome = simulate(recording.program(), target.machine(recording.zero3_size))
    waits: defaultdict[str, float] = defaultdict(float)
    for step in outcome.waits:
        for kind, waited in step.items():
            waits[kind] += waited
    calls = sorted(outcome.calls.items())
    if as_json:
        result = {
            "cluster": target.as_dict(),
            "steps": len(outcome.step_ends),
            "seconds": outcome.seconds,
            "computed_seconds": outcome.computed,
            "waited_seconds": outcome.waited,
            "collectives": {
                kind: {"calls": n, "sent_bytes": outcome.bytes[kind], "waited_seconds": waits[kind]}
                for kind, n in calls
            },
            "busy_seconds": dict(outcome.busy),
        }
        typer.echo(json.dumps(result, indent=1))
        return
    typer.echo(
        f"simulated: {len(outcome.step_ends)} steps in {seconds_text(outcome.seconds)}, "
        f"computing {seconds_text(outcome.computed)}, waiting {seconds_text(outcome.waited)}; nodes of "
        f"{target.accelerators} accelerators, {target.node_link_text}"
    )
    rows = [(kind, str(n), size_text(outcome.bytes[kind]), seconds_text(waits[kind])) for kind, n in calls]
    typer.echo(table(("collective", "calls", "sent", "waited"), rows))
    typer.echo(
        "links were busy: " + ", ".join(f"{name} {seconds_text(busy)}" for name, busy in sorted(outcome.busy.items()))
    )


def add_commands(app: typer.Typer) -> None:
    app.command("plan")(_plan)
    app.command("trace")(_trace)
    app.command("simulate")(_simulate)


def _parse_none(names: list[str] | None) -> list[str | None]:
    """Return the values of a repeated option, in which ``none`` stands for None."""
    return [None if name == "none" else name for name in names or ["none"]]


def _site_settings(
    sites: int | None, between: float | None, every: int | None, fragments: int | None
) -> SiteSettings | None:
    given = (sites, between, every, fragments)
    if all(value is None for value in given):
        return None
    if sites is None or between is None:
        missing = "--sites" if sites is None else "--between-sites"
        raise ValueError(f"{missing} is missing, but other options about sites were given. Pass it, or leave them out")
    return SiteSettings(sites, between, 16 if every is None else every, fragments)


class _Progress:
    """Progress line on standard error with the number of estimates so far.

    The line appears after a few seconds, and only if standard error is a terminal. Call :meth:`clear` before other
    output. Exiting the context also clears the line.
    """

    def __init__(self) -> None:
        self._began = self._updated = time.monotonic()
        self._count = 0
        self._visible = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def count_estimate(self) -> None:
        self._count += 1
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._began > _PATIENCE and now - self._updated > _INTERVAL:
            self._updated, self._visible = now, True
            typer.echo(f"\rlayerzero: {self._count} estimates in {now - self._began:.0f} s", err=True, nl=False)

    def clear(self) -> None:
        if self._visible:
            typer.echo("\r\x1b[K", err=True, nl=False)
            self._visible = False


def _probe_cluster(given: dict[str, Any], *, quiet: bool) -> Cluster:
    """Measure the cluster, and replace measured fields by the values in `given` that are not None."""
    return replace(_run_probe(quiet=quiet), **{name: value for name, value in given.items() if value is not None})


def _read_cluster(path: Path | None, given: dict[str, Any]) -> Cluster:
    given = {name: value for name, value in given.items() if value is not None}
    if path is not None:
        return Cluster.from_yaml(path, **given)
    if "nodes" not in given:
        raise ValueError("the number of nodes is unknown. Pass --nodes, or a YAML file as --cluster")
    return Cluster(**given)


def _run_probe(*, quiet: bool) -> Cluster:
    """Measure the cluster with the ranks that torchrun has started. All ranks except the first then exit.

    If `quiet` is True, the measurements are printed to standard error.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "--probe measures the cluster on which it runs, so it requires torchrun. Run this command on "
            "all nodes: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "-m layerzero plan --probe ..."
        )
    device = default_device_type()
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    is_first = dist.get_rank() == 0
    try:
        result = probe_cluster()
    finally:
        dist.destroy_process_group()
    if not is_first:
        raise typer.Exit(0)
    typer.echo(f"{result}\n", err=quiet)
    return result.cluster


def _read_model(
    named: str | None, sizes: dict[str, Any], optional: dict[str, Any]
) -> Callable[[], nn.Module] | TransformerShape | str:
    by_sizes = [name for name, value in sizes.items() if value is not None]
    if named is not None and by_sizes:
        raise ValueError(f"{named} and --{by_sizes[0]} exclude each other. Pass either a model or its sizes")
    if named is not None and Path(named).exists():
        return named
    if named is not None and ":" not in named:
        raise ValueError(
            f"there is no file or folder {named!r}. As the model, pass a config.json, its folder, or a module:function"
        )
    if named is not None:
        if os.getcwd() not in sys.path:  # `python -m layerzero` adds it, but the command `layerzero` does not
            sys.path.insert(0, os.getcwd())
        return load_named(named, "the model")
    if missing := [name for name, value in sizes.items() if value is None]:
        raise ValueError(f"--{missing[0]} is missing. Pass all sizes, or a module:function or a config.json")
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden > 0 and heads > 0 and hidden % heads:  # TransformerShape would name `head_dim`, which is not an option
        raise ValueError(f"--heads={heads} does not divide --hidden={hidden}. Change one of them")
    return TransformerShape(**sizes, **optional)


@contextmanager
def _readable_failures(command: Callable[..., None]) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError, ModuleNotFoundError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            message = f"cannot open {str(error.filename)!r}: {error.strerror}. Check the path and its permissions"
        else:
            message = _with_option_names(str(error), command)
        typer.echo(f"layerzero: {message}", err=True)
        raise typer.Exit(2) from None


def _with_option_names(message: str, command: Callable[..., None]) -> str:
    """Replace the name of an argument at the start of a message by the option of `command`, such as --zero3-size."""
    start = re.match(r"\w*", message)
    assert start is not None
    options = inspect.signature(command).parameters
    name = next((each for each in (start[0], start[0].removesuffix("s")) if each in options), None)
    if name is None:
        return message
    return re.sub(rf"\b{start[0]}\b", "--" + name.replace("_", "-"), message)
