"""Gathered parameters with strides that are not row-major, such as transposed or channels_last ones."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.device.buffer_pools import FullBufferPool

__all__ = ["StridedParam", "keeps_order"]


def keeps_order(parameter: Tensor) -> bool:
    """Return whether a view of row-major memory can have the parameter's strides. Dims of size 1 are ignored."""
    return parameter.is_contiguous() or parameter.numel() == 0


class StridedParam:
    """Gathered parameter that is copied to memory with the strides of the original parameter.

    Shards consist of rows, so the full buffer is row-major. Kernels may be faster with the original strides, and other
    strides change the last bits of the results. So each gather copies the parameter once.
    """

    def __init__(self, source: Tensor, like: Tensor) -> None:
        self._source = source  # row-major, a view of the full buffer
        self._written = torch.empty_like(like, dtype=source.dtype, device=source.device)  # keeps dense strides
        self.gathered_bytes = self._written.untyped_storage().nbytes()
        self.tensor = self._written.data  # an alias whose version counter does not count the writes of `fill`

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    @torch.no_grad()
    def fill(self, storages: FullBufferPool) -> None:
        storages.allocate(self._written.untyped_storage(), self.gathered_bytes)
        self._written.copy_(self._source)

    def free(self, storages: FullBufferPool) -> None:
        storages.free(self._written.untyped_storage())
