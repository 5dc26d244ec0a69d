"""Report memory, traffic and wait times of a sharded model as named numbers for a logger, with :func:`metrics`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch.distributed as dist
from torch import nn

from layerzero.comm.traffic_counters import GATHERS, Collective
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.reports.memory_and_traffic import measure_memory
from layerzero.utils.text_tables import seconds_text, size_text, table

__all__ = ["metrics"]

_SHOWN = 3  # number of stragglers that are reported
_ALONG = {  # collectives, by the axis on which they run
    "zero3": (*GATHERS, Collective.HOP1),
    "replica": (Collective.HOP2, Collective.REFRESH),
}


class Metrics(dict[str, float]):
    """Values of metrics by name. ``str()`` formats them as a table with units."""

    def __str__(self) -> str:
        rows = []
        for name, value in self.items():
            kind = name.split("/")[1] if name.count("/") > 1 else ""
            text = (
                size_text(value)
                if kind in ("memory", "bytes")
                else seconds_text(value)
                if "seconds" in kind
                else f"{value:g}"
            )
            rows.append((name.removeprefix("layerzero/"), text))
        return table(("layerzero", "this rank"), rows)


def metrics(model: nn.Module, reset: bool = True, *, compare: bool = False) -> Metrics:
    """Return this rank's metrics by name, for TensorBoard, W&B or a log.

    Counters cover the time since the last reset. If `compare` is False, this function does not communicate.

    - ``layerzero/memory/KIND``: number of bytes currently allocated. KIND is a kind of memory in
      :class:`layerzero.MemoryReport`.
    - ``layerzero/bytes/AXIS``: number of bytes sent along an axis: ``zero3`` (inside the ZeRO-3 group), ``replica``
      (between replicas), ``control`` (small messages on the CPU), or ``model_parallel`` (such as the tensor-parallel
      axis).
    - ``layerzero/wait_seconds/COLLECTIVE``: number of seconds that the host has waited for ``gather``, ``regather``,
      ``hop1``, ``hop2``, ``refresh``, ... These waits are close to zero on accelerators, where streams wait instead. If
      ranks share memory, ``gather`` is the wait until the other ranks have read the old weights and written the new
      weights.
    - ``layerzero/steps/taken``, ``layerzero/steps/skipped``: number of steps that the model's optimizers have taken or
      skipped. A step counts as skipped if gradients are discarded without a step, for example if a ``GradScaler`` skips
      the step.

    With `compare`, the result also has the following numbers, which are the same on all ranks. To compute them, the
    host waits for collectives:

    - ``layerzero/waited_for/rank_N``: median wait time of the other ranks minus the wait time of rank N, in seconds,
      for the three ranks with the largest values. A rank that is regularly late waits least, because all other ranks
      wait for this rank.
    - ``layerzero/transfer_seconds/AXIS/ranks_N_M_...``: shortest wait time of any rank in a group, in seconds, for the
      slowest group on each axis. This wait is the duration of the transfer, because the rank that arrives last waits
      only for the link.

    Args:
        model: a sharded model.
        reset: if True, set the counters to zero, including those of :func:`layerzero.traffic`.
        compare: if True, also report stragglers and slow links. All ranks must then call this function.

    Example::

        for name, value in layerzero.metrics(model).items():
            writer.add_scalar(name, value, step)
    """
    lz_state = get_state(model)
    counters = lz_state.mesh_info.counters
    sent_bytes = Counter(dict.fromkeys(("zero3", "replica", "control"), 0))
    totals = counters.take() if reset else counters.totals()
    for (_, axis), nbytes in totals.bytes.items():
        sent_bytes[axis] += nbytes
    values = Metrics({f"layerzero/memory/{kind}": float(nbytes) for kind, nbytes in measure_memory(lz_state).items()})
    values |= {f"layerzero/bytes/{axis}": float(nbytes) for axis, nbytes in sent_bytes.items()}
    values |= {f"layerzero/wait_seconds/{collective}": seconds for collective, seconds in sorted(totals.waited.items())}
    values |= {f"layerzero/steps/{outcome}": float(totals.steps.get(outcome, 0)) for outcome in ("taken", "skipped")}
    if compare:
        values |= _compare_waits(lz_state, totals.waited)
    return values


def _compare_waits(lz_state: LayerZeroState, waited_here: Mapping[str, float]) -> dict[str, float]:
    model_ranks, mesh_info = lz_state.ranks, lz_state.mesh_info
    by_axis = {axis: sum(waited_here.get(each.value, 0.0) for each in along) for axis, along in _ALONG.items()}
    groups = {
        "zero3": dist.get_process_group_ranks(mesh_info.zero3_gather_comm.group),
        "replica": dist.get_process_group_ranks(mesh_info.replica_comm.group),
    }
    entries = [json.loads(text) for text in model_ranks.all_gather_text(json.dumps([by_axis, groups]))]
    waited = {rank: waits for rank, (waits, _) in zip(model_ranks.ranks, entries, strict=True)}
    values = rank_delays({rank: sum(waits.values()) for rank, waits in waited.items()})
    for axis in _ALONG:
        shortest = {
            tuple(groups[axis]): min(waited[rank][axis] for rank in groups[axis])
            for _, groups in entries
            if len(groups[axis]) > 1
        }
        if shortest:
            slowest = max(shortest, key=lambda ranks: (shortest[ranks], ranks))
            name = "_".join(map(str, slowest))
            values[f"layerzero/transfer_seconds/{axis}/ranks_{name}"] = shortest[slowest]
    return values


def rank_delays(waited: Mapping[int, float]) -> dict[str, float]:
    """Return the delays of the latest ranks in seconds, by metric name.

    The delay of a rank is the median wait time of the other ranks minus the wait time of that rank.

    Args:
        waited: number of seconds that each rank has waited, by rank.
    """
    delays: dict[int, float] = {}
    for rank, wait in waited.items():
        other_waits = [waits for other, waits in waited.items() if other != rank]
        if other_waits and (delay := median(other_waits) - wait) > 0:
            delays[rank] = delay
    slowest: Sequence[int] = sorted(delays, key=lambda rank: (-delays[rank], rank))[:_SHOWN]
    return {f"layerzero/waited_for/rank_{rank}": delays[rank] for rank in slowest}
