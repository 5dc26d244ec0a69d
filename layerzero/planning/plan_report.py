"""Define the result of :func:`layerzero.plan`, and format the result as text or as data for JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isinf
from typing import Any

from layerzero import LayerZeroConfig
from layerzero.extend import size_text, table
from layerzero.planning.cluster import Cluster
from layerzero.planning.estimator import Estimator, Row
from layerzero.planning.step_cost import ASSUMPTIONS, MARGIN, paying_links

_SHOWN = 12  # number of rows of layerzero in the text
_LINKS = (50.0, 200.0, 400.0)  # in Gbit/s per accelerator; with eight accelerators 400, 1,600 and 3,200 per node
_ONE_UNIT = "The whole model is one unit, so a gather collects all weights at once. `units` or --unit divides it."
_COLUMNS = ("scheme", "S", "accum", "offload", "reshard", "peak", "room", "host", "zero3", "between", "step")
_LEGEND = (
    "S: zero3_size, the number of ranks over which weights are sharded; accum: accumulation; reshard: "
    "reshard_after_forward, if it is 'step'; peak, room: bytes on an accelerator during a step, and bytes that remain "
    "free; offload, host: what is offloaded, and bytes in host memory, if any; zero3, between: bytes that a rank sends "
    "per step inside its ZeRO-3 group, and to other nodes; HFSDP: hybrid mode of Megatron-FSDP; ZeRO-1: Megatron's "
    "distributed optimizer."
)


@dataclass(frozen=True)
class Plan:
    """Result of :func:`layerzero.plan`. ``print(plan)`` prints the result as tables.

    Attributes:
        estimator: model, cluster and common settings.
        tokens: number of tokens per micro-batch and rank.
        rows: estimates of layerzero, one per combination of settings. Settings that fit into memory come first, the
            fastest first. The others follow, those that lack the least memory first.
        other_schemes: estimates of FSDP2, HSDP, HFSDP and ZeRO-1, from formulas.
        best: recommended row; None if no settings fit.
    """

    estimator: Estimator
    tokens: int
    rows: tuple[Row, ...]
    other_schemes: tuple[Row, ...]
    best: Row | None

    @property
    def cluster(self) -> Cluster:
        return self.estimator.cluster

    @property
    def numel(self) -> int:
        """Number of parameter elements in the model."""
        return sum(parameter.numel() for parameter in self.estimator.parameters)

    @property
    def trained_numel(self) -> int:
        """Number of elements of trainable parameters."""
        return sum(parameter.numel() for parameter in self.estimator.parameters if parameter.requires_grad)

    @property
    def config(self) -> LayerZeroConfig | None:
        """Recommended settings; None if no settings fit."""
        best = self.best
        if best is None or best.reshards is None:
            return None
        return self.estimator.settings(best.zero3_size, best.accumulation, best.offload, best.reshards)

    @cached_property
    def compared(self) -> tuple[Row, ...]:
        """Rows that are compared at several links: the recommended or closest row, and one of each other scheme."""
        last = {row.scheme: row for row in self.other_schemes}  # the one that fits, or the one with the largest S
        return (self.best or self.rows[0], *last.values())

    @property
    def links(self) -> tuple[float, ...]:
        """Speeds of the link between nodes at which schemes are compared, in Gbit/s per node; empty for one node."""
        if self.cluster.nodes == 1:
            return ()
        return tuple(sorted({self.cluster.node_link, *(each * self.cluster.accelerators for each in _LINKS)}))

    @property
    def why(self) -> str:
        """Text of the recommendation. If no settings fit, the text describes the closest settings."""
        best = self.best
        if best is not None:
            alike = best.zero3_size, best.accumulation, best.offload
            also = "".join(
                f" reshard_after_forward='step' fits as well: peak {size_text(row.peak)}, and a rank "
                f"sends {size_text(row.cost.zero3)} instead of {size_text(best.cost.zero3)} inside its ZeRO-3 group."
                for row in self.rows
                if row.reshards == "step" and (row.zero3_size, row.accumulation, row.offload) == alike
            )
            return f"Recommended: {best.label}, peak {size_text(best.peak)}." + also * (best.reshards != "step")
        closest = self.rows[0]
        lacking = [f"{size_text(closest.excess)} more per accelerator"] if closest.excess else []
        lacking += [f"{size_text(closest.host_excess)} more host memory per node"] if closest.host_excess else []
        return (
            f"No settings fit. The settings that come closest ({closest.label}) need {' and '.join(lacking)}. "
            "Smaller micro-batches, activation checkpointing, a larger zero3_size or more nodes reduce memory."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the plan as dicts, lists, strings and numbers, for JSON.

        ``docs/planning.md`` lists the keys.
        """
        return {
            "parameters": self.numel,
            "trained_parameters": self.trained_numel,
            "units": len(self.estimator.units),
            "cluster": self.cluster.as_dict(),
            "micro_batches": self.estimator.micro_batches,
            "tokens": self.tokens,
            "rows": [self._row_data(row) for row in self.rows],
            "other_schemes": [self._row_data(row) for row in self.other_schemes],
            "recommended": None if self.best is None else self._row_data(self.best),
            "why": self.why,
            "assumptions": ASSUMPTIONS,
        }

    def _row_data(self, row: Row) -> dict[str, Any]:
        cost = row.cost
        return {
            "scheme": row.scheme,
            "zero3_size": row.zero3_size,
            "accumulation": row.accumulation or None,
            "offload": list(row.offload),
            "reshard_after_forward": None if callable(row.reshards) else row.reshards,
            "fits": row.fits,
            "peak_bytes": row.peak,
            "room_bytes": self.cluster.room - row.peak,
            "host_bytes": row.host,
            "host_excess_bytes": row.host_excess,
            "memory_bytes": row.memory,
            "zero3_bytes": cost.zero3,
            "replica_bytes": cost.replica,
            "between_bytes": cost.between,
            "step_seconds": cost.seconds(),
            "link_seconds": {f"{link:g}": cost.seconds(link) for link in self.links},
            "hidden_from_gbit": cost.hidden_from,
        }

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the compared rows to a PNG, PDF or SVG file (requires matplotlib)."""
        from layerzero.planning.plot import draw  # noqa: PLC0415 - needs the optional matplotlib

        draw(self.compared, path)

    def as_text(self) -> str:
        """Return the answers to the three questions as tables, with at most twelve rows of layerzero."""
        cluster, num_units, count = self.cluster, len(self.estimator.units), self.estimator.micro_batches
        trained = f" ({_count_text(self.trained_numel)} trained)"
        activations = "" if self.estimator.compute.activation_bytes else "; activations are unknown and not counted"
        shown = [row for row in self.rows if row.fits or self.best is None][:_SHOWN]
        columns = zip(_COLUMNS, *(_cells(row) for row in (*shown, *self.other_schemes)), strict=True)
        header, *cells = zip(*(column for column in columns if any(column[1:])), strict=True)
        lines = [
            _wrapped(
                f"{_count_text(self.numel)} parameters{trained * (self.numel != self.trained_numel)} in "
                f"{num_units} unit{'s' * (num_units > 1)}; {count} micro-batch{'es' * (count > 1)} of "
                f"{self.tokens:,} tokens per rank and step{activations}"
            ),
            _wrapped(str(cluster)),
            *([_wrapped(_ONE_UNIT)] if num_units == 1 else ()),
            "",
            _wrapped(
                f"Does it fit into {size_text(cluster.room)} ({cluster.memory:.4g} GB minus a reserve of "
                f"{cluster.reserve:.4g} GB)? And what crosses nodes?"
            ),
            table(header, cells),
            _wrapped(_LEGEND),
            "",
            _wrapped(f"Memory per rank of {self.compared[0].label}:"),
            _wrapped(", ".join(f"{kind} {size_text(n)}" for kind, n in self.compared[0].kinds.items())),
            "",
            *self._link_lines(),
            _wrapped(ASSUMPTIONS),
            "",
            _wrapped(self.why),
        ]
        return "\n".join(lines)

    def _link_lines(self) -> Iterable[str]:
        if not self.links:
            return ()
        ours = self.compared[0]
        lines = []
        for row in self.compared:
            pays = _links_text(paying_links(ours.cost, row.cost)) if row is not ours else ""
            times = [seconds_text(row.cost.seconds(link)) for link in self.links]
            label = row.label if row is not ours else f"{row.scheme} S={row.zero3_size}"
            label += " (does not fit)" * (not row.fits)
            lines.append((label, *times, f"{row.cost.hidden_from:,.4g}", pays))
        header = ("step time", *(f"{link:,.4g}" for link in self.links), "hidden from", "layerzero pays")
        return (
            _wrapped(
                "At which link does it pay? Columns are Gbit/s per node. From the speed in the column `hidden from` "
                "on, the link does not prolong a step. The last column says where a step of layerzero is shorter by "
                f"more than {MARGIN:.0%}."
            ),
            table(header, lines),
        )

    def __str__(self) -> str:
        return self.as_text()


def _cells(row: Row) -> Sequence[str]:
    cost = row.cost
    lacking = [f"-{size_text(row.excess)}"] if row.excess else []
    lacking += [f"host -{size_text(row.host_excess)}"] if row.host_excess else []
    return (
        *(row.scheme, str(row.zero3_size), str(row.accumulation), "+".join(row.offload)),
        *("step" if row.reshards == "step" else "", size_text(row.peak)),
        ", ".join(lacking) or size_text(cost.cluster.room - row.peak),
        size_text(row.host) if row.host else "",
        *map(size_text, (cost.zero3, cost.between)),
        seconds_text(cost.seconds()),
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 78, break_on_hyphens=False)


def _count_text(number: float) -> str:
    """Return a number of parameters as text, such as ``6.74 B``."""
    return size_text(number).removesuffix("B").rstrip().replace("G", "B")


def seconds_text(value: float) -> str:
    if value >= 1 or value == 0:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"


def _links_text(links: tuple[float, float] | None) -> str:
    """Return the last column of the table of links."""
    if links is None:
        return "at no link"
    slowest, fastest = links
    if isinf(fastest):
        return f"above {slowest:,.4g}" if slowest else "at any link"
    return f"{slowest:,.4g} to {fastest:,.4g}" if slowest else f"below {fastest:,.4g}"
