"""The bits of tensors: sums that any single flip changes, and where two tensors differ."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_integers", "different_at", "place_sum", "sum64"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements whose places are in memory at once


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, 1-D; a copy where the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def sum64(tensor: Tensor) -> Tensor:
    """0-dim int64: the sum of all words of 64 bits, which a flip of any one bit changes. One read, nothing else."""
    words = as_integers(tensor)
    per_word = 8 // words.element_size()
    if words.numel() % per_word == 0 and (words.storage_offset() * words.element_size()) % 8 == 0:
        words = words.view(torch.int64)
    return words.sum(dtype=torch.int64)


def place_sum(tensor: Tensor, first: int, run: int = 1, pitch: int = 1) -> Tensor:
    """0-dim int64: a sum in which every element counts by its place, `first` for the first one.

    Args:
        run: elements of `tensor` that follow each other in the whole, of which it is a part.
        pitch: from the place of one such run to that of the next.

    The sums of the parts of a tensor, with the places that they have in it, add up to that of the whole, however it is
    cut; what has changed places changes it.
    """
    words = as_integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        index = torch.arange(start, start + len(piece), device=words.device)
        places = first + index // run * pitch + index % run
        # An odd factor loses no bit of a word; zeros count, too, as they stand for something.
        total += ((piece + 1) * (2 * places + 1)).sum()
    return total


def different_at(one: Tensor, other: Tensor, most: int) -> list[int]:
    """The first places, `most` of them, where two tensors of equal shape and dtype have other bits."""
    places: list[int] = (as_integers(one) != as_integers(other)).nonzero().view(-1)[:most].tolist()
    return places
