"""Predict the memory and traffic of a rank from the specs of its units.

:func:`estimate_memory` adds weights, gradients, full buffers (full_buffers.py) and scratch buffers
(scratch_buffers.py). :func:`optimizer_bytes` returns the size of the optimizer state. planning/estimator.py adds both
for :func:`layerzero.plan`, with the activations. In a run, :func:`layerzero.memory` measures the optimizer state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from layerzero.comm.codecs import EncodedPartsSpec, has_feedback, residual_numel
from layerzero.comm.collectives import Collective
from layerzero.config import LayerZeroConfig
from layerzero.engine.gradient_offload import accumulator_bytes
from layerzero.engine.rank_traits import RankTraits
from layerzero.engine.reduction_spec import ReductionStage
from layerzero.estimates.full_buffers import simulate_full_buffers
from layerzero.estimates.scratch_buffers import count_scratch
from layerzero.estimates.specs import HandleSpec, UnitSpec
from layerzero.layout.shard_grid import Extent, ShardGrid

_STEP = 4  # size of a step counter in bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory of a rank in bytes, excluding optimizer state."""

    kinds: dict[str, int]  # memory by kind, as in `layerzero.MemoryReport`
    peak: int  # maximum memory on the device at any time during a step


def optimizer_bytes(units: Sequence[UnitSpec], numbers: int) -> int:
    """Return the size in bytes of the optimizer state on one rank.

    The state has `numbers` values per element, in the dtype of the masters, and one step counter per parameter.
    """
    total = 0
    for unit in units:
        for handle in unit.handles:
            for slot in handle.layout.slots if handle.trainable else ():
                own = unit.traits.grid.slot_slice(handle.layout, slot, Extent.ZERO1)
                total += numbers * (own.stop - own.start) * handle.precision.master.itemsize + _STEP
    return total


def estimate_memory(
    units: Sequence[UnitSpec], config: LayerZeroConfig, *, scratch: int | None = None
) -> MemoryEstimate:
    """Return the predicted memory of the rank for which `units` were planned.

    Args:
        units: specs of all units on the rank. The root must be first.
        scratch: size in bytes of the scratch buffers for reductions, which is included in the result. If None, it is
            planned from `units`.
    """
    if scratch is None:
        scratch = count_scratch(units, config).nbytes
    kinds: Counter[str] = Counter()
    for unit in units:
        for handle in unit.handles:
            kinds.update(_handle_bytes(handle, unit, config))
    kinds["accumulator"], kinds["host_accumulator"] = _accumulator_bytes(units, config)
    kinds["reduce_buffer"] = scratch
    full = simulate_full_buffers(units, config.prefetch)
    of_passes = device_bytes(kinds) + full.peak
    kinds["cached_buffer"], kinds["full_buffer"] = full.idle, full.kept
    return MemoryEstimate(dict(kinds), of_passes)


def held_bytes(units: Sequence[UnitSpec], config: LayerZeroConfig) -> int:
    """Return the number of bytes used on the device between two steps, without scratch buffers or optimizer state."""
    handles = [(handle, unit) for unit in units for handle in unit.handles]
    of_handles = sum(device_bytes(_handle_bytes(handle, unit, config)) for handle, unit in handles)
    kept = (  # frozen weights that stay gathered
        sum(handle.gathered_sizes(unit.traits))
        for handle, unit in handles
        if not handle.trainable and not unit.reshard_after_backward
    )
    return of_handles + sum(kept) + _accumulator_bytes(units, config)[0]


