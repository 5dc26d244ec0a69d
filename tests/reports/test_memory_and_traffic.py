"""Counted bytes equal the formulas of docs/architecture.md, and measured memory equals predicted memory.

The full buffer of a resharded unit holds no storage, and nothing grows over steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import layerzero
from layerzero import PrecisionPolicy
from layerzero.engine.hooks import get_state
from layerzero.engine.hyperparameter_check import DIGEST_BYTES
from layerzero.estimates.memory_estimate import held_bytes
from layerzero.estimates.specs import specs_of
from tests.support.models import IntegerNet, TiedTransformer, exact_model, integer_batch, integer_loss, integer_net
from tests.support.ranks import on_ranks, run_ranks

SHARDINGS = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # data-parallel ranks: ZeRO-3 sizes
MODES = ("sharded", "full", "local")


@dataclass(frozen=True)
class Precision:
    """Dtypes of compute weights, of hop 1 and of hop 2."""

    compute: torch.dtype
    reduce: torch.dtype
    replica_reduce: torch.dtype

    @property
    def settings(self) -> dict[str, object]:
        policy = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)
        return {"mp_policy": PrecisionPolicy.of(policy, replica_reduce_dtype=self.replica_reduce)}


FP32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = (
    Precision(BF16, FP32, BF16),
    Precision(FP32, FP32, FP32),
    Precision(BF16, BF16, FP32),
    Precision(BF16, FP32, FP32),
)


def sharded_net(mesh: object, **settings: object) -> tuple[nn.Module, layerzero.ShardedOptimizer]:
    """Return a sharded IntegerNet after its first step, which may have more agreements."""
    model, optimizer = exact_model(mesh=mesh, **settings)
    one_step(model, optimizer, dist.get_rank(), 1)
    return model, optimizer


def backward(model: nn.Module, rank: int, *, inside_no_sync: bool = False) -> None:
    with layerzero.no_sync(model) if inside_no_sync else nullcontext():
        integer_loss(model, integer_batch(rank=rank)).backward()


def one_step(model: nn.Module, optimizer: layerzero.ShardedOptimizer, rank: int, micro_batches: int) -> None:
    for index in range(micro_batches):
        backward(model, rank, inside_no_sync=index + 1 < micro_batches)
    optimizer.step()
    optimizer.zero_grad()


def traffic_of_a_step(model: nn.Module, optimizer: layerzero.ShardedOptimizer, rank: int, micro_batches: int):
    layerzero.traffic(model, reset=True)
    one_step(model, optimizer, rank, micro_batches)
    return layerzero.traffic(model, reset=True)


def padded_sizes(model: nn.Module) -> list[int]:
    """Return the elements G of each handle, padding included."""
    return [handle.layout.numel for handle in get_state(model).handles]


def sent(sizes: Sequence[int], axis: int, dtype: torch.dtype, *, share: int = 1, times: int = 1) -> int:
    """Return the bytes that a rank sends if `1/share` of each handle goes `times` over an axis of `axis` ranks."""
    total = sum(Fraction(size, share) for size in sizes) * (1 - Fraction(1, axis)) * dtype.itemsize * times
    assert total.denominator == 1
    return int(total)


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _count(rank: int, zero3_size: int) -> None:
    world = dist.get_world_size()
    mesh, replicas = layerzero.init_mesh(zero3_size), world // zero3_size
    for precision, mode in itertools.product(PRECISIONS[: world + 1], MODES):
        model, optimizer = sharded_net(mesh, accumulation=mode, **precision.settings)
        sizes = padded_sizes(model)
        for micro_batches in (1, 4):
            case = f"D={world} S={zero3_size} A={micro_batches} {mode} {precision}"
            traffic = traffic_of_a_step(model, optimizer, rank, micro_batches)
            hop1s = 1 if mode == "full" else micro_batches
            hop2s = micro_batches if mode == "local" else 1
            # Sums that layerzero itself adds are sent in the compute dtype.
            hop1 = precision.reduce if mode == "full" else min(precision.compute, precision.reduce, key=_width)
            hop2 = precision.replica_reduce
            if mode == "local" and zero3_size == 1:
                hop2 = min(precision.compute, hop2, key=_width)
            expected_bytes = {
                "gather": sent(sizes, zero3_size, precision.compute, times=2 * micro_batches),
                "hop1": sent(sizes, zero3_size, hop1, times=hop1s),
                "hop2": sent(sizes, replicas, hop2, share=zero3_size, times=hop2s),
                "refresh": sent(sizes, replicas, precision.compute, share=zero3_size),
            }
            expected_calls = {
                "gather": 2 * micro_batches * len(sizes) * (zero3_size > 1),
                "hop1": hop1s * len(sizes) * (zero3_size > 1),
                "hop2": hop2s * len(sizes) * (replicas > 1),
                "refresh": len(sizes) * (replicas > 1),
            }
            assert {name: traffic.bytes.get(name, 0) for name in expected_bytes} == expected_bytes, case
            assert {name: traffic.calls.get(name, 0) for name in expected_calls} == expected_calls, case
            assert set(traffic.calls) - set(expected_calls) <= {"metadata", "gather_order"}, f"{case}: {traffic}"
            by_axis = {axis: traffic.bytes_by_axis.get(axis, 0) for axis in ("zero3", "replica")}
            assert by_axis == {
                "zero3": expected_bytes["gather"] + expected_bytes["hop1"],
                "replica": expected_bytes["hop2"] + expected_bytes["refresh"],
            }, case
            used = sum(1 for _ in model.parameters()) + DIGEST_BYTES
            few = (zero3_size - 1 + replicas - 1) * used + traffic.bytes.get("gather_order", 0)
            assert traffic.bytes_by_axis.get("control", 0) == few, f"{case}: a byte a parameter, a digest of settings"
        again = traffic_of_a_step(model, optimizer, rank, 4)
        assert "gather_order" not in again.calls, f"{case}: a loop that repeats itself is predicted"


@pytest.mark.default_sample(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("data_parallel", "zero3_size"),
    [
        pytest.param(each, size, marks=[pytest.mark.slow] * (each == 4 and size != 2))
        for each, sizes in SHARDINGS.items()
        for size in sizes
    ],
)
def test_a_step_sends_exactly_what_the_formulas_say(data_parallel: int, zero3_size: int) -> None:
    run_ranks(_count, zero3_size, world_size=data_parallel, shared_memory="off")


@on_ranks(shared_memory="off")
def test_bytes_between_nodes_depend_on_the_number_of_micro_batches_only_in_local_mode(rank: int) -> None:
    # (1 - 1/R) * (N/S) * (A' * replica_reduce bytes + compute bytes), with A' = A for "local", otherwise 1;
    # see "Process groups" in architecture.md.
    mesh = layerzero.init_mesh(2)
    for mode, precision in itertools.product(MODES, PRECISIONS[:2]):
        model, optimizer = sharded_net(mesh, accumulation=mode, **precision.settings)
        for micro_batches in (1, 6):
            reduced = micro_batches if mode == "local" else 1
            each = reduced * precision.replica_reduce.itemsize + precision.compute.itemsize
            expected = sum(padded_sizes(model)) // 2 // 2 * each
            traffic = traffic_of_a_step(model, optimizer, rank, micro_batches)
            assert traffic.bytes_by_axis["replica"] == expected, f"{mode} {precision} A={micro_batches}"


def calls_of(traffic: layerzero.TrafficReport) -> dict[str, int]:
    """Return nonzero call counts except "gather_order", which a first pass needs because its order is unknown."""
    return {name: calls for name, calls in traffic.calls.items() if calls and name != "gather_order"}


@on_ranks(shared_memory="off")
def test_no_sync_reduces_inside_a_node_in_sharded_mode_and_over_all_ranks_in_local_mode(rank: int) -> None:
    mesh = layerzero.init_mesh(2)
    for mode in MODES:
        model, optimizer = sharded_net(mesh, accumulation=mode)
        handles = len(padded_sizes(model))
        layerzero.traffic(model, reset=True)
        for _ in range(3):
            backward(model, rank, inside_no_sync=True)
        traffic = layerzero.traffic(model, reset=True)
        expected = {"gather": 6 * handles} | ({"hop1": 3 * handles} if mode != "full" else {})
        expected |= {"hop2": 3 * handles} if mode == "local" else {}
        assert calls_of(traffic) == expected, f"{mode}: {traffic}"
        assert (traffic.bytes_by_axis.get("replica", 0) > 0) == (mode == "local"), mode
        assert not traffic.bytes.get("metadata", 0), mode
        optimizer.step()
        traffic = layerzero.traffic(model)
        counted = {name: traffic.calls.get(name, 0) for name in ("gather", "hop1", "hop2", "refresh")}
        late_hop1s = handles if mode == "full" else 0
        late_hop2s = 0 if mode == "local" else handles
        late = {"gather": 0, "hop1": late_hop1s, "hop2": late_hop2s, "refresh": handles}
        assert counted == late, f"{mode}: {traffic}"


@on_ranks(shared_memory="off")
def test_gathers_follow_resharding_and_evaluation_and_each_plain_backward_reduces(rank: int) -> None:
    mesh = layerzero.init_mesh(2)
    for settings, forwards, gathers in (
        ({"reshard_after_forward": False}, 1, 1),
        ({"prefetch": 0}, 1, 2),
        ({"prefetch": 3}, 1, 2),
    ):
        model, optimizer = sharded_net(mesh, **settings)
        handles = len(padded_sizes(model))
        assert traffic_of_a_step(model, optimizer, rank, forwards).calls["gather"] == gathers * handles, str(settings)
    # Every plain backward is reduced, but the step alone refreshes.
    backward(model, rank)
    backward(model, rank)
    optimizer.step()
    traffic = layerzero.traffic(model, reset=True)
    assert (traffic.calls["hop1"], traffic.calls["hop2"], traffic.calls["refresh"]) == (
        2 * handles,
        2 * handles,
        handles,
    )
    with torch.no_grad():
        model(integer_batch()[0])
    traffic = layerzero.traffic(model, reset=True)
    assert calls_of(traffic) == {"gather": handles}
    optimizer.zero_grad()
    report = layerzero.traffic(model)
    assert not any(report.calls.values()) and not any(report.bytes.values()), "zero_grad sends nothing"


def _kinds_predicted(model: nn.Module, zero3_size: int, mode: str, precision: Precision) -> dict[str, int]:
    """Return the bytes between two passes after a backward, with padding: N/D, N/S or N elements of each kind."""
    world, total = dist.get_world_size(), sum(padded_sizes(model))
    shares_master = precision.compute == FP32
    return {
        "zero1_shard": 0 if shares_master else total // world * 4,
        "zero3_shard": total // zero3_size * precision.compute.itemsize,
        "full_buffer": 0,
        "gradient_shard": 0 if mode == "sharded" and 1 < zero3_size < world else total // world * 4,
        "accumulator": {"sharded": total // zero3_size, "full": total, "local": 0}[mode] * 4,
    }


def _weigh(rank: int, zero3_sizes: tuple[int, ...]) -> None:
    world = dist.get_world_size()
    for zero3_size in zero3_sizes:
        mesh = layerzero.init_mesh(zero3_size)
        for precision, mode in itertools.product(PRECISIONS[:2], MODES):
            model, optimizer = sharded_net(mesh, accumulation=mode, **precision.settings)
            by_formula = _kinds_predicted(model, zero3_size, mode, precision)
            for micro_batches in (1, 3):
                case = f"D={world} S={zero3_size} A={micro_batches} {mode} {precision}"
                for index in range(micro_batches):
                    backward(model, rank, inside_no_sync=index + 1 < micro_batches)
                    assert_as_predicted(model, by_formula, f"{case}, after backward {index}")
                optimizer.step()
                assert_as_predicted(model, by_formula, f"{case}, after the step")
                weights = layerzero.memory(model)
                assert weights.measured["optimizer"] >= total_of_masters(model), f"{case}: a momentum each"
                assert weights.total == sum(weights.measured.values()), case
                optimizer.zero_grad()
            for _ in range(3):
                one_step(model, optimizer, rank, 2)
            later = layerzero.memory(model).measured
            scratch = sum(2 * 4 * (size + size // zero3_size) for size in padded_sizes(model))
            assert later["reduce_buffer"] <= scratch, f"{case}: each handle needs at most two buffers a hop"
            assert later.items() <= weights.measured.items(), f"{case}: something grew: {later} {weights.measured}"


def total_of_masters(model: nn.Module) -> int:
    return sum(parameter.to_local().numel() * 4 for parameter in model.parameters())


def assert_as_predicted(model: nn.Module, by_formula: dict[str, int], case: str) -> None:
    report = layerzero.memory(model)
    measured = {kind: report.measured[kind] for kind in report.predicted}
    assert measured == report.predicted, f"{case}: measured and predicted"
    # If one rank's shard is everything, the library may skip a separate buffer; never the reverse.
    for kind in ("zero1_shard", "zero3_shard", "full_buffer", "gradient_shard"):
        assert report.predicted[kind] == by_formula[kind], f"{case}: {kind}"
    assert report.predicted["accumulator"] <= by_formula["accumulator"], f"{case}: accumulator"


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("data_parallel", SHARDINGS)
def test_held_bytes_are_the_predicted_ones_and_do_not_grow(data_parallel: int) -> None:
    run_ranks(_weigh, SHARDINGS[data_parallel], world_size=data_parallel, shared_memory="off")


@on_ranks(shared_memory="off")
def test_no_more_units_are_whole_than_the_root_the_current_one_and_those_ahead(rank: int) -> None:
    mesh = layerzero.init_mesh(2)
    for prefetch in (0, 1):
        model = layerzero.shard_model(
            TiedTransformer(), mesh=mesh, units=("blocks.0", "blocks.1", "norm"), prefetch=prefetch
        )
        units = {handle.name: handle for handle in get_state(model).handles}
        seen: list[int] = []

        def look(*_: object, units=units, seen=seen) -> None:
            seen.append(sum(handle.weights.full_buffer.untyped_storage().nbytes() > 0 for handle in units.values()))

        for unit in model.blocks:
            unit.register_forward_hook(look)
            unit.register_full_backward_hook(look)
        for step in range(2):
            TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank)).backward()
        assert len(seen) == 8 and max(seen) <= 2 + prefetch, f"root, this unit and {prefetch} ahead: {seen}"


class Mixed(nn.Module):
    """Net with units of two dtypes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(5, 6, dtype=BF16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.low(x.to(BF16)).float()))


