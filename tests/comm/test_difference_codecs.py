"""Refreshes with 4-bit differences: ``shard_model(refresh_codec=layerzero.Int4Difference())``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import layerzero
from layerzero import checkpoint
from layerzero.engine import weight_storage
from layerzero.engine.handle import Handle
from layerzero.engine.hooks import get_state
from layerzero.layout.shard_grid import Extent
from layerzero.slow_links.int4_difference import _AT_ONCE
from layerzero.utils.bit_sums import digest
from tests.support.bits import flip
from tests.support.late_device import NAME, Device, register
from tests.support.models import different, full_parameters
from tests.support.ranks import mesh_of, run_ranks
from tests.support.refreshes import BF16, FP16, WIDTH, Layer, Net, load, make_adamw, make_muon, refresh, update
from tests.support.wrapped_gloo import mesh_on

CODEC = layerzero.Int4Difference()
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = (0, 1, 2, 7, 127, 128, 129, 1000, 2 * _AT_ONCE + 130)


def _random(numel: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return previous and new weights."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(4)
    new = old + 0.01 * torch.randn(numel, generator=generator)
    return old.to(dtype), new.to(dtype)


def _sent(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the message and the weights that the sender has afterwards."""
    out, own = torch.empty(2 * len(new), dtype=torch.uint8), new.clone()
    return out[: CODEC.encode(old, own, out)], own


def _received(message: Tensor, old: Tensor) -> Tensor:
    weights = old.clone()
    CODEC.decode(message, weights)
    return weights


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _largest(differences: Tensor) -> Tensor:
    """Return, for each element, the largest absolute element of its block of 128."""
    blocks = torch.nn.functional.pad(differences.abs().float(), (0, -len(differences) % 128)).view(-1, 128)
    return blocks.amax(1, keepdim=True).expand(-1, 128).reshape(-1)[: len(differences)]


def _bound(old: Tensor, new: Tensor) -> Tensor:
    """Return the documented bound on the error of each weight: 1/13 of its block's largest difference, and rounding."""
    largest = _largest(new.float() - old.float())
    rounding = torch.finfo(new.dtype).eps / 2 * (new.abs() + largest) + torch.finfo(new.dtype).smallest_normal
    return largest / 13 + rounding


# --- messages ---


