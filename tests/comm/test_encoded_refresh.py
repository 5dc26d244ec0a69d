"""Lossless refreshes: ``shard_model(refresh_codec="lossless")``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from layerzero.comm.refreshers import COMPARE_EVERY
from layerzero.device.accelerator import default_device_type
from layerzero.engine.hooks import get_state
from layerzero.engine.state import LayerZeroState
from layerzero.layout.shard_grid import Extent
from layerzero.slow_links.lossless_differences import LosslessDifferences
from tests.support.bits import flip
from tests.support.late_device import NAME, Device, register
from tests.support.late_threads import late_threads
from tests.support.models import different, full_parameters
from tests.support.ranks import BOTH, mesh_of, run_ranks
from tests.support.refreshes import BF16, FP16, WIDTH, Layer, Net, load, make_adamw, make_muon, refresh, update
from tests.support.wrapped_gloo import mesh_on

CODECS = (None, "lossless")


def _shard(size: int, codec: str | None, **settings: Any) -> nn.Module:
    settings = {"mp_policy": BF16, "units": {Layer}} | settings
    return layerzero.shard_model(Net(), mesh=mesh_of(size), refresh_codec=codec, **settings)


def _backward(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> None:
    for micro_batch in range(2):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
        x = torch.randn(6, WIDTH, generator=generator)
        with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
            (scale * (model(x) - x[:, :7]).square().mean()).backward()


def _step(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int) -> None:
    _backward(model, rank, step)
    update(optimizers)


def _bits(model: nn.Module) -> list[Tensor]:
    """Return the bits of this rank's compute weights and masters."""
    weights = [handle.weights for handle in get_state(model).handles]
    shards = [each.read_zero3().view(torch.int16).clone() for each in weights]
    return [*shards, *(each.master.clone().view(torch.int32) for each in weights)]


def _assert_same(models: list[nn.Module], case: object) -> None:
    plain, encoded = map(_bits, models)
    assert all(map(torch.equal, plain, encoded)), case


# --- masters that a thread may read ---


def _writes_after_refreshes(rank: int) -> None:
    model = _shard(2, "lossless")
    state, sgd = get_state(model), sys.modules["torch.optim.sgd"]
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    _step(model, [optimizer], rank, 0)
    _backward(model, rank, 1)
    weights = {handle.weights.master.untyped_storage().data_ptr(): handle.weights for handle in state.handles}
    write, written = sgd.sgd, set()

    def checked(parameters: list[Tensor], *args: Any, **settings: Any) -> None:
        masters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        assert not any(weights[master].is_refreshing for master in masters)
        written.update(masters)
        write(parameters, *args, **settings)

    with late_threads(0.2), mock.patch.object(sgd, "sgd", checked):
        for _ in range(2):
            optimizer.step()
            assert any(each.is_refreshing for each in weights.values())
        state.refreshes.before_master_write()
        assert not any(each.is_refreshing for each in weights.values())
        state.refreshes.launch()
    assert written == set(weights)


def test_masters_are_written_only_after_their_refresh_has_ended() -> None:
    run_ranks(_writes_after_refreshes)


# --- same bits ---

Event = Callable[[nn.Module, list[Optimizer], int, int, Path], None]


def _edit(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.25)
        model.head.weight.add_(0.01)


