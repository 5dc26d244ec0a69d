"""Messages of ``layerzero.Int4Difference()``: differences of weights in 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import layerzero
from layerzero.slow_links.int4_difference import _AT_ONCE

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
    assert len(message) == min(-(-numel // 2) + 2 * -(-numel // 128), 2 * numel)
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
def test_a_part_whose_difference_is_not_finite_is_sent_as_it_is(value: float, place: int) -> None:
    old, new = _random(_AT_ONCE + 10, torch.bfloat16)
    broken = new.clone()
    broken[place] = value
    overflowing = tuple(torch.full((200,), sign * 3e38).bfloat16() for sign in (-1, 1))
    for before, after in ((old, broken), (broken, new), overflowing):
        message, own = _sent(before, after)
        assert len(message) == after.nbytes and _same(own, after) and _same(_received(message, before), after)


def test_a_message_may_begin_at_any_byte_and_has_a_known_size() -> None:
    old, new = _random(1001, torch.bfloat16)
    message, own = _sent(old, new)
    moved = torch.empty(len(message) + 1, dtype=torch.uint8)[1:].copy_(message)
    assert _same(_received(moved, old), own)
    for wrong in (message[:-1], torch.cat((message, message[:1]))):
        with pytest.raises(ValueError, match=r"of \d+ bytes does not contain the 517 bytes .* 1001 weights"):
            _received(wrong, old)
