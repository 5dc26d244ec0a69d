"""`Offload.optimizer`: the host updates with the same bits, and does not access memory that is still being copied.

There is no device here whose copies run late: see tests/support/late_transfers.py. Odd graphs and failures are in
engine/test_gradient_offload.py.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Offload, checkpoint
from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.gradient_storage import HostStorage
from layerzero.engine.hooks import get_state
from tests.optimizers import test_grad_scaler
from tests.support.graphs import WORLD
from tests.support.late_device import Device, DeviceCopies, Stream
from tests.support.late_transfers import LateTransfers, late
from tests.support.models import (
    IntegerNet,
    OptionalBias,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
)
from tests.support.ranks import mesh_of, on_ranks, run_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MODES = ("sharded", "full", "local")
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@on_ranks(world_size=1)
def test_the_host_and_the_pool_wait_for_work_on_a_gradient(rank: int) -> None:
    with Device().installed() as device:
        pool, side, copies = BufferPool.of(CPU), Stream(), DeviceCopies(CPU)
        pool.set_predicted({(4, torch.float32): 1}, 16)
        storage, read = HostStorage(4, torch.float32, copies, pool), torch.empty(4)
        for value in range(10):
            storage.open(keep=False).fill_(value)
            storage.close(keep=True)
            storage.wait_for_host()
            assert storage.stored_tensor().eq(value).all(), "the host has waited for the copy"

            storage.open(keep=False).fill_(-value)
            side.wait_event(device.current_stream().record_event())
            with device.stream(side):
                read.copy_(storage.open(keep=False))
            storage.close(keep=False)
            pool.acquire(4, torch.float32).fill_(100)  # the next owner of the released scratch buffer
            device.current_stream().wait_stream(side)
            assert read.eq(-value).all(), "the buffer is reused after its last use on another stream"


def _shard(zero3_size: int, **settings: Any) -> nn.Module:
    return layerzero.shard_model(integer_net(), mesh=mesh_of(zero3_size), units=IntegerNet.UNITS, **settings)


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range, pattern: tuple[bool, ...]) -> list[Any]:
    """Return gradients and weights after each step, with clipping, user writes and kept gradients in between."""
    seen = []
    for step in steps:
        for index, inside in enumerate(pattern):
            with layerzero.no_sync(model) if inside else nullcontext():
                integer_loss(model, integer_batch(step=step, micro_batch=index, rank=rank)).backward()
        if step == 1:
            layerzero.clip_grad_norm_(model, 0.25)
        seen.append(full_gradients(model))
        if step == 2:
            model.first.weight.grad.mul_(2)
            model.head.bias.grad = model.head.bias.grad * 0.5
        optimizer.step()
        seen.append(full_parameters(model))
        if step == 3:
            with torch.no_grad():
                model.second.weight.mul_(0.5)
        if step != 2:  # which the next step adds to
            optimizer.zero_grad(set_to_none=step != 1)
    return seen


@on_ranks()
def test_a_kept_gradient_is_read_after_its_copy_to_the_host(rank: int) -> None:
    """Read a kept gradient after a backward pass whose used parameters the ranks have not agreed on yet."""
    with late():
        model = layerzero.shard_model(
            OptionalBias(2), mesh=mesh_of(2), units=["units.0", "units.1"], offload=Offload(optimizer=True)
        )
    kept = None
    for step in range(1, 4):
        model(torch.ones(2, 5), uses_own=rank != 0).sum().backward()
        if kept is None:
            kept = model.units[0].weight.grad
        assert kept.to_local().eq(2.0 * step).all(), kept.to_local()


def _same_bits(rank: int, zero3_size: int, mode: str) -> None:
    steps = range(1, 5)  # the special steps, and their effect on the next one
    for policy, pattern in itertools.product(({}, {"mp_policy": LOW}), ((False,), (True, False))):
        settings = {"accumulation": mode, **policy}
        model = _shard(zero3_size, **settings)
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        expected = _train(model, optimizer, rank, steps, pattern)
        for grads in (False, True):
            with late():
                model = _shard(zero3_size, offload=Offload(optimizer=True, grads=grads), **settings)
            optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
            seen = _train(model, optimizer, rank, steps, pattern)
            for index, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
                assert not different(ours, theirs), (mode, bool(policy), pattern, grads, index)


# Each reduction spec of engine/reduction_spec.py.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "zero3_size", "mode"),
    [
        (1, 1, "sharded"),
        (2, 1, "sharded"),
        *itertools.product((2,), (2,), MODES),
        *itertools.product((4,), (2,), MODES),
    ],
)
def test_the_host_updates_with_the_bits_of_the_device(world_size: int, zero3_size: int, mode: str) -> None:
    run_ranks(_same_bits, zero3_size, mode, world_size=world_size)


@on_ranks(world_size=WORLD)
def test_masters_gradients_and_state_lie_in_the_host_and_each_moves_once_a_step(rank: int) -> None:
    with late():
        model = _shard(2, mp_policy=LOW, offload=Offload(optimizer=True))
    (transfers,) = LateTransfers.made
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(3):
        transfers.stores = transfers.fetches = 0
        _train(model, optimizer, rank, range(step * 10, step * 10 + 1), (True, False))
        handles = get_state(model).handles
        assert transfers.stores == transfers.fetches == len(handles), "a gradient down, fresh rows up, once a step"
        for handle in handles:
            assert handle.weights.master.data_ptr() in transfers._host
            assert handle.gradients.final.storage.stored_tensor().data_ptr() in transfers._host
    for parameter in model.parameters():
        owned = {parameter.to_local().data_ptr()} - {0}
        assert optimizer.state[parameter]["exp_avg"].device == parameter.device and len(owned) <= 1
    report = layerzero.memory(model)
    assert report.measured["zero1_shard"] == report.predicted["zero1_shard"] == 0
    assert report.measured["gradient_shard"] == report.predicted["gradient_shard"] == 0
    elements = sum(handle.layout.shard_numel for handle in get_state(model).handles)
    for kind in ("host_zero1_shard", "host_gradient_shard"):
        assert report.measured[kind] == report.predicted[kind] == 4 * elements, kind


@on_ranks(world_size=WORLD)
def test_checkpoints_averages_and_whole_states_do_not_care_where_masters_are(rank: int, tmp_path: Path) -> None:
    def made(**settings: Any) -> tuple[nn.Module, Any]:
        model = _shard(2, **settings)
        return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)

    model, optimizer = made()
    with late():
        offloaded = made(offload=Offload(optimizer=True))
    ema = layerzero.EMA(offloaded[0], decay=0.5)
    for each in ((model, optimizer), offloaded):
        _train(*each, rank, range(2), (False,))
    ema.update()
    for name, saved, loading in (("down", (model, optimizer), offloaded), ("up", offloaded, (model, optimizer))):
        checkpoint.save(tmp_path / name, *saved)
        checkpoint.load(tmp_path / name, *loading)
        results = [_train(*each, rank, range(2, 4), (False,)) for each in (saved, loading)]
        assert all(not different(a, b) for a, b in zip(*results, strict=True)), name
    whole = layerzero.full_state_dict(offloaded[0], rank0_only=False)
    layerzero.load_full_state_dict(offloaded[0], {key: 2 * value for key, value in whole.items()})
    with layerzero.unsharded(offloaded[0], writeback=True):
        for parameter in offloaded[0].parameters():
            parameter.data.mul_(0.5)
    again = layerzero.full_state_dict(offloaded[0], rank0_only=False)
    assert not different(again, whole)


@on_ranks(world_size=2)
def test_what_cannot_be_updated_by_the_host_is_refused(rank: int) -> None:
    with late():
        model = _shard(2, offload=Offload(optimizer=True))
    with pytest.raises(NotImplementedError, match=r"optimizer=True.*full parameters.*optimizer=False"):
        layerzero.shard_optimizer(torch.optim.Adafactor(model.parameters()), model)
    with pytest.raises(TypeError, match="optimizer must be a bool"):
        Offload(optimizer="yes")
    with pytest.warns(
        UserWarning,
        match=r"^Offload\(optimizer=True\) on cpu: .* to free\. Results do not change\. Leave offload out$",
    ):
        _shard(2, offload=Offload(optimizer=True))


def _scaled(rank: int, zero3_size: int, references: list[test_grad_scaler.Reference]) -> list[Any]:
    seen = []
    for mode, clip in (("sharded", "layerzero"), ("full", None)):
        with late():
            settings = {"accumulation": mode, "mp_policy": test_grad_scaler.POLICIES["fp16"]}
            model, optimizer = test_grad_scaler.shard(mesh_of(zero3_size), offload=Offload(optimizer=True), **settings)
        seen += test_grad_scaler.follow(model, optimizer, rank, references, clip, f"S={zero3_size} {mode}", exact=True)
    return seen


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero3_size", [1, 2, 4])
def test_a_loss_scale_of_gradients_in_the_host_is_that_of_one_process(zero3_size: int) -> None:
    seen = run_ranks(_scaled, zero3_size, test_grad_scaler.reference(torch.float16))
    assert all(each == seen[0] for each in seen)
