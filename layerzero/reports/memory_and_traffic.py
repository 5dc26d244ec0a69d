"""Reports of the memory and traffic of a sharded model: :func:`memory` and :func:`traffic`."""

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

    Kinds on the device:

    - ``zero1_shard``: masters; 0 if they are inside the ZeRO-3 shard
    - ``zero3_shard``: compute weights
    - ``full_buffer``: gathered units, and the post-forward shards of `reshard_after_forward`
    - ``idle_buffer``: cached memory of full buffers that are freed; at most that of the root, one unit, the units
      gathered ahead of it, and the units that stay gathered
    - ``accumulator``: accumulated gradients
    - ``gradient_shard``: final gradients; 0 if they are inside the accumulator, until a backward that begins without
      zero_grad copies them
    - ``reduce_buffer``: reused scratch buffers of gradients that arrive, are sent and are received
    - ``optimizer``: optimizer state, measured only

    Kinds in host memory: ``host_accumulator`` with `offload_grads`; ``host_zero1_shard``, ``host_gradient_shard`` and
    ``host_optimizer`` with `offload_optimizer`; ``host_zero3_shard`` with `offload_params`. The kinds on the device
    that these replace are then 0.

    If the ranks of a ZeRO-3 group share memory, each rank counts its own part: its ZeRO-3 shard, and the gradients that
    other ranks read. These are in ``reduce_buffer``, and with ``accumulation="full"`` in ``accumulator``.

    Attributes:
        predicted: bytes by formula, from layouts and settings. The prediction holds between two steps, from the second
            step on, if units are called one after the other in the order of their registration. Measured
            ``reduce_buffer`` may be larger if calls of units interleave (their gradients arrive at the same time) or
            parameters were unfrozen. It is smaller before the first backward that reduces, because it is allocated on
            first use.
        measured: bytes of the storages that exist now.
        predicted_peak: predicted maximum of bytes on the device during a step, including the measured bytes of the
            optimizer.
        measured_peak: maximum of bytes on the device so far, as counted by the model's own pools. Activations and
            temporary allocations of torch or the optimizer are not included.
        node: bytes of the shared memory of the ZeRO-3 group, as counted by the system: the parts of all ranks and some
            pages of counters. Each rank reports the same number; 0 if memory is not shared.
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
    """Collectives and bytes that this rank has sent since the last reset.

    Attributes:
        calls: number of calls by collective: ``gather``, ``regather`` (for a backward, among the number of ranks that
            `reshard_after_forward` gives), ``hop1``, ``hop2``, ``refresh``, ``agree`` (one byte per parameter),
            ``order`` (16 bytes whenever units are called in a new order), ``norm``, ``unshard``, ``broadcast``,
            ``collect`` and ``hand_back`` (full parameters, to their owners and back, inside the ZeRO-3 group).
            With shared memory, a ``gather`` sends nothing.
        bytes: bytes sent, by collective. With shared memory, ``hop1`` counts the bytes that this rank has read from
            other ranks' memory.
        bytes_by_axis: bytes sent, by axis: ``zero3`` (inside the ZeRO-3 group), ``replica`` (between replicas),
            ``control`` (the few bytes of ``agree`` and ``order``, on the CPU), ``across`` (model-parallel axes, such as
            those of tensor parallelism).
        predicted: bytes by collective, for gathers, reductions and refreshes: by formula, for the same number of calls,
            if all handles have been called equally often.
        transport: how the ranks of the ZeRO-3 group move weights and gradients: ``"process_group"`` or
            ``"shared_memory"``.
    """

    calls: dict[str, int]
    bytes: dict[str, int]
    bytes_by_axis: dict[str, int]
    predicted: dict[str, int] = field(default_factory=dict)
    transport: str = ""

    def __str__(self) -> str:
        rows = [
            (exchange, str(calls), size(self.predicted[exchange]) if exchange in self.predicted else "", size(sent))
            for exchange, calls in self.calls.items()
            for sent in (self.bytes.get(exchange, 0),)
        ]
        rows += [(f"axis {axis}", "", "", size(sent)) for axis, sent in self.bytes_by_axis.items()]
        rows += [("transport", self.transport, "", "")] if self.transport else []
        return table(("sent by this rank", "calls", "predicted", "measured"), rows)


