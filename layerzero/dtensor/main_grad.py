"""Gathered parameters with ``main_grad``, for kernels that accumulate weight gradients in fp32 themselves.

The protocol is the one of Megatron-LM's gradient accumulation fusion, which NVIDIA Apex's
``fused_weight_gradient_mlp_cuda`` and Transformer Engine follow. The kernel adds to ``weight.main_grad``, sets
``weight.grad_added_to_main_grad = True``, and returns a gradient with arbitrary values, which only triggers autograd's
gradient accumulation. If the weight has ``zero_out_wgrad = True`` (a weight that is also used elsewhere), the returned
gradient counts, too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["FLAG", "MainGradParameter", "take_flag"]

FLAG = "grad_added_to_main_grad"


class MainGradParameter(nn.Parameter):
    """Gathered parameter whose full gradient is kept between the backwards of a step."""

    grad_added_to_main_grad: bool
    open_main_grad: Callable[[], Tensor | None] | None

    def offer(self, open_main_grad: Callable[[], Tensor | None]) -> None:
        """Provide ``main_grad`` through a callable; if it returns None, the parameter has no ``main_grad``."""
        self.open_main_grad = open_main_grad
        self.grad_added_to_main_grad = False

    @property
    def main_grad(self) -> Tensor:
        """Full gradient so far, in the master's dtype (fp32) and the parameter's shape. Kernels add to it.

        Raises:
            AttributeError: there is no ``main_grad``.
        """
        opened = None if self.open_main_grad is None else self.open_main_grad()
        if opened is None:
            raise AttributeError("main_grad")
        return opened

    @main_grad.setter
    def main_grad(self, kept: Tensor) -> None:
        # Megatron's linear layers save main_grad in forward and set it again in backward.
        if kept.data_ptr() != self.main_grad.data_ptr():
            raise AttributeError("main_grad of a gathered parameter is layerzero's; add to it instead of replacing it")


def take_flag(leaf: Tensor) -> bool:
    """Return whether a kernel has added the gradient to ``main_grad``, and reset the flag."""
    if not getattr(leaf, FLAG, False):
        return False
    setattr(leaf, FLAG, False)
    return True