@DTYPES
@pytest.mark.parametrize("numel", SIZES)
def test_sender_and_receivers_get_the_same_weights_within_the_bound(numel: int, dtype: torch.dtype) -> None:
    old, new = _random(numel, dtype)
    message, own = _sent(old, new)
    assert len(message) == min(-(-numel // 2) + 2 * -(-numel // 128), 2 * numel)
    assert _same(_received(message, old), own)
    assert ((own - new).abs().float() <= _bound(old, new)).all()
    if numel > 1000:
        assert not _same(own, new) and not _same(own, old)


def test_unchanged_weights_stay_unchanged() -> None:
    old, _ = _random(1000, torch.bfloat16)
    message, own = _sent(old, old)
    assert _same(own, old) and _same(_received(message, old), old)


def test_integers_with_a_largest_difference_of_seven_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for step in (2.0**-6, 1.0, 2.0**10):
        old = torch.randint(-20, 20, (1000,), generator=generator)
        change = torch.randint(-7, 8, (1000,), generator=generator)
        change[::100] = 7
        before, after = (step * old).bfloat16(), (step * (old + change)).bfloat16()
        message, own = _sent(before, after)
        assert torch.equal(own, after) and torch.equal(_received(message, before), after)


@DTYPES
def test_errors_do_not_accumulate_and_vanish_when_masters_stop(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(3000, generator=generator)
    deltas = [1e-3 * torch.randn(3000, generator=generator) for _ in range(50)]
    weights = master.to(dtype)
    for delta in deltas:
        master = master + delta
        target = master.to(dtype)
        bound = _bound(weights, target)
        weights = _sent(weights, target)[1]
        error = (weights.float() - target.float()).abs()
        assert (error <= bound).all()
        # The difference is at most the last step, the roundings of both casts, and the previous error.
        moved = 6e-3 + 2 * torch.finfo(dtype).eps * 5
        assert error.max() <= 1.2 * moved / 13 + torch.finfo(dtype).eps * 5
    largest = float("inf")
    for _ in range(15):
        remaining = (weights.float() - target.float()).abs().max().item()
        assert remaining <= largest / 6
        if not remaining:
            break
        largest, weights = remaining, _sent(weights, target)[1]
    assert torch.equal(weights, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, _AT_ONCE + 5])
def test_a_part_that_is_not_finite_is_sent_as_it_is(value: float, place: int) -> None:
    old, new = _random(_AT_ONCE + 10, torch.bfloat16)
    broken = new.clone()
    broken[place] = value
    for before, after in ((old, broken), (broken, new)):
        message, own = _sent(before, after)
        assert len(message) == after.nbytes and _same(own, after) and _same(_received(message, before), after)


def test_a_difference_that_overflows_is_sent_as_it_is() -> None:
    old, new = torch.full((200,), -3e38).bfloat16(), torch.full((200,), 3e38).bfloat16()
    message, own = _sent(old, new)
    assert len(message) == new.nbytes and _same(own, new) and _same(_received(message, old), new)


def test_a_message_may_begin_at_any_byte() -> None:
    old, new = _random(1001, torch.bfloat16)
    message, own = _sent(old, new)
    moved = torch.empty(len(message) + 1, dtype=torch.uint8)[1:].copy_(message)
    assert _same(_received(moved, old), own)


def test_a_message_of_another_size_is_an_error() -> None:
    old, new = _random(1000, torch.bfloat16)
    message, _ = _sent(old, new)
    for wrong in (message[:-1], torch.cat((message, message[:1]))):
        with pytest.raises(ValueError, match=r"of \d+ bytes does not contain the 516 bytes .* 1000 weights"):
            _received(wrong, old)


# --- training ---


def _shard(size: int, codec: Any = CODEC, **settings: Any) -> nn.Module:
    settings = {"mp_policy": BF16, "units": {Layer}} | settings
    return layerzero.shard_model(Net(), mesh=mesh_of(size), refresh_codec=codec, **settings)


def _backward(model: nn.Module, rank: int, step: int) -> float:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x[:, :7]).square().mean()
    loss.backward()
    return loss.item()


def _step(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int) -> float:
    loss = _backward(model, rank, step)
    update(optimizers)
    return loss


def _handles(model: nn.Module) -> list[Handle]:
    return [handle for handle in get_state(model).handles if handle.members]


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


Event = Callable[[nn.Module, list[Optimizer], int, int, Path], None]


def _edit(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    _backward(model, rank, step)  # refreshes the weights


def _write_back(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _resume(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    saved = optimizers[0] if len(optimizers) == 1 else None
    checkpoint.save(folder / f"{step}", model, saved)
    masters = [handle.weights.master.clone() for handle in _handles(model)]
    _step(model, optimizers, rank, step)
    checkpoint.load(folder / f"{step}", model, saved)
    assert all(torch.equal(h.weights.master, before) for h, before in zip(_handles(model), masters, strict=True))


def _average(model: nn.Module, optimizers: list[Optimizer], rank: int, step: int, folder: Path) -> None:
    ema = layerzero.EMA(model, decay=0.5)
    ema.update()
    _step(model, optimizers, rank, step)
    with ema.swapped():
        assert _follows_masters(model)


EVENTS: tuple[Event, ...] = (_edit, load, _write_back, _resume, refresh, _average)


def _same_replicas(rank: int, size: int, folder: Path, muon: bool, settings: dict[str, Any]) -> list[list[str]]:
    """Train, change the weights in between, and return the digests of the weights after each operation."""
    model = _shard(size, **settings)
    optimizers = make_muon(model) if muon else make_adamw(model)
    digests = []
    for step, event in enumerate(EVENTS):
        _step(model, optimizers, rank, 10 * step)
        if step == 0 and not muon:  # Muon and AdamW each refresh after the first step
            assert _follows_masters(model), "the first refresh"
        for part in range(1, 4):
            before = _own_parts(model)
            _step(model, optimizers, rank, 10 * step + part)
            for (old, _), (weights, cast) in zip(before, _own_parts(model), strict=True):
                assert ((weights - cast).abs().float() <= _bound(old, cast)).all()
            digests.append(_digests(model))
        assert not _follows_masters(model) or not sum(len(cast) for _, cast in _own_parts(model))
        assert layerzero.fingerprint(model).ok
        event(model, optimizers, rank, 10 * step + 5, folder)
        assert _follows_masters(model), event.__name__
        digests.append(_digests(model))
    report = layerzero.memory(model)
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report
    return digests


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("ranks", "size", "shared_memory", "muon"),  # with S = 1, no ranks share memory
    [
        pytest.param(2, 1, "off", True, marks=pytest.mark.slow),
        pytest.param(2, 1, "off", False, marks=pytest.mark.slow),
        pytest.param(4, 2, None, False, marks=pytest.mark.slow),
        pytest.param(4, 2, "off", True, marks=pytest.mark.slow),
        pytest.param(3, 1, "off", False, marks=pytest.mark.slow),
        pytest.param(3, 1, "off", True, marks=pytest.mark.slow),
        pytest.param(4, 2, "off", False, marks=pytest.mark.slow),
        pytest.param(4, 2, None, True, marks=pytest.mark.slow),
    ],
)
def test_all_replicas_have_the_same_weights(
    ranks: int, size: int, shared_memory: str | None, muon: bool, tmp_path: Path
) -> None:
    found = run_ranks(_same_replicas, size, tmp_path, muon, {}, world_size=ranks, shared_memory=shared_memory)
    _assert_replicas_agree(found, size)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mp_policy": FP16},
        {"accumulation": "full"},
        {"accumulation": "local", "reshard_after_forward": False},
        {"gather_codec": layerzero.Float8Rows()},
        {"hop2_codec": layerzero.Int4Blocks()},
        {"units": None},
    ],
    ids=str,
)
def test_all_replicas_have_the_same_weights_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    _assert_replicas_agree(run_ranks(_same_replicas, 2, tmp_path, False, settings), 2)


def _without_forward(rank: int) -> list[list[str]]:
    """Steps follow each other without a forward pass, and some parameters are frozen for a while."""
    model = _shard(2)
    optimizers = make_adamw(model)
    digests = []
    for step in range(6):
        model.layers[0].up.weight.requires_grad_(step >= 3)
        _backward(model, rank, step)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
        update(optimizers)
        digests.append(_digests(model))
    return digests


def test_steps_without_a_forward_pass_and_frozen_parameters() -> None:
    _assert_replicas_agree(run_ranks(_without_forward), 2)


@pytest.mark.parametrize("setting", ["offload_optimizer", "offload_params"])
def test_offloading(setting: str) -> None:
    _assert_replicas_agree(run_ranks(_offloaded, setting), 2)


def _offloaded(rank: int, setting: str) -> list[list[str]]:
    with pytest.warns(UserWarning, match=setting):
        model = _shard(2, **{setting: True})
    optimizers = make_adamw(model)
    digests = []
    for step in range(4):
        _step(model, optimizers, rank, step)
        digests.append(_digests(model))
    report = layerzero.memory(model)
    assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], report
    return digests


