"""Data of the plots, independent of the plotting library: bars, their ranges, and reference lines."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Range, Results
from benchmarks.tables import COMPARED, fastest_of_each

__all__ = ["Bar", "Figure", "Line", "Panel", "figure_of"]


@dataclass(frozen=True)
class Bar:
    """Bar of one scheme.

    Attributes:
        family: family of the contestant; determines the color.
        value: length of the bar, and ends of the whisker.
        apart: part of the length that is drawn in a lighter tone at the end of the bar.
    """

    label: str
    family: str
    value: Range
    apart: float = 0.0


@dataclass(frozen=True)
class Line:
    label: str
    at: float


@dataclass(frozen=True)
class Panel:
    title: str
    bars: tuple[Bar, ...]
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Panels below each other."""

    name: str  # file name without suffix
    panels: tuple[Panel, ...]


def figure_of(results: Results) -> Figure:
    """Return the step times and the memory of the fastest variant of each scheme, for A = 4 and the shortest dtype.

    Raises:
        ValueError: there are no runs with A = 4.
    """
    tables = {reduce: fastest_of_each(results, reduce) for a, reduce in results.cells() if a == COMPARED}
    measured = [(reduce, rows) for reduce, rows in tables.items() if rows]
    if not measured:
        raise ValueError(
            f"the results of {results.where} have no runs with A = {COMPARED}, which the figure shows. Run python -m "
            f"benchmarks.contest --where {results.where} --micro-batches {COMPARED}"
        )
    reduce, rows = measured[-1]
    rows = {
        label.replace("layerzero hybrid,", "layerzero").removesuffix(" at its fastest"): row
        for label, row in rows.items()
    }
    times = tuple(Bar(label, row.entry.family, row.seconds_range) for label, row in rows.items())
    memory = tuple(
        Bar(label, row.entry.family, row.peak_range.scaled(1e-6), (row.peak_bytes - row.state_bytes) / 1e6)
        for label, row in rows.items()
    )
    bound = results.bound(COMPARED, reduce)
    reference = "compute alone" if results.link_bytes_per_second is None else "bound of a synchronous step"
    lines = () if bound is None else (Line(reference, bound.middle),)
    case = f"A = {COMPARED}, {reduce} gradients, {results.where.replace('-', ' ')}"
    return Figure(
        results.where,
        (
            Panel(f"step time, s ({case})", times, lines),
            Panel("memory of a rank, MB: model state, and peak (light)", memory),
        ),
    )
