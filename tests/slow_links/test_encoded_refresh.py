"""Refreshes that send differences: ``Codecs(refresh="lossless")`` and ``Int4Difference()``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import layerzero
from layerzero import Codecs, Offload, checkpoint
from layerzero.comm.collectives import Collective, PendingCollective
from layerzero.engine import weight_storage
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from layerzero.extend import StepObserver, attach
from layerzero.layout.shard_grid import Extent
from layerzero.slow_links.lossless_differences import LosslessDifferences
from layerzero.utils.bit_sums import digest
from tests.slow_links.test_int4_difference import bound
from tests.support.bits import flip
from tests.support.late_device import on_device
from tests.support.late_threads import late_threads
from tests.support.models import BF16, different, full_parameters, update
from tests.support.ranks import BOTH, mesh_of, on_ranks, run_ranks
from tests.support.refreshes import FP16, WIDTH, Layer, Net, is_refreshing, load, make_adamw, make_muon, refresh

INT4 = layerzero.Int4Difference()
EACH_CODEC = pytest.mark.parametrize("codec", ["lossless", INT4], ids=["lossless", "int4"])


def _shard(size: int, codec: Any, **settings: Any) -> nn.Module:
    settings = {"mp_policy": BF16, "units": {Layer}, "codecs": Codecs()} | settings
    settings["codecs"] = replace(settings["codecs"], refresh=codec)
    return layerzero.shard_model(Net(), **({"mesh": mesh_of(size)} | settings))


def _backward(model: nn.Module, rank: int, step: int, micro_batches: int = 2) -> float:
    for micro_batch in range(micro_batches):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
        x = torch.randn(6, WIDTH, generator=generator)
        with layerzero.no_sync(model) if micro_batch < micro_batches - 1 else nullcontext():
            loss = (model(x) - x[:, :7]).square().mean()
            loss.backward()
    return loss.item()


def _step(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, micro_batches: int = 2) -> float:
    loss = _backward(model, rank, step, micro_batches)
    update(*optimizers)
    return loss


def _trained(size: int, codec: Any, rank: int, steps: int) -> tuple[nn.Module, list[Optimizer]]:
    model = _shard(size, codec)
    optimizers = make_adamw(model)
    for step in range(steps):
        _step(model, optimizers, rank, step)
    return model, optimizers


def _handles(model: nn.Module) -> list[Handle]:
    return [handle for handle in get_state(model).handles if handle.members]


def _finish_refreshes(model: nn.Module) -> None:
    for handle in get_state(model).handles:
        handle.weights.finish_refresh()


def _assert_same(models: list[nn.Module], case: object) -> None:
    """Compare the bits of this rank's compute weights and masters."""
    for one, other in zip(*(get_state(model).handles for model in models), strict=True):
        shards = [each.weights.read_zero3().view(torch.int16) for each in (one, other)]
        masters = [each.weights.master.view(torch.int32) for each in (one, other)]
        assert torch.equal(*shards) and torch.equal(*masters), case


