"""Encoded weights in gathers, ``Codecs(gather=...)``, and the codecs that are refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerzero
from layerzero import Codecs, Float8Rows, Int4Blocks, Int4Difference, Int8Blocks
from layerzero.comm.codecs import ParamRows
from layerzero.engine.hooks import get_state
from tests.support.models import BF16, different, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks
from tests.support.refreshes import Layer, Net

pytestmark = pytest.mark.slow

WIDTH = 64
MOST = 2.0**-4  # relative to the largest number of a row: the error bound of float8_e4m3fn


class AsTheyAre:
    """User-defined codec that sends the weights unchanged."""

    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(block.numel for block in blocks)

    def encode(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        assert out.dtype == torch.uint8 and len(out) == self.nbytes(blocks, shard.dtype) and out.data_ptr() % 16 == 0
        for part, block in self._parts(out, blocks, shard.dtype):
            part.copy_(block.of(shard).reshape(-1))

    def decode(self, encoded: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        assert len(encoded) == self.nbytes(blocks, out.dtype)
        for part, block in self._parts(encoded, blocks, out.dtype):
            block.of(out).copy_(part.view(block.rows, block.length))

    @staticmethod
    def _parts(encoded: Tensor, blocks: Sequence[ParamRows], dtype: torch.dtype) -> list[tuple[Tensor, ParamRows]]:
        found, start = [], 0
        for block in blocks:
            end = start + block.numel * dtype.itemsize
            found.append((encoded[start:end].view(dtype), block))
            start = end
        return found


def make_net() -> nn.Module:
    return Net(WIDTH, 96, outputs=8, bias=True)


def shard(size: int = 4, **settings: Any) -> nn.Module:
    return layerzero.shard_model(make_net(), mesh=mesh_of(size), units={Layer}, **({"mp_policy": BF16} | settings))


def batch(rank: int, step: int, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * (step % 4) + 10 * micro_batch + rank)
    x = torch.randn(16, WIDTH, generator=generator)
    return x, x[:, :8].mul(2).tanh()


def train(model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
    losses = []
    for step in range(steps):
        for micro_batch in range(2):
            x, y = batch(rank, step, micro_batch)
            with layerzero.no_sync(model) if micro_batch == 0 else nullcontext():
                loss = (model(x) - y).square().mean()
                loss.backward()
        losses.append(loss.item())
        update(optimizer)
    return losses


# --- the numbers ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_is_off_by_a_sixteenth_of_the_largest_of_its_row_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codec = Float8Rows()
    blocks = [
        ParamRows(0, 5, 40),
        ParamRows(208, 7, 1),
        ParamRows(224, 3, 16),
        ParamRows(280, 0, 9),
        ParamRows(280, 2, 15),
    ]
    shard = torch.randn(320).mul(torch.logspace(-4, 4, 320)).to(dtype)
    shard[40:80] = 0
    encoded = torch.full((codec.nbytes(blocks, dtype),), 77, dtype=torch.uint8)
    assert len(encoded) == 5 * (40 + 4) + 2 * 7 + 3 * (16 + 4) + 2 * 30
    codec.encode(shard, blocks, encoded)
    found = torch.full_like(shard, -1)
    codec.decode(encoded, blocks, found)
    for block in blocks:
        given, back = block.of(shard).float(), block.of(found).float()
        if block.length < 16:
            assert torch.equal(given, back), "as they are"
        elif block.rows:
            most = given.abs().amax(1, keepdim=True)
            assert ((given - back).abs() <= MOST * most).all()
            assert not torch.equal(given, back)
    assert not found[40:80].any(), "a row of zeros"
    assert (found[200:208] == -1).all() and (found[215:224] == -1).all(), "what lies between is nobody's"
    for odd in (float("nan"), float("inf")):
        shard[3] = odd
        codec.encode(shard, blocks, encoded)
        codec.decode(encoded, blocks, found)
        assert not found[:40].isfinite().any() and found[80:200].isfinite().all(), "nothing is hidden"


def test_a_decoded_weight_is_its_number_times_its_scale_rounded_once() -> None:
    """Cover every number of float8_e4m3fn, times scales whose products have to be rounded."""
    numbers = torch.arange(256, dtype=torch.uint8)
    exact = numbers.view(torch.float8_e4m3fn).float()
    scales = torch.logspace(-3, 1, 37)
    encoded = torch.cat([scales.view(torch.uint8), numbers.repeat(37)])
    for dtype in (torch.bfloat16, torch.float16):
        found = torch.zeros(37 * 256, dtype=dtype)
        Float8Rows().decode(encoded, [ParamRows(0, 37, 256)], found)
        expected = (exact * scales[:, None]).to(dtype)
        assert torch.equal(found.view(37, 256).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert expected.isfinite().sum() == 37 * 254


def test_coding_takes_scratch_for_some_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the temporaries of torch, which layerzero.memory does not count, with torch's profiler."""
    torch.manual_seed(0)
    codec, blocks = Float8Rows(), [ParamRows(0, 500, 1000), ParamRows(500_000, 3, 100_000)]
    shard = torch.randn(800_000).bfloat16()
    at_once = torch.empty(codec.nbytes(blocks, shard.dtype), dtype=torch.uint8)
    codec.encode(shard, blocks, at_once)
    monkeypatch.setattr(Float8Rows, "_AT_ONCE", 50_000)
    encoded, found = torch.empty_like(at_once), torch.empty_like(shard)
    for code in (
        lambda: codec.encode(shard, blocks, encoded),
        lambda: codec.decode(encoded, blocks, found),
    ):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            code()
        memory = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        assert memory and max(accumulate(memory)) < 12 * 100_000, "one long row at a time"
    assert torch.equal(encoded, at_once)
    assert ((found - shard).abs() <= MOST * shard.abs().max()).all()


