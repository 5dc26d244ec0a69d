"""Compute sums and digests of tensor bits, to compare tensors bitwise between ranks and to detect bit flips."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_integers", "digest", "sum64", "weighted_sum"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # number of elements that are processed together, to limit the memory needed for their positions
_CHUNK = 1 << 20  # number of 8-byte words that are processed together


def digest(tensor: Tensor) -> str:
    """Return a hexadecimal digest of the bits of a tensor: a weighted sum of its 8-byte words modulo 2^64.

    Tensors with different bits almost surely have different digests.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned_size = raw.numel() // 8 * 8
    words = raw[:aligned_size]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    weights = torch.arange(min(words.numel(), _CHUNK), device=raw.device) * 0x5851F42D4C957F2D + 1
    total = int.from_bytes(bytes(raw[aligned_size:].tolist()), "little")
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total = total * 0x9E3779B97F4A7C15 + int((chunk * weights[: chunk.numel()]).sum())
    return f"{total % 2**64:x}"


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as a 1-D integer tensor. If the tensor is not contiguous, return a copy."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def sum64(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's 64-bit words as a 0-dim int64 tensor.

    If the memory of the tensor cannot be viewed as 64-bit words, the elements are summed instead. Any single bit flip
    changes the sum. The tensor is read once.
    """
    words = as_integers(tensor)
    per_word = 8 // words.element_size()
    if words.numel() % per_word == 0 and (words.storage_offset() * words.element_size()) % 8 == 0:
        words = words.view(torch.int64)
    return words.sum(dtype=torch.int64)


def weighted_sum(tensor: Tensor, first: int, run: int = 1, pitch: int = 1) -> Tensor:
    """Return the sum of a tensor's elements, weighted by their positions in a full tensor, as a 0-dim int64 tensor.

    Positions are flat indices into the full tensor, and `tensor` is a part of the full tensor. For any partition, the
    sums of all parts add up to the sum of the full tensor. The sum also changes if elements are moved.

    Args:
        tensor: part of the full tensor.
        first: position of the part's first element.
        run: number of elements per run. The elements of a run are adjacent in the full tensor.
        pitch: difference between the positions of the first elements of consecutive runs.
    """
    words = as_integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        index = torch.arange(start, start + len(piece), device=words.device)
        positions = first + index // run * pitch + index % run
        # Multiplication by an odd factor preserves all bits of a word. The added 1 makes zeros contribute to the sum.
        total += ((piece + 1) * (2 * positions + 1)).sum()
    return total
