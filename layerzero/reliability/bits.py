"""Sums of tensor bits that detect any single bit flip, and comparison of bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_integers", "differing_indices", "sum64", "weighted_sum"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are processed at once, to limit the memory of their positions


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as a 1-D integer tensor; a copy if the tensor is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def sum64(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's 64-bit words, or of smaller words, as 0-dim int64.

    Any single bit flip changes the sum. The tensor is read once.
    """
    words = as_integers(tensor)
    per_word = 8 // words.element_size()
    if words.numel() % per_word == 0 and (words.storage_offset() * words.element_size()) % 8 == 0:
        words = words.view(torch.int64)
    return words.sum(dtype=torch.int64)


def weighted_sum(tensor: Tensor, first: int, run: int = 1, pitch: int = 1) -> Tensor:
    """Return the sum of a tensor's elements, weighted by their positions in a full tensor, as 0-dim int64.

    Positions are flat indices into the full tensor, of which `tensor` is a part. Over all parts of any partition, the
    sums add up to the sum of the full tensor. The sum also changes if elements are moved.

    Args:
        tensor: the part.
        first: position of the part's first element.
        run: number of elements per run. The elements of a run are adjacent in the full tensor.
        pitch: distance between the positions of the first elements of two consecutive runs.
    """
    words = as_integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        index = torch.arange(start, start + len(piece), device=words.device)
        places = first + index // run * pitch + index % run
        # Multiplication by an odd factor loses no bit of a word. Because of the 1, zeros contribute to the sum.
        total += ((piece + 1) * (2 * places + 1)).sum()
    return total


def differing_indices(one: Tensor, other: Tensor, most: int) -> list[int]:
    """Return the flat indices, at most `most`, at which two tensors of equal shape and dtype differ bitwise."""
    places: list[int] = (as_integers(one) != as_integers(other)).nonzero().view(-1)[:most].tolist()
    return places
