"""Add tensors to an accumulator.

[Note: Chunked accumulation]
On a CPU, torch adds a tensor of another dtype by first copying the full tensor to the dtype of the accumulator. If the
chunks fit into a core's cache, the copy of each chunk stays in the cache. The same holds for the chunk of the
accumulator to which several tensors are added. Each element is rounded as in an addition of the full tensors, so the
results are bitwise identical. On a device, an addition is a single kernel.

[Note: Accumulators in bf16]
With `accumulation_dtype`, all parts are added to the value of an accumulator in fp32, and the sum is rounded once, to
the nearest bf16 value. torch does so for a single part. The sum of several parts needs fp32 memory, which is limited to
one chunk, also on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_PIECE = 1 << 16  # elements per chunk: half a MiB in fp32, including the copy; torch uses two threads for a chunk
_DEVICE_PIECE = 1 << 22  # elements per chunk of a sum that needs fp32 memory on a device: 16 MiB


def accumulate_parts(
    target: Tensor,
    parts: Iterable[Tensor],
    *,
    wire: torch.dtype | None = None,
    overwrite: bool = False,
    scale: float = 1.0,
    rounds_once: bool = False,
) -> None:
    """Add ``scale * sum(parts)`` to `target`, one part after the other, in the target's dtype.

    Args:
        parts: tensors with the shape of the target and any floating-point dtype.
        wire: dtype to which each part is first rounded. If it is None, parts are not rounded.
        overwrite: if True, replace the contents of the target instead of adding to them.
        rounds_once: if True, compute the sum in fp32, and round it once; see [Note: Accumulators in bf16].
    """
    parts = tuple(parts)
    add = _add_in_fp32 if rounds_once and len(parts) > 1 else _add_parts
    if _needs_pieces(target, parts, add is _add_in_fp32):
        numel = _PIECE * max(1, torch.get_num_threads() // 2) if target.device.type == "cpu" else _DEVICE_PIECE
        for piece, *of_parts in zip(*(torch.split(each.view(-1), numel) for each in (target, *parts)), strict=True):
            add(piece, of_parts, wire, overwrite, scale)
    else:
        add(target, parts, wire, overwrite, scale)


def _needs_pieces(target: Tensor, parts: Sequence[Tensor], needs_fp32_memory: bool) -> bool:
    tensors = (target, *parts)
    return (
        target.numel() > _PIECE
        and (target.device.type == "cpu" or needs_fp32_memory)
        and (len(parts) > 1 or parts[0].dtype is not target.dtype)
        and all(tensor.is_contiguous() for tensor in tensors)
    )


def _add_in_fp32(
    target: Tensor, parts: Sequence[Tensor], wire: torch.dtype | None, overwrite: bool, scale: float
) -> None:
    total = torch.empty_like(target, dtype=torch.float32)
    if not overwrite:
        total.copy_(target)
    _add_parts(total, parts, wire, overwrite, scale)
    target.copy_(total)


def _add_parts(
    target: Tensor, parts: Sequence[Tensor], wire: torch.dtype | None, overwrite: bool, scale: float
) -> None:
    for tensor in parts:
        part = tensor if wire is None else tensor.to(wire)
        if overwrite and scale != 1.0 and part.dtype.itemsize >= target.dtype.itemsize:
            # One kernel. If the target is narrower, a value may be representable in its dtype only after scaling.
            torch.mul(part, scale, out=target)
            overwrite = False
        elif overwrite:
            target.copy_(part)
            if scale != 1.0:
                target.mul_(scale)
            overwrite = False
        else:
            target.add_(part, alpha=scale)
