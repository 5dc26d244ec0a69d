"""Write a plan as an HTML report with tables and inline SVG figures. Requires matplotlib (extra ``plots``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from io import StringIO
from pathlib import Path

from layerzero.planning.estimator import LAYERZERO, Candidate, Estimate
from layerzero.planning.plan_report import (
    COLUMNS_TEXT,
    HEADER,
    Plan,
    call_text,
    count_text,
    group_size,
    parts_text,
    reduce_text,
    row_cells,
    scheme_comparison_text,
    settings_text,
    short_settings,
    shown_rows,
    shown_text,
    speeds_text,
    yaml_text,
)
from layerzero.planning.simulator import simulate
from layerzero.planning.site_estimate import SiteEstimate, sites_text
from layerzero.utils.text_tables import seconds_text, size_text, size_unit

try:
    import matplotlib
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, ScalarFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the HTML report of a plan requires matplotlib. Run: pip install matplotlib") from error

__all__ = ["report_html", "write_report"]

_NODES = (8, 32, 128, 512, 2048, 4096)
_SHOWN = 8  # maximum number of bars in the memory figure, and of rows in the table
_TIMELINE = {  # kind of a span: (row of the timeline, legend entry)
    "forward": ("compute", "forward"), "backward": ("compute", "backward"), "update": ("compute", "update"),
    "gather": ("gather", "gather"), "regather": ("gather", "gather"), "hop1": ("hop 1", "hop 1"),
    "hop2": ("hop 2", "hop 2"), "refresh": ("refresh", "refresh"),
    "fetch": ("host", "host"), "store": ("host", "host"), "down": ("host", "host"), "up": ("host", "host"),
}  # fmt: skip
_GATHERED = "gathered units"
_MEMORY_KINDS = {  # kind in `Estimate.memory`: name in the memory figure, the same for all schemes
    "zero1_shard": "masters", "masters": "masters",
    "zero3_shard": "weights", "weights": "weights",
    "accumulator": "gradients", "gradient_shard": "gradients", "gradients": "gradients",
    "reduce_buffer": "reduction buffers",
    "full_buffer": _GATHERED, "cached_buffer": _GATHERED, "gathered": _GATHERED,
    "residual": "residuals", "refresh_state": "refresh state",
    "optimizer": "optimizer", "activations": "activations",
}  # fmt: skip
_MEMORY_TEXTS = {  # explanations of the names in the memory figure, in the order of the parts of a bar
    "masters": "weights in full precision, which the optimizer updates",
    "weights": "shards of the weights in the compute dtype",
    "gradients": "accumulated and final gradients",
    "reduction buffers": "gradients that are being sent or received",
    _GATHERED: "weights of the units that are gathered at the peak, including memory kept for the next gather",
    "residuals": "errors of encoded gradients",
    "refresh state": "last changes of the weights, for lossless refreshes",
    "optimizer": "state of AdamW",
    "activations": "tensors that the forward pass stores for the backward pass",
}
_MATPLOTLIB = {
    "svg.fonttype": "none",  # write text as text, not as paths
    "svg.hashsalt": "plan",  # write the same file for the same plan
    "text.parse_math": False,
}
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 0 16px 48px; max-width: 90rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 1.5rem } p { max-width: 60rem }
.answer { font-size: 1.15rem; border-left: 4px solid #228833; padding: .2rem .8rem } .answer.none { border-color: #c00 }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 0 2rem }
section { min-width: 0 } figure { margin: 0 } svg { width: 100%; height: auto; max-width: 46rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; min-width: 100% }
th, td { padding: .15rem .4rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left } tr.best { font-weight: bold } tr.over { color: #b33 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem; font-size: .85rem }
pre.table { white-space: pre; overflow-x: auto; font-size: .78rem }
.note { font-size: .85rem; color: #555 }
"""


def write_report(
    plan: Plan, path: str | os.PathLike[str], *, nodes: Sequence[int] = _NODES, sites: Sequence[SiteEstimate] = ()
) -> None:
    """Write the HTML report of a plan.

    Args:
        plan: result of :func:`layerzero.plan`.
        path: path of the HTML file to write.
        nodes: numbers of nodes on the x axis of the figure that shows micro-batch times.
        sites: result of :meth:`Plan.at_sites`. If it is not empty, the report contains it.
    """
    Path(path).write_text(report_html(plan, nodes=nodes, sites=sites), encoding="utf-8")