def _own_parts(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return, for each handle, copies of this rank's part of the compute weights, and of its cast masters."""
    return [
        (
            handle.weights.read_zero3()[handle.mesh_info.grid.slice_within(handle.layout, Extent.ZERO1, Extent.ZERO3)]
            .clone()
            .detach(),
            handle.weights.master.to(handle.precision.compute),
        )
        for handle in _handles(model)
    ]


def _follows_masters(model: nn.Module) -> bool:
    """Return whether this rank's compute weights equal its cast masters."""
    return all(torch.equal(part.nan_to_num(), cast.nan_to_num()) for part, cast in _own_parts(model))


def _digests(model: nn.Module) -> list[str]:
    """Return the digests of this rank's ZeRO-3 shards."""
    return [digest(handle.weights.read_zero3()) for handle in _handles(model)]


def _assert_replicas_agree(digests: list[list[Any]], size: int) -> None:
    """Check the digests of all steps, listed by rank."""
    for rank, own in enumerate(digests):
        assert own == digests[rank % size], f"ranks {rank % size} and {rank}"
    assert len(set(map(str, digests[0]))) > len(digests[0]) // 2, "the weights do not change"


def _assert_predicted(model: nn.Module) -> None:
    report = layerzero.memory(model)
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report


# --- masters that a thread may read ---


@on_ranks()
def test_masters_are_written_only_after_their_refresh_has_ended(rank: int) -> None:
    model = _shard(2, "lossless")
    state, sgd = get_state(model), sys.modules["torch.optim.sgd"]
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    _step(model, [optimizer], rank, 0)
    _backward(model, rank, 1)
    weights = {handle.weights.master.untyped_storage().data_ptr(): handle.weights for handle in state.handles}
    write, written = sgd.sgd, set()

    def checked(parameters: list[Tensor], *args: Any, **settings: Any) -> None:
        masters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        assert not any(is_refreshing(weights[master]) for master in masters)
        written.update(masters)
        write(parameters, *args, **settings)

    with late_threads(0.2), mock.patch.object(sgd, "sgd", checked):
        for _ in range(2):
            optimizer.step()
            assert any(map(is_refreshing, weights.values()))
        state.refreshes.before_master_write()
        assert not any(map(is_refreshing, weights.values()))
        state.refreshes.launch()
    assert written == set(weights)


# --- training ---

Event = Callable[[nn.Module, list[Optimizer], int, int, Path], None]


def _edit(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    _backward(model, rank, step)  # refreshes the weights


def _edit_before_the_step(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    _backward(model, rank, step)
    with torch.no_grad():
        model.head.weight.mul_(0.75)
    update(*optimizers)


def _write_back(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _skip(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    _backward(model, rank, step)
    for optimizer in optimizers:
        optimizer.zero_grad()


def _resume(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    path = folder / f"{get_state(model).config.codecs.refresh}-{step}"
    saved = optimizers[0] if len(optimizers) == 1 else None
    checkpoint.save(path, model, saved)
    masters = [handle.weights.master.clone() for handle in _handles(model)]
    _step(model, optimizers, rank, step)
    checkpoint.load(path, model, saved)
    assert all(torch.equal(h.weights.master, before) for h, before in zip(_handles(model), masters, strict=True))


def _average(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    ema = layerzero.EMA(model, decay=0.5)
    ema.update()
    _step(model, optimizers, rank, step)
    with ema.swapped():
        assert _follows_masters(model)


def _evaluate(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        with layerzero.full_precision(model):
            model(torch.ones(2, WIDTH))


SENT_IN_FULL: tuple[Event, ...] = (_edit, load, _write_back, _resume, refresh, _average)
EVENTS: tuple[Event, ...] = (*SENT_IN_FULL, _skip, _edit_before_the_step, _evaluate)


def _same_bits(rank: int, size: int, steps: int, folder: Path, muon: bool, settings: dict[str, Any]) -> None:
    models = [_shard(size, codec, **settings) for codec in (None, "lossless")]
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
    if get_state(models[0]).mesh_info.replicas > 1:
        sent = [layerzero.traffic(model).bytes["refresh"] for model in models]
        assert sent[1] < 0.9 * sent[0], sent
    _assert_predicted(models[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    # With S = 1, no ranks share memory. With one replica, (2, 2) stands for (4, 4). In 72 steps, each event happens
    # twice.
    ("ranks", "size", "shared_memory", "muon", "steps"),
    [
        (2, 1, "off", False, 40),
        (2, 1, "off", True, 40),
        (4, 2, None, False, 40),
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
def test_weights_have_the_same_bits_after_every_step(
    ranks: int, size: int, shared_memory: str | None, muon: bool, steps: int, tmp_path: Path
) -> None:
    run_ranks(_same_bits, size, steps, tmp_path, muon, {}, world_size=ranks, shared_memory=shared_memory, timeout=400)


def _same_replicas(rank: int, size: int, folder: Path, muon: bool, settings: dict[str, Any]) -> list[list[str]]:
    """Train, change the weights in between, and return the digests of the weights after each operation."""
    model = _shard(size, INT4, **settings)
    optimizers = make_muon(model) if muon else make_adamw(model)
    digests = []
    for step, event in enumerate(SENT_IN_FULL):
        _step(model, optimizers, rank, 10 * step)
        if step == 0 and not muon:  # Muon and AdamW each refresh after the first step
            assert _follows_masters(model), "the first refresh"
        for part in range(1, 4):
            before = _own_parts(model)
            _step(model, optimizers, rank, 10 * step + part)
            for (old, _), (weights, cast) in zip(before, _own_parts(model), strict=True):
                assert ((weights - cast).abs().float() <= bound(old, cast)).all()
            digests.append(_digests(model))
        assert not _follows_masters(model) or not sum(len(cast) for _, cast in _own_parts(model))
        assert layerzero.fingerprint(model).ok
        event(model, optimizers, rank, 10 * step + 5, folder)
        assert _follows_masters(model), event.__name__
        digests.append(_digests(model))
    _assert_predicted(model)
    return digests


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "size", "shared_memory", "muon"),  # with S = 1, no ranks share memory
    [
        (2, 1, "off", True),
        (2, 1, "off", False),
        (4, 2, None, False),
        (4, 2, "off", True),
        (3, 1, "off", False),
        (3, 1, "off", True),
        (4, 2, "off", False),
        (4, 2, None, True),
    ],
)
def test_all_replicas_have_the_same_weights(
    ranks: int, size: int, shared_memory: str | None, muon: bool, tmp_path: Path
) -> None:
    found = run_ranks(_same_replicas, size, tmp_path, muon, {}, world_size=ranks, shared_memory=shared_memory)
    _assert_replicas_agree(found, size)


@pytest.mark.sample(2)
@pytest.mark.slow
@EACH_CODEC
@pytest.mark.parametrize(
    "settings",
    [
        {"mp_policy": FP16},
        {"accumulation": "full"},
        {"accumulation": "local", "reshard_after_forward": False},
        {"codecs": Codecs(gather=layerzero.Float8Rows())},
        {"codecs": Codecs(hop2=layerzero.Int4Blocks())},
        {"units": None},
    ],
    ids=str,
)
def test_weights_are_right_with_other_settings(codec: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    if codec == INT4:
        _assert_replicas_agree(run_ranks(_same_replicas, 2, tmp_path, False, settings), 2)
    else:
        run_ranks(_same_bits, 2, 40, tmp_path, False, settings)


def _without_forward(rank: int, codec: Any, setting: str | None) -> list[list[str]]:
    """Steps follow each other without a forward pass, and a parameter is frozen for a while."""
    settings = {} if setting is None else {"offload": Offload(**{setting: True})}
    with nullcontext() if setting is None else pytest.warns(UserWarning, match=setting):
        models = [_shard(2, each, **settings) for each in ((None, codec) if codec == "lossless" else (codec,))]
    for model in models:
        model.layers[0].up.weight.requires_grad_(False)
    optimizers = [make_adamw(model) for model in models]
    digests = []
    for step in range(6):
        for model, own in zip(models, optimizers, strict=True):
            model.layers[0].up.weight.requires_grad_(step >= 3)
            _backward(model, rank, step)
            for _ in range(2):
                for optimizer in own:
                    optimizer.step()
            update(*own)
        digests.append(_digests(models[-1]))
        if len(models) > 1:
            _assert_same(models, step)
    _assert_predicted(models[-1])
    return digests


@EACH_CODEC
@pytest.mark.parametrize("setting", [None, "optimizer", "params"])
def test_offloading_steps_without_a_forward_pass_and_frozen_parameters(codec: Any, setting: str | None) -> None:
    _assert_replicas_agree(run_ranks(_without_forward, codec, setting), 2)


def _losses(rank: int, codec: Any) -> list[float]:
    model = _shard(2, codec)
    optimizers = make_adamw(model)
    return [_step(model, optimizers, rank, step % 8, micro_batches=1) for step in range(48)]


@pytest.mark.exhaustive
def test_a_model_learns_as_well_as_without_the_codec() -> None:
    plain, encoded = (torch.tensor(run_ranks(_losses, codec)).mean(0) for codec in (None, INT4))
    assert encoded[-8:].mean() < 0.6 * encoded[:8].mean()
    assert abs(encoded[-8:].mean() / plain[-8:].mean() - 1) < 0.05


# --- messages ---


@EACH_CODEC
@on_ranks()
def test_which_refreshes_are_sent_in_full(rank: int, codec: Any) -> None:
    """The first refresh, and refreshes after edits and loads, send the weights and not differences."""
    model = _shard(2, codec)
    optimizers = make_adamw(model)
    parts = [handle.mesh_info.grid.numel(handle.layout, Extent.ZERO1) for handle in _handles(model)]
    everything = 2 * sum(parts)
    encoded = sum(min(66 * -(-part // 128), 2 * part) for part in parts)

    def sent(operation: Callable[[], object]) -> int:
        layerzero.traffic(model, reset=True)
        operation()
        _finish_refreshes(model)
        report = layerzero.traffic(model, reset=True)
        assert "refresh" not in report.predicted
        return report.bytes.get("refresh", 0)

    _backward(model, rank, 0)
    assert sent(lambda: update(*optimizers)) == everything, "the first refresh"
    state = layerzero.full_state_dict(model)
    for step, operation in enumerate(
        (lambda: layerzero.refresh(model), lambda: layerzero.load_full_state_dict(model, state)), 1
    ):
        _backward(model, rank, step)
        differences = sent(lambda: update(*optimizers))
        assert differences == encoded < 0.3 * everything if codec == INT4 else 0 < differences < 0.9 * everything
        assert sent(operation) == everything


@on_ranks()
def test_a_rank_can_ask_for_a_full_refresh(rank: int) -> None:
    """A rank that has written to its rows asks its counterparts in the other replicas for full refreshes."""
    for deferred in (False, True):
        model, optimizers = _trained(2, INT4, rank, 2)
        _backward(model, rank, 2)
        if rank == 3:
            rows = next(p.to_local() for p in model.layers[1].parameters() if p.to_local().numel())
            with torch.no_grad():
                rows.mul_(1.0)
        get_state(model).refreshes.deferred = deferred
        update(*optimizers)
        get_state(model).refreshes.launch_due()
        parts = zip(_handles(model), _own_parts(model), strict=True)
        followed = {handle.label: torch.equal(*pair) for handle, pair in parts}
        assert followed == {label: label == "layers.1" and rank % 2 == 1 for label in followed}, deferred


@pytest.mark.default_sample(1)
@BOTH
@on_ranks()
def test_the_last_changes_of_weights_are_equal_on_all_replicas(rank: int, shared_memory: str | None) -> None:
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
    report = layerzero.memory(_shard(2, INT4))
    assert report.measured["refresh_state"] == report.predicted["refresh_state"] == 0


class _Useless(LosslessDifferences):
    """Codec whose messages are never smaller than the weights."""

    def encode(self, old: Tensor, new: Tensor, out: Tensor, last_change: Tensor | None = None) -> int:
        out.copy_(new.view(torch.uint8))
        last_change.zero_()
        return out.numel()


@on_ranks()
def test_each_rank_sends_its_weights_unless_differences_are_smaller(rank: int) -> None:
    models = [_shard(2, codec) for codec in (None, "lossless")]
    optimizers = [make_adamw(model) for model in models]
    for handle in get_state(models[1]).handles:
        if rank // 2 == 0:  # one of the two replicas
            handle.weights.refresher._codec = _Useless(LosslessDifferences.best().compression)
    for step in range(4):
        for model, own in zip(models, optimizers, strict=True):
            _step(model, own, rank, step)
        _assert_same(models, step)


def _not_finite(rank: int) -> list[list[str]]:
    """A NaN in a master of rank 2 is visible as a block on all replicas, and disappears with the master's NaN."""
    model = _shard(1, INT4)
    optimizer = layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    digests = []

    def nans() -> int:
        digests.append(_digests(model))
        return sum(int(handle.weights.read_zero3().isnan().sum()) for handle in _handles(model))

    def write_to_master(value: float) -> None:
        if rank == 2:
            _handles(model)[1].weights.master[3] = value

    def load() -> None:
        layerzero.load_full_state_dict(model, state)

    def write_back() -> None:
        with layerzero.unsharded(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.nan_to_num_()

    state = layerzero.full_state_dict(model)
    for step in range(3):
        _step(model, [optimizer], rank, step)
    _backward(model, rank, 3)
    for heal in (lambda: write_to_master(0.5), load, write_back):
        optimizer.step()
        assert nans() == 0 and not _follows_masters(model)
        write_to_master(float("nan"))
        optimizer.step()
        assert nans() == 128
        optimizer.step()
        assert nans() == 128
        heal()
        optimizer.step()
        assert nans() == 0
    return digests


def test_a_nan_is_visible_on_all_ranks_and_can_be_removed() -> None:
    _assert_replicas_agree(run_ranks(_not_finite), 1)


@EACH_CODEC
@on_ranks()
def test_a_wrong_bit_is_found_when_digests_are_compared(rank: int, codec: Any) -> None:
    model = _shard(2, codec)
    optimizers = make_adamw(model)
    with mock.patch.object(weight_storage, "COMPARE_EVERY", 4):
        for step in range(2):
            _step(model, optimizers, rank, step)
        handle = _handles(model)[1]
        if rank == 1:  # in the part of the other replica
            other = 1 - handle.mesh_info.grid.replica_rank
            flip(handle.weights.read_zero3(), other * len(handle.weights.master) + 3, 2)
        _step(model, optimizers, rank, 2)
        message = r"compute weights of 'layers.0' differ between replicas.*on rank 1.*on rank 3"
        # Ranks 0 and 2 hold another ZeRO-3 shard.
        with pytest.raises(RuntimeError, match=message) if rank % 2 else nullcontext():
            _step(model, optimizers, rank, 3)
            _finish_refreshes(model)


# --- what else reads compute weights ---


def _fingerprints(rank: int, size: int) -> list[Any]:
    """Flip a bit of a compute weight on rank 1, recover, and flip a bit of a master."""
    model = _shard(size, INT4)
    optimizers = make_adamw(model)
    guard = layerzero.guard_corruption(model, *optimizers, every=1)
    for step in range(3):
        _step(model, optimizers, rank, step)
    assert layerzero.fingerprint(model).ok and not _follows_masters(model)
    _backward(model, rank, 3)
    if rank == 1:
        flip(_handles(model)[1].weights.read_zero3(), 0, 9)
    found = layerzero.fingerprint(model).corruptions
    with pytest.raises(layerzero.SilentDataCorruption) as error:
        update(*optimizers)
    assert error.value.recoverable
    guard.recover()
    assert _follows_masters(model) and layerzero.fingerprint(model).ok
    _step(model, optimizers, rank, 3)
    _backward(model, rank, 4)
    if rank == 1:
        flip(_handles(model)[1].weights.master, 0, 9)
    assert layerzero.fingerprint(model).ok, "masters are not compared with compute weights"
    with pytest.raises(layerzero.SilentDataCorruption, match=r"masters of .* on rank 1"):
        update(*optimizers)
    guard.close()
    return [(each.kind, each.ranks, each.detail) for each in found]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (3, [("compute weights", (1,), "element 0, differ from other replicas")]),
        (2, [("compute weights", (0, 1), "element 0, replicas differ, and the wrong replica is unknown")]),
    ],
)
def test_fingerprints_compare_replicas_only(ranks: int, expected: list[Any]) -> None:
    assert run_ranks(_fingerprints, 1, world_size=ranks) == [expected] * ranks


@on_ranks()
def test_streams_have_the_weights_of_forward_passes(rank: int) -> None:
    """Streams yield the weights of the next forward pass; everything else that reads weights yields the masters."""
    model, _ = _trained(2, INT4, rank, 3)
    masters = layerzero.full_state_dict(model, rank0_only=False)
    streamed = {name: tensor.clone() for name, tensor in layerzero.stream_weights(model)}
    assert any(not torch.equal(streamed[name], masters[name].bfloat16()) for name in masters)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        served, exact = Net().bfloat16(), Net()
        served.load_state_dict(streamed)
        exact.load_state_dict(masters)
        assert torch.equal(model(x), served(x.bfloat16()))
        with layerzero.full_precision(model):
            torch.testing.assert_close(model(x), exact(x))


def _resumed(rank: int, folder: Path) -> list[list[str]]:
    """A resumed run begins with a full refresh, so that its weights differ by the error that the run carried."""
    models = [_shard(2, INT4) for _ in range(2)]
    optimizers = [make_adamw(model) for model in models]
    for step in range(3):
        _step(models[0], optimizers[0], rank, step)
    checkpoint.save(folder / "saved", models[0], optimizers[0][0])
    checkpoint.load(folder / "saved", models[1], optimizers[1][0])
    assert not different(*map(full_parameters, models))
    assert _follows_masters(models[1]) and not _follows_masters(models[0])
    assert _digests(models[0]) != _digests(models[1])
    losses = [_step(model, own, rank, 3) for model, own in zip(models, optimizers, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    digests = []
    for step in range(4, 6):
        _step(models[1], optimizers[1], rank, step)
        digests.append(_digests(models[1]))
    return digests


def test_a_resumed_run_begins_with_the_cast_masters(tmp_path: Path) -> None:
    _assert_replicas_agree(run_ranks(_resumed, tmp_path), 2)


# --- life time ---


@on_ranks()
def test_close_ends_the_threads(rank: int) -> None:
    model, _ = _trained(2, "lossless", rank, 1)
    refresher = get_state(model).handles[0].weights.refresher
    threads = [stream.thread for stream in (refresher._encoding, refresher._decoding)]
    assert all(thread.is_alive() for thread in threads)
    layerzero.close(model)
    assert not any(thread.is_alive() for thread in threads)


@on_ranks(world_size=2, pg_timeout=5)
def test_a_rank_that_does_not_take_part_is_an_error(rank: int) -> None:
    model, optimizers = _trained(1, "lossless", rank, 2)
    if rank == 0:
        return
    with pytest.raises(RuntimeError, match=r"layerzero: .*failed|did not take part"):
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
            layerzero.refresh(model)
            _finish_refreshes(model)


class _Launches(StepObserver):
    """Observer that lists the units whose refreshes were launched."""

    def __init__(self) -> None:
        self.refreshed_units: list[str] = []

    def launched(self, works: PendingCollective) -> None:
        if works.launched.collective is Collective.REFRESH:
            self.refreshed_units.append(works.launched.name)


@on_ranks()
def test_observers_and_the_watchdog_see_encoded_refreshes(rank: int) -> None:
    model = _shard(2, "lossless")
    watchdog = layerzero.watchdog(model, 60.0)
    optimizers = make_adamw(model)
    _step(model, optimizers, rank, 0)
    _finish_refreshes(model)
    launches = attach(model, _Launches())
    _step(model, optimizers, rank, 1)
    _finish_refreshes(model)
    assert sorted(launches.refreshed_units) == sorted(handle.label for handle in get_state(model).handles)
    watchdog.close()


# --- where nothing is encoded ---


@EACH_CODEC
@on_ranks(world_size=2)
def test_one_replica_encodes_nothing(rank: int, codec: Any) -> None:
    model = _shard(2, codec)
    _step(model, make_adamw(model), rank, 0)
    assert _follows_masters(model)
    assert get_state(model).handles[0].weights.refresher is None
    assert layerzero.traffic(model).calls.get("refresh", 0) == 0


# --- on a device ---


def _bits_of_steps(model: nn.Module, muon: bool, rank: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the compute weights and the masters of this rank after each step."""
    found, optimizers = [], make_muon(model) if muon else make_adamw(model)
    for step in range(9):
        _step(model, optimizers, rank, step)
        if step == 4:
            with torch.no_grad():
                model.head.weight.to_local().mul_(1.25)  # sent in full before the next forward pass
        if step == 6:  # in the next refresh, CPUs compare digests, and devices send the weights
            layerzero.refresh(model)
        if step != 4:
            weights = [handle.weights for handle in get_state(model).handles]
            found.append([(each.read_zero3().clone(), each.master.clone()) for each in weights])
    return found


def _on_device(rank: int, size: int, muon: bool, settings: dict[str, Any]) -> list[list[str]]:
    """Train on the CPU and on a device with late streams, compare the bits, and return digests of the weights."""
    with mock.patch.object(weight_storage, "COMPARE_EVERY", 1000 if muon else 8):  # Muon and AdamW refresh apart
        on_cpu = {name: value for name, value in settings.items() if name != "offload"}
        expected = _bits_of_steps(_shard(size, INT4, shared_memory="off", **on_cpu), muon, rank)
        with on_device(size) as (_, mesh):
            found = _bits_of_steps(_shard(size, INT4, mesh=mesh, **settings), muon, rank)
    for step, handles in enumerate(zip(expected, found, strict=True)):
        for one, other in zip(*handles, strict=True):
            assert torch.equal(one[1], other[1]), f"masters after step {step}"
            assert torch.equal(one[0].view(torch.int16), other[0].view(torch.int16)), f"weights after step {step}"
    return [[digest(weights) for weights, _ in handles] for handles in found]


@pytest.mark.default_sample(1)
@pytest.mark.parametrize(
    ("ranks", "size", "muon", "settings"),
    [
        (4, 2, False, {}),
        (2, 1, True, {"mp_policy": FP16}),
        (3, 1, True, {}),
        (4, 2, False, {"offload": Offload(optimizer=True)}),
        (2, 1, False, {"offload": Offload(params=True)}),
        (4, 2, False, {"codecs": Codecs(hop2=layerzero.Int4Blocks(), gather=layerzero.Float8Rows())}),
    ],
)
def test_a_device_gives_the_bits_of_the_cpu(ranks: int, size: int, muon: bool, settings: dict[str, Any]) -> None:
    _assert_replicas_agree(run_ranks(_on_device, size, muon, settings, world_size=ranks), size)


@on_ranks(world_size=2)
def test_what_a_device_does_not_support_is_refused(rank: int) -> None:
    text = r"refresh='lossless' is not supported on cpu with the backends .*Int4Difference\(\) with NCCL"
    with on_device(1) as (_, mesh), pytest.raises(ValueError, match=text):
        _shard(1, "lossless", mesh=mesh)
