"""Measured runs on disk, and the rows that tables and plots read from them.

A file holds one place (one machine, or two emulated nodes), one model and one machine. Its records are keyed by
contestant, A and reduce dtype, so that a contest can be resumed, or repeated for some of the contestants. Numbers of
two machines never share a table.

[Note: The bound of a synchronous step]
What crosses the link once a step can hide behind the computation that surrounds it, and behind nothing else. Hop 2
sends gradients that exist from the last micro-batch's backward on; the refresh sends weights that the next step's
first forward uses. A step is synchronous if these weights come from these gradients, and if no weight is updated before
all gradients are known, as clipping by their norm demands. So it takes at least

    compute + max(0, hop 2 - last backward) + max(0, refresh - first forward)

with compute as measured for "compute alone", hop 2 and refresh as bytes over the link's speed, and for a micro-batch of
A a forward of compute / 3A and a backward of twice that: the matrix products of a backward are twice those of its
forward. Left out is whatever else costs time: the optimizer, exchanges inside the node, adding up gradients, headers.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contestants import ENTRIES, Entry
from benchmarks.network import bits_per_second
from benchmarks.task import COMPUTE_DTYPE, REDUCE_DTYPES

__all__ = ["FOLDER", "Range", "Results", "Row", "published", "ratio_of", "summarise"]

FOLDER = Path(__file__).parent / "results"


class Range(NamedTuple):
    """A middle, and what it lies between."""

    middle: float
    low: float
    high: float


def ratio_of(above: Range, below: Range) -> Range:
    return Range(above.middle / below.middle, above.low / below.high, above.high / below.low)


def published() -> list[Results]:
    """All that the pages show."""
    return [Results.load(path) for path in sorted(FOLDER.glob("*.json"))]


def summarise(ranks: Sequence[dict[str, Any]], *, nodes: int) -> dict[str, Any]:
    """One run, from what its ranks wrote. See [Note: How a step is timed] in worker.py."""
    finished = [max(marks) for marks in zip(*(rank["marks"] for rank in ranks), strict=True)]
    node_size = len(ranks) // nodes
    return {
        "seconds": [after - before for before, after in itertools.pairwise(finished)],
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "wire_bytes": [ranks[node * node_size]["sent_bytes"] for node in range(nodes)],  # sent by each node
        "ledger": {axis: sum(rank["ledger"][axis] for rank in ranks[:node_size]) for axis in ranks[0]["ledger"]},
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "state_bytes": {moment: [rank["state_bytes"][moment] for rank in ranks] for moment in ranks[0]["state_bytes"]},
        "kinds": ranks[0]["kinds"],
    }


@dataclass
class Results:
    """The contents of one file."""

    where: str  # "one-machine" or "two-nodes"
    settings: dict[str, Any]  # of the task and the network: the same for all records
    machine: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps(self.__dict__, indent=1) + "\n")
        os.replace(whole, path)  # an interrupted contest loses nothing

    @staticmethod
    def key(name: str, micro_batches: int, reduce: str) -> str:
        return f"{name}/A{micro_batches}/{reduce if ENTRIES[name].reduces else 'none'}"

    def record(self, name: str, micro_batches: int, reduce: str) -> dict[str, Any]:
        """The record of one key, made where there is none yet."""
        return self.records.setdefault(self.key(name, micro_batches, reduce), {"runs": [], "problem": None})

    def row(self, name: str, micro_batches: int, reduce: str) -> Row | None:
        """What the tables say about one key; None if it has not been tried."""
        record = self.records.get(self.key(name, micro_batches, reduce))
        if record is None or not (record["runs"] or record["problem"]):
            return None
        return Row(name, ENTRIES[name], record["runs"], record["problem"])

    def rows(self, micro_batches: int, reduce: str) -> list[Row]:
        """All rows of one table, in the order of ENTRIES."""
        found = (self.row(name, micro_batches, reduce) for name in ENTRIES)
        return [row for row in found if row is not None]

    def cells(self) -> list[tuple[int, str]]:
        """The (A, reduce dtype) of all tables."""
        pairs = {(int(key.split("/")[1][1:]), key.split("/")[2]) for key in self.records}
        order = list(REDUCE_DTYPES)
        return sorted((pair for pair in pairs if pair[1] in order), key=lambda pair: (order.index(pair[1]), pair[0]))

    def formula_bytes(self, reduce: str) -> float:
        """What one node of the hybrid must send per step: S ranks, (1 - 1/R) N/S elements each, there and back."""
        return self._crossing_bytes(REDUCE_DTYPES[reduce].itemsize) + self._crossing_bytes(COMPUTE_DTYPE.itemsize)

    def _crossing_bytes(self, width: int) -> float:
        replicas = self.settings["ranks"] // self.settings["node_size"]
        return (1 - 1 / replicas) * float(self.settings["parameters"]) * width

    def bound(self, micro_batches: int, reduce: str) -> Range | None:
        """Seconds of a step. See [Note: The bound of a synchronous step]; without a slow link it is compute alone."""
        compute = self.row("compute", micro_batches, reduce)
        if compute is None or not compute.runs:
            return None
        return Range(*(self._bound(seconds, micro_batches, reduce) for seconds in compute.seconds_range))

    def _bound(self, compute: float, micro_batches: int, reduce: str) -> float:
        speed = self.link_bytes_per_second
        if speed is None:
            return compute
        forward = compute / micro_batches / 3
        hop2 = self._crossing_bytes(REDUCE_DTYPES[reduce].itemsize) / speed
        refresh = self._crossing_bytes(COMPUTE_DTYPE.itemsize) / speed
        return compute + max(0.0, hop2 - 2 * forward) + max(0.0, refresh - forward)

    @property
    def link_bytes_per_second(self) -> float | None:
        rate = self.settings.get("rate")
        return bits_per_second(rate) / 8 if rate else None


@dataclass(frozen=True)
class Row:
    """One contestant at one A and reduce dtype."""

    name: str
    entry: Entry
    runs: list[dict[str, Any]]
    problem: str | None

    @property
    def seconds(self) -> list[float]:
        return [seconds for run in self.runs for seconds in run["seconds"]]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def seconds_range(self) -> Range:
        """Median of all steps, between the medians of runs; of one run, between its fastest and its slowest step."""
        each = [statistics.median(run["seconds"]) for run in self.runs] if len(self.runs) > 1 else self.seconds
        return Range(self.median, min(each), max(each))

    @property
    def wire_bytes(self) -> float:
        """Sent per step by the node that sends more."""
        return self.wire_range.middle

    @property
    def wire_range(self) -> Range:
        return _range([max(run["wire_bytes"]) for run in self.runs])

    @property
    def state_bytes(self) -> int:
        """Of the rank and the moment that hold most."""
        return max(held for run in self.runs for ranks in run["state_bytes"].values() for held in ranks)

    @property
    def scratch_bytes(self) -> int:
        """Of them, what layerzero keeps for the next exchange or gather, and whose contents nobody needs; peers: 0."""
        kinds = self.runs[0]["kinds"] or {}
        return int(kinds.get("reduce_buffer", 0) + kinds.get("idle_buffer", 0))

    @property
    def peak_bytes(self) -> float:
        """Of the rank that needs most, above what its imports need."""
        return self.peak_range.middle

    @property
    def peak_range(self) -> Range:
        return _range([max(run["peak_bytes"]) for run in self.runs])

    @property
    def losses(self) -> list[float]:
        """By step, of the run with most steps; runs repeat the same steps."""
        return max((run["losses"] for run in self.runs), key=len)

    @property
    def ledger_bytes(self) -> float | None:
        """Counted by layerzero for one node's ranks, on the axis between replicas."""
        ledger = self.runs[0]["ledger"]
        return float(ledger["replica"]) if "replica" in ledger else None


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))
