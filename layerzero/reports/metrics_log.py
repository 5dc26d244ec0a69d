"""What a sharded model holds, sends and waits for, as flat numbers for a logger: :func:`metrics`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch.distributed as dist
from torch import nn

from layerzero.comm.traffic_counters import GATHERS, Collective, TrafficCounters
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.reports.memory_and_traffic import measure
from layerzero.utils.text_tables import seconds, size, table

__all__ = ["metrics"]

_SHOWN = 3  # ranks that were waited for most
_ALONG = {  # exchanges by the axis that carries them
    "zero3": (*GATHERS, Collective.HOP1, Collective.NODE_SUM, Collective.HAND_OVER),
    "replica": (Collective.HOP2, Collective.REFRESH),
}


class Metrics(dict[str, float]):
    """Numbers by flat names; printed, a table with units."""

    def __str__(self) -> str:
        rows = []
        for name, value in self.items():
            kind = name.split("/")[1] if name.count("/") > 1 else ""
            text = size(value) if kind in ("memory", "bytes") else seconds(value) if "seconds" in kind else f"{value:g}"
            rows.append((name.removeprefix("layerzero/"), text))
        return table(("layerzero", "this rank"), rows)


def metrics(model: nn.Module, reset: bool = True, *, compare: bool = False) -> Metrics:
    """This rank's numbers since the last call, with flat names, for TensorBoard, W&B or a log.

    Nothing is exchanged, unless ranks are to be compared.

    - ``layerzero/memory/KIND``: bytes that are held now; the kinds of :class:`layerzero.MemoryReport`
    - ``layerzero/bytes/AXIS``: sent to ``zero3`` (the node), ``replica`` (other nodes), ``control``; ``across``: along
      axes of tensor parallelism
    - ``layerzero/wait_seconds/EXCHANGE``: that the program has waited for ``gather``, ``regather``, ``hop1``, ``hop2``,
      ``refresh``, ...; next to nothing on devices, whose streams wait. In shared memory ``hand_over`` takes the place
      of ``gather`` and ``refresh``: for the others to have read the old weights, and written the new ones
    - ``layerzero/steps/taken``, ``layerzero/steps/skipped``: of the model's optimizers; a step is skipped where
      gradients are forgotten that nobody has stepped, as a ``GradScaler`` lets them be

    And with `compare`, the same on all ranks, where the host waits for exchanges:

    - ``layerzero/waited_for/rank_N``: seconds that the other ranks have waited longer than rank N, as their median; of
      the three ranks with the most. Who comes late again and again waits least, as all others wait for it
    - ``layerzero/transfer_seconds/AXIS/ranks_N_M_...``: of the group on each axis that is slowest, what even the rank
      that came last has waited: what the link takes, whoever is late

    Args:
        model: from :func:`layerzero.shard_model`.
        reset: begin the next count at zero, that of :func:`layerzero.traffic` as well.
        compare: look for stragglers and slow links. All ranks must call this then.

    Example::

        for name, value in layerzero.metrics(model).items():
            writer.add_scalar(name, value, step)
    """
    runtime = get_state(model)
    ledger = runtime.mesh_info.counters
    sent = Counter(dict.fromkeys(("zero3", "replica", "control"), 0))
    for (_, axis), nbytes in ledger.bytes.items():
        sent[axis] += nbytes
    found = Metrics({f"layerzero/memory/{kind}": float(nbytes) for kind, nbytes in measure(runtime).items()})
    found |= {f"layerzero/bytes/{axis}": float(nbytes) for axis, nbytes in sent.items()}
    found |= {f"layerzero/wait_seconds/{exchange}": seconds for exchange, seconds in sorted(ledger.waited.items())}
    found |= {f"layerzero/steps/{what}": float(ledger.steps[what]) for what in ("taken", "skipped")}
    if compare:
        found |= _compared(runtime, ledger)
    if reset:
        ledger.reset()
    return found


def _compared(runtime: LayerZeroState, ledger: TrafficCounters) -> dict[str, float]:
    everyone, topology = runtime.ranks, runtime.mesh_info
    by_axis = {axis: sum(ledger.waited.get(each.value, 0.0) for each in along) for axis, along in _ALONG.items()}
    groups = {
        "zero3": dist.get_process_group_ranks(topology.zero3_gather_comm.group),
        "replica": dist.get_process_group_ranks(topology.replica_comm.group),
    }
    told = [json.loads(text) for text in everyone.all_gather_text(json.dumps([by_axis, groups]))]
    waited = {rank: waits for rank, (waits, _) in zip(everyone.ranks, told, strict=True)}
    found = waited_for({rank: sum(waits.values()) for rank, waits in waited.items()})
    for axis in _ALONG:
        least = {tuple(of[axis]): min(waited[rank][axis] for rank in of[axis]) for _, of in told if len(of[axis]) > 1}
        if least:
            slowest = max(least, key=lambda ranks: (least[ranks], ranks))
            name = "_".join(map(str, slowest))
            found[f"layerzero/transfer_seconds/{axis}/ranks_{name}"] = least[slowest]
    return found


def waited_for(waited: Mapping[int, float]) -> dict[str, float]:
    """The ranks that others wait for, by what each has waited itself."""
    late: dict[int, float] = {}
    for rank, own in waited.items():
        others = [waits for other, waits in waited.items() if other != rank]
        if others and (more := median(others) - own) > 0:
            late[rank] = more
    most: Sequence[int] = sorted(late, key=lambda rank: (-late[rank], rank))[:_SHOWN]
    return {f"layerzero/waited_for/rank_{rank}": late[rank] for rank in most}
