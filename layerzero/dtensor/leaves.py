"""Gathered parameters of a handle: the autograd leaves with which modules compute."""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from layerzero.device.buffer_pools import FullBufferPool
from layerzero.dtensor.main_grad import MainGradParameter
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec
from layerzero.dtensor.strided import StridedParam, keeps_order

__all__ = ["GatheredParams"]


class GatheredParams:
    """Gathered parameters over `compute`, a 1-D alias of the full buffer.

    Most are views and share the version counter of `compute`. Parameters with non-contiguous strides and DTensors have
    their own version counters.
    """

    def __init__(self, compute: Tensor) -> None:
        self._compute = compute  # 1-D [G]
        self._strided: list[StridedParam] = []
        self._counters = [compute]

    def make(
        self, place: slice, original: Tensor, face: ModelParallelSpec | None, *, offers_main_grad: bool
    ) -> nn.Parameter:
        """Create the leaf for the elements at `place`, with the shape and strides of `original`."""
        whole = self._compute[place].view(original.shape)
        if not keeps_order(original):
            self._strided.append(StridedParam(whole, like=original))
            whole = self._strided[-1].tensor
            self._counters.append(whole)
        if face is None or not face.is_dtensor:
            return (MainGradParameter if offers_main_grad else nn.Parameter)(whole)
        leaf = face.to_module_param(whole)
        self._counters.append(leaf)
        return leaf

    def fill(self, storages: FullBufferPool) -> None:
        """Copy the gathered full buffer to the parameters that have their own strides."""
        for strided in self._strided:
            strided.fill(storages)

    def free(self, storages: FullBufferPool) -> None:
        for strided in self._strided:
            strided.free(storages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each allocation that exists beside the full buffer while the unit computes."""
        return tuple(strided.gathered_bytes for strided in self._strided)

    @property
    def nbytes(self) -> int:
        """Number of these bytes that are allocated now."""
        return sum(strided.nbytes for strided in self._strided)

    @property
    def version(self) -> int:
        """Sum of the version counters, which grows with every in-place write to a leaf."""
        return sum(tensor._version for tensor in self._counters)

    def bump_version(self) -> None:
        """Make autograd reject graphs that have saved a leaf."""
        increment_version(self._counters)