def predicted_traffic(units: Sequence[UnitSpec], config: LayerZeroConfig) -> dict[str, list[int]]:
    """Return the number of bytes that a rank sends in each call: a list with one entry per handle, by collective.

    Reductions and refreshes are omitted for handles whose ZeRO-1 shards have different lengths, because their ranks
    send different amounts. Refreshes are also omitted if any of them is encoded, because the number of bytes then
    depends on the weights.
    """
    sent_bytes: dict[str, list[int]] = {}

    def record(collective: Collective, nbytes: int) -> None:
        sent_bytes.setdefault(collective.value, []).append(nbytes)

    encoded = any(handle.encodes_refresh for unit in units for handle in unit.handles)
    for unit in units:
        grid = unit.traits.grid
        for handle in unit.handles:
            for nbytes in _gathered_shards(handle, unit.traits) if grid.zero3_size > 1 else ():
                record(Collective.GATHER, (grid.zero3_size - 1) * nbytes)
            if kept_bytes := unit.post_forward_bytes_of(handle):
                record(Collective.REGATHER, (unit.reshard_after_forward - 1) * kept_bytes)
            if handle.layout.bounds or not handle.trainable:
                continue
            if grid.replicas > 1 and not encoded:
                record(Collective.REFRESH, (grid.replicas - 1) * (_zero3_bytes(handle, grid) // grid.replicas))
            for stage in handle.reduction_spec.stages:
                record(stage.collective, _reduction_bytes(stage, handle, unit.traits, config))
    return sent_bytes


def _zero3_bytes(handle: HandleSpec, grid: ShardGrid) -> int:
    """Return the size of the ZeRO-3 shard in the compute dtype."""
    return grid.numel(handle.layout, Extent.ZERO3) * handle.precision.compute.itemsize


def _gathered_shards(handle: HandleSpec, traits: RankTraits) -> list[int]:
    """Return the number of bytes that a rank sends to each other rank, for each collective of a gather."""
    if handle.extension is not None:
        return [received // traits.grid.zero3_size for received in handle.extension.received]
    if traits.transport.shares_memory:
        return [0]
    return [handle.coded // traits.grid.zero3_size or _zero3_bytes(handle, traits.grid)]


def _reduction_bytes(stage: ReductionStage, handle: HandleSpec, traits: RankTraits, config: LayerZeroConfig) -> int:
    """Return the number of bytes that a rank sends in a stage of a reduction between equal ZeRO-1 shards."""
    grid, is_hop1 = traits.grid, stage.collective is Collective.HOP1
    if stage.codec is not None:
        return sum(EncodedPartsSpec.of(stage.codec, handle.layout, grid, stage.wire_dtype).to_each)
    in_place = is_hop1 and traits.transport.shares_memory and handle.has_persistent_send_buffer(config)
    dtype = handle.precision.master if in_place else stage.wire_dtype
    return (
        ((grid.zero3_size if is_hop1 else grid.replicas) - 1) * grid.numel(handle.layout, stage.target) * dtype.itemsize
    )


def device_bytes(kinds: Mapping[str, int]) -> int:
    return sum(size for kind, size in kinds.items() if not kind.startswith("host_"))


def _handle_bytes(handle: HandleSpec, unit: UnitSpec, config: LayerZeroConfig) -> dict[str, int]:
    grid, precision = unit.traits.grid, handle.precision
    in_host = handle.in_host
    prefix = "host_" if in_host else ""
    weights = "host_" if unit.traits.weights_in_host else ""
    shares_master = precision.master == precision.compute and not in_host and not weights
    own_bytes = grid.numel(handle.layout, Extent.ZERO1) * precision.master.itemsize
    stays_on_device = not (config.offload.grads or in_host or handle.set_aside)
    inside_zero3_shard = stays_on_device and handle.reduction_spec.fits_final(handle.layout, grid, precision.master)
    return {
        "zero1_shard": 0,
        "gradient_shard": 0,
        f"{prefix}zero1_shard": 0 if shares_master else own_bytes,
        f"{prefix}gradient_shard": own_bytes if handle.trainable and not inside_zero3_shard else 0,
        "zero3_shard": 0,
        f"{weights}zero3_shard": _zero3_bytes(handle, grid),
        "full_buffer": 0,
        "residual": _residual_bytes(handle, grid),
        "refresh_state": _refresh_state_bytes(handle, grid, config),
    }


def _residual_bytes(handle: HandleSpec, grid: ShardGrid) -> int:
    """Return the size in bytes of the residuals that a hop-2 codec with error feedback stores."""
    codecs = [stage.codec for stage in handle.reduction_spec.stages if stage.codec is not None]
    if not handle.trainable or not any(has_feedback(codec) for codec in codecs):
        return 0
    return residual_numel(handle.layout, grid) * torch.bfloat16.itemsize


def _refresh_state_bytes(handle: HandleSpec, grid: ShardGrid, config: LayerZeroConfig) -> int:
    """Return the size of the last changes of weights, from which lossless refreshes are predicted."""
    codec = config.codecs.refresh
    if not handle.encodes_refresh or codec is None or not (isinstance(codec, str) or codec.predicts):
        return 0
    return grid.numel(handle.layout, Extent.ZERO3) * torch.int16.itemsize


def _accumulator_bytes(units: Sequence[UnitSpec], config: LayerZeroConfig) -> tuple[int, int]:
    """Return the sizes in bytes of the accumulators on the device and in host memory."""
    sizes = [
        unit.traits.grid.numel(handle.layout, handle.reduction_spec.accumulator_extent)
        * handle.accumulator_dtype.itemsize
        for unit in units
        for handle in unit.handles
        if handle.trainable and handle.reduction_spec.accumulator_extent is not Extent.ZERO1
    ]
    return accumulator_bytes(sizes, offloaded=config.offload.grads)
