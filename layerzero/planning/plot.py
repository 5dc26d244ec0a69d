"""Draw rows of a plan: memory by kind, and the duration of a step by the speed of the link between nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from layerzero.planning.estimator import Row


def draw(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write a picture of rows for the same cluster to a PNG, PDF or SVG file (requires matplotlib).

    For a cluster of one node, all step times are constant.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - needed only for a picture
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a picture of a plan needs matplotlib. Run: pip install matplotlib") from error
    cluster, figure = rows[0].cost.cluster, Figure(figsize=(13, 5), layout="constrained")
    memory, times = figure.subplots(1, 2)
    labels, starts = [row.label.replace(", ", ",\n", 1) for row in rows], [0.0] * len(rows)
    for kind in dict.fromkeys(kind for row in rows for kind in row.kinds if not kind.startswith("host_")):
        sizes = [row.kinds.get(kind, 0) / 1e9 for row in rows]
        memory.barh(labels, sizes, left=starts, label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    memory.axvline(cluster.room / 1e9, color="black", linestyle="--", label="available")
    memory.set_xlabel("GB per rank at the peak of a step")
    memory.invert_yaxis()
    slowest, fastest = cluster.accelerators * 10.0, cluster.accelerators * 800.0
    speeds = [slowest * (fastest / slowest) ** (index / 99) for index in range(100)]
    for label, row in zip(labels, rows, strict=True):
        times.plot(speeds, [row.cost.seconds(speed) for speed in speeds], label=label)
    times.axvline(cluster.node_link, color="black", linestyle="--", label="this cluster")
    times.set(xscale="log", yscale="log", xlabel="link between nodes, Gbit/s per node", ylabel="seconds per step")
    for axes in (memory, times):
        axes.legend(fontsize="small")
    figure.savefig(path)
