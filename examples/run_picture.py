"""Draw a run of train_gpt.py: losses, memory by kind, and bytes between nodes (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from scheme_costs import Cost

import layerzero


def draw(
    path: str,
    losses: Sequence[float],
    memory: layerzero.MemoryReport,
    traffic: layerzero.TrafficReport,
    costs: Sequence[Cost],
) -> None:
    """Write a PNG, SVG or PDF file. Values of layerzero are measured on this rank, those of other schemes computed."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["memory", "sent"]])
    axes["loss"].plot(range(1, len(losses) + 1), losses, color="#1b6ca8")
    axes["loss"].set(xlabel="optimizer step", ylabel="training loss, nats per byte")

    others = [cost for cost in costs if cost.scheme != "layerzero"]
    labels = ["layerzero\n(measured)", *(f"{cost.scheme}\n(formula)" for cost in others)]
    start = 0.0
    for kind, nbytes in memory.measured.items():
        if nbytes and not kind.startswith("host_"):
            axes["memory"].barh(labels[:1], nbytes / 1e6, left=start, label=kind)
            start += nbytes / 1e6
    states = [cost.state_bytes / 1e6 for cost in others]
    axes["memory"].barh(labels[1:], states, color="#b0b0b0", label="all states, without scratch memory")
    axes["memory"].set(xlabel="memory per rank, MB", xlim=(0, 1.15 * max(start, *states)))
    sent = [traffic.bytes_by_axis.get("replica", 0) / len(losses), *(cost.slow_bytes for cost in others)]
    sent = [nbytes / 1e6 for nbytes in sent]
    axes["sent"].barh(labels, sent, color=["#1b6ca8", *["#b0b0b0"] * len(others)])
    axes["sent"].set(xlabel="sent to other nodes per rank and step, MB", xlim=(0, 1.15 * max(*sent, 1e-9)))
    for name, values in (("memory", [start, *states]), ("sent", sent)):
        for place, value in enumerate(values):
            axes[name].text(value, place, f" {value:.3g}", va="center")
        axes[name].invert_yaxis()
    figure.legend(*axes["memory"].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
