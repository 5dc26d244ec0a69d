"""Messages of ``layerzero.Int4Difference()``: differences of weights in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero
from layerzero.slow_links.int4_difference import _AT_ONCE, _SEVENTH

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


def bound(old: Tensor, new: Tensor) -> Tensor:
    """Return the documented bound on the error of each weight: 1/13 of its block's largest difference, and rounding."""
    largest = _largest(new.float() - old.float())
    rounding = torch.finfo(new.dtype).eps / 2 * (new.abs() + largest) + torch.finfo(new.dtype).smallest_normal
    return largest / 13 + rounding


@DTYPES
@pytest.mark.parametrize("numel", SIZES)
def test_sender_and_receivers_get_the_same_weights_within_the_bound(numel: int, dtype: torch.dtype) -> None:
    old, new = _random(numel, dtype)
    message, own = _sent(old, new)
    assert len(message) == min(66 * -(-numel // 128), 2 * numel)
    assert _same(_received(message, old), own)
    assert ((own - new).abs().float() <= bound(old, new)).all()
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
        allowed = bound(weights, target)
        weights = _sent(weights, target)[1]
        error = (weights.float() - target.float()).abs()
        assert (error <= allowed).all()
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
def test_a_block_that_is_not_finite_is_visible_until_the_masters_are_finite(value: float, place: int) -> None:
    old, new = _random(_AT_ONCE + 10, torch.bfloat16)
    block = torch.arange(len(new)) // 128 == place // 128
    broken = new.clone()
    broken[place] = value
    message, own = _sent(old.clone(), broken)
    assert torch.equal(~own.isfinite(), block) and _same(_received(message, old).nan_to_num(), own.nan_to_num())
    allowed = bound(torch.where(block, 0, own), new)
    message, healed = _sent(own.clone(), new)
    assert _same(_received(message, own), healed) and ((healed - new).abs().float() <= allowed).all()
    overflowing = tuple(torch.full((200,), sign * 3e38).bfloat16() for sign in (-1, 1))
    assert not _sent(*overflowing)[1].isfinite().any()


@DTYPES
def test_a_reference_in_fp64_gives_the_same_bits(dtype: torch.dtype) -> None:
    """The reference rounds a sum of a product once, as a processor that fuses both."""
    old, new = _random(128 * 300, dtype, seed=2)
    message, own = _sent(old, new)
    blocks = (new - old).double().view(-1, 128)
    scales = (blocks.abs().amax(1, keepdim=True) * _SEVENTH + 2.0**-120).float().bfloat16()
    integers = (blocks.float() / scales.float()).round().double() + 0.0  # no -0
    assert integers.abs().max() == 7
    first, second = (integers + 8).to(torch.uint8).chunk(2, 1)
    assert torch.equal(message, torch.cat((scales.view(torch.uint8).flatten(), (first + 16 * second).flatten())))
    assert _same(own, (old.double() + (integers * scales.double()).flatten()).float().to(dtype))


class _Kernels(TorchDispatchMode):
    """Lists the operations that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [1280, 1281])
def test_the_number_of_kernels_is_small_and_does_not_depend_on_the_ranks(numel: int) -> None:
    old, new = _random(numel, torch.bfloat16)
    message = torch.empty(CODEC.message_bytes(numel), dtype=torch.uint8)
    with _Kernels() as encode:
        CODEC.write(old, new, message)
    encode.names.remove("aten::abs")  # a device needs one operation instead of abs and amax
    assert len(encode.names) == 7 + bool(numel % 128)
    for ranks in (1, 16):
        messages, weights = message.repeat(ranks, 1), old.repeat(ranks, 1)
        with _Kernels() as decode:
            CODEC.decode_parts(messages, weights)
        assert len(decode.names) == 6


def test_a_message_has_a_known_size() -> None:
    old, new = _random(1001, torch.bfloat16)
    message, _ = _sent(old, new)
    for wrong in (message[:-1], torch.cat((message, message[:1]))):
        with pytest.raises(ValueError, match=r"of \d+ bytes does not contain the 528 bytes .* 1001 weights"):
            _received(wrong, old)