def report_html(plan: Plan, *, nodes: Sequence[int] = _NODES, sites: Sequence[SiteEstimate] = ()) -> str:
    """Return the HTML report of a plan as a string; see :func:`write_report`."""
    cluster = plan.cluster
    rows = shown_rows(plan, _SHOWN)
    row = plan.best or rows[0]
    comparable = _fastest_of_each_scheme(plan.other_schemes, row.choice.micro_batches)
    with matplotlib.rc_context(_MATPLOTLIB):
        memory, step, times = (
            _plot_memory([*rows, *comparable], plan),
            _plot_step(plan, row),
            _plot_nodes(plan, row, comparable, nodes),
        )
    waits = parts_text(row)
    waits = waits[0].upper() + waits[1:]
    sections = [
        (f"Peak memory per {cluster.rank_text}", f'{memory}<p class="note">{_memory_text([*rows, *comparable])}</p>'),
        (
            f"A step with {settings_text(row.choice)}",
            f'{step}<p class="note">The figure shows {_micro_batches_in_figure(row.choice.micro_batches)}. '
            f"{_collectives_text(row.choice.zero3_size, cluster.ranks)}{escape(waits)}.</p>",
        ),
        (
            "Time per micro-batch by number of nodes",
            f'{times}<p class="note">With many ranks, shards of small units are padded, because a shard is at least '
            "as large as one row. The times of layerzero include this padding; the other schemes are modeled without "
            "it.</p>",
        ),
    ]
    if sites:
        sections.append(("Training at several sites", f"<pre>{escape(sites_text(sites))}</pre>"))
    if plan.best is not None:
        price = f"<p>Price of the cluster: {plan.best.price:,.0f} per day.</p>" if plan.best.price else ""
        snippets = f"<pre>{escape(call_text(plan))}</pre><pre>{escape(yaml_text(plan))}</pre>{price}"
        sections.append(("Recommended settings to copy", snippets))
    omitted = (
        f"Of the {len(plan.rows)} combinations of layerzero settings that were tried, the table shows "
        f"{shown_text(plan, rows)}. "
        "<code>layerzero plan --all</code> prints all of them. "
        if len(rows) < len(plan.rows)
        else ""
    )
    parts = [
        "<h1>Training plan</h1>",
        f'<p class="answer{"" if plan.best else " none"}">{escape(_answer_sentence(plan))}</p>',
        f"<p>{plan.parameters_text} in {count_text(plan.units, 'unit')}; {count_text(cluster.nodes, 'node')} "
        f"&times; {count_text(cluster.accelerators, cluster.rank_text)} of {cluster.memory:.4g} GB, "
        f"{cluster.node_link_text}; "
        f"{speeds_text(plan)}.</p>",
        f"<p>{escape(plan.why)}</p>" if plan.best else "",
        '<div class="parts">',
        *(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections),
        "</div>",
        "<h2>Settings</h2>",
        _table([*rows, *plan.other_schemes], plan.best),
        f'<p class="note">The recommended row is bold, and rows that do not fit are red. {omitted}{COLUMNS_TEXT} '
        "For layerzero, the formulas for memory are "
        "those that <code>layerzero.memory</code> uses during a run. Activations are estimated from the "
        "sizes of a transformer, unless you passed their size. The times of FSDP2, HSDP, HFSDP and ZeRO-1 come from "
        "simulated schedules of these schemes.</p>",
        f'<pre class="table">{escape(links)}</pre>' if (links := scheme_comparison_text(plan)) else "",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    )
    return f"{head}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _micro_batches_in_figure(count: int) -> str:
    return {1: "the only micro-batch", 2: "both micro-batches"}.get(
        count, f"the first and the last of {count} micro-batches"
    )


def _collectives_text(zero3_size: int, ranks: int) -> str:
    """Return the explanation of the collectives in the figure of a step. It is empty for one rank."""
    inside = (
        "Gather: the ranks of a ZeRO-3 group, over which the weights are sharded, all-gather the weights of the next "
        "unit. Hop 1: the same ranks reduce-scatter gradients. "
    )
    across = (
        "Hop 2: ranks with the same shard reduce-scatter gradients between groups. Refresh: ranks with the same shard "
        "all-gather the updated weights; the refresh on the left belongs to the previous step. "
    )
    return inside * (zero3_size > 1) + across * (zero3_size < ranks)


