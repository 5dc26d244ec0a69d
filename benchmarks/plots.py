"""Draw the results as SVG files into docs/images/: ``python -m benchmarks.plots`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import Panel, figure_of
from benchmarks.results import Results, published

__all__ = ["IMAGES", "draw"]

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
_COLORS = {
    "ours": "#1b6ca8",
    "sites": "#74a9cf",
    "full": "#c97b3d",
    "hybrid": "#6a9a5b",
    "hpz": "#8d6ab8",
    "optimizer": "#b0504f",
    "replicated": "#4f9aa8",
    "compute": "#9a9a9a",
}
_MATPLOTLIB = {
    "font.size": 11,  # the size in points at which a phone shows the labels in 10 pixels
    "svg.fonttype": "none",  # write text as text
    "svg.hashsalt": "benchmarks",  # write the same file for the same results
}


def draw(results: Results, folder: Path) -> Path:
    """Draw the figure of one results file; return the path of the image."""
    figure = figure_of(results)
    path = folder / f"{figure.name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_MATPLOTLIB):
        size = (6, sum(0.42 * len(panel.bars) + 1 for panel in figure.panels))
        canvas, places = plt.subplots(len(figure.panels), figsize=size, layout="constrained")
        for panel, place in zip(figure.panels, places, strict=True):
            _panel(panel, place)
        canvas.savefig(path, metadata={"Date": None})
        plt.close(canvas)
    return path


def _panel(panel: Panel, place: Axes) -> None:
    top = max([bar.value.high for bar in panel.bars] + [line.at for line in panel.lines])
    for index, bar in enumerate(panel.bars):
        value, color = bar.value, _COLORS[bar.family]
        place.barh(-index, value.middle - bar.apart, color=color)
        if bar.apart:
            place.barh(-index, bar.apart, left=value.middle - bar.apart, color=color, alpha=0.4)
        if value.high > value.low:
            whisker = [[value.middle - value.low], [value.high - value.middle]]
            place.errorbar(value.middle, -index, xerr=whisker, color="black", capsize=2, linewidth=0.9)
        place.text(value.high + top / 80, -index, f"{value.middle:#.3g}".rstrip("."), va="center")
    for line in panel.lines:
        place.axvline(line.at, color="#c02050", linestyle="--", linewidth=1)
        place.set_xlabel(f"dashed: {line.label}, {line.at:.3g}", loc="right")
    labels = [textwrap.fill(bar.label, 24) for bar in panel.bars]
    place.set_yticks([-index for index in range(len(labels))], labels)
    place.set_xlim(0, 1.15 * top)
    place.set_title(panel.title, loc="right", fontsize=11)
    place.grid(axis="x", alpha=0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default what is published")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    for results in [Results.load(path) for path in args.results] or published():
        print(draw(results, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
