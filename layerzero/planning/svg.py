"""Charts as inline SVG, drawn by hand: stacked bars, a timeline, lines. They scale with the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["COLOURS", "Bar", "Strip", "lines", "stacked", "timeline"]

_WIDTH = 360  # of the drawing; the page scales it
_TEXT = 10
# One for each thing, told apart also by those who see few colours.
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
    "#222222",
    "#ee8866",
    "#99ddff",
    "#b8860b",
    "#7f3c8d",
    "#0b6e4f",
    "#c2b280",
)


class Bar(NamedTuple):
    label: str
    parts: Mapping[str, float]  # by kind
    said: str  # how much it is in all


class Strip(NamedTuple):
    """Something on a row of a timeline."""

    row: str
    kind: str
    start: float
    end: float
    said: str


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" height="{height:.1f}" fill="{colour}">'
    return f"{shape}<title>{escape(title)}</title></rect>"


def _svg(height: float, content: Sequence[str], said: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(said)}" font-size="{_TEXT}">'
    return "\n".join([head, *content, "</svg>"])


def legend(kinds: Mapping[str, str]) -> str:
    """Names beside their colours."""
    items = [f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in kinds.items()]
    return f'<p class="legend">{"".join(items)}</p>'


def stacked(bars: Sequence[Bar], colours: Mapping[str, str], limit: float, limit_said: str, said: str) -> str:
    """Bars of parts, and a line at `limit`."""
    most = max(limit, *(sum(bar.parts.values()) for bar in bars)) * 1.02
    content = []
    for index, bar in enumerate(bars):
        top = 14 + 32 * index
        content.append(_text(0, top + 2, f"{bar.label}: {bar.said}"))
        x = 0.0
        for kind, value in bar.parts.items():
            width = _WIDTH * value / most
            content.append(_box(x, top + 6, width, 14, colours[kind], f"{bar.label}: {kind}"))
            x += width
    height = 14 + 32 * len(bars)
    x = _WIDTH * limit / most
    content.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height}" stroke="#c00" stroke-dasharray="4 3"/>')
    content.append(_text(x, height + 10, limit_said, anchor="end" if x > _WIDTH / 2 else "start"))
    return _svg(height + 14, content, said)


def timeline(strips: Sequence[Strip], colours: Mapping[str, str], said: str, *, unit: str) -> str:
    """What happens when, on a row for each thing that does it."""
    rows = list(dict.fromkeys(strip.row for strip in strips))
    start, end = min(strip.start for strip in strips), max(strip.end for strip in strips)
    left, scale = 62, (_WIDTH - 64) / max(end - start, 1e-12)
    content = []
    for index, row in enumerate(rows):
        top = 4 + 24 * index
        content.append(_text(0, top + 13, row))
        content.append(f'<rect x="{left}" y="{top}" width="{_WIDTH - 64}" height="18" fill="#8881"/>')
    for strip in strips:
        top = 4 + 24 * rows.index(strip.row)
        x, width = left + scale * (strip.start - start), max(0.3, scale * (strip.end - strip.start))
        content.append(_box(x, top, width, 18, colours[strip.kind], strip.said))
    bottom = 4 + 24 * len(rows)
    for part in range(5):
        x = left + (_WIDTH - 64) * part / 4
        anchor = "start" if not part else "end" if part == 4 else "middle"
        last = f" {unit}" if part == 4 else ""
        content.append(_text(x, bottom + 10, f"{_number((end - start) * part / 4)}{last}", anchor=anchor))
    return _svg(bottom + 14, content, said)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    colours: Mapping[str, str],
    said: str,
    *,
    x_said: str,
    y_said: str,
) -> str:
    """Curves over a logarithmic axis of x; y from 0."""
    points = [point for each in series.values() for point in each]
    low, high = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    most = max(y for _, y in points) * 1.05
    left, bottom, height = 34, 150, 140

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (_WIDTH - left - 12) * (math.log2(x) - low) / max(high - low, 1e-9), bottom - height * y / most

    content = [_text(0, 8, y_said)]
    for part in range(5):
        y = most * part / 4
        content.append(f'<line x1="{left}" x2="{_WIDTH}" y1="{place(2**low, y)[1]:.1f}" y2="{place(2**low, y)[1]:.1f}"')
        content[-1] += ' stroke="#8884"/>'
        if part < 4:
            content.append(_text(left - 4, place(2**low, y)[1] + 3, _number(y), anchor="end"))
    counts = sorted({x for x, _ in points})
    content += [_text(place(x, 0)[0], bottom + 12, f"{x:g}", anchor="middle") for x in counts]
    content.append(_text(_WIDTH, bottom + 24, x_said, anchor="end"))
    for name, curve in series.items():
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        content.append(f'<polyline points="{places}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        for point in curve:
            x, y = place(*point)
            content.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colours[name]}">')
            content[-1] += f"<title>{escape(name)}: {_number(point[1])} at {point[0]:g}</title></circle>"
    return _svg(bottom + 28, content, said)