@on_ranks(world_size=4)
def test_all_ranks_compute_with_the_same_decoded_weights(rank: int) -> None:
    """Compare the weights used in a forward with the bf16 masters; they must be equal on all ranks."""
    for kept in (True, 2):
        model = shard(codecs=Codecs(gather=Float8Rows()), reshard_after_forward=kept)
        train(model, rank, 2)
        seen: dict[str, Tensor] = {}

        def look(module: nn.Module, args: object, seen: dict[str, Tensor] = seen) -> None:
            seen |= {f"{id(module)} {name}": p.detach().clone() for name, p in module.named_parameters()}

        for layer in model.layers:
            layer.register_forward_pre_hook(look)
        with torch.no_grad():
            model(batch(rank, 0)[0])
        masters = full_parameters(model)
        off = 0.0
        for index, layer in enumerate(model.layers):
            for name, _ in layer.named_parameters():
                exact, got = masters[f"layers.{index}.{name}"].bfloat16().float(), seen[f"{id(layer)} {name}"].float()
                if exact.ndim == 1:
                    assert torch.equal(got, exact), name
                else:
                    off = max(off, ((got - exact).abs() / exact.abs().amax(1, keepdim=True)).max().item())
        assert 0 < off <= MOST, off
        bits = torch.cat([value.view(torch.int16).flatten() for value in seen.values()]).long()
        told = [torch.empty_like(bits) for _ in range(4)]
        dist.all_gather(told, bits)
        assert all(torch.equal(each, bits) for each in told)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setting", "codec", "tolerance"),
    [("gather", layerzero.Float8Rows(), 0.1), ("hop2", layerzero.Int8Blocks(), 0.02)],
)
@on_ranks(world_size=4)
def test_training_goes_down_alike(rank: int, setting: str, codec: Any, tolerance: float) -> None:
    plain, coded = (train(shard(size=2, codecs=Codecs(**{setting: each})), rank, 40) for each in (None, codec))
    assert plain[-1] < plain[0] / 5, "it learns"
    assert plain != coded
    for ours, theirs in zip(coded, plain, strict=True):
        assert abs(ours - theirs) < tolerance * plain[0], (ours, theirs)
    assert coded[-1] < coded[0] / 5 and coded[-1] < 1.5 * plain[-1]


