"""Short texts that tell whether tensors on several ranks have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest"]

_CHUNK = 1 << 20  # words of eight bytes that are worked on at once


def digest(tensor: Tensor) -> str:
    """Equal for equal bits, and almost surely different otherwise: a weighted sum of 8-byte words modulo 2^64."""
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
