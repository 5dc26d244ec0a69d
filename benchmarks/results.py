"""Measured runs on disk, and the rows of tables and plots.

A file has the results of one setup (one machine, or two emulated nodes), one model and one machine. Its records are
keyed by contestant, A and reduce dtype, so that a contest can be resumed, or repeated for some contestants. A table
never mixes numbers of two machines.

[Note: Bound of a synchronous step]
Communication between nodes, once per step, can overlap only with the computation next to it. Hop 2 sends gradients,
which exist after the backward of the last micro-batch has started. The refresh sends weights, which the first forward
of the next step uses. A step is synchronous if these weights result from these gradients, and if no weight is updated
before all gradients are known, as gradient clipping requires. The minimum time of such a step is

    compute + max(0, hop 2 - last backward) + max(0, refresh - first forward)

Here compute is the measured time of "compute alone", and hop 2 and refresh are bytes over the speed of the link. Each
of the A micro-batches has a forward of compute / 3A and a backward of twice that, because a backward has twice the
matrix products of its forward. The bound ignores the optimizer, collectives inside the node, additions of gradients and
packet headers.
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

__all__ = ["FOLDER", "Range", "Results", "Row", "published", "ratio_of", "summarize"]

FOLDER = Path(__file__).parent / "results"


class Range(NamedTuple):
    """Middle value with lower and upper bound."""

    middle: float
    low: float
    high: float

    def scaled(self, factor: float) -> Range:
        return Range(*(factor * each for each in self))


def ratio_of(above: Range, below: Range) -> Range:
    return Range(above.middle / below.middle, above.low / below.high, above.high / below.low)


def published() -> list[Results]:
    """Return all results that the docs show."""
    return [Results.load(path) for path in sorted(FOLDER.glob("*.json"))]


def summarize(ranks: Sequence[dict[str, Any]], *, nodes: int) -> dict[str, Any]:
    """Combine the results of all ranks into one run. See [Note: Step timing] in worker.py."""
    finished = [max(marks) for marks in zip(*(rank["marks"] for rank in ranks), strict=True)]
    node_size = len(ranks) // nodes
    return {
        "seconds": [after - before for before, after in itertools.pairwise(finished)],
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "wire_bytes": [ranks[node * node_size]["sent_bytes"] for node in range(nodes)],  # bytes sent by each node
        "ledger": {axis: sum(rank["ledger"][axis] for rank in ranks[:node_size]) for axis in ranks[0]["ledger"]},
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "state_bytes": {moment: [rank["state_bytes"][moment] for rank in ranks] for moment in ranks[0]["state_bytes"]},
        "kinds": ranks[0]["kinds"],
    }


@dataclass
class Results:
    """Contents of one results file."""

    where: str  # "one-machine" or "two-nodes"
    settings: dict[str, Any]  # settings of task and network, the same for all records
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
        os.replace(whole, path)  # atomic, so that an interrupted contest loses nothing

    @staticmethod
    def key(name: str, micro_batches: int, reduce: str) -> str:
        return f"{name}/A{micro_batches}/{reduce if ENTRIES[name].reduces else 'none'}"

    def record(self, name: str, micro_batches: int, reduce: str) -> dict[str, Any]:
        """Return the record of one key; create it if it does not exist."""
        return self.records.setdefault(self.key(name, micro_batches, reduce), {"runs": [], "problem": None})

    def row(self, name: str, micro_batches: int, reduce: str) -> Row | None:
        """Return the row of one key; None if there is no run and no failure."""
        record = self.records.get(self.key(name, micro_batches, reduce))
        if record is None or not (record["runs"] or record["problem"]):
            return None
        return Row(name, ENTRIES[name], record["runs"], record["problem"])

    def rows(self, micro_batches: int, reduce: str) -> list[Row]:
        """Return all rows of one table, in the order of ENTRIES."""
        found = (self.row(name, micro_batches, reduce) for name in ENTRIES)
        return [row for row in found if row is not None]

    def cells(self) -> list[tuple[int, str]]:
        """Return the (A, reduce dtype) of all tables."""
        pairs = {(int(key.split("/")[1][1:]), key.split("/")[2]) for key in self.records}
        order = list(REDUCE_DTYPES)
        return sorted((pair for pair in pairs if pair[1] in order), key=lambda pair: (order.index(pair[1]), pair[0]))

    def formula_bytes(self, reduce: str) -> float:
        """Return the bytes that one node of the hybrid must send per step.

        Each of its S ranks sends (1 - 1/R) N/S elements of gradients, and as many of weights.
        """
        return self._crossing_bytes(REDUCE_DTYPES[reduce].itemsize) + self._crossing_bytes(COMPUTE_DTYPE.itemsize)

    def _crossing_bytes(self, width: int) -> float:
        replicas = self.settings["ranks"] // self.settings["node_size"]
        return (1 - 1 / replicas) * float(self.settings["parameters"]) * width

    def bound(self, micro_batches: int, reduce: str) -> Range | None:
        """Return the minimum seconds of a step; see [Note: Bound of a synchronous step].

        Without a slow link this is the time of "compute alone".
        """
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
    """Runs of one contestant with one A and reduce dtype."""

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
        """Median of all steps, with the range of the medians of runs; with one run, the range of its steps."""
        each = [statistics.median(run["seconds"]) for run in self.runs] if len(self.runs) > 1 else self.seconds
        return Range(self.median, min(each), max(each))

    @property
    def wire_bytes(self) -> float:
        """Bytes per step of the node that sends more."""
        return self.wire_range.middle

    @property
    def wire_range(self) -> Range:
        return _range([max(run["wire_bytes"]) for run in self.runs])

    @property
    def state_bytes(self) -> int:
        """Largest bytes of model state over ranks and times in a step."""
        return max(held for run in self.runs for ranks in run["state_bytes"].values() for held in ranks)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of model state in layerzero's cached and reduction buffers, with unused contents; 0 for peers."""
        kinds = self.runs[0]["kinds"] or {}
        return int(kinds.get("reduce_buffer", 0) + kinds.get("cached_buffer", 0))

    @property
    def peak_bytes(self) -> float:
        """Peak memory in bytes of the rank that needs most, above its memory after imports."""
        return self.peak_range.middle

    @property
    def peak_range(self) -> Range:
        return _range([max(run["peak_bytes"]) for run in self.runs])

    @property
    def losses(self) -> list[float]:
        """Losses by step, of the run with most steps; all runs repeat the same steps."""
        return max((run["losses"] for run in self.runs), key=len)

    @property
    def ledger_bytes(self) -> float | None:
        """Bytes that layerzero has counted on the replica axis for the ranks of one node; None for peers."""
        ledger = self.runs[0]["ledger"]
        return float(ledger["replica"]) if "replica" in ledger else None


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))
