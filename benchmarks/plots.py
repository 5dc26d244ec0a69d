"""Draw the results as PNG files into docs/images/: ``python -m benchmarks.plots`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.contestants import ENTRIES
from benchmarks.results import FOLDER, Results, Row

__all__ = ["IMAGES", "draw"]

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
_COLOURS = {
    "ours": "#1b6ca8",
    "full": "#c97b3d",
    "hybrid": "#6a9a5b",
    "hpz": "#8d6ab8",
    "optimizer": "#b0504f",
    "compute": "#9a9a9a",
}


def draw(results: Results, folder: Path) -> list[Path]:
    """Step time, bytes on the wire and memory of one file of results; returns the paths written."""
    wire = "bytes over the slow link per step" if results.link_bytes_per_second else "bytes over the loopback per step"
    return [
        _figure(results, folder / f"{results.where}-step-time.png", "step time, s", lambda row: row.median),
        _figure(results, folder / f"{results.where}-bytes.png", f"{wire}, MB", lambda row: row.wire_bytes / 1e6),
        _memory(results, folder / f"{results.where}-memory.png"),
    ]


def _figure(results: Results, path: Path, title: str, value: Callable[[Row], float]) -> Path:
    """One panel for each A, a row of panels for each reduce dtype."""
    cells = results.cells()
    micro_batches = sorted({a for a, _ in cells})
    reduces = list(dict.fromkeys(reduce for _, reduce in cells))
    size = (4.2 * len(micro_batches) + 2.5, 4.4 * len(reduces))
    figure, panels = plt.subplots(len(reduces), len(micro_batches), figsize=size, squeeze=False, sharey=True)
    for line, reduce in zip(panels, reduces, strict=True):
        for panel, a in zip(line, micro_batches, strict=True):
            _bars(panel, [row for row in results.rows(a, reduce) if row.runs], value)
            panel.set_title(f"A = {a}, reduction in {reduce}", fontsize=9)
    figure.suptitle(f"{title} ({results.where.replace('-', ' ')})")
    return _save(figure, path)


def _bars(panel: Axes, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    places = {name: -index for index, name in enumerate(ENTRIES)}  # the same order in all panels
    top = max((value(row) for row in rows), default=1.0)
    for row in rows:
        height = value(row)
        panel.barh(places[row.name], height, color=_COLOURS[row.entry.family])
        panel.text(height + top / 100, places[row.name], f"{height:.3g}", va="center", fontsize=7)
    panel.set_yticks(list(places.values()), [ENTRIES[name].label for name in places], fontsize=7)
    panel.set_xlim(0, 1.15 * top)
    panel.grid(axis="x", alpha=0.3)


def _memory(results: Results, path: Path) -> Path:
    """Peak and model state, at the largest A that has results."""
    a, reduce = max(results.cells(), key=lambda cell: (cell[0], cell[1] == "fp32"))
    rows = [row for row in results.rows(a, reduce) if row.runs]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    _bars(panels[0], rows, lambda row: row.state_bytes / 1e6)
    panels[0].set_title("model state", fontsize=9)
    _bars(panels[1], rows, lambda row: row.peak_bytes / 1e6)
    panels[1].set_title("peak above imports", fontsize=9)
    figure.suptitle(f"memory of a rank, MB (A = {a}, reduction in {reduce}, {results.where.replace('-', ' ')})")
    return _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default all of benchmarks/results/")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    for path in args.results or sorted(FOLDER.glob("*.json")):
        for image in draw(Results.load(path), args.folder):
            print(image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
