"""Lossless compression of differences between versions of weights."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from layerzero.slow_links.lossless_differences import _AT_ONCE, COMPRESSIONS, LosslessDifferences

CODECS = pytest.mark.parametrize(
    "compression",
    [
        pytest.param(
            each,
            marks=pytest.mark.skipif(
                each == "zstd" and importlib.util.find_spec("zstandard") is None, reason="needs the package zstandard"
            ),
        )
        for each in COMPRESSIONS
    ],
)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def _encoded(codec: LosslessDifferences, old: Tensor, new: Tensor) -> Tensor:
    out = torch.full((new.nbytes,), 0xA5, dtype=torch.uint8)
    return out[: codec.encode(old, new, out)]


def _step(numel: int, dtype: torch.dtype, change: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Return weights before and after a step that changes each by about `change` of the largest ones."""
    weights = torch.randn(numel)
    return weights.to(dtype), (weights + change * torch.randn(numel)).to(dtype)


@CODECS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 100, 5000, _AT_ONCE - 1, _AT_ONCE, _AT_ONCE + 1, 2 * _AT_ONCE + 77])
def test_decoded_weights_have_the_bits_of_the_new_weights(compression: str, dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    codec = LosslessDifferences(compression)
    old, new = _step(numel, dtype)
    encoded, weights = _encoded(codec, old, new), old.clone()
    codec.decode(encoded, weights)
    assert torch.equal(_bits(weights), _bits(new))
    assert torch.equal(_bits(old), _bits(_step_again(numel, dtype))), "encoding only reads the old weights"
    if numel >= 5000:
        assert encoded.numel() < 0.6 * new.nbytes


def _step_again(numel: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(numel)
    return _step(numel, dtype)[0]


@CODECS
def test_every_pair_of_bit_patterns_is_restored(compression: str) -> None:
    """All differences modulo 2^16, with wrap-around, infinities, NaNs with payloads, and both zeros."""
    codec, every = LosslessDifferences(compression), torch.arange(2**16).to(torch.int16)
    for old, last in zip(
        (0, 1, -1, 0x7F80, -0x8000, 0x7FFF, -0x0080), (None, 0, 1, -1, -8, 0x7FFF, -0x8000), strict=True
    ):
        weights, new = torch.full_like(every, old).view(torch.bfloat16), every.view(torch.bfloat16)
        back, message = weights.clone(), torch.empty(new.nbytes, dtype=torch.uint8)
        sent, received = (None if last is None else torch.full_like(every, last) for _ in range(2))
        codec.decode(message[: codec.encode(back, new, message, sent)], weights, received)
        assert torch.equal(_bits(weights), every), (old, last)
        codec.decode(message[: codec.encode(new, back, message, sent)], weights, received)
        assert torch.equal(_bits(weights), _bits(back)), (old, last)


@CODECS
def test_weights_that_do_not_compress_are_sent_as_they_are_and_reset_the_predictions(compression: str) -> None:
    codec = LosslessDifferences(compression)
    for numel in (1, 3, 1000, _AT_ONCE + 5):
        generator = torch.Generator().manual_seed(numel)
        old, new = (
            torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int32).to(torch.int16)
            for _ in range(2)
        )
        sent, received = (torch.full_like(old, 5) for _ in range(2))  # predictions, which the message resets
        message = torch.empty(new.nbytes, dtype=torch.uint8)
        assert codec.encode(old, new, message, sent) == new.nbytes and torch.equal(message, new.view(torch.uint8))
        codec.decode(message, old, received)
        assert torch.equal(old, new) and not sent.any() and not received.any()


@CODECS
def test_slices_of_larger_tensors_are_encoded_and_decoded_in_place(compression: str) -> None:
    codec = LosslessDifferences(compression)
    old, new = _step(9000, torch.bfloat16)
    everything = torch.zeros(3 * 9000 + 6, dtype=torch.bfloat16)
    everything[9003:18003] = old
    message = torch.zeros(2 * 9000 + 1, dtype=torch.uint8)[1:]  # at an odd address
    size = codec.encode(everything[9003:18003], new, message)
    codec.decode(message[:size], everything[9003:18003])
    assert torch.equal(everything[9003:18003], new)
    assert not everything[:9003].any() and not everything[18003:].any()


@CODECS
def test_fine_tuning_needs_fewer_bits_than_training_from_scratch(compression: str) -> None:
    bits = []
    for change in (0.0, 1e-4, 1e-3, 1e-2):
        torch.manual_seed(0)
        old, new = _step(200_000, torch.bfloat16, change)
        bits.append(_encoded(LosslessDifferences(compression), old, new).numel() * 8 / len(new))
    assert bits[0] < 0.05 and bits[1] < 2, "equal weights need almost no bytes"
    assert bits[1] < bits[2] < bits[3] < 8


def _versions(steps: int, numel: int) -> list[Tensor]:
    """Return the bf16 weights of `steps` updates with momentum."""
    generator = torch.Generator().manual_seed(7)
    weights, update = torch.randn(numel, generator=generator), torch.zeros(numel)
    versions = [weights.bfloat16()]
    for _ in range(steps):
        update = 0.9 * update + 1e-3 * torch.randn(numel, generator=generator)
        weights = weights + update
        versions.append(weights.bfloat16())
    return versions


@CODECS
@pytest.mark.parametrize("numel", [1, 5000, _AT_ONCE + 77])
def test_predictions_from_the_last_change_save_bytes_and_no_bits(compression: str, numel: int) -> None:
    codec, versions = LosslessDifferences(compression), _versions(6, numel)
    sent, received = (torch.zeros(numel, dtype=torch.int16) for _ in range(2))
    weights, sizes = versions[0].clone(), []
    for old, new in pairwise(versions):
        out = torch.empty(new.nbytes, dtype=torch.uint8)
        message = out[: codec.encode(old, new, out, sent)]
        codec.decode(message, weights, received)
        assert torch.equal(_bits(weights), _bits(new))
        assert torch.equal(sent, received)
        if message.numel() < new.nbytes:
            assert torch.equal(sent, _bits(new) - _bits(old))
        sizes.append((message.numel(), _encoded(codec, old, new).numel()))
    if numel >= 5000:
        assert sizes[0][0] == sizes[0][1], "the first change is not predicted"
        assert sum(predicted for predicted, _ in sizes[2:]) < 0.95 * sum(unpredicted for _, unpredicted in sizes[2:])


@CODECS
def test_damaged_messages_are_refused(compression: str) -> None:
    codec = LosslessDifferences(compression)
    old, new = _step(3000, torch.bfloat16)
    encoded = _encoded(codec, old, new)
    with pytest.raises(ValueError, match="does not contain the 1 pieces of 3000 weights"):
        codec.decode(encoded[:-1], old.clone())
    other = torch.zeros(2000, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"planes of|decompress"):
        codec.decode(encoded, other)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compression='lz4' is not supported. Use one of \('zstd', 'zlib'\)"):
        LosslessDifferences("lz4")


def test_the_best_compression_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LosslessDifferences.best().compression in COMPRESSIONS
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert LosslessDifferences.best() == LosslessDifferences("zlib")