@on_ranks(world_size=4)
def test_a_codec_of_the_user_that_changes_nothing_changes_no_bit(rank: int) -> None:
    for settings in ({}, {"size": 2, "accumulation": "full"}, {"reshard_after_forward": 2}, {"prefetch": 2}):
        found = []
        for codec in (None, AsTheyAre()):
            model = shard(codecs=Codecs(gather=codec), **settings)
            train(model, rank)
            found.append(full_parameters(model))
        assert not different(*found), settings


@pytest.mark.exhaustive
@on_ranks(world_size=4)
def test_rows_that_tensor_parallelism_has_cut_are_encoded_too(rank: int) -> None:
    """Encode rows of parameters that tp cuts along both dims, and of copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    weights, losses, sent = [], [], []
    for codec in (None, AsTheyAre(), Float8Rows()):
        model = layerzero.shard_model(
            parallelize_module(make_net(), mesh["tp"], cut),
            mesh=mesh["dp"],
            units={Layer},
            mp_policy=BF16,
            codecs=Codecs(gather=codec),
        )
        losses.append(train(model, mesh["dp"].get_local_rank()))
        weights.append(full_parameters(model))
        layerzero.traffic(model, reset=True)
        model(batch(rank, 0)[0])
        traffic = layerzero.traffic(model)
        assert traffic.predicted["gather"] == traffic.bytes["gather"]
        sent.append(traffic.bytes["gather"])
    assert not different(weights[1], weights[0]) and losses[1] == losses[0]
    assert different(weights[2], weights[0])
    for ours, theirs in zip(losses[2], losses[0], strict=True):
        assert abs(ours - theirs) < 0.05 * theirs
    assert sent[2] < 0.62 * sent[0], sent  # the rows of a half are shorter, and each has a scale


# --- bytes ---


@on_ranks(world_size=4)
def test_bytes_and_memory_are_those_that_are_predicted(rank: int) -> None:
    for size, codec, kept in (
        (2, Float8Rows(), True),
        (4, Float8Rows(), 2),
        (4, AsTheyAre(), True),
    ):
        sent = []
        for each in (None, codec):
            model = shard(size=size, codecs=Codecs(gather=each), reshard_after_forward=kept)
            train(model, rank, 2)
            report = layerzero.memory(model)
            measured = {kind: nbytes for kind, nbytes in report.measured.items() if kind != "optimizer"}
            assert measured == report.predicted, report
            assert report.measured_peak == report.predicted_peak, report
            layerzero.traffic(model, reset=True)
            model(batch(rank, 0)[0]).sum().backward()
            traffic = layerzero.traffic(model)
            assert traffic.predicted["gather"] == traffic.bytes["gather"]
            sent.append(traffic)
        handles = get_state(model).handles
        gathers = 1 if kept == 2 else 2
        assert (
            sent[1].bytes["gather"]
            == gathers * sum(h.weights.buffer.encoded_bytes for h in handles) * (size - 1) // size
        )
        assert sent[1].bytes.get("regather") == sent[0].bytes.get("regather"), "what is kept has been decoded"
        ratio = sent[1].bytes["gather"] / sent[0].bytes["gather"]
        assert ratio < 0.58 if isinstance(codec, Float8Rows) else 0.9 < ratio < 1.1, ratio


@on_ranks(world_size=2, shared_memory="auto")
def test_where_nothing_is_gathered_it_has_no_effect(rank: int) -> None:
    for size in (1, 2):
        plain, coded = (shard(size=size, codecs=Codecs(gather=codec)) for codec in (None, Float8Rows()))
        for model in (plain, coded):
            train(model, rank)
        assert not different(full_parameters(coded), full_parameters(plain))
        traffic = layerzero.traffic(coded)
        if size == 1:
            assert "gather" not in traffic.calls, traffic
        else:
            assert traffic.transport == "shared_memory" and traffic.bytes["gather"] == 0, traffic


# --- settings ---


class Lies(AsTheyAre):
    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> Any:
        return "many"


class Bits(AsTheyAre):
    """Codec with settings that change its size."""

    def __init__(self, spare: int) -> None:
        self._spare = spare

    def nbytes(self, blocks: Sequence[ParamRows], dtype: torch.dtype) -> int:
        return super().nbytes(blocks, dtype) + self._spare

    def encode(self, shard: Tensor, blocks: Sequence[ParamRows], out: Tensor) -> None:
        assert blocks and len(out) == self.nbytes(blocks, shard.dtype)
        super().encode(shard, blocks, out[: len(out) - self._spare])


@dataclass(frozen=True)
class Shifted(AsTheyAre):
    """Codec whose size does not depend on its settings."""

    by: int


@on_ranks(world_size=2)
def test_wrong_and_unequal_codecs_are_refused(rank: int) -> None:
    float8, int8, int4, difference = Float8Rows(), Int8Blocks(), Int4Blocks(), Int4Difference()
    fp32, fp16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float16)
    computes_in_fp32 = r"but the model computes in .*float32.*param_dtype"
    for kind, methods, example in (("gather", "nbytes, encode, decode", float8), ("hop2", "", int8)):
        for given in (kind, object(), type(example), difference):
            text = f"{kind} must be an object with the methods {methods}.*{type(example).__name__}"
            with pytest.raises(TypeError, match=text):
                shard(2, codecs=Codecs(**{kind: given}))
        for given, text in (
            (Lies(), "Lies.nbytes must return a number of bytes, got 'many'"),
            (example if rank else None, f"ranks disagree.*codecs.{kind}"),
            (Bits(16 if rank else 32), f"ranks disagree.*bytes of Codecs.{kind} for the root"),
            (Shifted(rank), rf"ranks disagree.*codecs.{kind}.*Shifted\(by="),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                shard(2 if kind == "gather" else 1, codecs=Codecs(**{kind: given}))
    for kind, given, policy, text in (
        ("gather", float8, fp32, f"encodes weights in bf16 and fp16, {computes_in_fp32}"),
        ("hop2", Int4Blocks(feedback=rank == 0), BF16, r"ranks disagree.*codecs.hop2"),
        ("hop2", int4, fp16, r"Int4Blocks adds the encoding errors .* fp16, .*Compute in bf16"),
        ("refresh", "zip", BF16, r"refresh='zip' is not supported. Use one of"),
        ("refresh", int4, BF16, r"refresh=Int4Blocks\(.*\) is not supported. Use one of .*Int4Difference"),
        ("refresh", Int4Difference, BF16, r"refresh=<class.*Int4Difference'> is not supported"),
        ("refresh", "lossless", fp32, computes_in_fp32),
        ("refresh", difference, fp32, computes_in_fp32),
        ("refresh", "lossless" if rank else None, BF16, r"ranks disagree.*codecs.refresh"),
        ("refresh", difference if rank else None, BF16, r"ranks disagree.*codecs.refresh"),
        ("refresh", difference if rank else "lossless", BF16, r"ranks disagree.*codecs.refresh"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            shard(2 if kind == "gather" else 1, codecs=Codecs(**{kind: given}), mp_policy=policy)
    with (
        mock.patch.dict(sys.modules, {"zstandard": ModuleType("zstandard") if rank else None}),
        pytest.raises(ValueError, match=r"ranks disagree.*compression that codecs.refresh uses"),
    ):
        shard(1, codecs=Codecs(refresh="lossless"))