class _Signs(torch.optim.Optimizer):
    """Optimizer that moves each weight by 7/64 against the sign of its gradient."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-7 / 64)


def _exact(rank: int) -> None:
    models = [_shard(2, codec) for codec in (None, CODEC)]
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(64).round_().div_(64)
    optimizers = [layerzero.shard_optimizer(_Signs(model.parameters()), model, elementwise=True) for model in models]
    for step in range(8):
        for model, optimizer in zip(models, optimizers, strict=True):
            _step(model, [optimizer], rank, step)
        plain, encoded = ([h.weights.read_zero3().clone() for h in _handles(model)] for model in models)
        assert all(map(torch.equal, plain, encoded)), step
        assert not different(*map(full_parameters, models)), step
    sent = [layerzero.traffic(model).bytes["refresh"] for model in models]
    assert sent[1] < 0.4 * sent[0]


@pytest.mark.slow
def test_training_is_bitwise_the_same_if_differences_are_exact() -> None:
    run_ranks(_exact)


def _losses(rank: int, codec: Any) -> list[float]:
    model = _shard(2, codec)
    optimizers = make_adamw(model)
    return [_step(model, optimizers, rank, step % 8) for step in range(48)]


@pytest.mark.exhaustive
def test_a_model_learns_as_well_as_without_the_codec() -> None:
    plain, encoded = (torch.tensor(run_ranks(_losses, codec)).mean(0) for codec in (None, CODEC))
    assert encoded[-8:].mean() < 0.6 * encoded[:8].mean()
    assert abs(encoded[-8:].mean() / plain[-8:].mean() - 1) < 0.05


# --- messages of a model ---


def _in_full(rank: int) -> None:
    model = _shard(2)
    optimizers = make_adamw(model)
    handles = _handles(model)
    parts = [handle.mesh_info.grid.numel(handle.layout, Extent.ZERO1) for handle in handles]
    everything = 2 * sum(parts)
    encoded = sum(-(-part // 2) + 2 * -(-part // 128) for part in parts)

    def sent(operation: Callable[[], object]) -> int:
        layerzero.traffic(model, reset=True)
        operation()
        for handle in handles:
            handle.weights.finish_refresh()
        report = layerzero.traffic(model, reset=True)
        assert "refresh" not in report.predicted
        return report.bytes.get("refresh", 0)

    _backward(model, rank, 0)
    assert sent(lambda: update(optimizers)) == everything, "the first refresh"
    state = layerzero.full_state_dict(model)
    for step, operation in enumerate(
        (lambda: layerzero.refresh(model), lambda: layerzero.load_full_state_dict(model, state)), 1
    ):
        _backward(model, rank, step)
        assert sent(lambda: update(optimizers)) == encoded < 0.27 * everything
        assert sent(operation) == everything


def test_which_refreshes_are_sent_in_full() -> None:
    run_ranks(_in_full)


def _asked(rank: int, folder: Path) -> None:
    """A rank that has written to its rows asks its counterparts in the other replicas for full refreshes."""
    model = _shard(2)
    optimizers = make_adamw(model)
    for step in range(2):
        _step(model, optimizers, rank, step)
    _backward(model, rank, 2)
    if rank == 3:
        rows = next(p.to_local() for p in model.layers[1].parameters() if p.to_local().numel())
        with torch.no_grad():
            rows.mul_(1.0)
    update(optimizers)
    followed = {
        handle.label: torch.equal(*pair) for handle, pair in zip(_handles(model), _own_parts(model), strict=True)
    }
    assert followed == {label: label == "layers.1" and rank % 2 == 1 for label in followed}


def test_a_rank_can_ask_for_a_full_refresh(tmp_path: Path) -> None:
    run_ranks(_asked, tmp_path)


def _not_finite(rank: int) -> list[list[str]]:
    """A NaN in a master of rank 2 is visible on all replicas, and disappears with the master's NaN."""
    model = _shard(1)
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
        assert nans() == 1
        optimizer.step()
        assert nans() == 1
        heal()
        optimizer.step()
        assert nans() == 0
    return digests


