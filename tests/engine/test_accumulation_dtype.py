"""`accumulation_dtype`: accumulators in bf16, exact sums of small integers, unchanged final gradients."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Codecs, Offload, PrecisionPolicy
from layerzero.device import accumulate
from layerzero.device.accumulate import accumulate_parts
from layerzero.engine.gradient_offload import OffloadedStorage
from layerzero.engine.gradient_storage import AliasedStorage
from layerzero.engine.hooks import get_state
from layerzero.reliability.local_gradient_check import LocalGradientCheck
from tests.support.accumulating import alone, assert_step, backward, prepare
from tests.support.graphs import batch, blocks, loss_of, shard
from tests.support.late_transfers import late
from tests.support.models import (
    IntegerNet,
    assert_close,
    different,
    full_gradients,
    integer_batch,
    integer_loss,
    integer_net,
)
from tests.support.ranks import BOTH, BOTH_SHARED_SLOW, mesh_of, on_ranks

BF16 = torch.bfloat16
MODES = ("sharded", "full")


def _pass(model: nn.Module, rank: int, micro_batch: int) -> None:
    loss_of(model(batch(rank, 0, micro_batch).float())).backward()


def _accumulators(model: nn.Module) -> list[Any]:
    return [handle.gradients.accumulator for handle in get_state(model).handles if handle.gradients is not None]


# --- sums ---


@pytest.mark.parametrize("numel", [1, 1000, accumulate._PIECE + 3, 3 * accumulate._PIECE])
def test_parts_are_added_in_fp32_and_rounded_once(numel: int) -> None:
    cases = [*itertools.product((1, 2, 4), (False, True), (None, BF16), (1.0,)), (4, False, None, 0.5)]
    for parts, overwrite, wire, scale in cases:
        torch.manual_seed(0)
        start = torch.randn(numel).to(BF16)
        addends = [torch.randn(numel) for _ in range(parts)]
        target = start.clone()
        accumulate_parts(target, addends, wire=wire, scale=scale, overwrite=overwrite, rounds_once=True)
        total = torch.zeros(numel) if overwrite else start.float()
        for addend in addends:
            total += scale * (addend if wire is None else addend.to(wire).float())
        assert torch.equal(target, total.to(BF16)), (parts, numel, scale, overwrite, wire)


def test_values_that_are_not_finite_stay_so() -> None:
    large = torch.finfo(BF16).max
    target = torch.tensor([1.0, 1.0, float("inf"), large, 1.0]).to(BF16)
    accumulate_parts(target, (torch.tensor([float("inf"), float("nan"), 1.0, 1.0, -float("inf")]),))
    assert target.tolist()[0] == float("inf") and target[1].isnan() and target[2].isinf()
    assert target[3] == large, "a small addend does not overflow a finite value"
    assert target[4] == -float("inf")


# --- the engine ---


@on_ranks()
def test_units_with_local_accumulation_keep_their_final_gradient(rank: int) -> None:
    modes = {"first": "full", "second": "local"}
    model, _ = prepare(lambda name, _: modes.get(name, "sharded"), mp_policy=PrecisionPolicy(accumulation_dtype=BF16))
    dtypes = {handle.label: handle.gradients.accumulator.storage.dtype for handle in get_state(model).handles}
    assert len(dtypes) == 4
    assert all(dtype == (torch.float32 if label == "second" else BF16) for label, dtype in dtypes.items()), dtypes


POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
)


def _random_gradients(
    rank: int, loop: tuple[bool, ...], zero3_size: int, policy: MixedPrecisionPolicy, **settings: Any
) -> tuple[dict[str, Tensor], nn.Module]:
    torch.manual_seed(0)
    model = shard(blocks(3).float(), size=zero3_size, mp_policy=policy, **settings)
    for micro_batch, inside_no_sync in enumerate(loop):
        with layerzero.no_sync(model) if inside_no_sync else nullcontext():
            _pass(model, rank, micro_batch)
    return full_gradients(model), model


@pytest.mark.sample(1)
@pytest.mark.slow
@BOTH
@on_ranks()
def test_a_step_of_one_micro_batch_gives_the_same_bits_as_without_the_setting(
    rank: int, shared_memory: str | None
) -> None:
    for size, policy, mode in itertools.product((1, 2, 4), POLICIES, MODES):
        expected, _ = _random_gradients(rank, (False,), size, policy, accumulation=mode)
        found, model = _random_gradients(
            rank, (False,), size, PrecisionPolicy.of(policy, accumulation_dtype=BF16), accumulation=mode
        )
        assert not different(found, expected), (size, policy, mode)
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.dtype == torch.float32


@pytest.mark.slow
@BOTH_SHARED_SLOW
@on_ranks()
def test_accumulators_are_rounded_in_the_same_way_in_each_run(rank: int, shared_memory: str | None) -> None:
    """Compare sums of random gradients with fp32 accumulators, and two runs with each other."""
    loop = (True,) * 7 + (False,)
    for size, mode in ((1, "sharded"), (2, "sharded"), (2, "full"), (4, "full")):
        policy = POLICIES[2]
        expected, _ = _random_gradients(rank, loop, size, policy, accumulation=mode)
        runs = [
            _random_gradients(rank, loop, size, PrecisionPolicy.of(policy, accumulation_dtype=BF16), accumulation=mode)
            for _ in "ab"
        ]
        (found, model), (again, _) = runs
        assert not different(found, again), "two runs give the same bits"
        assert different(found, expected), "the accumulators are rounded"
        for name, gradient in found.items():
            error = float((gradient - expected[name]).norm() / expected[name].norm())
            assert error < 0.02, (size, mode, name, error)
        for accumulator in _accumulators(model):
            assert accumulator.storage.dtype == BF16
            assert accumulator.storage.open(keep=False).dtype == BF16


@on_ranks()
def test_the_micro_batch_that_reduces_is_not_rounded(rank: int) -> None:
    """A value that is lost in a bf16 accumulator counts in the micro-batch that reduces gradients."""
    for mode, last in itertools.product(MODES, (False, True)):
        torch.manual_seed(0)
        model = layerzero.shard_model(
            nn.Sequential(nn.Linear(4, 4, bias=False)),
            mesh=mesh_of(2),
            accumulation=mode,
            mp_policy=PrecisionPolicy(accumulation_dtype=BF16),
        )
        x = torch.ones(1, 4)
        for inside_no_sync, factor in ((True, 1.0), (last, 2.0**-12)):
            with layerzero.no_sync(model) if inside_no_sync else nullcontext():
                (model(x).sum() * factor).backward()
        layerzero.clip_grad_norm_(model, float("inf"))  # reduces what backward passes inside no_sync have accumulated
        (gradient,) = full_gradients(model).values()
        assert gradient.eq(1.0 if last else 1.0 + 2.0**-12).all(), (mode, last, gradient)


@on_ranks()
def test_an_overflow_survives_the_accumulator_and_leaves_nothing_behind(rank: int) -> None:
    for mode, offload_grads in itertools.product(MODES, (False, True)):
        with late() if offload_grads else nullcontext():
            model, optimizer = prepare(
                mode, mp_policy=PrecisionPolicy(accumulation_dtype=BF16), offload=Offload(grads=offload_grads)
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        own = LocalGradientCheck(get_state(model).handles)
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}
        for index in range(3):
            with layerzero.no_sync(model) if index < 2 else nullcontext():
                factor = float("inf") if (rank, index) == (1, 0) else 1.0
                (scaler.scale(integer_loss(model, integer_batch(micro_batch=index, rank=rank))) * factor).backward()
        assert bool(own.nonfinite_messages()) == (rank == 1), "the check includes what the accumulator holds"
        scaler.unscale_(optimizer)
        found = torch.tensor(float(any(not g.isfinite().all() for g in full_gradients(model).values())))
        assert found == 1, "the overflow of one rank reaches the final gradients"
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0, "the step is skipped, and the scale is halved"
        assert all(torch.equal(before[name], p.to_local()) for name, p in model.named_parameters())
        optimizer.zero_grad()
        for index in range(2):
            backward(model, rank, index, inside_no_sync=index < 1)
        assert_step(model, optimizer, alone([range(2)])[0], f"{mode}: after the overflow")


@pytest.mark.slow
@on_ranks(shared_memory="off")
def test_accumulators_take_half_the_memory_on_the_device_and_in_the_host(rank: int) -> None:
    for mode, offload_grads in itertools.product(MODES, (False, True)):
        case = (mode, offload_grads)
        with late() if offload_grads else nullcontext():
            models = [
                shard(blocks(6).float(), accumulation=mode, offload=Offload(grads=offload_grads), **settings)
                for settings in ({}, {"mp_policy": PrecisionPolicy(accumulation_dtype=BF16)})
            ]
            for model, step in itertools.product(models, range(2)):
                for micro_batch in range(2):
                    with layerzero.no_sync(model) if micro_batch < 1 else nullcontext():
                        _pass(model, rank, step)
                model.zero_grad()
        default, halved = (layerzero.memory(model) for model in models)
        kind = "host_accumulator" if offload_grads else "accumulator"
        assert 0 < 2 * halved.measured[kind] == default.measured[kind], case
        assert halved.measured[kind] == halved.predicted[kind], case
        # The fp32 final gradient still needs no memory of its own.
        assert halved.measured["gradient_shard"] == default.measured["gradient_shard"], case
        assert halved.predicted == {k: v for k, v in halved.measured.items() if not k.endswith("optimizer")}, case
        for accumulator in _accumulators(models[1]):
            assert isinstance(accumulator.storage, OffloadedStorage) == offload_grads
            assert not offload_grads or accumulator.storage._host.dtype == BF16
        if mode == "sharded" and not offload_grads:
            assert all(isinstance(h.gradients.final.storage, AliasedStorage) for h in get_state(models[1]).handles)


@on_ranks()
def test_gradients_can_be_clipped_and_sent_encoded(rank: int) -> None:
    for mode, codec in itertools.product(MODES, (None, layerzero.Int4Blocks())):
        torch.manual_seed(0)
        model = shard(
            blocks(3).float(),
            accumulation=mode,
            mp_policy=PrecisionPolicy(accumulation_dtype=BF16),
            codecs=Codecs(hop2=codec),
        )
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for step in range(3):
            for micro_batch in range(3):
                with layerzero.no_sync(model) if micro_batch < 2 else nullcontext():
                    _pass(model, rank, 3 * step + micro_batch)
            before = full_gradients(model)
            norm = layerzero.clip_grad_norm_(model, 0.01)
            expected = torch.stack([g.norm() for g in before.values()]).norm()
            torch.testing.assert_close(torch.as_tensor(float(norm)), expected.cpu(), rtol=1e-5, atol=0)
            assert_close(full_gradients(model), {n: g * (0.01 / (norm + 1e-6)) for n, g in before.items()}, mode)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)


# --- one replica, several meshes ---


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(shared_memory="off")
def test_with_one_replica_the_accumulator_is_the_final_gradient(rank: int, world_size: int) -> None:
    models = [
        layerzero.shard_model(integer_net(), units=IntegerNet.UNITS, mesh=mesh_of(dist.get_world_size()), **settings)
        for settings in ({}, {"mp_policy": PrecisionPolicy(accumulation_dtype=BF16)})
    ]
    for model in models:
        backward(model, rank, 0, inside_no_sync=True)
        backward(model, rank, 1, inside_no_sync=False)
    plain, halved = models
    assert not different(full_gradients(halved), full_gradients(plain))
    assert layerzero.memory(halved).measured == layerzero.memory(plain).measured
    assert all(each.storage.dtype == torch.float32 for each in _accumulators(halved))


@on_ranks()
def test_units_on_several_meshes_accumulate_in_bf16(rank: int) -> None:
    (expected,) = alone([range(3)])
    root, other = layerzero.init_mesh(2), layerzero.init_mesh(1)
    for mode in MODES:
        model, optimizer = prepare(
            mode,
            zero3_size=None,
            mesh=lambda name, module: other if name == "second" else root,
            mp_policy=PrecisionPolicy(accumulation_dtype=BF16),
        )
        for index in range(3):
            backward(model, rank, index, inside_no_sync=index < 2)
        assert_step(model, optimizer, expected, mode)


# --- settings ---


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (torch.float16, ValueError, "float16 is not supported.*range.*Use torch.bfloat16"),
        (torch.float32, ValueError, "float32 is not supported. Use torch.bfloat16, or None"),
        ("bf16", TypeError, "accumulation_dtype must be torch.bfloat16 or None, got 'bf16'"),
        (BF16, ValueError, "no effect with accumulation='local'.*final gradients.*Leave accumulation_dtype out"),
    ],
)
def test_settings_are_checked(dtype: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layerzero.LayerZeroConfig(mp_policy=PrecisionPolicy(accumulation_dtype=dtype), accumulation="local")
