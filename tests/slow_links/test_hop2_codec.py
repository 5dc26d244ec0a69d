"""Encoded gradients between nodes: ``Codecs(hop2=...)``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero import Codecs, Offload
from layerzero.comm.codecs import EncodedPartsSpec, ParamRows
from layerzero.comm.collectives import Collective, Communicator, encoded_reduce_scatter
from layerzero.comm.traffic_counters import TrafficCounters
from layerzero.device.buffer_pools import BufferPool
from layerzero.engine.hooks import get_state
from layerzero.layout.flat_layout import plan_layouts
from layerzero.layout.shard_grid import ShardGrid
from tests.slow_links.test_codecs import AsTheyAre
from tests.support.late_device import NAME, Device, register
from tests.support.models import (
    BF16,
    IntegerNet,
    different,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    update,
)
from tests.support.ranks import (
    BOTH_SHARED_EXHAUSTIVE,
    BOTH_SHARED_SLOW,
    every_nth_setting,
    mesh_of,
    on_ranks,
    run_ranks,
)
from tests.support.wrapped_gloo import mesh_on

INT8, INT4 = layerzero.Int8Blocks(), layerzero.Int4Blocks()
MODES = ("sharded", "full", "local")


# --- the codec ---


def _coded(values: Tensor, codec: Any = INT8) -> Tensor:
    blocks, out = [ParamRows(0, 1, values.numel())], torch.full_like(values, torch.nan)
    encoded = torch.zeros(codec.nbytes(blocks, values.dtype), dtype=torch.uint8)
    codec.encode(values, blocks, encoded)
    codec.decode(encoded, blocks, out)
    return out


@pytest.mark.parametrize(("codec", "most", "bits"), [(INT8, 250, 8), (INT4, 13, 4)])
@pytest.mark.parametrize("numel", [1, 5, 127, 128, 129, 1000, INT8._AT_ONCE, INT8._AT_ONCE + 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_element_is_close_to_its_value_by_the_scale_of_its_block(
    codec: Any, most: float, bits: int, numel: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(numel)
    values = (torch.randn(numel) * torch.logspace(-6, 3, numel)).to(dtype)
    got = _coded(values, codec)
    padded = torch.nn.functional.pad(values.float().abs(), (0, -numel % 128)).view(-1, 128)
    bound = (padded.amax(1, keepdim=True) / most).expand(-1, 128).flatten()[:numel]
    assert ((got - values.float()).abs() <= bound).all()
    assert codec.nbytes([ParamRows(0, 1, numel)], dtype) == -(-numel * bits // 8) + 2 * -(-numel // 128)


def test_all_pairs_of_4_bit_integers_are_packed() -> None:
    pairs = torch.cartesian_prod(torch.arange(-7.0, 8), torch.arange(-7.0, 8))
    values = torch.full((len(pairs), 128), 7.0)
    values[:, 5], values[:, 64 + 5] = pairs.unbind(1)
    assert torch.equal(_coded(values.flatten(), INT4), values.flatten())


def _feed_back(steps: int, numel: int = 3000) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of random values over some steps: exact, encoded with feedback, and encoded without it."""
    torch.manual_seed(0)
    blocks, residual = [ParamRows(0, 1, numel)], torch.zeros(numel, dtype=torch.bfloat16)
    encoded = torch.zeros(INT4.nbytes(blocks, torch.float32), dtype=torch.uint8)
    exact, fed_back, plain = (torch.zeros(numel) for _ in range(3))
    for _ in range(steps):
        values, decoded = torch.randn(numel), torch.empty(numel)
        before = residual.clone()
        INT4.encode_with_feedback(values, blocks, encoded, residual)
        INT4.decode(encoded, blocks, decoded)
        assert torch.equal(decoded, _coded(values + before, INT4))
        assert torch.allclose(residual.float(), values + before - decoded, rtol=2**-8, atol=2**-20)
        exact, fed_back, plain = exact + values, fed_back + decoded, plain + _coded(values, INT4)
    return exact, fed_back, plain