def _answer_sentence(plan: Plan) -> str:
    """Return one sentence: the recommended settings, the fastest other scheme that fits, and the memory of both.

    The other scheme has the same number of micro-batches, but may reduce gradients in another dtype.
    """
    best = plan.best
    if best is None:
        return plan.why
    sentence = (
        f"Use {settings_text(best.choice)}: a simulated step takes {seconds_text(best.step)}, and peak memory is "
        f"{size_text(best.peak)} of {size_text(plan.cluster.room)}"
    )
    count = best.choice.micro_batches
    rivals = [each for each in plan.other_schemes if each.fits and each.choice.micro_batches == count]
    fastest = min(rivals, key=lambda each: each.step, default=None)
    if fastest is None:
        return f"{sentence}; no other scheme fits with {count_text(count, 'micro-batch')}."
    change = f"{abs(fastest.step / best.step - 1):.1%} {'less' if fastest.step < best.step else 'longer'}"
    other = f"{_scheme_name(fastest.choice)} with {reduce_text(fastest.choice)} gradients"
    return (
        f"{sentence}; the fastest other scheme that fits, {other}, takes {seconds_text(fastest.step)} ({change}) and "
        f"needs {size_text(fastest.peak)}."
    )


def _fastest_of_each_scheme(rows: Sequence[Estimate], micro_batches: int) -> list[Estimate]:
    """Return the fastest row of each scheme and S with `micro_batches` micro-batches. Rows that fit are preferred."""
    found: dict[str, Estimate] = {}
    for row in sorted(rows, key=lambda row: (not row.fits, row.step)):
        if row.choice.micro_batches == micro_batches:
            found.setdefault(_scheme_name(row.choice), row)
    return [found[name] for name in dict.fromkeys(_scheme_name(row.choice) for row in rows) if name in found]


def _row_name(row: Estimate) -> str:
    """Return a name for the row that is unique within a figure."""
    choice = row.choice
    if choice.scheme == LAYERZERO:
        return f"{short_settings(choice)}, {reduce_text(choice)}, A={choice.micro_batches}"
    return _line_name(choice)


def _line_name(choice: Candidate) -> str:
    return f"{_scheme_name(choice)}, {reduce_text(choice)}"


def _scheme_name(choice: Candidate) -> str:
    """Return the name of a scheme, with S if a plan may have rows with several values of S."""
    shared = None if choice.scheme == LAYERZERO else group_size(choice)
    return choice.scheme if shared is None else f"{choice.scheme} S={shared}"


def _new_figure(height: float) -> Figure:
    """Return an empty figure. `height` is its height in inches without the legend, which :func:`_svg` adds."""
    return Figure(figsize=(5.6, height), layout="constrained")


