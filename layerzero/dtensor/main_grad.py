"""Gathered parameters that offer ``main_grad``, for kernels that add weight gradients in fp32 themselves.

The protocol is the one of Megatron-LM's gradient accumulation fusion, which NVIDIA Apex's
``fused_weight_gradient_mlp_cuda`` and Transformer Engine follow: the kernel adds to ``weight.main_grad``, sets
``weight.grad_added_to_main_grad = True``, and returns a gradient of any contents, which only tells autograd that the
weight's turn has come. Where the weight has ``zero_out_wgrad = True``, what it returns counts as well (a weight that is
also used elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["FLAG", "MainGradParameter", "take_flag"]

FLAG = "grad_added_to_main_grad"


class MainGradParameter(nn.Parameter):
    """A gathered parameter whose gradients are kept whole between the backwards of a step."""

    grad_added_to_main_grad: bool
    open_main_grad: Callable[[], Tensor | None] | None

    def offer(self, open_main_grad: Callable[[], Tensor | None]) -> None:
        """Let ``main_grad`` be what the callable returns; there is none where it returns None."""
        self.open_main_grad = open_main_grad
        self.grad_added_to_main_grad = False

    @property
    def main_grad(self) -> Tensor:
        """The whole gradient so far, in the master's dtype (fp32) and the parameter's shape, to be added to."""
        opened = None if self.open_main_grad is None else self.open_main_grad()
        if opened is None:
            raise AttributeError("main_grad")
        return opened

    @main_grad.setter
    def main_grad(self, kept: Tensor) -> None:
        # Megatron's linear layers keep it in their forward, and put it back in their backward.
        if kept.data_ptr() != self.main_grad.data_ptr():
            raise AttributeError("main_grad of a gathered parameter is layerzero's; add to it instead of replacing it")


def take_flag(leaf: Tensor) -> bool:
    """A kernel has added the gradient to ``main_grad``; the flag is lowered."""
    if not getattr(leaf, FLAG, False):
        return False
    setattr(leaf, FLAG, False)
    return True
