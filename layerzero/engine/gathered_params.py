"""Create the gathered parameters of a handle, which are the autograd leaves that modules use, and their ``main_grad``.

[Note: main_grad]
Kernels may accumulate weight gradients in fp32 themselves, with the protocol of Megatron-LM's gradient accumulation
fusion. NVIDIA Apex's ``fused_weight_gradient_mlp_cuda`` and Transformer Engine use the same protocol. The kernel adds
the gradient to ``weight.main_grad``, sets ``weight.grad_added_to_main_grad = True``, and returns a gradient with
arbitrary values. The returned gradient only triggers autograd's gradient accumulation. If a weight also has other uses
(``zero_out_wgrad = True``), the returned gradient is added as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from layerzero.device.buffer_pools import FullBufferPool
from layerzero.dtensor.model_parallel_spec import ModelParallelSpec

FLAG = "grad_added_to_main_grad"


class MainGradParameter(nn.Parameter):
    """Gathered parameter with ``main_grad``, the full gradient accumulated over the backward passes of a step."""

    grad_added_to_main_grad: bool
    open_main_grad: Callable[[], Tensor | None] | None

    def offer_main_grad(self, open_main_grad: Callable[[], Tensor | None]) -> None:
        """Register the function that opens ``main_grad``. It returns None while the parameter has no ``main_grad``."""
        self.open_main_grad = open_main_grad
        self.grad_added_to_main_grad = False

    @property
    def main_grad(self) -> Tensor:
        """Full gradient accumulated so far, in the master's dtype (usually fp32) and the parameter's shape.

        Kernels add gradients to this tensor.

        Raises:
            AttributeError: the parameter currently has no ``main_grad``.
        """
        opened = None if self.open_main_grad is None else self.open_main_grad()
        if opened is None:
            raise AttributeError("main_grad")
        return opened

    @main_grad.setter
    def main_grad(self, kept: Tensor) -> None:
        # Megatron's linear layers save main_grad in the forward pass and set it again in the backward pass.
        if kept.data_ptr() != self.main_grad.data_ptr():
            raise AttributeError(
                "main_grad of a gathered parameter cannot be replaced, because layerzero reads it. Add to main_grad in "
                "place"
            )


def consume_main_grad_flag(leaf: Tensor) -> bool:
    """Return whether a kernel has added the gradient of `leaf` to ``leaf.main_grad``, and reset the flag."""
    if not getattr(leaf, FLAG, False):
        return False
    setattr(leaf, FLAG, False)
    return True


def is_row_major(parameter: Tensor) -> bool:
    """Return whether a view of row-major memory can have the strides of `parameter`. Dims of size 1 are ignored."""
    return parameter.is_contiguous() or parameter.numel() == 0


class StridedParam:
    """Gathered parameter that is copied to memory with the strides of the original parameter.

    Shards consist of rows, so the full buffer is row-major. Kernels may be faster with the original strides, and
    different strides would change the last bits of the results. Therefore each gather copies the parameter once.
    """

    def __init__(self, source: Tensor, like: Tensor) -> None:
        self._source = source  # row-major, a view of the full buffer
        self._written = torch.empty_like(like, dtype=source.dtype, device=source.device)  # keeps dense strides
        self.gathered_bytes = self._written.untyped_storage().nbytes()
        self.tensor = self._written.data  # an alias whose version counter does not count the writes by `fill`

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    @torch.no_grad()
    def fill(self, storages: FullBufferPool) -> None:
        storages.allocate(self._written.untyped_storage(), self.gathered_bytes)
        self._written.copy_(self._source)

    def free(self, storages: FullBufferPool) -> None:
        storages.free(self._written.untyped_storage())


class GatheredParams:
    """Gathered parameters of one handle.

    Most parameters are views of `compute` and share its version counter. DTensors, and parameters that are not
    contiguous, have separate version counters.

    Args:
        compute: 1-D alias of the full buffer.
    """

    def __init__(self, compute: Tensor) -> None:
        self._compute = compute  # 1-D [G]
        self._strided: list[StridedParam] = []
        self._counters = [compute]

    def make(
        self, elements: slice, original: Tensor, model_parallel: ModelParallelSpec | None, *, offers_main_grad: bool
    ) -> nn.Parameter:
        """Create a gathered parameter for `elements` of the flat order, with the shape and strides of `original`.

        If `offers_main_grad` is True, the parameter has ``main_grad``, unless it is a DTensor.
        """
        full = self._compute[elements].view(original.shape)
        if not is_row_major(original):
            self._strided.append(StridedParam(full, like=original))
            full = self._strided[-1].tensor
            self._counters.append(full)
        if model_parallel is None or not model_parallel.is_dtensor:
            return (MainGradParameter if offers_main_grad else nn.Parameter)(full)
        leaf = model_parallel.to_module_param(full)
        self._counters.append(leaf)
        return leaf

    def fill(self, storages: FullBufferPool) -> None:
        """Copy values from the full buffer to the parameters that have separate memory."""
        for strided in self._strided:
            strided.fill(storages)

    def free(self, storages: FullBufferPool) -> None:
        for strided in self._strided:
            strided.free(storages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size in bytes of each allocation that exists while the unit computes, in addition to the full buffer."""
        return tuple(strided.gathered_bytes for strided in self._strided)

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated, in addition to the full buffer."""
        return sum(strided.nbytes for strided in self._strided)

    @property
    def version(self) -> int:
        """Sum of the version counters, which increases with every in-place write to a gathered parameter."""
        return sum([tensor._version for tensor in self._counters])

    def bump_version(self) -> None:
        """Bump the version counters, so that autograd rejects graphs that have saved a gathered parameter."""
        increment_version(self._counters)
