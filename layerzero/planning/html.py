"""A plan as one page that needs nothing else: no network, no script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from layerzero.planning import svg
from layerzero.planning.machine import simulate
from layerzero.planning.plan_report import HEADER, Plan, call_text, cells, yaml_text
from layerzero.planning.rows import Row
from layerzero.views.tables import rate, seconds, size

__all__ = ["report_html", "write_report"]

_NODES = (8, 32, 128, 512, 2048, 4096)
_SHOWN = 8  # bars and rows
_ROWS = {  # of the timeline: by exchange
    "gather": "gather", "regather": "gather", "hop1": "hop 1", "hop2": "hop 2", "refresh": "refresh",
    "fetch": "host", "store": "host", "down": "host", "up": "host",
}  # fmt: skip
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 0 16px 48px; max-width: 46rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
svg { width: 100%; max-width: 560px; height: auto; display: block; font-family: inherit }
svg text { fill: currentColor }
.why { border-left: 4px solid #228833; padding: .2rem .8rem } .why.none { border-color: #c00 }
.legend span { display: inline-block; margin-right: .9rem; font-size: .85rem; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left } tr.best { font-weight: bold } tr.over { color: #b33 }
pre { overflow-x: auto; background: #8881; padding: .6rem; font-size: .85rem }
.note { font-size: .85rem; opacity: .8 }
"""


def write_report(plan: Plan, path: str | os.PathLike[str], *, nodes: Sequence[int] = _NODES) -> None:
    """Write the report of a plan: one file."""
    Path(path).write_text(report_html(plan, nodes=nodes), encoding="utf-8")


def report_html(plan: Plan, *, nodes: Sequence[int] = _NODES) -> str:
    cluster = plan.cluster
    shown = [row for row in plan.rows if row.fits][:_SHOWN] or sorted(plan.rows, key=lambda row: row.excess)[:_SHOWN]
    if plan.best is not None and plan.best not in shown:
        shown = [plan.best, *shown[:-1]]
    row = plan.best or shown[0]
    parts = [
        "<h1>Plan</h1>",
        f"<p>{rate(plan.numel)} parameters in {plan.units} units; {cluster.nodes} nodes &times; "
        f"{cluster.accelerators} accelerators of {cluster.memory:.4g} GB, {cluster.between:.4g} Gbit/s a node.</p>",
        f'<p class="why{"" if plan.best else " none"}">{escape(plan.why)}</p>',
        "<h2>Memory of an accelerator at its peak</h2>",
        _memory([*shown, *_peers(plan, row)], plan),
        f"<h2>A step of {escape(_name(row))}</h2>",
        _step(plan, row),
        "<h2>Time for a micro-batch over nodes</h2>",
        _over_nodes(plan, row, nodes),
        "<h2>Settings</h2>",
        _table([*shown, *plan.peers], plan.best),
    ]
    if plan.best is not None:
        parts += ["<h2>To paste</h2>", f"<pre>{escape(call_text(plan))}</pre>", f"<pre>{escape(yaml_text(plan))}</pre>"]
        if plan.best.price:
            parts.append(f"<p>{plan.best.price:,.0f} a day.</p>")
    parts.append(
        '<p class="note">Memory is what layerzero itself predicts in a run, but for activations, which are estimated. '
        "Times are simulated, not measured; those of FSDP2, HSDP and ZeRO-1 are models of these schemes.</p>"
    )
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    )
    return f"{head}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _peers(plan: Plan, row: Row) -> list[Row]:
    """With as many micro-batches, and gradients of the same dtype."""

    def settings(each: Row) -> tuple[object, ...]:
        return each.choice.micro_batches, each.choice.reduce_dtype

    return [peer for peer in plan.peers if settings(peer) == settings(row)]


def _name(row: Row) -> str:
    choice = row.choice
    if choice.scheme != "layerzero":
        return choice.scheme
    mode = f" {choice.accumulation}" if choice.zero3_size > 1 else ""
    offload = "" if choice.offload == "-" else f" offload {choice.offload}"
    return f"S={choice.zero3_size}{mode}{offload}, A={choice.micro_batches}"


def _memory(rows: Sequence[Row], plan: Plan) -> str:
    found = {_name(row): row for row in reversed(rows)}  # each once: the first of a name
    kinds: list[str] = []
    bars = []
    for name, row in reversed(found.items()):
        held = {kind: float(nbytes) for kind, nbytes in row.memory.items() if nbytes and not kind.startswith("host_")}
        gathered = row.peak - sum(held.values())  # what is there at the peak beside what stays
        held = {**held, "gathered at the peak": gathered} if gathered > 0 else held
        kinds += [kind for kind in held if kind not in kinds]
        bars.append(svg.Bar(name, held, size(row.peak)))
    colours = {kind: svg.COLOURS[place % len(svg.COLOURS)] for place, kind in enumerate(kinds)}
    said = f"{size(plan.cluster.room)} of {plan.cluster.memory:g} GB"
    return svg.legend(colours) + svg.stacked(bars, colours, plan.cluster.room, said, "memory by kind")


def _step(plan: Plan, row: Row) -> str:
    """Its first micro-batch and its last: those between are like the first."""
    machine, program = plan.workshop.program(replace(row.choice, micro_batches=min(row.choice.micro_batches, 2)))
    outcome = simulate(program, machine)
    start = outcome.step_start
    strips = []
    for span in outcome.spans:
        if span.end <= start or span.start >= outcome.step_ends[-1]:
            continue
        kind = span.what if span.what in ("forward", "backward", "update") else _ROWS.get(span.what)
        if kind is not None:
            line = "compute" if kind in ("forward", "backward", "update") else kind
            said = f"{span.what} {span.name}: {seconds(span.end - span.start)}"
            strips.append(svg.Strip(line, kind, 1e3 * (max(span.start, start) - start), 1e3 * (span.end - start), said))
    order = ["compute", "gather", "hop 1", "hop 2", "refresh", "host"]
    strips.sort(key=lambda strip: order.index(strip.row))
    kinds = list(dict.fromkeys(strip.kind for strip in strips))
    colours = {kind: svg.COLOURS[place % len(svg.COLOURS)] for place, kind in enumerate(kinds)}
    waits = ", ".join(f"{kind} {seconds(value)}" for kind, value in sorted(row.parts.items()) if value > 1e-5)
    note = f'<p class="note">Of {row.choice.micro_batches} micro-batches, the first and the last one are drawn; '
    note += f"the refresh at the left is of the step before. All of the step, {seconds(row.step)}: {escape(waits)}.</p>"
    return svg.legend(colours) + svg.timeline(strips, colours, "a step", unit="ms") + note


def _over_nodes(plan: Plan, row: Row, nodes: Sequence[int]) -> str:
    choices = {each.choice.scheme: each.choice for each in (row, *_peers(plan, row))}
    series = {}
    for name, choice in choices.items():
        curve = [
            (each_nodes, 1e3 * found.step / choice.micro_batches)
            for each_nodes in nodes
            for found in plan.over_nodes([each_nodes], choice)
        ]
        if curve:
            series[name] = curve
    colours = {name: svg.COLOURS[place] for place, name in enumerate(series)}
    chart = svg.lines(series, colours, "time over nodes", x_said="nodes", y_said="ms")
    return svg.legend(colours) + chart


def _table(rows: Sequence[Row], best: Row | None) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in HEADER) + "</tr>"]
    for row in rows:
        kind = ' class="best"' if row is best else "" if row.fits else ' class="over"'
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
