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
from benchmarks.scale import FSDP2, HSDP, Job

__all__ = ["IMAGES", "draw", "draw_scale"]

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


def draw_scale(folder: Path) -> Path:
    """Draw what a rank sends per step, against the number of ranks; return the path of the image."""
    schemes = {"layerzero": ("sharded", "ours"), HSDP: (HSDP, "hybrid"), FSDP2: (FSDP2, "full")}
    path, ranks = folder / "scale.svg", [2**power for power in range(4, 15)]
    with matplotlib.rc_context(_MATPLOTLIB):
        canvas, (upper, lower) = plt.subplots(2, figsize=(6, 5.6), sharex=True, layout="constrained")
        for label, (scheme, family) in schemes.items():
            steps = [Job(each, 8, micro_batches=4, units=33, numel=10**9).traffic(scheme) for each in ranks]
            style = {"color": _COLORS[family], "label": label, "linestyle": "--" if scheme == HSDP else "-"}
            upper.plot(ranks, [step.bytes_between / 1e9 for step in steps], **style)
            lower.plot(ranks, [step.messages_inside + step.messages_between for step in steps], **style)
        upper.set_ylim(0)
        upper.set_title("GB sent to other nodes per step and rank", loc="right", fontsize=11)
        lower.set_title("messages sent per step and rank", loc="right", fontsize=11)
        lower.set_yscale("log")
        lower.set_xscale("log", base=2)
        lower.set_xticks(ranks[::2], [f"{each:,}" for each in ranks[::2]])
        lower.set_xlabel("ranks, 8 on a node; A = 4, 33 units, 10⁹ parameters")
        for place in (upper, lower):
            place.grid(alpha=0.3)
        upper.legend(frameon=False)
        canvas.savefig(path, metadata={"Date": None})
        plt.close(canvas)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default what is published")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args()
    for results in [Results.load(path) for path in args.results] or published():
        print(draw(results, args.folder))
    if not args.results:
        print(draw_scale(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
