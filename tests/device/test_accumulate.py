"""Adding tensors in pieces gives the same bits as adding them at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerzero.device import accumulate
from layerzero.device.accumulate import accumulate_parts

PIECE = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "_PIECE", PIECE)


def _whole(target: Tensor, parts: list[Tensor], wire: torch.dtype | None, overwrite: bool, scale: float) -> Tensor:
    total = target.clone()
    for number, each in enumerate(parts):
        part = each if wire is None else each.to(wire)
        wider = torch.promote_types(part.dtype, total.dtype)
        added = part.to(wider) * scale if overwrite and number == 0 else total.add(part, alpha=scale)
        total = added.to(total.dtype)
    return total


@pytest.mark.parametrize("numel", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 17])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("to", "of", "wire"),
    [
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.float32, None),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_pieces_have_the_bits_of_the_whole(
    numel: int, count: int, scale: float, overwrite: bool, to: torch.dtype, of: torch.dtype, wire: torch.dtype | None
) -> None:
    draw = torch.Generator().manual_seed(numel)
    target = torch.randn(numel, generator=draw).to(to)
    parts = [torch.randn(numel, generator=draw).to(of) for _ in range(count)]
    expected = _whole(target, parts, wire, overwrite, scale)
    accumulate_parts(target, iter(parts), wire=wire, overwrite=overwrite, scale=scale)
    assert torch.equal(target, expected)


def test_what_fits_after_it_is_scaled_is_scaled_before_it_is_rounded() -> None:
    target, part = torch.zeros(2, dtype=torch.float16), torch.tensor([2.0**18, 2.0**-18])
    accumulate_parts(target, (part,), overwrite=True, scale=0.25)
    assert target.tolist() == [torch.inf, 2.0**-20]
    accumulate_parts(target, (part,), overwrite=True, scale=2.0**-3)
    assert target.tolist() == [2.0**15, 2.0**-21]


@pytest.mark.parametrize("turned", ["target", "part"])
def test_what_does_not_lie_in_one_piece_is_added_in_its_shape(turned: str) -> None:
    target, part = torch.randn(16, 24), torch.randn(16, 24).bfloat16()
    if turned == "target":
        target = target.t().contiguous().t()
    else:
        part = part.t().contiguous().t()
    expected = target + part
    accumulate_parts(target, [part])
    assert torch.equal(target, expected)