def test_a_nan_is_visible_on_all_ranks_and_can_be_removed() -> None:
    _assert_replicas_agree(run_ranks(_not_finite), 1)


def _flipped(rank: int) -> None:
    model = _shard(2)
    optimizers = make_adamw(model)
    with mock.patch.object(weight_storage, "COMPARE_EVERY", 4):
        for step in range(2):
            _step(model, optimizers, rank, step)
        handle = _handles(model)[1]
        if rank == 1:
            flip(handle.weights.read_zero3(), 3, 2)
        _step(model, optimizers, rank, 2)
        message = r"compute weights of 'layers.0' differ between replicas.*on rank 1.*on rank 3"
        # Ranks 0 and 2 hold another ZeRO-3 shard.
        with pytest.raises(RuntimeError, match=message) if rank % 2 else nullcontext():
            _step(model, optimizers, rank, 3)
            for each in _handles(model):
                each.weights.finish_refresh()


def test_a_wrong_bit_is_found_when_digests_are_compared() -> None:
    run_ranks(_flipped)


# --- what else reads compute weights ---


def _fingerprints(rank: int, size: int) -> list[Any]:
    """Flip a bit of a compute weight on rank 1, recover, and flip a bit of a master."""
    model = _shard(size)
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
        update(optimizers)
    assert error.value.recoverable
    guard.recover()
    assert _follows_masters(model) and layerzero.fingerprint(model).ok
    _step(model, optimizers, rank, 3)
    _backward(model, rank, 4)
    if rank == 1:
        flip(_handles(model)[1].weights.master, 0, 9)
    assert layerzero.fingerprint(model).ok, "masters are not compared with compute weights"
    with pytest.raises(layerzero.SilentDataCorruption, match=r"masters of .* on rank 1"):
        update(optimizers)
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


