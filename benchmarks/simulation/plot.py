"""Draw projections: ``python -m benchmarks.simulation.plot log.json ring.json --out docs/images/projection.png``.

Needs matplotlib. ``python -m benchmarks.simulate --json FILE`` writes the input files. Each model of each file
has a row of panels, and each number of micro-batches a column.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

__all__ = ["draw"]

_COLORS = {"layerzero": "#1b6ca8", "HSDP": "#6a9a5b", "full": "#c97b3d"}
_STYLES = ("-", "--", ":")  # line styles of the links, fastest first
_STEPS = {"log": "trees", "ring": "rings", "direct": "direct"}

Rows = list[dict[str, Any]]


def draw(projections: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the share of a step in which a GPU computes, over the number of nodes.

    Args:
        projections: contents of the JSON files.
    """
    lines = [
        (f"{model}, {_STEPS[each['assumed']['steps']]}", [row for row in each["rows"] if row["model"] == model])
        for each in projections
        for model in dict.fromkeys(row["model"] for row in each["rows"])
    ]
    counts = sorted({row["micro_batches"] for _, rows in lines for row in rows})
    links = sorted({row["gbit"] for _, rows in lines for row in rows}, reverse=True)
    canvas, places = plt.subplots(len(lines), len(counts), sharey=True, squeeze=False, figsize=(10, 2.6 * len(lines)))
    for (title, rows), axes_row in zip(lines, places, strict=True):
        for count, place in zip(counts, axes_row, strict=True):
            _panel([row for row in rows if row["micro_batches"] == count], links, place)
            place.set_title(f"{title}, A = {count}", fontsize=9)
        axes_row[0].set_ylabel("computing, % of the step", fontsize=8)
    for place in places[-1]:
        place.set_xlabel("nodes of 8 GPUs", fontsize=8)
    legend = [Line2D([], [], color=color, label=scheme) for scheme, color in _COLORS.items()]
    legend += [
        Line2D([], [], color="black", linestyle=style, label=f"{gbit:g} Gbit/s a node")
        for gbit, style in zip(links, _STYLES, strict=False)
    ]
    legend.append(Line2D([], [], color="black", alpha=0.3, linewidth=3, label="state alone exceeds 80 GB"))
    canvas.legend(handles=legend, loc="lower center", ncols=4, fontsize=8, frameon=False)
    canvas.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def _panel(rows: Rows, links: Sequence[float], place: Axes) -> None:
    for scheme, color in _COLORS.items():
        for gbit, style in zip(links, _STYLES, strict=False):
            line = sorted((row["nodes"], row["efficiency"], row["fits"]) for row in _of(rows, scheme, gbit))
            if not line:
                continue
            nodes, shares, fits = zip(*line, strict=True)
            percent = [100 * share for share in shares]
            place.plot(nodes, percent, style, color=color, linewidth=1.4, marker=".", markersize=4)
            if not all(fits):
                place.plot(nodes, percent, color=color, alpha=0.25, linewidth=6)
    place.set_xscale("log", base=2)
    ticks = sorted({row["nodes"] for row in rows})
    place.set_xticks(ticks, [f"{each:,}" for each in ticks], fontsize=7, rotation=40)
    place.tick_params(axis="y", labelsize=7)
    place.set_ylim(0, 100)
    place.grid(alpha=0.3)


def _of(rows: Rows, scheme: str, gbit: float) -> Rows:
    return [row for row in rows if row["scheme"] == scheme and row["gbit"] == gbit]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("projections", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw([json.loads(path.read_text()) for path in args.projections], args.out)


if __name__ == "__main__":
    main()
