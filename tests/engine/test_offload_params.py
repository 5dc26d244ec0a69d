"""`Offload.params`: compute weights are in host memory, and are gathered from there with the same bits.

There is no device here whose copies run late: see tests/support/late_transfers.py and late_device.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import layerzero
from layerzero import Codecs, Offload, checkpoint
from layerzero.device.accelerator import HostDeviceCopies
from layerzero.device.host_shard import HostShard
from layerzero.engine.hooks import get_state
from tests.optimizers.test_offload_optimizer import LOW, MODES, WORLD, _shard, _train
from tests.support.late_device import NAME, Device, register
from tests.support.late_transfers import LateTransfers, late
from tests.support.models import IntegerNet, different, exact_sgd, full_parameters, integer_batch, integer_net
from tests.support.ranks import on_ranks, run_ranks
from tests.support.wrapped_gloo import mesh_on

pytestmark = pytest.mark.slow

OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"offload": Offload(optimizer=True)},
    {"offload": Offload(grads=True, optimizer=True), "prefetch": 0},
    {"mp_policy": LOW},
    {"mp_policy": LOW, "offload": Offload(optimizer=True), "prefetch": 2},
    {"mp_policy": LOW, "offload": Offload(grads=True)},
)


def _trained(model: nn.Module, rank: int, steps: range, pattern: tuple[bool, ...] = (True, False)) -> list[Any]:
    return _train(model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model), rank, steps, pattern)


def _assert_same(seen: list[Any], expected: list[Any], case: object) -> None:
    for index, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        assert not different(ours, theirs), (case, index)


def _with_params(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"offload": replace(settings.get("offload", Offload()), params=True)}


def _without_offload(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith("offload")}


def _same_bits(rank: int, zero3_size: int, mode: str, more: tuple[dict[str, Any], ...]) -> None:
    for settings in more:
        expected = _trained(_shard(zero3_size, accumulation=mode, **_without_offload(settings)), rank, range(1, 4))
        with late():
            model = _shard(zero3_size, accumulation=mode, **_with_params(settings))
        _assert_same(_trained(model, rank, range(1, 4)), expected, (zero3_size, mode, settings))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "zero3_size", "mode"),
    [(1, 1, "sharded"), (2, 1, "sharded"), (2, 2, "sharded"), *itertools.product((4,), (2,), MODES)],
)
def test_weights_in_the_host_train_with_the_bits_of_the_device(world_size: int, zero3_size: int, mode: str) -> None:
    run_ranks(_same_bits, zero3_size, mode, OTHERS, world_size=world_size)


GATHER_SETTINGS: tuple[dict[str, Any], ...] = (
    {"reshard_after_forward": 2},
    {"reshard_after_forward": 2, "mp_policy": LOW, "offload": Offload(optimizer=True)},
    {"reshard_after_forward": False},
    {"codecs": Codecs(gather=layerzero.Float8Rows()), "mp_policy": LOW},
    {"codecs": Codecs(gather=layerzero.Float8Rows()), "mp_policy": LOW, "reshard_after_forward": 2},
)


def test_post_forward_shards_and_encoded_gathers_come_from_the_host_too() -> None:
    run_ranks(_same_bits, 4, "sharded", GATHER_SETTINGS, world_size=WORLD)


@pytest.mark.exhaustive
@on_ranks()
def test_streams_of_a_device_order_every_copy_of_weights(rank: int) -> None:
    register()
    for size, others in itertools.product((1, 2), ({}, {"offload": Offload(grads=True, optimizer=True)})):
        for mode in MODES if size == 2 else ("sharded",):
            settings = {"accumulation": mode, "mp_policy": LOW, "units": IntegerNet.UNITS}
            mesh = mesh_on(NAME, size)  # its backend adds in the dtype of the collective, unlike gloo
            with Device().installed():
                model = layerzero.shard_model(integer_net(), mesh=mesh, **settings)
                expected = _trained(model, rank, range(4, 6))
            with Device().installed():
                model = layerzero.shard_model(integer_net(), mesh=mesh, **_with_params(others), **settings)
                _assert_same(_trained(model, rank, range(4, 6)), expected, (size, mode, others))
                report = layerzero.memory(model)
                measured = {kind: n for kind, n in report.measured.items() if not kind.endswith("optimizer")}
                assert measured == report.predicted, (size, mode, others, report)
                assert report.measured_peak == report.predicted_peak, (size, mode, others, report)
                assert report.measured["zero3_shard"] == 0 < report.measured["host_zero3_shard"]


@on_ranks(world_size=WORLD)
def test_memory_of_weights_in_the_host_is_predicted(rank: int) -> None:
    for size, others in itertools.product((1, 2, 4), ({}, {"offload": Offload(optimizer=True)}, {"mp_policy": LOW})):
        with late():
            model = _shard(size, **_with_params(others))
        (transfers,) = LateTransfers.made
        _trained(model, rank, range(1))
        handles = get_state(model).handles
        assert all(handle.weights.zero3_shard.data_ptr() in transfers._host for handle in handles)
        report = layerzero.memory(model)
        elements = sum(handle.layout.numel // size * handle.precision.compute.itemsize for handle in handles)
        assert report.measured["host_zero3_shard"] == report.predicted["host_zero3_shard"] == elements
        kinds = {kind: n for kind, n in report.measured.items() if not kind.endswith("optimizer")}
        assert kinds == report.predicted, (size, others, report)
        assert report.measured_peak == report.predicted_peak, (size, others, report)


@on_ranks(world_size=WORLD)
def test_checkpoints_averages_and_fingerprints_do_not_care_where_weights_are(rank: int, tmp_path: Path) -> None:
    def made(**settings: Any) -> tuple[nn.Module, Any]:
        model = _shard(2, mp_policy=LOW, **settings)
        return model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model)

    plain = made()
    with late():
        offloaded = made(offload=Offload(params=True, optimizer=True))
    ema = layerzero.EMA(offloaded[0], decay=0.5)
    averages = layerzero.EMA(plain[0], decay=0.5)
    for each in (plain, offloaded):
        _train(*each, rank, range(2), (False,))
    ema.update()
    averages.update()
    results = []
    for model, average in ((plain[0], averages), (offloaded[0], ema)):
        with average.swapped(), torch.no_grad():
            results.append(model(integer_batch(step=0, rank=0)[0]))
    assert torch.equal(*results)
    for name, saved, loading in (("down", plain, offloaded), ("up", offloaded, plain)):
        checkpoint.save(tmp_path / name, *saved)
        checkpoint.load(tmp_path / name, *loading)
        trained = [_train(*each, rank, range(2, 4), (False,)) for each in (saved, loading)]
        _assert_same(*trained, name)
        sums = [layerzero.fingerprint(model).sums for model, _ in (saved, loading)]
        assert sums[0] == sums[1]
        assert not layerzero.fingerprint(offloaded[0]).corruptions
    whole = layerzero.full_state_dict(offloaded[0], rank0_only=False)
    layerzero.load_full_state_dict(offloaded[0], {key: 2 * value for key, value in whole.items()})
    with layerzero.unsharded(offloaded[0], writeback=True):
        for parameter in offloaded[0].parameters():
            parameter.data.mul_(0.5)
    layerzero.refresh(offloaded[0])
    assert not different(layerzero.full_state_dict(offloaded[0], rank0_only=False), whole)
    for handle in get_state(offloaded[0]).handles:
        handle.weights.read_zero3()[0] += 1 if get_state(offloaded[0]).mesh_info.grid.replica_rank else 0
    assert layerzero.fingerprint(offloaded[0]).corruptions, "replicas that differ in the host are noticed"


@on_ranks(world_size=WORLD)
def test_owners_of_whole_parameters_refresh_weights_in_the_host(rank: int) -> None:
    seen = []
    for settings in ({}, {"offload": Offload(params=True)}):
        with late():
            model = _shard(2, **settings)
        optimizer = layerzero.shard_optimizer(torch.optim.Adafactor(model.parameters()), model)
        _train(model, optimizer, rank, range(2), (True, False))
        seen.append(full_parameters(model))
    assert not different(*seen)


@on_ranks(world_size=2, shared_memory="auto")
def test_ranks_that_share_memory_have_their_weights_there(rank: int) -> None:
    expected = _trained(_shard(2), rank, range(2))
    with pytest.warns(
        UserWarning,
        match=r"^Offload\(params=True\) on cpu: .* to free\. Results do not change\. Leave offload out$",
    ):
        model = _shard(2, offload=Offload(params=True))
    assert all(handle.weights.host_shard is None for handle in get_state(model).handles)
    _assert_same(_trained(model, rank, range(2)), expected, "shared memory")
    report = layerzero.memory(model)
    assert "host_zero3_shard" not in report.measured and "host_zero3_shard" not in report.predicted
    kinds = {kind: n for kind, n in report.measured.items() if not kind.endswith("optimizer")}
    assert kinds == report.predicted and report.measured_peak == report.predicted_peak, report


@on_ranks(world_size=2)
def test_settings_of_host_memory_are_checked_and_warn_on_the_cpu(rank: int) -> None:
    with pytest.raises(TypeError, match="params must be a bool"):
        Offload(params="yes")
    with pytest.raises(TypeError, match="pin_memory must be a bool"):
        Offload(params=True, pin_memory=1)
    with pytest.raises(ValueError, match=r"pin_memory=False .*none of them is set. Set one of them"):
        Offload(pin_memory=False)
    said = (
        r"^Offload\(grads=True, params=True\) on cpu: there is no device memory to free and no memory to pin\. "
        r"Results do not change\. Leave offload out$"
    )
    with pytest.warns(UserWarning, match=said):
        model = _shard(2, offload=Offload(grads=True, params=True, pin_memory=False))
    expected = _trained(_shard(2), rank, range(2))
    _assert_same(_trained(model, rank, range(2)), expected, "not pinned")


@pytest.mark.parametrize("pin_memory", [True, False])
def test_what_lies_in_the_host_is_pinned_unless_the_user_says_otherwise(pin_memory: bool) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs.pop("pin_memory", False))
        return empty(*args, **kwargs)

    transfers = HostDeviceCopies(torch.device("cpu"), pin_memory=pin_memory)
    transfers.device = torch.device("cuda")
    with mock.patch("torch.empty", noting):
        HostShard(4, torch.float32, transfers, mock.Mock())
    assert asked == [pin_memory]


class _RecordedCopies(HostDeviceCopies):
    """Records which events each copy follows, and which events the current stream waits for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.record: list[tuple[str, Any]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_host: bool, after: Any = ()) -> Any:
        self.record.append(("store" if to_host else "fetch", [event for event in after if event is not None]))
        return len(self.record)

    def wait(self, mark: Any) -> None:
        self.record.append(("wait", mark))

    def finish(self, mark: Any) -> None:
        self.record.append(("finish", mark))


def test_copies_of_a_shard_come_one_after_the_other_on_whatever_stream_they_are_launched() -> None:
    copies, pool = _RecordedCopies(), mock.Mock()
    pool.release = lambda scratch: copies.record.append(("release", scratch))
    shard, full = HostShard(2, torch.float32, copies, pool), torch.empty(2)
    shard.start_fetch(full)
    shard.store(full)
    shard.start_fetch(full).wait()
    shard.read_on_host()
    assert copies.record == [
        ("fetch", []),
        ("store", [1]),  # must not overwrite what the fetch reads
        ("wait", 2),
        ("release", full),
        ("fetch", [2]),
        ("wait", 5),
        ("finish", 2),
    ]
