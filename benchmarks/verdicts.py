"""Performance targets for the developers of layerzero: ``python -m benchmarks.verdicts``.

The results are only printed. The docs show comparisons instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Results, Row, published

__all__ = ["HYBRIDS", "Verdict", "main", "verdicts"]

HYBRIDS = ("layerzero", "layerzero-full")
_HSDP = ("fsdp2-hsdp", "fsdp2-hsdp-keep", "fsdp2-hsdp-no-sync")

# Setup, label and names of the peers, required speed relative to the fastest of them.
_TIMES_FASTER = (
    ("one-machine", "FSDP2 HSDP", _HSDP, 3.5),
    ("one-machine", "FSDP2 full sharding", ("fsdp2-full",), 4.5),
    ("two-nodes", "FSDP2 HSDP", _HSDP, 2.0),
    ("two-nodes", "FSDP1 _HYBRID_SHARD_ZERO2", ("fsdp1-hybrid-zero2",), 1.3),
    ("two-nodes", "FSDP2 full sharding", ("fsdp2-full",), 5.5),
)
_JUDGED = 4  # A of the targets
_OVER_BOUND = {"one-machine": 1.3, "two-nodes": 1.25}


@dataclass(frozen=True)
class Verdict:
    """Result of one target for one configuration of layerzero.

    Attributes:
        bar: description of the target.
        ours: name of the configuration.
        measured, needed: measured and required value of the same quantity.
        at_least: True: `needed` is a minimum; False: it is a maximum.
        peer: reference of the comparison.
    """

    bar: str
    ours: str
    measured: float
    needed: float
    at_least: bool
    peer: str

    @property
    def met(self) -> bool:
        return self.measured >= self.needed if self.at_least else self.measured <= self.needed

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:<6} {self.ours:<16} {self.bar}: {self.measured:.3g} {sign} {self.needed:g} ({self.peer})"


def verdicts(results: Results, micro_batches: int, reduce: str) -> list[Verdict]:
    """Return verdicts on all targets whose contestants have results for `micro_batches` and the reduce dtype."""
    rows = {row.name: row for row in results.rows(micro_batches, reduce) if row.runs}
    found = []
    for name in HYBRIDS:
        if name in rows:
            found += _hybrid(results, rows, rows[name], micro_batches, reduce)
    zero1 = [row for name, row in rows.items() if name.startswith("deepspeed-zero1")]
    if "layerzero-zero1" in rows and zero1:
        best = min(zero1, key=lambda row: row.median)
        ratio = best.median / rows["layerzero-zero1"].median
        found.append(Verdict("not slower than DeepSpeed ZeRO-1", "layerzero-zero1", ratio, 1.0, True, best.entry.label))
    return found


def _hybrid(results: Results, rows: dict[str, Row], ours: Row, micro_batches: int, reduce: str) -> list[Verdict]:
    found = []
    for where, what, names, times in _TIMES_FASTER:
        peers = [rows[name] for name in names if name in rows]
        if peers and where == results.where:
            best = min(peers, key=lambda row: row.median)
            bar = f"times faster than {what}"
            found.append(Verdict(bar, ours.name, best.median / ours.median, times, True, best.entry.label))
    hybrids = [row for row in rows.values() if row.entry.family in ("hybrid", "hpz")]
    if hybrids:
        least = min(hybrids, key=lambda row: row.state_bytes)
        ratio = ours.state_bytes / least.state_bytes
        bar = "model state with scratch, over every hybrid peer's"
        found.append(Verdict(bar, ours.name, ratio, 1.0, False, least.entry.label))
    if results.link_bytes_per_second is not None:
        error = abs(ours.wire_bytes / results.formula_bytes(reduce) - 1)
        found.append(Verdict("bytes on the link off the formula by", ours.name, error, 0.03, False, "formula"))
    bound = results.bound(micro_batches, reduce)
    if bound is not None:
        ratio, needed = ours.median / bound.middle, _OVER_BOUND[results.where]
        bar = "step over the bound"
        found.append(Verdict(bar, ours.name, ratio, needed, False, f"{bound.middle:.2f} s"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="*", help="by default what is published")
    args = parser.parse_args(arguments)
    chosen = [Results.load(path) for path in args.results] or published()
    for results in chosen:
        for a, reduce in results.cells():
            if a == _JUDGED:
                print(f"{results.where}, A = {a}, reduction in {reduce}")
                for verdict in verdicts(results, a, reduce):
                    print(f"  {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
