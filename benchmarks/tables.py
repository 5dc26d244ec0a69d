"""Write the measured tables and verdicts into docs/benchmarks.md: ``python -m benchmarks.tables``.

The text between two markers belongs to this script, so that the page cannot drift from benchmarks/results/.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import FOLDER, Results, Row
from benchmarks.verdicts import LOSS_TOLERANCE, losses_agree, verdicts

__all__ = ["PAGE", "page_with", "render"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
_REFERENCE = "layerzero"  # whose step time is 1
_JUDGED = 4  # the A of the bars


def page_with(page: str, results: Sequence[Results]) -> str:
    """The page with the generated parts written anew."""
    for each in results:
        begin, end = f"<!-- {each.where} -->", f"<!-- end of {each.where} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no {begin} ... {end}")
        text = f"{begin}\n\n{render(each)}\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)
    return page


def render(results: Results) -> str:
    """Everything the page says about one file of results."""
    parts = [_header(results)]
    if results.link_bytes_per_second is not None:
        parts += [_verdict_table(results, reduce) for a, reduce in results.cells() if a == _JUDGED]
    parts += [_table(results, a, reduce) for a, reduce in results.cells()]
    return "\n".join(parts)


def _header(results: Results) -> str:
    machine, settings = results.machine, results.settings
    packages = ", ".join(f"{name} {machine[name]}" for name in ("torch", "deepspeed") if name in machine)
    dates = sorted(run["date"][:10] for record in results.records.values() for run in record["runs"])
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no runs"
    return (
        f"{settings['parameters'] / 1e6:.1f} M parameters, {settings['ranks']} ranks, hybrids with S = "
        f"{settings['node_size']}, micro-batches of {settings['batch_size'] * settings['seq_len']} tokens"
        + (f", link of {settings['rate']}" if "rate" in settings else "")
        + f". {machine['processor']}, {machine['cores']} cores, {machine['memory']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {packages}. Measured {days}.\n\n"
        "```\n" + "\n".join(dict.fromkeys(results.commands)) + "\n```\n"
    )


def _verdict_table(results: Results, reduce: str) -> str:
    lines = [
        f"**Bars, A = {_JUDGED}, reduction in {reduce}**\n",
        "| bar | layerzero | measured | needed | verdict | held against |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for verdict in verdicts(results, _JUDGED, reduce):
        label = results.row(verdict.ours, _JUDGED, reduce)
        assert label is not None
        sign = "≥" if verdict.at_least else "≤"
        lines.append(
            f"| {verdict.bar} | {_short(label)} | {verdict.measured:.3g} | {sign} {verdict.needed:g} "
            f"| {'met' if verdict.met else '**missed**'} | {verdict.peer} |"
        )
    return "\n".join(lines) + "\n"


def _short(row: Row) -> str:
    return row.entry.label.removeprefix("layerzero").lstrip(", ")


def _table(results: Results, micro_batches: int, reduce: str) -> str:
    rows = results.rows(micro_batches, reduce)
    reference = next((row.median for row in rows if row.name == _REFERENCE and row.runs), None)
    wire = "link, MB" if results.link_bytes_per_second is not None else "loopback, MB"
    lines = [
        f"**A = {micro_batches}, reduction in {reduce}**\n",
        f"| | step, s | (min - max, steps) | ratio | {wire} | ledger, MB | state, MB | scratch, MB | peak, MB | loss |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    measured = [row for row in rows if row.runs]
    common, apart = losses_agree(measured)
    for row in rows:
        if not row.runs:
            reason = (row.problem or "").strip().splitlines()[-1]
            lines.append(f"| {row.entry.label} | not measured: {reason} | | | | | | | | |")
            continue
        ledger = "" if row.ledger_bytes is None else f"{row.ledger_bytes / 1e6:.1f}"
        ratio = "" if reference is None else f"{row.median / reference:.2f}"
        scratch = f"{row.scratch_bytes / 1e6:.1f}" if row.scratch_bytes else ""
        loss = "" if row.entry.family == "compute" else f"{row.losses[common - 1]:.4f}"
        lines.append(
            f"| {row.entry.label} | {row.median:.3f} | {min(row.seconds):.2f} - {max(row.seconds):.2f}, "
            f"{len(row.seconds)} | {ratio} | {row.wire_bytes / 1e6:.1f} | {ledger} | {row.state_bytes / 1e6:.1f} "
            f"| {scratch} | {row.peak_bytes / 1e6:.0f} | {loss} |"
        )
    agree = "agree" if apart <= LOSS_TOLERANCE else "**DO NOT AGREE**"
    lines.append(f"\nLosses after step {common} {agree}: they lie {100 * apart:.2f} % apart.\n")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default all of benchmarks/results/")
    parser.add_argument("--print", action="store_true", help="to the terminal, and leave the page as it is")
    args = parser.parse_args()
    results = [Results.load(path) for path in args.results or sorted(FOLDER.glob("*.json"))]
    if args.print:
        print("\n".join(map(render, results)))
    else:
        PAGE.write_text(page_with(PAGE.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
