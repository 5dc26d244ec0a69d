"""What a sharded model holds and sends: :func:`memory` and :func:`traffic`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.hooks import get_states
from layerzero.engine.state import LayerZeroState
from layerzero.estimates.memory_estimate import estimate_memory, on_device, predicted_traffic
from layerzero.estimates.specs import specs_of
from layerzero.utils.text_tables import size, table

__all__ = ["MemoryReport", "TrafficReport", "measure", "memory", "traffic"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, by kind.

    Kinds: ``zero1_shard`` (masters; 0 where they lie inside the ZeRO-3 shard), ``zero3_shard`` (compute weights),
    ``full_buffer`` (gathered units, and what `reshard_after_forward` keeps of them), ``idle_buffer`` (memory that these
    take turns in, while none is there; at most the root's, one unit's, those of the units gathered ahead of it, and
    those that stay), ``accumulator``, ``host_accumulator`` (of `offload_grads`, in host memory), ``gradient_shard`` (0
    if it is inside the accumulator, until a backward that begins without zero_grad copies it),
    ``reduce_buffer`` (scratch that is reused: what lands, is sent and is received), ``optimizer`` (measured only). With
    `offload_optimizer` there are ``host_zero1_shard``, ``host_gradient_shard`` and ``host_optimizer`` in host memory,
    with `offload_params` ``host_zero3_shard``, and 0 of these on the device.

    Where the ranks of a node share memory, each counts its own part of it: its ZeRO-3 shard, and the gradients that
    others read, in ``reduce_buffer`` and, where ``"full"`` accumulates, ``accumulator``.

    Attributes:
        predicted: by formula, from the layouts and settings, for a model between two steps, the second one or a later
            one, whose units are called one after the other in the order of their registration. Measured may be more,
            in ``reduce_buffer``, where units are not (their gradients land at the same time), or where parameters were
            unfrozen; less before the first backward that reduces, as ``reduce_buffer`` is allocated when it is used.
        measured: of the storages that exist now.
        predicted_peak: the most bytes on the device at any time in a step, with the optimizer's as they are measured.
        measured_peak: the most so far, as the model's own pools count them. Activations, and what an optimizer or
            torch allocates for a moment, are not in it.
        node: bytes that the ranks of the node share, all their parts and some pages for signals, as the system counts
            them: one number for the node, which each of its ranks reports. 0 where they exchange.
    """

    predicted: dict[str, int]
    measured: dict[str, int]
    node: int = 0
    predicted_peak: int = 0
    measured_peak: int = 0

    @property
    def total(self) -> int:
        """Measured bytes of all kinds on the device."""
        return on_device(self.measured)

    def __str__(self) -> str:
        kinds = [*self.measured, *(kind for kind in self.predicted if kind not in self.measured)]
        kinds = [kind for kind in kinds if self.measured.get(kind) or self.predicted.get(kind)]
        rows = [
            (kind, size(self.predicted[kind]) if kind in self.predicted else "", size(self.measured.get(kind, 0)))
            for kind in kinds
        ]
        rows.append(("on the device", "", size(self.total)))
        rows.append(("peak of a step", size(self.predicted_peak), size(self.measured_peak)))
        if self.node:
            rows.append(("shared by the node, in all", "", size(self.node)))
        return table(("memory of this rank", "predicted", "measured"), rows)


@dataclass(frozen=True)
class TrafficReport:
    """What this rank has sent since the last reset.

    Attributes:
        calls: by exchange: ``gather``, ``regather`` (for a backward, among as many ranks as `reshard_after_forward`
            says), ``hop1``, ``hop2``, ``refresh``, ``agree`` (one byte a parameter), ``order``
            (16 bytes whenever units are called in another order than before), ``norm``, ``unshard``, ``broadcast``,
            ``collect`` and ``hand_back`` (whole parameters, to their owners and back, inside the node).
            Where the ranks of a node share memory, ``node_sum`` takes the place of ``hop1``, and there are no gathers;
            ``hand_over`` counts the refreshes.
        bytes: by exchange; of ``node_sum``, those that this rank has read in the memory of others.
        bytes_by_axis: by axis: ``zero3`` (inside a node), ``replica`` (between nodes), ``control`` (the few bytes of
            ``agree`` and ``order``, on the CPU), ``across`` (of further axes, such as tensor parallel ones).
        predicted: by exchange, of gathers, reductions and refreshes: by formula, for as many calls, where each of the
            handles has been called as often as the others.
    """

    calls: dict[str, int]
    bytes: dict[str, int]
    bytes_by_axis: dict[str, int]
    predicted: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [
            (exchange, str(calls), size(self.predicted[exchange]) if exchange in self.predicted else "", size(sent))
            for exchange, calls in self.calls.items()
            for sent in (self.bytes.get(exchange, 0),)
        ]
        rows += [(f"axis {axis}", "", "", size(sent)) for axis, sent in self.bytes_by_axis.items()]
        return table(("sent by this rank", "calls", "predicted", "measured"), rows)


