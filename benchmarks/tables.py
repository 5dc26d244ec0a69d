"""Write the measured tables into benchmarks/results/*.md: ``python -m benchmarks.tables``."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contestants import ENTRIES
from benchmarks.results import FOLDER, Range, Results, Row, published, ratio_of

__all__ = [
    "COMPARED",
    "LOSS_TOLERANCE",
    "PAGE",
    "fastest_of_each",
    "file_of",
    "losses_agree",
    "render",
]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
LOSS_TOLERANCE = 0.005  # relative: bf16 has 8 bits, and contestants round at different places
_REFERENCE = "layerzero"  # its step time is the unit of the comparison
COMPARED = 4  # A of the comparison
_KEPT = "layerzero-full-exchanges-keep-bf16"
_OURS = ("layerzero", "layerzero-full", "layerzero-exchanges", "layerzero-full-exchanges", _KEPT)
# In the figures, rows without shared memory are first, because devices do not share memory.
_OURS_IN_SHORT = (_KEPT, "layerzero-exchanges", "layerzero-full-exchanges", "layerzero", "layerzero-full")
# layerzero is compared with the fastest variant of each peer.
_PEERS = {
    "FSDP2 HSDP at its fastest": ("fsdp2-hsdp", "fsdp2-hsdp-keep", "fsdp2-hsdp-no-sync"),
    "FSDP1 hybrid at its fastest": ("fsdp1-hybrid", "fsdp1-hybrid-zero2"),
    "FSDP2 full sharding at its fastest": ("fsdp2-full", "fsdp2-full-no-sync"),
    "DeepSpeed ZeRO-3, hpZ": ("deepspeed-hpz",),
    "DeepSpeed ZeRO-1 at its fastest": ("deepspeed-zero1", "deepspeed-zero1-bf16"),
}
_SCHEMES = {ENTRIES[name].label: (name,) for name in _OURS_IN_SHORT} | _PEERS


def file_of(results: Results) -> str:
    """Return the text of the file with all tables of one setup."""
    title = f"Results: {results.where.replace('-', ' ')}"
    return f"# {title}\n\nREADME.md explains the columns.\n\n{render(results)}"


def render(results: Results) -> str:
    """Return the generated text for one results file."""
    parts = [_header(results)]
    parts += [_comparison(results, a, reduce) for a, reduce in results.cells() if a == COMPARED]
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
        + (f", {_rate_text(settings['rate'])} link" if "rate" in settings else "")
        + f". {machine['processor']}, {machine['cores']} cores, {machine['memory']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {packages}. Measured {days}.\n\n"
        "```\n" + "\n".join(dict.fromkeys(results.commands)) + "\n```\n"
    )


def _rate_text(rate: str) -> str:
    """Return a rate of tc, such as ``"1gbit"``, with a unit."""
    return re.sub(r"(\d+)([gm])bit", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)


def _comparison(results: Results, micro_batches: int, reduce: str) -> str:
    """Return the table of the step times of other schemes, divided by those of layerzero."""
    rows = {row.name: row for row in results.rows(micro_batches, reduce) if row.runs}
    ours = [rows[name] for name in _OURS if name in rows]
    others: dict[str, Range] = {}
    for what, names in _PEERS.items():
        fastest = _fastest(rows, names)
        if fastest is not None:
            others[what] = fastest.seconds_range
    lines = [
        f"**Step times relative to layerzero, A = {micro_batches}, reduction in {reduce}**\n",
        "| | " + " | ".join(row.entry.label.removeprefix("layerzero ") for row in ours) + " |",
        "| --- |" + " ---: |" * len(ours),
    ]
    for what, seconds in others.items():
        ratios = (_ranged(ratio_of(seconds, row.seconds_range), 2) for row in ours)
        lines.append(f"| {what} | " + " | ".join(ratios) + " |")
    return "\n".join(lines) + "\n"


def _table(results: Results, micro_batches: int, reduce: str) -> str:
    rows = results.rows(micro_batches, reduce)
    measured = [row for row in rows if row.runs]
    reference = next((row.seconds_range for row in measured if row.name == _REFERENCE), None)
    bound = results.bound(micro_batches, reduce)
    has_link = results.link_bytes_per_second is not None
    of_bound, wire = ("/ bound", "link") if has_link else ("/ compute", "loopback")
    lines = [
        f"**A = {micro_batches}, reduction in {reduce}**\n",
        f"| | step, s | runs, steps | ratio | {of_bound} | {wire}, MB | ledger, MB | state, MB | scratch, MB "
        "| peak, MB | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    common, apart = losses_agree(measured)
    for row in rows:
        if not row.runs:
            lines.append(f"| {row.entry.label} | not measured: {_reason(row)} | | | | | | | | | |")
            continue
        ledger = "" if row.ledger_bytes is None else f"{row.ledger_bytes / 1e6:.1f}"
        scratch = f"{row.scratch_bytes / 1e6:.1f}" if row.scratch_bytes else ""
        loss = "" if row.entry.family == "compute" else f"{row.losses[common - 1]:.4f}"
        lines.append(
            f"| {row.entry.label} | {_ranged(row.seconds_range, 3)} | {len(row.runs)}, {len(row.seconds)} "
            f"| {_ratio(row.seconds_range, reference)} | {_ratio(row.seconds_range, bound)} "
            f"| {_ranged(row.wire_range, 1, 1e6)} | {ledger} | {row.state_bytes / 1e6:.1f} "
            f"| {scratch} | {_ranged(row.peak_range, 0, 1e6)} | {loss} |"
        )
    if has_link and bound is not None:
        lines.append(
            f"| bound of a synchronous step | {_ranged(bound, 3)} | | {_ratio(bound, reference)} | 1 "
            f"| {results.formula_bytes(reduce) / 1e6:.1f} | | | | | |"
        )
    agree = "agree" if apart <= LOSS_TOLERANCE else "**DO NOT AGREE**"
    lines.append(f"\nThe losses after step {common} {agree}: they differ by {100 * apart:.2f}%.\n")
    return "\n".join(lines)


def fastest_of_each(results: Results, reduce: str) -> dict[str, Row]:
    """Return the fastest variant of each measured scheme, for A = 4 and one reduce dtype."""
    rows = {row.name: row for row in results.rows(COMPARED, reduce) if row.runs}
    found = {what: _fastest(rows, names) for what, names in _SCHEMES.items()}
    return {what: row for what, row in found.items() if row is not None}


def _fastest(rows: dict[str, Row], names: Sequence[str]) -> Row | None:
    return min((rows[name] for name in names if name in rows), key=lambda row: row.median, default=None)


def losses_agree(rows: Sequence[Row]) -> tuple[int, float]:
    """Return the number of steps that all contestants took, and the relative spread of their losses after them.

    The spread is infinite if a loss is NaN or infinite.
    """
    trained = [row.losses for row in rows if row.runs and row.entry.family not in ("compute", "sites")]
    if not trained:
        return 0, 0.0
    steps = min(map(len, trained))
    final = [losses[steps - 1] for losses in trained]
    if not all(map(math.isfinite, final)):
        return steps, math.inf
    return steps, (max(final) - min(final)) / min(final)


def _reason(row: Row) -> str:
    return (row.problem or "").strip().splitlines()[-1]


def _ratio(above: Range, below: Range | None) -> str:
    if below is None:
        return ""
    return "1" if above == below else _ranged(ratio_of(above, below), 2)


def _ranged(value: Range, digits: int, unit: float = 1.0) -> str:
    """Return the middle value as text, with the range in parentheses if the rounded values differ."""
    middle, low, high = (f"{each / unit:.{digits}f}" for each in value)
    return middle if low == high else f"{middle} ({low} - {high})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default all of benchmarks/results/")
    parser.add_argument("--print", action="store_true", help="to the terminal, and leave the files as they are")
    args = parser.parse_args()
    results = [Results.load(path) for path in args.results] or published()
    if args.print:
        print("\n".join(map(render, results)))
    else:
        for each in results:
            (FOLDER / f"{each.where}.md").write_text(file_of(each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
