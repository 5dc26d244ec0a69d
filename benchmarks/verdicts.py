"""The bars that layerzero has set itself on two emulated nodes, and whether the results meet them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.contestants import ENTRIES
from benchmarks.results import Results, Row

__all__ = ["HYBRIDS", "LOSS_TOLERANCE", "Verdict", "losses_agree", "verdicts"]

HYBRIDS = ("layerzero", "layerzero-full")
LOSS_TOLERANCE = 0.005  # relative: bf16 keeps 8 bits, and contestants round at different places

# peers, how many times faster than the fastest of them we must be. FSDP2's full sharding is judged twice: without
# synchronisation between micro-batches it holds every gradient whole on each rank, so it is another trade.
_TIMES_FASTER = (
    (("fsdp2-full",), 6.0),
    (("fsdp2-full-no-sync",), 6.0),
    (("fsdp2-hsdp", "fsdp2-hsdp-keep", "fsdp2-hsdp-no-sync"), 1.5),
    (("deepspeed-hpz",), 2.5),
)


@dataclass(frozen=True)
class Verdict:
    """One bar for one of our configurations.

    Attributes:
        bar: what is asked, in words.
        ours: the name of our configuration.
        measured, needed: the same quantity.
        at_least: whether `measured` must reach `needed`, or must not exceed it.
        peer: what it was held against.
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


def verdicts(results: Results, micro_batches: int, reduce: str) -> list[Verdict]:
    """All bars whose contestants have results at this A and reduce dtype."""
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
    for names, times in _TIMES_FASTER:
        peers = [rows[name] for name in names if name in rows]
        if peers:
            best = min(peers, key=lambda row: row.median)
            bar = f"times faster than {ENTRIES[names[0]].label.partition(', all')[0]}"
            found.append(Verdict(bar, ours.name, best.median / ours.median, times, True, best.entry.label))
    hybrids = [row for row in rows.values() if row.entry.family in ("hybrid", "hpz")]
    if hybrids:
        least = min(hybrids, key=lambda row: row.state_bytes)
        bar = "model state below every hybrid peer's, ratio"
        ratio = ours.state_bytes / least.state_bytes
        found.append(Verdict(bar, ours.name, ratio, 1.0, False, least.entry.label))
        bare = (ours.state_bytes - ours.scratch_bytes) / least.state_bytes
        found.append(Verdict(f"{bar}, without our scratch", ours.name, bare, 1.0, False, least.entry.label))
    speed = results.link_bytes_per_second
    if speed is None:
        return found
    error = abs(ours.wire_bytes / results.formula_bytes(reduce) - 1)
    found.append(Verdict("bytes on the link off the formula by", ours.name, error, 0.03, False, "formula"))
    compute = results.row("compute", micro_batches, reduce)
    if compute is not None and compute.runs:
        link = ours.wire_bytes / speed
        bound = max(compute.median, link)
        what = "compute alone" if compute.median > link else "bytes / speed of the link"
        bar = "step over max(compute alone, bytes / speed)"
        found.append(Verdict(bar, ours.name, ours.median / bound, 1.25, False, f"{what}, {bound:.2f} s"))
    return found


def losses_agree(rows: list[Row]) -> tuple[int, float]:
    """The last step that all contestants of a table took, and how far their losses after it lie apart, relative."""
    trained = [row.losses for row in rows if row.runs and ENTRIES[row.name].family != "compute"]
    steps = min(map(len, trained))
    final = [losses[steps - 1] for losses in trained]
    return steps, (max(final) - min(final)) / min(final)
