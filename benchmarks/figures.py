"""What the plots show, before anybody draws it: bars, their spread, and lines to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results import Range, Results, Row

__all__ = ["Bar", "Figure", "Line", "Panel", "figures_of"]


@dataclass(frozen=True)
class Bar:
    """One contestant.

    Attributes:
        family: of the contestant; it chooses the colour.
        value: the length, and the whisker's ends.
        apart: of the length, what is stacked on top of the rest in a lighter tone.
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
    """Panels side by side, in rows. All of them have bars."""

    name: str  # of its file
    title: str
    rows: tuple[tuple[Panel, ...], ...]


def figures_of(results: Results) -> list[Figure]:
    """Step time, bytes on the wire and memory of one file of results."""
    place = results.where.replace("-", " ")
    wire = "slow link" if results.link_bytes_per_second else "loopback"
    return [
        Figure(f"{results.where}-step-time", f"step time, s ({place})", _grid(results, _step_time)),
        Figure(f"{results.where}-bytes", f"bytes over the {wire} per step, MB ({place})", _grid(results, _bytes)),
        Figure(f"{results.where}-memory", f"memory of a rank, MB ({place})", _grid(results, _memory)),
    ]


def _grid(results: Results, panels: Callable[[Results, int, str], tuple[Panel, ...]]) -> tuple[tuple[Panel, ...], ...]:
    """A row for each reduce dtype; what has not been measured has no panel, and no row."""
    by_reduce: dict[str, tuple[Panel, ...]] = {}
    for a, reduce in results.cells():
        if _measured(results, a, reduce):
            by_reduce[reduce] = (*by_reduce.get(reduce, ()), *panels(results, a, reduce))
    return tuple(by_reduce.values())


def _measured(results: Results, a: int, reduce: str) -> list[Row]:
    return [row for row in results.rows(a, reduce) if row.runs]


def _step_time(results: Results, a: int, reduce: str) -> tuple[Panel, ...]:
    bars = (Bar(row.entry.label, row.entry.family, row.seconds_range) for row in _measured(results, a, reduce))
    speed, bound = results.link_bytes_per_second, results.bound(a, reduce)
    lines = []
    if speed is not None:
        lines.append(Line("the hybrid's bytes at the link's speed", results.formula_bytes(reduce) / speed))
    if bound is not None:
        lines.append(Line("compute alone" if speed is None else "bound of a synchronous step", bound.middle))
    return (Panel(f"A = {a}, reduction in {reduce}", tuple(bars), tuple(lines)),)


def _bytes(results: Results, a: int, reduce: str) -> tuple[Panel, ...]:
    rows = [row for row in _measured(results, a, reduce) if row.entry.family != "compute"]
    bars = tuple(Bar(row.entry.label, row.entry.family, _in_mb(row.wire_range)) for row in rows)
    has_link = results.link_bytes_per_second is not None
    lines = (Line("the hybrid's formula", results.formula_bytes(reduce) / 1e6),) if has_link else ()
    return (Panel(f"A = {a}, reduction in {reduce}", bars, lines),)


def _memory(results: Results, a: int, reduce: str) -> tuple[Panel, ...]:
    """Model state and peak, at the largest A of a reduce dtype that has results."""
    if a != max(other for other, dtype in results.cells() if dtype == reduce and _measured(results, other, dtype)):
        return ()
    rows = _measured(results, a, reduce)
    state = (
        Bar(row.entry.label, row.entry.family, Range(*3 * (row.state_bytes / 1e6,)), row.scratch_bytes / 1e6)
        for row in rows
    )
    peak = (Bar(row.entry.label, row.entry.family, _in_mb(row.peak_range)) for row in rows)
    where = f"A = {a}, reduction in {reduce}"
    return (
        Panel(f"model state, light: scratch ({where})", tuple(state)),
        Panel(f"peak above imports ({where})", tuple(peak)),
    )


def _in_mb(value: Range) -> Range:
    return Range(*(each / 1e6 for each in value))