@on_ranks(shared_memory="off")
def test_frozen_weights_are_neither_reduced_nor_refreshed(rank: int) -> None:
    model = layerzero.shard_model(Mixed(), zero3_size=2, units=("low", "frozen", "head"))
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    handles = {handle.name: handle for handle in get_state(model).handles}
    trainable = [handle for handle in handles.values() if handle.trainable]
    assert len(handles) == 3 and len(trainable) == 2
    for _ in range(2):
        layerzero.traffic(model, reset=True)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    traffic = layerzero.traffic(model)
    assert (traffic.calls["hop1"], traffic.calls["hop2"], traffic.calls["refresh"]) == (2, 2, 2), "not the frozen one"
    in_fp32, in_bf16 = (
        [h.layout.numel for h in trainable if h.weights.zero3_shard.dtype == dtype] for dtype in (FP32, BF16)
    )
    assert traffic.bytes["refresh"] == sent(in_fp32, 2, FP32, share=2) + sent(in_bf16, 2, BF16, share=2)
    report = layerzero.memory(model)
    assert {kind: report.measured[kind] for kind in report.predicted} == report.predicted


@on_ranks(shared_memory="off")
def test_the_logged_size_counts_frozen_weights_that_stay_gathered_between_steps(rank: int) -> None:
    for reshard in (True, "step", False):
        units = ("low", "frozen", "head")
        model = layerzero.shard_model(Mixed(), zero3_size=2, units=units, reshard_after_forward=reshard)
        optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        state, measured = get_state(model), layerzero.memory(model).measured
        kinds = ("zero1_shard", "zero3_shard", "gradient_shard", "accumulator", "full_buffer")
        held = held_bytes(specs_of(state.units), state.config)
        assert held == sum(measured[kind] for kind in kinds), reshard
        assert (measured["full_buffer"] > 0) == (reshard == "step"), reshard


@on_ranks()
def test_units_in_reentrant_checkpoints_without_a_root_are_reduced_once(rank: int) -> None:
    """Call units without a forward of the root, one of them under reentrant activation checkpointing.

    The backward of that unit is nested in the outer backward.
    """
    model = layerzero.shard_model(integer_net(), zero3_size=1, units=IntegerNet.UNITS)
    alone = integer_net()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        hidden = checkpoint(net.first, x.clone().requires_grad_(), use_reentrant=True)
        return net.head(hidden.relu())

    for step in range(2):
        layerzero.traffic(model, reset=True)
        x, y = integer_batch(step=step, rank=rank)
        ((forward(model, x) - y) ** 2).sum().backward()
        calls = layerzero.traffic(model).calls
        assert calls["hop2"] == len(get_state(model).handles), calls
        for r in range(4):
            x, y = integer_batch(step=step, rank=r)
            (((forward(alone, x) - y) ** 2).sum() / 4).backward()
        for name in ("first.weight", "head.weight", "head.bias"):
            ours = model.get_parameter(name).grad.full_tensor()
            assert torch.equal(ours, alone.get_parameter(name).grad), name
        model.zero_grad()
        alone.zero_grad()
