"""Data of the plots, independent of the plotting library: bars, their ranges, and reference lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results import Range, Results, Row

__all__ = ["Bar", "Figure", "Line", "Panel", "figures_of"]


@dataclass(frozen=True)
class Bar:
    """Bar of one contestant.

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
    """Panels in rows. Every panel has bars."""

    name: str  # file name without suffix
    title: str
    rows: tuple[tuple[Panel, ...], ...]


def figures_of(results: Results) -> list[Figure]:
    """Return the figures of one results file: step time, bytes sent, and memory."""
    place = results.where.replace("-", " ")
    wire = "slow link" if results.link_bytes_per_second else "loopback"
    return [
        Figure(f"{results.where}-step-time", f"step time, s ({place})", _grid(results, _step_time)),
        Figure(f"{results.where}-bytes", f"bytes over the {wire} per step, MB ({place})", _grid(results, _bytes)),
        Figure(f"{results.where}-memory", f"memory of a rank, MB ({place})", _grid(results, _memory)),
    ]


def _grid(results: Results, panels: Callable[[Results, int, str], tuple[Panel, ...]]) -> tuple[tuple[Panel, ...], ...]:
    """Return a row of panels for each reduce dtype, without panels and rows that have no measurements."""
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
    """Return panels of model state and peak memory, for the largest A with results of a reduce dtype."""
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