def _ticks(axis: Axis, *, most: int = 6) -> None:
    """Place ticks at round numbers."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))


def _time_unit(longest: float) -> tuple[str, float]:
    """Return the unit of a time axis for values up to `longest` seconds, and the number of units in one second."""
    return ("s", 1.0) if longest >= 1 else ("ms", 1e3)


def _add_legend(figure: Figure, columns: int) -> None:
    """Add a legend below the axes, with at most `columns` columns and no wider than the figure.

    The height of the figure grows by the height of the legend.
    """
    for count in range(columns, 0, -1):
        legend = figure.legend(loc="outside lower center", ncols=count, frameon=False)
        extent = legend.get_window_extent()
        if count == 1 or extent.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)
            return
        legend.remove()


def _svg(figure: Figure, label: str, *, columns: int = 4) -> str:
    """Return the figure as an HTML element, without the XML prologue and the metadata of an SVG file."""
    _add_legend(figure, columns)
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawing = buffer.getvalue()
    return f'<figure role="img" aria-label="{escape(label)}">{drawing[drawing.index("<svg") :]}</figure>'


def _memory_text(rows: Sequence[Estimate]) -> str:
    """Return an explanation of the names in the memory figure of `rows`."""
    shown = {name for row in rows for name in _memory_parts(row)}
    texts = [
        f"<strong>{name}</strong>{_memory_kinds_html(name, rows)}: {text}"
        for name, text in _MEMORY_TEXTS.items()
        if name in shown
    ]
    return f"{'; '.join(texts)}. The names in parentheses are those of <code>layerzero.memory</code>."


def _memory_kinds_html(name: str, rows: Sequence[Estimate]) -> str:
    """Return the kinds of :func:`layerzero.memory` for a name in the memory figure that `rows` of layerzero use."""
    used = {kind for row in rows if row.choice.scheme == LAYERZERO for kind, nbytes in row.memory.items() if nbytes}
    kinds = [kind for kind, shown in _MEMORY_KINDS.items() if shown == name and kind in used and kind != name]
    return f" ({', '.join(f'<code>{kind}</code>' for kind in kinds)})" if kinds else ""


def _memory_parts(row: Estimate) -> dict[str, float]:
    """Return the device memory at the peak of a step, in bytes, keyed by label in the memory figure.

    Kinds that use no memory are omitted.
    """
    parts = dict.fromkeys(_MEMORY_TEXTS, 0.0)
    for kind, nbytes in row.memory.items():
        if not kind.startswith("host_"):
            parts[_MEMORY_KINDS[kind]] += nbytes
    parts[_GATHERED] += max(0.0, row.peak - sum(parts.values()))
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _plot_memory(rows: Sequence[Estimate], plan: Plan) -> str:
    """Plot the peak memory of each row as a stacked bar with one part per kind, and the memory limit as a line.

    The line is omitted if the limit is at least 50 times the largest peak.
    """
    bars = {_row_name(row): _memory_parts(row) for row in rows}
    unit, scale = size_unit(max(row.peak for row in rows))
    figure = _new_figure(1.0 + 0.32 * len(bars))
    axes = figure.subplots()
    axes.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)  # type: ignore[attr-defined]
    bar_ends = [0.0] * len(bars)
    for name in [name for name in _MEMORY_TEXTS if any(name in parts for parts in bars.values())]:
        widths = [parts.get(name, 0.0) / scale for parts in bars.values()]
        bars_of_name = axes.barh(list(bars), widths, left=bar_ends, label=name)
        bar_ends = [start + width for start, width in zip(bar_ends, widths, strict=True)]
    axes.bar_label(bars_of_name, [size_text(row.peak) for row in rows], padding=3)  # at the ends of the last parts
    limit, longest = plan.cluster.room / scale, max(bar_ends)
    axes.set_xlim(0, 1.25 * longest)
    if limit < 50 * longest:  # otherwise the bars would be too short to read
        axes.axvline(
            limit, color="red", linestyle="--", label=f"{size_text(plan.cluster.room)} of {plan.cluster.memory:g} GB"
        )
        axes.set_xlim(0, max(1.25 * longest, 1.05 * limit))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _ticks(axes.xaxis)
    return _svg(figure, "Peak memory by kind", columns=3)


def _plot_step(plan: Plan, row: Estimate) -> str:
    """Plot the first and the last micro-batch of a step as a timeline.

    The micro-batches between these two are omitted, because they are similar to the first.
    """
    machine, program = plan.estimator.program(replace(row.choice, micro_batches=min(row.choice.micro_batches, 2)))
    outcome = simulate(program, machine)
    start, end = outcome.step_start, outcome.step_ends[-1]
    spans = [span for span in outcome.spans if span.what in _TIMELINE and span.end > start and span.start < end]
    unit, scale = _time_unit(end - start)
    figure = _new_figure(2.6)
    axes = figure.subplots()
    for line, kind in dict.fromkeys(_TIMELINE.values()):
        intervals = [(max(span.start, start), span.end) for span in spans if _TIMELINE[span.what] == (line, kind)]
        if intervals:
            widths = [scale * (ends - begins) for begins, ends in intervals]
            axes.barh(line, widths, left=[scale * (begins - start) for begins, _ in intervals], label=kind)
    axes.set_xlim(0, scale * (end - start))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _ticks(axes.xaxis)
    return _svg(figure, "Timeline of a step")


def _plot_nodes(plan: Plan, row: Estimate, others: Sequence[Estimate], nodes: Sequence[int]) -> str:
    """Plot the time per micro-batch against the number of nodes, for `row` and for the `others`."""
    figure = _new_figure(3.0)
    axes = figure.subplots()
    lines = {}
    for estimate in (row, *others):
        choice = estimate.choice
        points_of_row = [
            (count, at_nodes.step / choice.micro_batches)
            for count in nodes
            for at_nodes in plan.estimates_by_node_count([count], choice)
        ]
        lines[_line_name(choice)] = points_of_row
    unit, scale = _time_unit(max((step for points in lines.values() for _, step in points), default=0.0))
    for name, points in lines.items():
        axes.plot([count for count, _ in points], [scale * step for _, step in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    _ticks(axes.yaxis)
    axes.set_xlabel("nodes")
    axes.set_ylabel(unit)
    return _svg(figure, "Time per micro-batch by number of nodes")


def _table(rows: Sequence[Estimate], best: Estimate | None) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in HEADER) + "</tr>"]
    for row in rows:
        kind = ' class="best"' if row is best else "" if row.fits else ' class="over"'
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(value)}</td>" for value in row_cells(row)) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
