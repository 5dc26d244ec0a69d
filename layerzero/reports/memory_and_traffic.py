"""Report the memory and traffic of a sharded model, with :func:`memory` and :func:`traffic`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_states
from layerzero.engine.state import LayerZeroState
from layerzero.estimates.memory_estimate import device_bytes, estimate_memory, predicted_traffic
from layerzero.estimates.specs import specs_of
from layerzero.utils.text_tables import size_text, table
from layerzero.utils.torch_compat import tree_leaves


@dataclass(frozen=True)
class MemoryReport:
    """Memory that a sharded model uses on this rank, in bytes, by kind.

    Kinds of memory on the device, which is host memory if the model computes on a CPU:

    - ``zero1_shard``: masters, or 0 if the masters are inside the ZeRO-3 shard.
    - ``zero3_shard``: compute weights.
    - ``full_buffer``: gathered units, and the post-forward shards that `reshard_after_forward` keeps.
    - ``cached_buffer``: cached memory of freed full buffers. It is at most the memory of the root, one unit, the units
      that are gathered ahead, and the units that stay gathered.
    - ``accumulator``: accumulated gradients.
    - ``gradient_shard``: final gradients, or 0 if the final gradients are inside the accumulator. A backward
      pass that begins without zero_grad copies the final gradients out of the accumulator.
    - ``reduce_buffer``: scratch buffers for gradients that are about to be reduced, are sent or are received, and for
      refreshes that `Codecs.refresh` encodes. On a CPU, they are kept. On an accelerator, they are returned to torch's
      allocator between backward passes, and this kind is the maximum during a pass.
    - ``residual``: errors of encoded gradients that are added to the next gradients (`Codecs.hop2` with feedback). They
      are allocated by the first backward that reduces gradients.
    - ``refresh_state``: last change of each compute weight, from which a lossless codec predicts the next.
    - ``optimizer``: optimizer state. This kind is measured but not predicted.
    - ``outer``: anchors and momentum of :func:`layerzero.outer`. This kind is measured but not predicted.

    Kinds of host memory: ``host_accumulator`` with `Offload.grads`; ``host_zero1_shard``, ``host_gradient_shard``,
    ``host_optimizer`` and ``host_outer`` with `Offload.optimizer`; ``host_zero3_shard`` with `Offload.params`. The
    corresponding kinds on the device are then 0.

    If the ranks of a ZeRO-3 group share memory, each rank counts its own part, which is its ZeRO-3 shard and the
    gradients that other ranks read. These gradients are in ``reduce_buffer``, or in ``accumulator`` with
    ``accumulation="full"``.

    Attributes:
        predicted: number of bytes computed from layouts and settings. The prediction is valid between two steps, from
            the second step on, if units are called one after the other in the order of their registration, and if no
            other forward has run since the step. The measured ``reduce_buffer`` may be larger if parameters were
            unfrozen, or if reentrant checkpoints produce a gradient in several parts. If ranks do not share memory, the
            measured ``reduce_buffer`` is smaller before the first backward that reduces gradients, because it is
            allocated on first use.
        measured: number of bytes in the storages that currently exist.
        predicted_peak: predicted maximum number of bytes on the device during a step, including the measured optimizer
            state and the measured state of outer steps.
        measured_peak: maximum number of bytes on the device so far, as counted by the model's own pools. Activations
            and temporary allocations by torch or the optimizer are not included.
        shared_segment: number of bytes of shared memory that the ZeRO-3 group uses, as counted by the operating system.
            It includes the parts of all ranks and the pages of counters. Each rank reports the same number, or 0 if
            memory is not shared.

    In the printed table, the row "on the device" is the sum of all kinds on the device. The row "peak of a step" shows
    `predicted_peak` and `measured_peak`. The row "shared by the ZeRO-3 group" shows `shared_segment`, if it is not 0.
    Kinds whose predicted and measured values are both 0 are omitted.
    """

    predicted: dict[str, int]
    measured: dict[str, int]
    shared_segment: int = 0
    predicted_peak: int = 0
    measured_peak: int = 0

    @property
    def total(self) -> int:
        """Measured number of bytes on the device, summed over all kinds."""
        return device_bytes(self.measured)

    def __str__(self) -> str:
        kinds = [*self.measured, *(kind for kind in self.predicted if kind not in self.measured)]
        kinds = [kind for kind in kinds if self.measured.get(kind) or self.predicted.get(kind)]
        rows = [
            (
                kind,
                size_text(self.predicted[kind]) if kind in self.predicted else "",
                size_text(self.measured.get(kind, 0)),
            )
            for kind in kinds
        ]
        rows.append(("on the device", "", size_text(self.total)))
        rows.append(("peak of a step", size_text(self.predicted_peak), size_text(self.measured_peak)))
        if self.shared_segment:
            rows.append(("shared by the ZeRO-3 group", "", size_text(self.shared_segment)))
        return table(("memory of this rank", "predicted", "measured"), rows)


@dataclass(frozen=True)
class TrafficReport:
    """Collectives that this rank has called, and bytes that it has sent, since the last reset.

    Attributes:
        calls: number of calls by collective: ``gather``, ``regather`` (a gather for a backward pass, among as
            many ranks as `reshard_after_forward` specifies), ``hop1``, ``hop2``, ``refresh``, ``refresh_sizes`` (of
            encoded refreshes), ``metadata`` (one byte per parameter, and other control messages), ``gather_order`` (16
            bytes whenever units are called in a new order), ``scalar_reduce`` (norms), ``unshard``, ``broadcast``,
            ``owner_gather`` and ``owner_scatter`` (send full parameters to their owners and back, inside the ZeRO-3
            group), ``site_gradients`` and ``site_deltas`` (see :func:`layerzero.outer`). If ranks share memory, a
            ``gather`` sends no data.
        bytes: number of bytes sent, by collective. If ranks share memory, ``hop1`` counts the bytes that this rank has
            read from other ranks' memory.
        bytes_by_axis: number of bytes sent, by axis: ``zero3`` (inside the ZeRO-3 group), ``replica`` (between
            replicas), ``control`` (the bytes of ``metadata`` and ``gather_order``, on the CPU), ``model_parallel``
            (such as the tensor-parallel axis), ``site`` (between sites).
        predicted: predicted number of bytes that gathers, reductions and refreshes send, by collective, for the same
            number of calls. A collective is omitted if some units have called it more often than others. Refreshes are
            omitted if `Codecs.refresh` encodes them.
        transport: name of the transport inside the ZeRO-3 group: ``"process_group"`` or ``"shared_memory"``.
    """

    calls: dict[str, int]
    bytes: dict[str, int]
    bytes_by_axis: dict[str, int]
    predicted: dict[str, int] = field(default_factory=dict)
    transport: str = ""

    def __str__(self) -> str:
        rows = [
            (
                collective,
                str(calls),
                size_text(self.predicted[collective]) if collective in self.predicted else "",
                size_text(sent),
            )
            for collective, calls in self.calls.items()
            for sent in (self.bytes.get(collective, 0),)
        ]
        rows += [(f"axis {axis}", "", "", size_text(sent)) for axis, sent in self.bytes_by_axis.items()]
        rows += [("transport", self.transport, "", "")] if self.transport else []
        return table(("sent by this rank", "calls", "predicted", "measured"), rows)


def memory(model: nn.Module) -> MemoryReport:
    """Return the predicted and measured memory that a sharded model uses on this rank, in bytes, by kind.

    For a module that contains sharded models, the report contains sums over these models. The sum of their peaks is an
    upper bound on the peak of the module.

    Example::

        report = layerzero.memory(model)
        print(report.measured["zero1_shard"], report.predicted["zero1_shard"])
        print(report)  # a table
    """
    predicted: Counter[str] = Counter()
    measured: Counter[str] = Counter()
    shared_segment = predicted_peak = measured_peak = 0
    for lz_state in get_states(model).values():
        scratch = sum(pool.predicted_bytes for pool in _pools(lz_state))
        estimate = estimate_memory(specs_of(lz_state.units), lz_state.config, scratch=scratch)
        kinds = measure_memory(lz_state)
        predicted.update(estimate.kinds)
        measured.update(kinds)
        shared_segment += sum(transport.shared_bytes for transport in lz_state.transports)
        predicted_peak += estimate.peak + kinds["optimizer"] + kinds.get("outer", 0)
        full = kinds["full_buffer"] + kinds["cached_buffer"]
        measured_peak += device_bytes(kinds) - full + max(lz_state.pools.full.most_bytes, full)
    return MemoryReport(dict(predicted), dict(measured), shared_segment, predicted_peak, measured_peak)


def traffic(model: nn.Module, *, reset: bool = False) -> TrafficReport:
    """Return this rank's number of calls and number of bytes sent, by collective and by axis.

    On an axis of n ranks, a ring or direct algorithm sends n-1 times this rank's shard for a gather or refresh, and
    (n-1)/n of the buffer for hop 1 or hop 2. For a module that contains sharded models, the report contains sums over
    these models. If `reset` is True, the counters are set to zero after they have been read.
    """
    calls: Counter[str] = Counter()
    by_collective: Counter[str] = Counter()
    by_axis: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    unknown: set[str] = set()  # collectives without a prediction for at least one of the models
    transports = set()
    for lz_state in get_states(model).values():
        counters = lz_state.mesh_info.counters
        totals = counters.totals(reset=reset)
        calls.update(totals.calls)
        for (collective, axis), sent_bytes in totals.bytes.items():
            by_collective[collective] += sent_bytes
            by_axis[axis] += sent_bytes
        expected = _predicted_bytes(lz_state, totals.calls)
        predicted.update(expected)
        unknown |= totals.calls.keys() - expected.keys()
        transports.add(lz_state.transports[0].traits.name)
    known = {collective: count for collective, count in predicted.items() if collective not in unknown}
    return TrafficReport(dict(calls), dict(by_collective), dict(by_axis), known, ", ".join(sorted(transports)))


def _predicted_bytes(lz_state: LayerZeroState, calls: Mapping[str, int]) -> dict[str, int]:
    """Return the predicted number of sent bytes for each collective that all handles have called equally often."""
    predicted: dict[str, int] = {}
    for collective, sent_by_handle in predicted_traffic(specs_of(lz_state.units), lz_state.config).items():
        rounds, remainder = divmod(calls.get(collective, 0), len(sent_by_handle))
        if rounds and not remainder:
            predicted[collective] = rounds * sum(sent_by_handle)
    return predicted


def measure_memory(lz_state: LayerZeroState) -> dict[str, int]:
    """Return the number of bytes in the storages of a model that currently exist, by kind."""
    measured = Counter(dict.fromkeys(("zero1_shard", "zero3_shard", "full_buffer", "gradient_shard", "optimizer"), 0))
    for handle in lz_state.handles:
        _add_handle(measured, handle)
    pools = lz_state.pools
    measured["cached_buffer"] = pools.full.cached_bytes
    measured["accumulator"] = pools.accumulators.device_bytes
    measured["host_accumulator"] = pools.accumulators.host_bytes
    measured["reduce_buffer"] = sum(pool.most_bytes for pool in _pools(lz_state))
    tensors = [
        value
        for optimizer in lz_state.optimizers
        for value in tree_leaves(list(optimizer.inner.state.values()))  # type: ignore[attr-defined]
        if isinstance(value, Tensor)
    ]
    measured["host_optimizer" if lz_state.config.offload.optimizer else "optimizer"] = sum(map(_storage_bytes, tensors))
    for observer in lz_state.attached:
        measured.update(observer.kept_bytes())
    return dict(measured)


def _add_handle(measured: Counter[str], handle: Handle) -> None:
    """Add the bytes of the weights and the gradients of a handle."""
    weights, gradients = handle.weights, handle.gradients
    host = "host_" if weights.to_host is not None else ""
    measured["host_zero3_shard" if weights.host_shard is not None else "zero3_shard"] += weights.zero3_shard.nbytes
    measured["refresh_state"] += 0 if weights.last_change is None else weights.last_change.nbytes
    measured[f"{host}zero1_shard"] += 0 if weights.shares_master else _storage_bytes(weights.master)
    measured["full_buffer"] += handle.gathered_bytes
    if gradients is not None:
        final = gradients.final.storage
        measured[f"{host}gradient_shard"] += final.host_bytes if host else final.nbytes
        measured["residual"] += 0 if gradients.residual is None else gradients.residual.nbytes


def _pools(lz_state: LayerZeroState) -> list[BufferPool]:
    """Return the pool of scratch buffers and, if they are separate, the pools of the buffers that hop 1 sends."""
    send_pools = (transport.send_scratch for transport in lz_state.transports)
    return list(dict.fromkeys((lz_state.pools.scratch, *send_pools)))


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
