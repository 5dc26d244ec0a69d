"""Draw the results as PNG files into docs/images/: ``python -m benchmarks.plots`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import Figure, Panel, figures_of
from benchmarks.results import Results, published

__all__ = ["IMAGES", "draw"]

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
_COLORS = {
    "ours": "#1b6ca8",
    "full": "#c97b3d",
    "hybrid": "#6a9a5b",
    "hpz": "#8d6ab8",
    "optimizer": "#b0504f",
    "replicated": "#4f9aa8",
    "compute": "#9a9a9a",
}
_LINES = ("#222222", "#c02050")


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the figures of one results file; return the paths of the images."""
    return [_draw(figure, folder / f"{figure.name}.png") for figure in figures_of(results)]


def _draw(figure: Figure, path: Path) -> Path:
    columns = max(map(len, figure.rows))
    most = max(len(panel.bars) for row in figure.rows for panel in row)
    size = (6.2 * columns, (0.27 * most + 1.4) * len(figure.rows))
    canvas, places = plt.subplots(len(figure.rows), columns, figsize=size, squeeze=False)
    for row, line in zip(figure.rows, places, strict=True):
        for panel, place in zip(row, line, strict=False):
            _panel(panel, place)
        for place in line[len(row) :]:
            place.remove()
    canvas.suptitle(figure.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
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
        place.text(value.high + top / 80, -index, f"{value.middle:.3g}", va="center", fontsize=7)
    for line, color in zip(panel.lines, _LINES, strict=False):
        place.axvline(line.at, color=color, linestyle="--", linewidth=1, label=f"{line.label}: {line.at:.3g}")
    if panel.lines:
        place.legend(fontsize=6, loc="lower right")
    place.set_yticks([-index for index in range(len(panel.bars))], [bar.label for bar in panel.bars], fontsize=7)
    place.tick_params(axis="x", labelsize=7)
    place.set_xlim(0, 1.12 * top)
    place.set_title(panel.title, fontsize=9)
    place.grid(axis="x", alpha=0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default what is published")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    for results in [Results.load(path) for path in args.results] or published():
        for image in draw(results, args.folder):
            print(image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
