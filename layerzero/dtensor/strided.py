"""Parameters that compute in a memory order of their own: transposed, channels_last."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.device.buffer_pools import FullBufferPool

__all__ = ["StridedParam", "keeps_order"]


def keeps_order(parameter: Tensor) -> bool:
    """A view of row-major memory has the parameter's strides, up to those of dims of size 1, which mean nothing."""
    return parameter.is_contiguous() or parameter.numel() == 0


class StridedParam:
    """A gathered parameter, copied into the strides that the model's own parameter had.

    Shards are made of rows, so the flat order is row-major. Kernels may be faster, and results differ in the last bit,
    with other strides; such a parameter therefore costs one copy for each gather.
    """

    def __init__(self, source: Tensor, like: Tensor) -> None:
        self._source = source  # row-major, a view of the full buffer
        self._written = torch.empty_like(like, dtype=source.dtype, device=source.device)  # keeps dense strides
        self.gathered_bytes = self._written.untyped_storage().nbytes()
        self.tensor = self._written.data  # as `compute` of a handle: a version counter apart from the writes

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    @torch.no_grad()
    def fill(self, storages: FullBufferPool) -> None:
        storages.allocate(self._written.untyped_storage(), self.gathered_bytes)
        self._written.copy_(self._source)

    def free(self, storages: FullBufferPool) -> None:
        storages.free(self._written.untyped_storage())