def memory(model: nn.Module) -> MemoryReport:
    """Return the predicted and measured bytes of a sharded model on this rank, by kind.

    For a module that contains sharded models, the report holds sums over these models. The sum of their peaks is an
    upper bound of the peak.

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
    """Return the sums of `counts` by key, in the order in which keys first occur."""
    found: dict[str, int] = {}
    for each in counts:
        for key, count in each.items():
            found[key] = found.get(key, 0) + count
    return found


def _memory(runtime: LayerZeroState) -> MemoryReport:
    scratch = sum(pool.predicted_bytes for pool in _pools(runtime))
    foreseen = estimate_memory(specs_of(runtime.units), runtime.config, scratch=scratch)
    measured = measure(runtime)
    return MemoryReport(
        predicted=foreseen.kinds,
        measured=measured,
        node=sum(transport.shared_bytes for transport in runtime.transports),
        predicted_peak=foreseen.peak + measured["optimizer"],
        measured_peak=on_device(measured)
        - measured["idle_buffer"]
        - measured["full_buffer"]
        + max(runtime.buffers.full.most_bytes, measured["full_buffer"] + measured["idle_buffer"]),
    )


def traffic(model: nn.Module, *, reset: bool = False) -> TrafficReport:
    """Return the calls and bytes that this rank has sent, by collective and axis; `reset` sets the counters to zero.

    On an axis of n ranks, a ring or direct algorithm sends n-1 times this rank's shard for a gather or refresh, and
    (n-1)/n of the buffer for hop 1 or hop 2. For a module that contains sharded models, the report holds sums over
    these models.
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
        transport=", ".join(sorted({report.transport for report in reports})),
    )


def _traffic(runtime: LayerZeroState, *, reset: bool) -> TrafficReport:
    ledger = runtime.mesh_info.counters
    by_exchange: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    for (exchange, axis), sent in ledger.bytes.items():
        by_exchange[exchange] += sent
        by_axis[axis] += sent
    predicted = _formulas(runtime, ledger.calls)
    report = TrafficReport(
        dict(ledger.calls), dict(by_exchange), dict(by_axis), predicted, runtime.transports[0].traits.name
    )
    if reset:
        ledger.reset()
    return report


def _formulas(runtime: LayerZeroState, calls: Mapping[str, int]) -> dict[str, int]:
    """Return the predicted bytes of each collective in `calls` that all of its handles have called equally often."""
    found: dict[str, int] = {}
    for exchange, places in predicted_traffic(specs_of(runtime.units), runtime.config).items():
        rounds, rest = divmod(calls.get(exchange, 0), len(places))
        if rounds and not rest:
            found[exchange] = rounds * sum(places)
    return found


def measure(runtime: LayerZeroState) -> dict[str, int]:
    measured = Counter(dict.fromkeys(("zero1_shard", "zero3_shard", "full_buffer", "gradient_shard", "optimizer"), 0))
    buffers = runtime.buffers
    for handle in runtime.handles:
        weights = handle.weights
        kind = "host_zero3_shard" if weights.host_shard is not None else "zero3_shard"
        measured[kind] += weights.zero3_shard.nbytes
        where = "host_" if weights.to_host is not None else ""
        measured[f"{where}zero1_shard"] += 0 if weights.shares_master else _bytes(weights.master)
        measured["full_buffer"] += handle.gathered_bytes
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
    """Return the pool of scratch buffers and, if they are different, the pools of buffers that hop 1 sends."""
    sent = (transport.send_buffers for transport in runtime.transports)
    return list(dict.fromkeys((runtime.buffers.scratch, *sent)))


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