def test_feedback_keeps_the_error_of_a_sum_as_small_as_that_of_one_step() -> None:
    exact, fed_back, plain = _feed_back(100)
    assert (fed_back - exact).norm() < 0.02 * exact.norm() < 0.05 * exact.norm() < (plain - exact).norm()


def test_a_block_that_is_not_finite_has_no_residual() -> None:
    values, residual = torch.ones(256), torch.full((256,), 0.25, dtype=torch.bfloat16)
    values[3] = torch.nan
    blocks = [ParamRows(0, 1, 256)]
    encoded = torch.zeros(INT4.nbytes(blocks, torch.float32), dtype=torch.uint8)
    INT4.encode_with_feedback(values, blocks, encoded, residual)
    decoded = torch.zeros(256)
    INT4.decode(encoded, blocks, decoded)
    assert decoded[:128].isnan().all() and decoded[128:].isfinite().all()
    assert not residual[:128].any()


def test_special_values() -> None:
    assert not _coded(torch.zeros(300)).any()
    tiny = torch.full((128,), 1e-42)
    assert (_coded(tiny) - tiny).abs().max() <= 2.0**-120
    for odd in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(384)
        values[130] = odd
        got = _coded(values)
        assert got[128:256].isnan().all(), "the step is skipped everywhere"
        assert (got[:128] - 1).abs().max() < 1 / 250 > (got[256:] - 1).abs().max()


# --- many replicas ---