def memory(model: nn.Module) -> MemoryReport:
    """Predicted and measured bytes of a sharded model on this rank, by kind.

    For a module that holds sharded models, returns sums. The sum of their peaks is at least the peak of all.

    Example::

        report = layerzero.memory(model)
        print(report.measured["zero1_shard"], report.predicted["zero1_shard"])
        print(report)  # a table
    """
    reports = [_memory(runtime) for runtime in get_states(model).values()]
    if len(reports) == 1:
        return reports[0]
    return MemoryReport(
        predicted=_total(report.predicted for report in reports),
        measured=_total(report.measured for report in reports),
        node=sum(report.node for report in reports),
        predicted_peak=sum(report.predicted_peak for report in reports),
        measured_peak=sum(report.measured_peak for report in reports),
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum by key; keys keep their order."""
    found: dict[str, int] = {}
    for each in counts:
        for key, count in each.items():
            found[key] = found.get(key, 0) + count
    return found


def _memory(runtime: LayerZeroState) -> MemoryReport:
    scratch = sum(pool.predicted_bytes for pool in _pools(runtime))
    foreseen = estimate_memory(specs_of(runtime.units), runtime.config, scratch=scratch)
    measured = measure(runtime)
    shared = next((handle.shared for handle in runtime.handles if handle.shared), None)
    return MemoryReport(
        predicted=foreseen.kinds,
        measured=measured,
        node=0 if shared is None else shared.barrier.memory.held_bytes,
        predicted_peak=foreseen.peak + measured["optimizer"],
        measured_peak=on_device(measured)
        - measured["idle_buffer"]
        - measured["full_buffer"]
        + max(runtime.buffers.full.most_bytes, measured["full_buffer"] + measured["idle_buffer"]),
    )


def traffic(model: nn.Module, *, reset: bool = False) -> TrafficReport:
    """Calls and bytes that this rank has sent, by exchange and axis; `reset` starts the next count at zero.

    A ring or a direct exchange sends, on an axis of n ranks: gather and refresh n-1 times this rank's shard, hop 1 and
    hop 2 (n-1)/n of the buffer. For a module that holds sharded models, returns sums.
    """
    reports = [_traffic(runtime, reset=reset) for runtime in get_states(model).values()]
    if len(reports) == 1:
        return reports[0]
    predicted = [report.predicted for report in reports]
    unknown = {exchange for report in reports for exchange in report.calls.keys() - report.predicted.keys()}
    return TrafficReport(
        calls=_total(report.calls for report in reports),
        bytes=_total(report.bytes for report in reports),
        bytes_by_axis=_total(report.bytes_by_axis for report in reports),
        predicted={exchange: count for exchange, count in _total(predicted).items() if exchange not in unknown},
    )


def _traffic(runtime: LayerZeroState, *, reset: bool) -> TrafficReport:
    ledger = runtime.mesh_info.counters
    by_exchange: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    for (exchange, axis), sent in ledger.bytes.items():
        by_exchange[exchange] += sent
        by_axis[axis] += sent
    predicted = _formulas(runtime, ledger.calls)
    report = TrafficReport(dict(ledger.calls), dict(by_exchange), dict(by_axis), predicted)
    if reset:
        ledger.reset()
    return report


def _formulas(runtime: LayerZeroState, calls: Mapping[str, int]) -> dict[str, int]:
    """Bytes of as many calls, if all handles have been called as often."""
    found: dict[str, int] = {}
    for exchange, places in predicted_traffic(specs_of(runtime.units)).items():
        rounds, rest = divmod(calls.get(exchange, 0), len(places))
        if rounds and not rest:
            found[exchange] = rounds * sum(places)
    return found


def measure(runtime: LayerZeroState) -> dict[str, int]:
    measured = Counter(dict.fromkeys(("zero1_shard", "zero3_shard", "full_buffer", "gradient_shard", "optimizer"), 0))
    buffers = runtime.buffers
    for handle in runtime.handles:
        weights = "host_zero3_shard" if handle.in_host is not None else "zero3_shard"
        measured[weights] += _bytes(handle.zero3_shard) if handle.shared is None else handle.zero3_shard.nbytes
        where = "host_" if handle.to_host is not None else ""
        measured[f"{where}zero1_shard"] += 0 if handle.shares_master else _bytes(handle.master)
        measured["full_buffer"] += handle.full_bytes + handle.whole.nbytes
        if handle.gradients is not None:
            final = handle.gradients.final.storage
            measured[f"{where}gradient_shard"] += final.host_bytes if where else final.nbytes
    measured["idle_buffer"] = buffers.full.cached_bytes
    measured["accumulator"] = buffers.accumulators.device_bytes
    measured["host_accumulator"] = buffers.accumulators.host_bytes
    measured["reduce_buffer"] = sum(pool.allocated_bytes for pool in _pools(runtime))
    tensors = [
        value
        for optimizer in runtime.optimizers
        for state in optimizer.inner.state.values()  # type: ignore[attr-defined]
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    measured["host_optimizer" if runtime.config.offload_optimizer else "optimizer"] = sum(
        _bytes(tensor) for tensor in tensors
    )
    return dict(measured)


def _pools(runtime: LayerZeroState) -> list[BufferPool]:
    """Each once: scratch, and what hop 1 sends."""
    buffers = runtime.buffers
    return [buffers.scratch] if buffers.outgoing is buffers.scratch else [buffers.scratch, buffers.outgoing]


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