def _edit_before_the_step(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    _backward(model, rank, step)
    with torch.no_grad():
        model.head.weight.mul_(0.75)
    update(optimizers)


def _write_back(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        model.layers[1].up.weight.mul_(0.9)


def _skip(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    _backward(model, rank, step)
    for optimizer in optimizers:
        optimizer.zero_grad()


def _resume(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    path = folder / f"{get_state(model).config.refresh_codec}-{step}"
    saved = optimizers[0] if len(optimizers) == 1 else None
    checkpoint.save(path, model, saved)
    _step(model, optimizers, rank, step)
    checkpoint.load(path, model, saved)


def _evaluate(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        with layerzero.full_precision(model):
            model(torch.ones(2, WIDTH))


EVENTS: tuple[Event, ...] = (
    _edit,
    load,
    _skip,
    _write_back,
    _edit_before_the_step,
    refresh,
    _resume,
    _evaluate,
)


def _same_bits(rank: int, size: int, steps: int, folder: Path, muon: bool, settings: dict[str, Any]) -> None:
    models = [_shard(size, codec, **settings) for codec in CODECS]
    optimizers = [make_muon(model) if muon else make_adamw(model) for model in models]
    for step in range(steps):
        for model, own in zip(models, optimizers, strict=True):
            _step(model, own, rank, step)
            if step % 4 == 3:
                EVENTS[step // 4 % len(EVENTS)](model, own, rank, step, folder)
        if step % 4 == 3 or step % 3:  # otherwise, the next forward passes wait for the refreshes
            _assert_same(models, step)
    _assert_same(models, "at the end")
    assert not different(*map(full_parameters, models))
    if models[0] and get_state(models[0]).mesh_info.replicas > 1:
        sent = [layerzero.traffic(model).bytes["refresh"] for model in models]
        assert sent[1] < 0.9 * sent[0], sent
    report = layerzero.memory(models[1])
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report


# The slow test below takes up to 200 steps with each sharding and transport.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "size", "shared_memory", "muon"),
    [(2, 1, "off", False), (2, 1, "off", True), (4, 2, None, False)],
)
def test_weights_have_the_same_bits_after_every_step(
    ranks: int, size: int, shared_memory: str | None, muon: bool, tmp_path: Path
) -> None:
    run_ranks(_same_bits, size, 40, tmp_path, muon, {}, world_size=ranks, shared_memory=shared_memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    # With S = 1, no ranks share memory. With one replica, (2, 2) stands for (4, 4). Muon's owners are tested with one
    # uneven and one shared case; the test above has (2, 1). In 72 steps, each event happens twice.
    ("ranks", "size", "shared_memory", "muon", "steps"),
    [
        pytest.param(4, 2, "off", False, 72, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, None, False, 72, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, "off", False, 200, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, "off", False, 200, marks=pytest.mark.exhaustive),
        pytest.param(3, 1, "off", False, 200, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, "off", False, 200, marks=pytest.mark.exhaustive),
        pytest.param(2, 2, None, False, 200, marks=pytest.mark.exhaustive),
        pytest.param(3, 1, "off", True, 200, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, None, True, 200, marks=pytest.mark.exhaustive),
    ],
)
def test_weights_have_the_same_bits_over_many_steps(
    ranks: int, size: int, shared_memory: str | None, muon: bool, steps: int, tmp_path: Path
) -> None:
    run_ranks(_same_bits, size, steps, tmp_path, muon, {}, world_size=ranks, shared_memory=shared_memory, timeout=400)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mp_policy": FP16},
        pytest.param({"accumulation": "full"}, marks=pytest.mark.exhaustive),
        {"accumulation": "local", "reshard_after_forward": False},
        pytest.param({"gather_codec": layerzero.Float8Rows()}, marks=pytest.mark.exhaustive),
        {"hop2_codec": layerzero.Int8Blocks()},
        pytest.param({"units": None}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_weights_have_the_same_bits_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(_same_bits, 2, 40, tmp_path, False, settings)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["offload_optimizer", "offload_params"])
def test_weights_have_the_same_bits_with_offloading(setting: str, tmp_path: Path) -> None:
    run_ranks(_offloaded, setting, tmp_path)


def _offloaded(rank: int, setting: str, folder: Path) -> None:
    with pytest.warns(UserWarning, match=setting):
        models = [_shard(2, codec, **{setting: True}) for codec in CODECS]
    optimizers = [make_adamw(model) for model in models]
    for step in range(8):
        for model, own in zip(models, optimizers, strict=True):
            _step(model, own, rank, step)
        _assert_same(models, step)
    report = layerzero.memory(models[1])
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report


def _partly_frozen(rank: int) -> None:
    models = [_shard(2, codec) for codec in CODECS]
    for model in models:
        model.layers[0].up.weight.requires_grad_(False)
    optimizers = [make_adamw(model) for model in models]
    for step in range(6):
        for model, own in zip(models, optimizers, strict=True):
            model.layers[0].up.weight.requires_grad_(step >= 3)
            _step(model, own, rank, step)
        _assert_same(models, step)


@pytest.mark.slow
def test_frozen_parameters() -> None:
    run_ranks(_partly_frozen)


def _without_forward(rank: int) -> None:
    """A refresh follows another one whose weights no pass has used."""
    models = [_shard(2, codec) for codec in CODECS]
    optimizers = [make_adamw(model) for model in models]
    for step in range(6):
        for model, own in zip(models, optimizers, strict=True):
            _backward(model, rank, step)
            for _ in range(3):
                for optimizer in own:
                    optimizer.step()
            update(own)
        _assert_same(models, step)


@pytest.mark.slow
def test_steps_without_a_forward_pass_between_them() -> None:
    run_ranks(_without_forward)


# --- messages ---


def _in_full(rank: int) -> None:
    """The first refresh, and refreshes after edits and loads, send the weights and not differences."""
    model = _shard(2, "lossless")
    optimizers = make_adamw(model)
    handles = get_state(model).handles
    everything = 2 * sum(handle.mesh_info.grid.numel(handle.layout, Extent.ZERO1) for handle in handles)

    def sent(operation: Callable[[], object]) -> int:
        layerzero.traffic(model, reset=True)
        operation()
        for handle in handles:
            handle.weights.finish_refresh()
        return layerzero.traffic(model, reset=True).bytes.get("refresh", 0)

    _backward(model, rank, 0)
    assert sent(lambda: update(optimizers)) == everything, "the first refresh"
    for step in (1, 2):
        _backward(model, rank, step)
        assert 0 < sent(lambda: update(optimizers)) < 0.9 * everything
    assert sent(lambda: layerzero.refresh(model)) == everything
    state = layerzero.full_state_dict(model)
    assert sent(lambda: layerzero.load_full_state_dict(model, state)) == everything


def test_which_refreshes_are_sent_in_full() -> None:
    run_ranks(_in_full)


def _asked(rank: int, folder: Path) -> None:
    """A rank that has written to its rows asks its counterparts in the other replicas for full refreshes."""
    model = _shard(2, "lossless")
    optimizers = make_adamw(model)
    handles = get_state(model).handles
    for step in range(2):
        _step(model, optimizers, rank, step)
    _backward(model, rank, 2)
    if rank == 3:
        rows = next(p.to_local() for p in model.layers[1].parameters() if p.to_local().numel())
        with torch.no_grad():
            rows.mul_(1.0)
    with layerzero.trace(model, folder / "{rank}.json") as trace:
        update(optimizers)
        for handle in handles:
            handle.weights.finish_refresh()
    sent = {event.name: event.bytes for event in trace.events if event.collective == "refresh" and event.bytes}
    full = {handle.label: 2 * len(handle.weights.master) for handle in handles}
    assert {name for name, size in sent.items() if size == full[name]} == ({"layers.1"} if rank % 2 else set())


def test_a_rank_can_ask_for_a_full_refresh(tmp_path: Path) -> None:
    run_ranks(_asked, tmp_path)


def _predicted(rank: int) -> None:
    """All replicas have the last change of each weight, and full refreshes reset it."""
    model = _shard(2, "lossless")
    optimizers = make_adamw(model)
    handles = [handle.weights for handle in get_state(model).handles]
    assert all(not weights.last_change.any() for weights in handles)
    for step in range(4):
        before = [weights.read_zero3().clone().view(torch.int16) for weights in handles]
        _step(model, optimizers, rank, step)
        for weights, old in zip(handles, before, strict=True):
            change = weights.read_zero3().view(torch.int16) - old
            assert change.any()
            assert torch.equal(weights.last_change, change if step else torch.zeros_like(change)), step
    report = layerzero.memory(model)
    kept = sum(weights.zero3_shard.nbytes for weights in handles)
    assert report.measured["refresh_state"] == report.predicted["refresh_state"] == kept
    if rank == 0:  # one rank asks for full refreshes
        for weights in handles:
            weights.refresh_in_full = True
    _step(model, optimizers, rank, 4)
    for weights in handles:
        weights.finish_refresh()
        assert weights.last_change.any() == bool(rank % 2), "ranks 0 and 2 have the same ZeRO-3 shards"
    model = _shard(2, layerzero.Int4Difference())
    assert layerzero.memory(model).measured["refresh_state"] == layerzero.memory(model).predicted["refresh_state"] == 0


@pytest.mark.default_sample(1)
@BOTH
def test_the_last_changes_of_weights_are_equal_on_all_replicas(shared_memory: str | None) -> None:
    run_ranks(_predicted, shared_memory=shared_memory)


class _Useless(LosslessDifferences):
    """Codec whose messages are never smaller than the weights."""

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        out.copy_(new.view(torch.uint8))
        last_change.zero_()
        return out.numel()


def _not_smaller(rank: int) -> None:
    models = [_shard(2, codec) for codec in CODECS]
    optimizers = [make_adamw(model) for model in models]
    for handle in get_state(models[1]).handles:
        if rank // 2 == 0:  # one of the two replicas
            handle.weights.refresher._codec = _Useless(LosslessDifferences.best().compression)
    for step in range(4):
        for model, own in zip(models, optimizers, strict=True):
            _step(model, own, rank, step)
        _assert_same(models, step)


def test_each_rank_sends_its_weights_unless_differences_are_smaller() -> None:
    run_ranks(_not_smaller)


def _flipped(rank: int) -> None:
    model = _shard(2, "lossless")
    optimizers = make_adamw(model)
    _step(model, optimizers, rank, 0)
    handle = get_state(model).handles[1]
    other = 1 - handle.mesh_info.grid.replica_rank
    if rank == 1:
        handle.weights.read_zero3()
        flip(handle.weights.zero3_shard, other * len(handle.weights.master) + 3, 2)
    # Ranks 0 and 2 hold another ZeRO-3 shard, and fail when they wait for ranks 1 and 3.
    for step in range(1, COMPARE_EVERY - 1):
        _step(model, optimizers, rank, step)
        if step == 5:
            assert not layerzero.fingerprint(model).ok
    with (
        pytest.raises(
            RuntimeError, match=r"compute weights of 'layers.0' differ between replicas.*on rank 1.*on rank 3"
        )
        if (rank % 2)
        else nullcontext()
    ):
        _step(model, optimizers, rank, -1)
        for each in get_state(model).handles:
            each.weights.finish_refresh()


@pytest.mark.slow
def test_a_wrong_bit_is_found_when_digests_are_compared() -> None:
    run_ranks(_flipped)


# --- life time ---


def _threads(lz_state: LayerZeroState) -> list[Any]:
    refresher = lz_state.handles[0].weights.refresher
    return [stream.thread for stream in (refresher._encoding, refresher._decoding)]


def _closed(rank: int) -> None:
    model = _shard(2, "lossless")
    optimizers = make_adamw(model)
    _step(model, optimizers, rank, 0)
    threads = _threads(get_state(model))
    assert all(thread.is_alive() for thread in threads)
    layerzero.close(model)
    assert not any(thread.is_alive() for thread in threads)


def test_close_ends_the_threads() -> None:
    run_ranks(_closed)


def _lost(rank: int) -> None:
    model = _shard(1, "lossless")
    optimizers = make_adamw(model)
    for step in range(2):
        _step(model, optimizers, rank, step)
    if rank == 0:
        return
    with pytest.raises(RuntimeError, match=r"layerzero: .*failed|did not take part"):
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
            layerzero.refresh(model)
            for handle in get_state(model).handles:
                handle.weights.finish_refresh()


def test_a_rank_that_does_not_take_part_is_an_error() -> None:
    run_ranks(_lost, world_size=2, pg_timeout=5)


# --- settings ---


def _refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"refresh_codec='zip' is not supported. Use one of"):
        _shard(1, "zip")
    with pytest.raises(ValueError, match=r"but the model computes in torch.float32. Set param_dtype in mp_policy"):
        _shard(1, "lossless", mp_policy=MixedPrecisionPolicy())
    with pytest.raises(ValueError, match=r"ranks disagree.*refresh_codec"):
        _shard(1, "lossless" if rank else None)
    installed = {"zstandard": ModuleType("zstandard") if rank else None}
    with (
        mock.patch.dict(sys.modules, installed),
        pytest.raises(ValueError, match=r"ranks disagree.*compression that refresh_codec uses"),
    ):
        _shard(1, "lossless")


def test_settings_are_checked() -> None:
    assert default_device_type() == "cpu"
    run_ranks(_refused, world_size=2)


def _one_replica(rank: int) -> None:
    model = _shard(2, "lossless")
    assert get_state(model).handles[0].weights.refresher is None
    _step(model, make_adamw(model), rank, 0)


def test_one_replica_encodes_nothing() -> None:
    run_ranks(_one_replica, world_size=2)


def _on_a_device(rank: int) -> None:
    register()
    with (
        Device().installed(),
        pytest.raises(ValueError, match=r"encodes weights on the CPU and sends them with gloo, but this model is on"),
    ):
        layerzero.shard_model(Net(), mesh=mesh_on(NAME, 2), mp_policy=BF16, refresh_codec="lossless")


def test_devices_are_refused() -> None:
    run_ranks(_on_a_device)


def _observed(rank: int, folder: Path) -> None:
    model = _shard(2, "lossless")
    watchdog = layerzero.watchdog(model, 60.0)
    optimizers = make_adamw(model)
    handles = get_state(model).handles
    _step(model, optimizers, rank, 0)
    for handle in handles:
        handle.weights.finish_refresh()
    with layerzero.trace(model, folder / "{rank}.json") as trace:
        _step(model, optimizers, rank, 1)
        for handle in handles:
            handle.weights.finish_refresh()
    units = [event.name for event in trace.events if event.collective == "refresh" and event.kind == "launch"]
    assert sorted(units) == sorted(handle.label for handle in handles)
    watchdog.close()


def test_traces_and_the_watchdog_include_encoded_refreshes(tmp_path: Path) -> None:
    run_ranks(_observed, tmp_path)


def test_a_file_names_the_codec(tmp_path: Path) -> None:
    path = tmp_path / "layerzero.yaml"
    path.write_text("refresh_codec: lossless\n")
    assert layerzero.LayerZeroConfig.from_yaml(path).refresh_codec == "lossless"