def _messages(codec: Any, parts: Tensor, residuals: Tensor | None = None) -> Tensor:
    """Return the encoded parts. Each row begins at a multiple of 16 bytes."""
    blocks = [ParamRows(0, 1, parts.size(1))]
    nbytes = codec.nbytes(blocks, parts.dtype)
    encoded = torch.zeros(len(parts), -(-nbytes // 16) * 16, dtype=torch.uint8)
    codec.encode_parts(parts, blocks, encoded[:, :nbytes], residuals)
    return encoded


def _add(codec: Any, encoded: Tensor, own: Tensor) -> Tensor:
    blocks, total = [ParamRows(0, 1, own.numel())], own.clone()
    codec.add_decoded(encoded[:, : codec.nbytes(blocks, own.dtype)], blocks, total)
    return total


@pytest.mark.parametrize("codec", [INT8, INT4])
@pytest.mark.parametrize("numel", [1, 255, 1000])
def test_parts_are_encoded_together_as_each_of_them(codec: Any, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(numel)
    parts, residuals, blocks = torch.randn(5, numel), torch.randn(5, numel).bfloat16(), [ParamRows(0, 1, numel)]
    encoded, together = _messages(codec, parts), residuals.clone()
    with_errors = _messages(codec, parts, together)
    monkeypatch.setattr(type(codec), "_AT_ONCE", 640)  # one block of each part
    assert torch.equal(_messages(codec, parts), encoded)
    for index, part in enumerate(parts):
        message, of_message = torch.zeros(codec.nbytes(blocks, part.dtype), dtype=torch.uint8), residuals[index]
        codec.encode(part, blocks, message)
        assert torch.equal(message, encoded[index, : len(message)])
        codec.encode_with_feedback(part, blocks, message, of_message)
        assert torch.equal(message, with_errors[index, : len(message)])
        assert torch.equal(of_message, together[index])


@pytest.mark.parametrize("codec", [INT8, INT4])
@pytest.mark.parametrize("replicas", [2, 3, 40])
def test_the_sum_of_decoded_parts_is_exact_in_any_order(codec: Any, replicas: int) -> None:
    """A sum in fp32, or of products that are not rounded, would depend on the order: the magnitudes differ."""
    torch.manual_seed(replicas)
    own, parts = torch.randn(1001), torch.randn(replicas - 1, 1001)
    scales = torch.logspace(-4, 1, replicas - 1)[:, None]
    encoded, nothing = _messages(codec, parts * scales), torch.zeros(1001)
    decoded = [_add(codec, message[None], nothing).tolist() for message in encoded]
    exact = torch.tensor([math.fsum(column) for column in zip(*decoded, strict=True)], dtype=torch.float64)
    assert torch.equal(_add(codec, encoded, own), (own + exact).float()), "rounded once"
    encoded, wide = _messages(codec, parts * scales**6), own.double()
    in_order = _add(codec, encoded, wide)
    for order in (torch.randperm(replicas - 1), torch.arange(replicas - 1).flip(0)):
        assert torch.equal(_add(codec, encoded[order], wide), in_order)


class _Kernels(TorchDispatchMode):
    """Counts operators that a device would launch as kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_kernel = func.namespace == "aten" and not func.is_view and "empty" not in func._schema.name
        self.count += is_kernel and func._schema.name != "aten::detach"
        return func(*args, **(kwargs or {}))


def _kernels(codec: Any, replicas: int) -> tuple[int, int]:
    """Return the numbers of kernels that encode the parts of a unit, and that decode and add them, on a middle rank."""
    rank = replicas // 2
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=replicas)
    try:
        assert dist.group.WORLD is not None
        comm = Communicator.over("replica", "replica", dist.group.WORLD, TrafficCounters(), "cpu")
        (layout,) = plan_layouts([("weight", (replicas * 8, 128))], num_shards=replicas, align=4)
        grid = ShardGrid.of_rank(rank, data_parallel=replicas, zero3_size=1)
        encoded = EncodedPartsSpec.of(codec, layout, grid, torch.float32)
        flat, target, residual = torch.ones(layout.numel), torch.zeros(1024), torch.zeros(layout.numel - 1024)
        with _Kernels() as encoding:
            pending = encoded_reduce_scatter(
                comm, Collective.HOP2, flat, BufferPool(torch.device("cpu")), encoded, residual=residual.bfloat16()
            )
        pending.wait()
        with _Kernels() as adding:
            pending.add_to(target, overwrite=True, scale=0.5)
        return encoding.count, adding.count
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("codec", "most"), [(INT8, 9), (INT4, 12)])
def test_the_number_of_kernels_does_not_grow_with_the_number_of_replicas(codec: Any, most: int) -> None:
    (_, of_two), (encoding, adding), (encoding_of_many, adding_of_many) = (_kernels(codec, n) for n in (2, 8, 128))
    assert of_two <= adding == adding_of_many == most
    assert encoding == encoding_of_many <= 50, "parts before and after the rank's own part"


# --- reductions ---


def _model(codec: Any, size: int = 2, **settings: Any) -> nn.Module:
    return layerzero.shard_model(
        integer_net(), mesh=mesh_of(size), units=IntegerNet.UNITS, codecs=Codecs(hop2=codec), **settings
    )


def _train(model: nn.Module, rank: int, optimizers: list[Any] | None = None, steps: int = 2) -> dict[str, Tensor]:
    optimizers = optimizers or [layerzero.shard_optimizer(exact_sgd(model.parameters()), model)]
    for step in range(steps):
        for micro_batch in range(2):
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                integer_loss(model, integer_batch(step=2 * step + micro_batch, rank=rank)).backward()
        update(*optimizers)
    return full_parameters(model)


@pytest.mark.slow
@every_nth_setting(5)
@BOTH_SHARED_SLOW
@on_ranks()
def test_a_codec_that_changes_nothing_changes_no_bit(rank: int, stride: int, shared_memory: str | None) -> None:
    others: tuple[dict[str, Any], ...] = (
        {},
        {"offload": Offload(grads=True)},
        {"offload": Offload(optimizer=True)},
        {"mp_policy": BF16},
    )
    for size, mode, settings in [*itertools.product((1, 2), MODES, others)][::stride]:
        found = []
        for codec in (None, AsTheyAre()):
            with pytest.warns(UserWarning) if "offload" in str(settings) else nullcontext():
                model = _model(codec, size, accumulation=mode, **settings)
            found.append(_train(model, rank))
        assert not different(*found), (size, mode, settings)


@pytest.mark.slow
@on_ranks()
def test_parts_of_different_sizes_are_encoded(rank: int) -> None:
    """Muon's owners have parts of different sizes, some of them empty."""
    found = []
    for codec in (None, AsTheyAre(), INT8, INT4):
        model = _model(codec)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        optimizers = [
            layerzero.shard_optimizer(torch.optim.Muon(matrices, lr=2.0**-6), model),
            layerzero.shard_optimizer(exact_sgd(rest), model),
        ]
        found.append(_train(model, rank, optimizers))
        report = layerzero.memory(model)
        for kind in ("reduce_buffer", "residual"):
            assert report.measured[kind] == report.predicted[kind], (codec, report)
    assert not different(found[0], found[1])
    assert different(found[0], found[2]) and different(found[2], found[3])


@on_ranks()
def test_gradients_are_close_to_exact_ones(rank: int) -> None:
    for size, mode in ((1, "sharded"), (2, "sharded"), (2, "full"), (2, "local")):
        gradients = []
        for codec in (None, INT8):
            model = _model(codec, size, accumulation=mode)
            integer_loss(model, integer_batch(rank=rank)).backward()
            gradients.append(full_gradients(model))
        off = max((gradients[1][name] - exact).abs().max() for name, exact in gradients[0].items())
        largest = max(exact.abs().max() for exact in gradients[0].values())
        assert off > 0, "something has been encoded"
        assert off < 0.03 * largest, (size, mode, off, largest)


@on_ranks()
def test_a_step_with_an_infinite_gradient_on_another_node_is_skipped_on_all_ranks(rank: int) -> None:
    model = _model(INT8)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    guard = layerzero.guard_steps(model, optimizer)
    before = full_parameters(model)
    (integer_loss(model, integer_batch(rank=rank)) * (torch.inf if rank == 3 else 1.0)).backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
    assert not all(bool(each.isfinite().all()) for each in gradients), "ranks 0 and 1 only receive encoded values"
    optimizer.step()
    assert guard.skipped == 1 and not different(before, full_parameters(model))


# --- error feedback ---


def _gradients(model: nn.Module, rank: int) -> dict[str, Tensor]:
    integer_loss(model, integer_batch(rank=rank)).backward()
    return full_gradients(model)


def _still(model: nn.Module) -> Any:
    """Return an optimizer that leaves the weights as they are, so that every step has the same exact gradient."""
    return layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)


def _exact(rank: int, size: int) -> dict[str, Tensor]:
    return _gradients(_model(None, size), rank)


@pytest.mark.exhaustive
@BOTH_SHARED_EXHAUSTIVE
@on_ranks()
def test_errors_do_not_add_up_over_steps(rank: int, shared_memory: str | None) -> None:
    for size, mode in itertools.product((1, 2), MODES):
        errors = {}
        for codec in (INT4, layerzero.Int4Blocks(feedback=False)):
            model = _model(codec, size, accumulation=mode)
            optimizer, total, first = _still(model), 0.0, 0.0
            exact = torch.cat([g.flatten() for g in _exact(rank, size).values()])
            for step in range(20):
                found = torch.cat([g.flatten() for g in _gradients(model, rank).values()])
                total, first = total + found, first if step else (found - exact).norm()
                update(optimizer)
            errors[codec.feedback] = float((total - 20 * exact).norm() / first)
            assert bool(layerzero.memory(model).measured["residual"]) == codec.feedback
        assert errors[True] < 3 and errors[False] > 15, (size, mode, errors)


def _dropped(rank: int, folder: str) -> None:
    """Errors belong to gradients that a step has used; the first gradient of a model has none."""
    model = _model(INT4)
    optimizer = _still(model)
    average = layerzero.EMA(model, decay=0.5)
    average.update()
    first = _gradients(model, rank)

    def step() -> None:
        update(optimizer)

    def edit() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0)
        step()

    def swap() -> None:
        step()
        with average.swapped():
            pass

    def write_back() -> None:
        step()
        with layerzero.unsharded(model, writeback=True):
            pass

    def save() -> None:
        step()
        layerzero.checkpoint.save(folder, model, optimizer)

    def load() -> None:
        step()
        layerzero.checkpoint.load(folder, model, optimizer)

    def skip() -> None:
        optimizer.zero_grad()
        guard = layerzero.guard_steps(model, optimizer)
        (integer_loss(model, integer_batch(rank=rank)) * (torch.nan if rank == 2 else 1.0)).backward()
        step()
        assert guard.skipped == 1

    events: list[tuple[Callable[[], object], bool]] = [
        (optimizer.zero_grad, True),
        (step, False),
        (lambda: [optimizer.zero_grad(), optimizer.step()], True),
        (edit, True),
        (swap, True),
        (lambda: optimizer.zero_grad(set_to_none=False), True),
        (lambda: model.zero_grad(set_to_none=False), True),
        (write_back, True),
        (save, False),
        (load, True),
        (skip, True),
    ]
    for number, (event, clears) in enumerate(events):
        optimizer.zero_grad()  # the third message has the bits of the first, so each event follows the first
        assert not different(_gradients(model, rank), first), number
        event()
        assert bool(different(_gradients(model, rank), first)) != clears, (rank, number)


def test_errors_of_a_gradient_that_no_step_has_used_are_dropped(tmp_path: Path) -> None:
    run_ranks(_dropped, str(tmp_path / "checkpoint"))


def _of_some_parameters(rank: int) -> bool:
    model = _model(INT4)
    optimizer = _still(model)
    before = _gradients(model, rank)
    model.get_parameter("second.bias").grad = None
    update(optimizer)
    changed = different(_gradients(model, rank), before)
    assert "second.weight" in changed, "a step has used a gradient of the handle"
    optimizer.step()
    residuals = {each.name: each.gradients.residual for each in get_state(model).handles if each.gradients}
    (of_head,) = (residual for name, residual in residuals.items() if "'head'" in name and residual is not None)
    old = of_head.clone()
    for parameter in model.head.parameters():
        parameter.requires_grad_(False)
    optimizer.zero_grad()
    _gradients(model, rank)
    layerzero.clip_grad_norm_(model, 1e-3)
    assert torch.equal(of_head, old), "errors of a gradient that a step has used are not clipped"
    return bool(old.any())


def test_errors_of_a_handle_stay_if_a_step_has_used_some_of_its_gradients() -> None:
    assert any(run_ranks(_of_some_parameters)), "some message has an error"


@on_ranks()
def test_a_step_of_another_optimizer_does_not_keep_errors(rank: int) -> None:
    model = _model(INT4)
    of_units = {name.split(".")[0] for name, _ in model.named_parameters()}
    mine = [p for name, p in model.named_parameters() if name.split(".")[0] == min(of_units)]
    others = [p for p in model.parameters() if all(p is not each for each in mine)]
    first, second = (layerzero.shard_optimizer(torch.optim.SGD(params, lr=0.0), model) for params in (mine, others))
    before = _gradients(model, rank)
    first.step()
    for optimizer in (first, second):
        optimizer.zero_grad()
    changed = different(_gradients(model, rank), before)
    assert {name.split(".")[0] for name in changed} == {min(of_units)}, "no step has used the other gradients"
    for set_to_none in (True, False):
        for optimizer in (first, second):
            optimizer.zero_grad()
        before = _gradients(model, rank)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        changed = different(_gradients(model, rank), before)
        assert {name.split(".")[0] for name in changed} > {min(of_units)}, (set_to_none, "both optimizers stepped")


def _clipped(rank: int) -> bool:
    model = _model(INT4)
    _gradients(model, rank)
    handles = get_state(model).handles
    before = [handle.gradients.residual.clone() for handle in handles]  # type: ignore[union-attr]
    norm = layerzero.clip_grad_norm_(model, 1.0)
    assert norm > 2
    for handle, residual in zip(handles, before, strict=True):
        assert torch.equal(handle.gradients.residual, residual.clone().mul_(1.0 / (norm + 1e-6)))  # type: ignore[union-attr]
    return any(bool(each.any()) for each in before)


def test_errors_are_clipped_with_their_gradient() -> None:
    assert any(run_ranks(_clipped)), "some message has an error"


@on_ranks()
def test_a_clipped_nan_does_not_stay_in_the_errors(rank: int) -> None:
    model = _model(INT4)
    optimizer = _still(model)
    norms = []
    for step in range(4):
        loss = integer_loss(model, integer_batch(rank=rank)) * (torch.nan if step == 1 and rank == 2 else 1.0)
        loss.backward()
        norms.append(layerzero.clip_grad_norm_(model, 1.0))
        if norms[-1].isfinite():
            optimizer.step()
        model.zero_grad(set_to_none=False)
    assert [bool(norm.isfinite()) for norm in norms] == [True, False, True, True]


# --- bytes ---


@pytest.mark.slow
@BOTH_SHARED_EXHAUSTIVE
@on_ranks()
def test_bytes_and_memory_are_those_that_are_predicted(rank: int, shared_memory: str | None) -> None:
    for size, mode, policy, codec in itertools.product((1, 2), MODES, (None, BF16), (INT8, INT4)):
        model = _model(codec, size, accumulation=mode, mp_policy=policy or MixedPrecisionPolicy())
        _train(model, rank)
        report, traffic, case = layerzero.memory(model), layerzero.traffic(model), (size, mode, policy, codec)
        measured = {kind: nbytes for kind, nbytes in report.measured.items() if kind != "optimizer"}
        assert measured == report.predicted and report.measured_peak == report.predicted_peak, (case, report)
        assert traffic.predicted["hop2"] == traffic.bytes["hop2"], (case, traffic)
        exact = 4 * sum(handle.layout.numel for handle in get_state(model).handles) // 4 * (4 // size - 1)
        calls = traffic.calls["hop2"] // len(get_state(model).handles)
        assert traffic.bytes["hop2"] < 0.6 * exact * calls, "small parts are padded to 16 bytes"


@pytest.mark.exhaustive
@on_ranks()
def test_late_streams_of_a_device_change_no_bit(rank: int) -> None:
    register()
    for mode in MODES:
        mesh, found = mesh_on(NAME, 2), []
        for codec in (AsTheyAre(), INT8, INT4):
            with Device().installed():
                model = layerzero.shard_model(
                    integer_net(), mesh=mesh, units=IntegerNet.UNITS, accumulation=mode, codecs=Codecs(hop2=codec)
                )
                found.append(_train(model, rank))
                report = layerzero.memory(model)
                assert report.measured["reduce_buffer"] == report.predicted["reduce_buffer"], (mode, report)
        expected = []
        for codec in (None, INT8, INT4):
            model = _model(codec, accumulation=mode)
            expected.append(_train(model, rank))
        for ours, theirs in zip(found, expected, strict=True):
            assert not different(ours, theirs), mode


# --- settings ---


@on_ranks(world_size=2)
def test_frozen_halves_and_one_replica_are_not_encoded(rank: int) -> None:
    frozen = torch.nn.Sequential(torch.nn.Linear(4, 4).half().requires_grad_(False), torch.nn.Linear(4, 4))
    layerzero.shard_model(frozen, mesh=mesh_of(1), codecs=Codecs(hop2=INT4))  # gradients are in fp32
    # With one replica, nothing crosses nodes.
    assert not different(*(_train(_model(codec), rank) for codec in (None, INT8)))
