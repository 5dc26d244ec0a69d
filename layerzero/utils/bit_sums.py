"""Digests of tensors, for bitwise comparison between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest"]

_CHUNK = 1 << 20  # 8-byte words that are processed at once


def digest(tensor: Tensor) -> str:
    """Return a hexadecimal digest of the bits of a tensor: a weighted sum of its 8-byte words modulo 2^64.

    Tensors with different bits almost surely have different digests.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    weights = torch.arange(min(words.numel(), _CHUNK), device=raw.device) * 0x5851F42D4C957F2D + 1
    total = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        total = total * 0x9E3779B97F4A7C15 + int((chunk * weights[: chunk.numel()]).sum())
    return f"{total % 2**64:x}"