def _read(rank: int) -> None:
    """Streams yield the weights of the next forward pass; everything else that reads weights yields the masters."""
    model = _shard(2)
    optimizers = make_adamw(model)
    for step in range(3):
        _step(model, optimizers, rank, step)
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


def test_streams_have_the_weights_of_forward_passes() -> None:
    run_ranks(_read)


def _resumed(rank: int, folder: Path) -> list[list[str]]:
    """A resumed run begins with a full refresh, so that its weights differ by the error that the run carried."""
    models = [_shard(2), _shard(2)]
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


# --- settings ---


def _refused(rank: int) -> None:
    with pytest.raises(
        ValueError, match=r"refresh_codec=Int4Blocks\(.*\) is not supported. Use one of .*Int4Difference"
    ):
        _shard(1, layerzero.Int4Blocks())
    with pytest.raises(ValueError, match=r"refresh_codec=<class.*Int4Difference'> is not supported"):
        _shard(1, layerzero.Int4Difference)
    for setting in ("hop2_codec", "gather_codec"):
        with pytest.raises(TypeError, match=rf"{setting} must be an object with the methods"):
            _shard(1, None, **{setting: CODEC})
    with pytest.raises(ValueError, match=r"but the model computes in torch.float32. Set param_dtype in mp_policy"):
        _shard(1, mp_policy=MixedPrecisionPolicy())
    for other in (None, "lossless"):
        with pytest.raises(ValueError, match=r"ranks disagree.*refresh_codec"):
            _shard(1, CODEC if rank else other)


def test_settings_are_checked() -> None:
    run_ranks(_refused, world_size=2)


def _on_a_device(rank: int) -> None:
    register()
    with (
        Device().installed(),
        pytest.raises(ValueError, match=r"refresh_codec=Int4Difference\(\) encodes weights on the CPU and sends them"),
    ):
        layerzero.shard_model(Net(), mesh=mesh_on(NAME, 2), mp_policy=BF16, refresh_codec=CODEC)


def test_devices_are_refused() -> None:
    run_ranks(_on_a_device)


def _one_replica(rank: int) -> None:
    model = _shard(2)
    _step(model, make_adamw(model), rank, 0)
    assert _follows_masters(model)
    assert layerzero.traffic(model).calls.get("refresh", 0) == 0


def test_one_replica_encodes_nothing() -> None:
    run_ranks(_one_replica, world_size=2)


def test_a_file_names_the_codec(tmp_path: Path) -> None:
    path = tmp_path / "layerzero.yaml"
    path.write_text("refresh_codec: int4_difference\n")
    config = layerzero.LayerZeroConfig.from_yaml(path)
    assert config.refresh_codec == CODEC
    assert layerzero.LayerZeroConfig(**config.arguments()) == config
    path.write_text("refresh_codec: int4_blocks\n")
    with pytest.raises(ValueError, match=r"refresh_codec='int4_blocks' is not supported"):
        layerzero.LayerZeroConfig.from_yaml(path)
