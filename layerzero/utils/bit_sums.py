"""Compute sums and digests of tensor bits, to compare tensors bitwise between ranks and to detect bit flips."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
