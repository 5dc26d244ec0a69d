"""Adding tensors up.

[Note: Adding in pieces]
On a CPU, torch adds a tensor of another dtype by first making a copy of all of it in the dtype of the sum. In pieces
that stay in a core's cache, that copy, and the sum while several tensors are added to it, need not go through memory.
Each element is rounded as if all were added at once: the same bits. On a device an addition is one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["accumulate_parts"]

_PIECE = 1 << 16  # elements: in fp32, with its copy, half a MiB; torch gives two threads of a pool such a one


def accumulate_parts(
    target: Tensor,
    parts: Iterable[Tensor],
    *,
    wire: torch.dtype | None = None,
    overwrite: bool = False,
    scale: float = 1.0,
) -> None:
    """target (+)= scale * sum of the parts, one after the other, in the target's dtype.

    Args:
        parts: each of the target's shape, of any floating dtype.
        wire: round each to that first.
        overwrite: forget what the target holds.
    """
    parts = tuple(parts)
    if _is_in_pieces(target, parts):
        numel = _PIECE * max(1, torch.get_num_threads() // 2)
        for piece, *of_parts in zip(*(torch.split(each.view(-1), numel) for each in (target, *parts)), strict=True):
            _add(piece, of_parts, wire, overwrite, scale)
    else:
        _add(target, parts, wire, overwrite, scale)


def _is_in_pieces(target: Tensor, parts: Sequence[Tensor]) -> bool:
    each = (target, *parts)
    return (
        target.numel() > _PIECE
        and target.device.type == "cpu"
        and (len(parts) > 1 or parts[0].dtype is not target.dtype)
        and all(tensor.is_contiguous() for tensor in each)
    )


def _add(target: Tensor, parts: Sequence[Tensor], wire: torch.dtype | None, overwrite: bool, scale: float) -> None:
    for each in parts:
        part = each if wire is None else each.to(wire)
        if overwrite and scale != 1.0 and part.dtype.itemsize > target.dtype.itemsize:
            torch.mul(part, scale, out=target)  # a value may fit the target only after it is scaled
            overwrite = False
        elif overwrite:
            target.copy_(part)
            if scale != 1.0:
                target.mul_(scale)
            overwrite = False
        else:
            target.add_(part, alpha=scale)
