"""Sums of tensor bits that detect any single bit flip, and comparison of bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_integers", "different_at", "place_sum", "sum64"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are processed at once, to limit the memory of their positions


def as_integers(tensor: Tensor) -> Tensor:
    """Return the same memory as integers, 1-D; a copy if the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def sum64(tensor: Tensor) -> Tensor:
    """Return the sum of all 64-bit words, 0-dim int64. Any single bit flip changes it. It reads the tensor once."""
    words = as_integers(tensor)
    per_word = 8 // words.element_size()
    if words.numel() % per_word == 0 and (words.storage_offset() * words.element_size()) % 8 == 0:
        words = words.view(torch.int64)
    return words.sum(dtype=torch.int64)


def place_sum(tensor: Tensor, first: int, run: int = 1, pitch: int = 1) -> Tensor:
    """Return a sum of elements weighted by their positions, 0-dim int64.

    If the positions of its parts refer to the full tensor, the sums of any partition add up to the sum of the full
    tensor. Moving elements changes the sum.

    Args:
        first: position of the first element in the full tensor.
        run: number of elements of `tensor` that are adjacent in the full tensor.
        pitch: distance between the positions of two such runs.
    """
    words = as_integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        index = torch.arange(start, start + len(piece), device=words.device)
        places = first + index // run * pitch + index % run
        # An odd factor loses no bit of a word. Adding 1 makes zeros count.
        total += ((piece + 1) * (2 * places + 1)).sum()
    return total


def different_at(one: Tensor, other: Tensor, most: int) -> list[int]:
    """Return the first `most` flat indices at which two tensors of equal shape and dtype have different bits."""
    places: list[int] = (as_integers(one) != as_integers(other)).nonzero().view(-1)[:most].tolist()
    return places
